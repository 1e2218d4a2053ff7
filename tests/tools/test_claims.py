"""Published speeds: a file of claims, what a claim means in microseconds, and the verdict by saved records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.features.gate.gated import Gate, GatePair, GateVerdict
from pytest_fa.features.gate.intervals import PROCESS_SD
from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import MachineIdentity, Record, Source
from pytest_fa.records.timing import Agreement, Clocks, Speed, Timing
from tests.factories import ENVIRONMENT, OK, SHAPE, SMALL_SHAPE, record, speed
from tools.claims.audit import ClaimAudit, audit_claims, is_of_gpu
from tools.claims.published import ClaimProblem, ClaimSource, PublishedClaim, claimed_us, read_claims
from tools.docs.claims_block import contents
from tools.docs.markdown import rewrite
from tools.docs.table_figures import problems_of

REPOSITORY = Path(__file__).parents[2]
H200 = "profiles/nvidia-h200"
OF_H200 = "{by: NVIDIA, source: 'https://example.org', version: v1, date: '2026-01-02', gpu: NVIDIA H200"
CLAIM = f"{{variant: mine, case: {SHAPE}, us: 10.0}}"
WORDS = f"<!-- fa-claims claims=claims.yaml profiles={H200} -->\n<!-- /fa-claims -->\n"

# -- the file ---------------------------------------------------------------------------------------------------------


def written(folder: Path, claim: str = CLAIM, more: str = "") -> Path:
    """A file with one source that has this claim."""
    path = folder / "claims.yaml"
    path.write_text(f"[{OF_H200}{more}, claims: [{claim}]}}]\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("claim", "more", "problem"),
    [
        (
            f"{{variant: mine, case: {SHAPE}}}",
            "",
            f"mine at {SHAPE}: it has no figure; give one of tflops, us and times",
        ),
        (f"{{variant: mine, case: {SHAPE}, us: 1, tflops: 2}}", ", flops: half", "it has tflops and us; give one of"),
        (f"{{variant: mine, case: {SHAPE}, us: 1, rival: other}}", "", "rival and times_as_fast belong together"),
        (f"{{variant: mine, case: {SHAPE}, times_as_fast: 1.5}}", "", "rival and times_as_fast belong together"),
        (f"{{variant: a, case: {SHAPE}, times_as_fast: 2, rival: a}}", "", "rival is the variant itself; name another"),
        (f"{{variant: mine, case: {SHAPE}, tflops: 2}}", "", "tflops needs flops in its source: half, full or unknown"),
        ("{variant: mine, case: b1h8, us: 1}", "", "case 'b1h8-seed0' is malformed; the form is b<B>h<H>"),
        (
            f"{{variant: mine, case: {SHAPE}-win9_0, tflops: 2}}",
            ", flops: half",
            "tflops is defined without a mask and",
        ),
        (
            f"{{variant: mine, case: {SHAPE}-causal-sk9, tflops: 2}}",
            ", flops: full",
            "as many queries as keys; give us",
        ),
        (
            f"{{variant: mine, case: {SHAPE}, us: -1}}",
            "",
            "Expected `float` >= 1e-06 - at `$[0].claims[0].us`; a source",
        ),
        (f"{{variant: mine, case: {SHAPE}, ns: 1}}", "", "unknown field `ns` - at `$[0].claims[0]`; a source has by,"),
        (CLAIM, ", flops: quarter", "Invalid enum value 'quarter' - at `$[0].flops`; a source has by, source,"),
        (CLAIM, ", sm_mhz: 0", "Expected `int` >= 1 - at `$[0].sm_mhz`"),
        (CLAIM, ", by: again", "duplicate key 'by'"),
    ],
)
def test_a_claim_that_is_none_is_refused(tmp_path: Path, claim: str, more: str, problem: str) -> None:
    """One sentence names the file, the place and what is allowed."""
    path = written(tmp_path, claim, more)
    with pytest.raises(ClaimProblem) as raised:
        read_claims(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert problem in str(raised.value)


def test_the_claims_of_this_repository_can_be_measured() -> None:
    """Twelve or more are about the H200; each variant exists and supports its case."""
    variants = discover((REPOSITORY / "kernels",)).variants
    sources = read_claims(REPOSITORY / "profiles" / "claims.yaml")
    claims = [claim for source in sources for claim in source.claims]
    refused = [variants[name].refuses(claim.shape) for claim in claims for name in (claim.variant, claim.rival) if name]
    assert len(refused) > len(claims)
    assert [problem for problem in refused if problem is not None] == []
    assert sum(len(source.claims) for source in sources if is_of_gpu(source, REPOSITORY / H200)) >= 12


# -- microseconds -----------------------------------------------------------------------------------------------------


def source_of(claim: PublishedClaim, **changes: Any) -> ClaimSource:
    """A source with this claim about an H200."""
    plain = ClaimSource("NVIDIA", "https://example.org", "v1", "2026-01-02", "NVIDIA H200", (claim,), flops="half")
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("case", "flops", "tflops", "us"),
    [
        # The first three are published with both figures.
        ("b1h64s16384d128-bf16-kv8", "half", 702.0, 12524.0),
        ("b1h64s16384d128-bf16-causal-kv8", "half", 673.0, 6531.0),
        ("b1h64s16384d128-bf16-causal-kv8-bwd", "half", 579.0, 19002.0),
        ("b1h64s16384d128-bf16-causal-kv8", "full", 1346.0, 6531.0),
        ("b1h64s16384d128-bf16-kv8", "full", 702.0, 12524.0),
        ("b1h2s1024d192-bf16-dv128", "half", 100.0, 2 * 1024**2 * 2 * (192 + 128) / 1e8),
    ],
)
def test_a_rate_means_a_time(case: str, flops: Any, tflops: float, us: float) -> None:
    """Half of the pairs count under a causal mask or all, and a backward call counts 2.5 times as much."""
    claim = PublishedClaim("mine", case, tflops=tflops)
    assert claimed_us(source_of(claim, flops=flops), claim) == pytest.approx(us, rel=1.5e-3)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def timed(variant: str, us: float, samples: int = 7, **changes: Any) -> Record:
    """A time on card `one`, with samples that hardly differ."""
    values = tuple(us * (1 + 1e-5 * number) for number in range(samples))
    one = msgspec.structs.replace(speed(us), device=Timing("graph", values, us, 10))
    plain = record(
        variant,
        f"{SHAPE}-seed0",
        "speed",
        check=OK,
        speed=one,
        environment=ENVIRONMENT,
        source=Source("0a1b2c3d" * 5, dirty=False, origin="git"),
        machine=MachineIdentity("host", "one"),
        measured_at="2026-11-29T00:00:00+00:00",
    )
    return msgspec.structs.replace(plain, **changes)


def with_speed(us: float, **changes: Any) -> Record:
    """A time whose `Speed` has other values of these fields."""
    plain = timed("mine", us)
    assert plain.speed
    return msgspec.structs.replace(plain, speed=msgspec.structs.replace(plain.speed, **changes))


def audited(folder: Path, claim: PublishedClaim, *records: Record, **changes: Any) -> ClaimAudit:
    """The verdict on a claim by these records alone."""
    save_records(list(records), folder / "profiles")
    (audit,) = audit_claims([source_of(claim, **changes)], folder / H200)
    return audit


AT_TEN = PublishedClaim("mine", SHAPE, us=10.0)
HALF_WIDTH = 2.807 * PROCESS_SD  # of the interval of one process


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        (3.0, "REPRODUCED"),
        (0.97 * math.exp(HALF_WIDTH + 0.001), "REPRODUCED"),
        (0.97 * math.exp(HALF_WIDTH - 0.001), "INCONCLUSIVE"),
        (0.97 * math.exp(-HALF_WIDTH + 0.001), "INCONCLUSIVE"),
        (0.97 * math.exp(-HALF_WIDTH - 0.001), "NOT REPRODUCED"),
    ],
)
def test_the_interval_of_one_process_has_the_spread_of_processes(tmp_path: Path, share: float, verdict: str) -> None:
    """The verdict needs the whole interval on one side of 0.97, even if the samples of the process agree."""
    audit = audited(tmp_path, AT_TEN, timed("mine", 10.0 / share))
    assert (audit.verdict, audit.reason) == (verdict, "")
    assert audit.share
    assert math.exp(audit.share.mean) == pytest.approx(share)
    assert audit.share.high - audit.share.mean == pytest.approx(HALF_WIDTH, rel=1e-2)


def test_one_sample_decides_nothing(tmp_path: Path) -> None:
    """A time without an interval of its own is inconclusive, however fast it is."""
    assert audited(tmp_path, AT_TEN, timed("mine", 1.0, samples=1)).verdict == "INCONCLUSIVE"


def throttled(mhz: int) -> Clocks:
    """Clocks during a measurement."""
    return Clocks(mhz, 3201, 400.0, 40, 0)


H100 = msgspec.structs.replace(ENVIRONMENT, gpu="NVIDIA H100 80GB HBM3")
UNCONFIRMED = Agreement(valid=False, reason="simulated")
LATER = "2026-11-30T00:00:00+00:00"
WRONG = timed("mine", 1.0, outcome=Outcome.WRONG, speed=None, measured_at=LATER)
NOT_COMPARABLE: dict[str, tuple[list[Record], dict[str, Any], str]] = {
    "other card model": ([timed("mine", 1.0)], {"gpu": H100.gpu}, "claimed on an NVIDIA H100 80GB HBM3"),
    "no record": ([timed("other", 1.0)], {}, "not measured yet"),
    "wrong since": ([timed("mine", 1.0), WRONG], {}, "mine: wrong (2026-11-30)"),
    "unconfirmed": ([with_speed(1.0, agreement=UNCONFIRMED)], {}, "mine: no other clock confirms its time"),
    "never compared": ([with_speed(1.0, agreement=None)], {}, "mine: no other clock confirms its time"),
    "overlapping": ([with_speed(1.0, order="programmatic")], {}, "mine: its calls overlap"),
    "other clock": (
        [with_speed(1.0, clocks_during=throttled(1980))],
        {"sm_mhz": 1500},
        "mine: measured at 1980 MHz, claimed at 1500 MHz",
    ),
    "unknown clock": (
        [timed("mine", 1.0)],
        {"sm_mhz": 1500},
        "mine: measured at an unknown number of MHz, claimed at 1500 MHz",
    ),
}


@pytest.mark.parametrize("why", NOT_COMPARABLE)
def test_what_cannot_be_compared_has_no_verdict(tmp_path: Path, why: str) -> None:
    """The reason is said, and a fast time does not help."""
    records, changes, reason = NOT_COMPARABLE[why]
    audit = audited(tmp_path, AT_TEN, *records, **changes)
    assert (audit.verdict, audit.reason, audit.share) == ("NOT COMPARABLE", reason, None)


def test_a_record_of_another_gpu_in_the_folder_does_not_count(tmp_path: Path) -> None:
    """The record itself must name the claimed card model."""
    save_records([timed("mine", 1.0, environment=H100)], tmp_path / "profiles")
    (tmp_path / "profiles" / "nvidia-h100-80gb-hbm3").rename(tmp_path / H200)
    assert audited(tmp_path, AT_TEN).reason == "mine: it was measured on an NVIDIA H100 80GB HBM3"


def test_a_locked_clock_may_be_reached(tmp_path: Path) -> None:
    """A clock within 3 % of that of the claim can be compared."""
    at_clock = with_speed(9.0, clocks_during=throttled(1530))
    assert audited(tmp_path, AT_TEN, at_clock, sm_mhz=1500).verdict == "REPRODUCED"


def test_an_unknown_convention_has_no_time(tmp_path: Path) -> None:
    """A rate is not compared if its source does not say which operations it counts."""
    claim = PublishedClaim("mine", f"{SHAPE}-causal", tflops=1.0)
    audit = audited(tmp_path, claim, timed("mine", 1.0), flops="unknown")
    assert audit.reason == "its source does not say which operations it counts"


# -- ratios -----------------------------------------------------------------------------------------------------------

TWICE = PublishedClaim("mine", SHAPE, times_as_fast=2.0, rival="other")
OTHER_COMMIT = Source("1a1b2c3d" * 5, dirty=False, origin="git")
DIRTY = Source("0a1b2c3d" * 5, dirty=True, origin="git")


@pytest.mark.parametrize(("us", "verdict"), [(20.0, "REPRODUCED"), (19.4, "INCONCLUSIVE"), (18.5, "NOT REPRODUCED")])
def test_a_ratio_is_of_two_times_of_one_run(tmp_path: Path, us: float, verdict: str) -> None:
    """The rival's time divided by that of the kernel is compared with the ratio."""
    audit = audited(tmp_path, TWICE, timed("mine", 10.0), timed("other", us))
    assert (audit.verdict, len(audit.records)) == (verdict, 2)
    assert audit.share
    assert math.exp(audit.share.mean) == pytest.approx(us / 20)


@pytest.mark.parametrize(
    "changes",
    [
        {"source": OTHER_COMMIT},
        {"source": DIRTY},
        {"machine": MachineIdentity("host", "two")},
        {"machine": MachineIdentity("host", None)},
        {"machine": None},
    ],
)
def test_times_of_two_runs_have_no_ratio(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Another commit, another card, or one that is not known make no ratio."""
    audit = audited(tmp_path, TWICE, timed("mine", 10.0), timed("other", 40.0, **changes))
    assert (audit.verdict, audit.reason) == ("NOT COMPARABLE", "the two times are not of one commit and one card")


def gated(ratio: float, verdict: GateVerdict = "PASS", noise: float = 0.0005) -> Record:
    """A gate of `mine` against `other`, whose rounds have this ratio of times."""
    rounds = tuple((math.log(ratio) + noise * (-1) ** number,) * 6 for number in range(6))
    control = tuple((noise * (-1) ** number,) * 6 for number in range(6))
    pair = GatePair(PairSamples(SHAPE, "other", rounds, control), ratio, None, None, None, None)
    gate = Gate(0.95, verdict, "a reason", 6, 1, 0, 0.01, 0.005, 60.0, {}, (pair,))
    plain = timed("mine", 1.0, speed=None, kind="gate", case=None, id="gate-mine", check=None)
    return gate.to(plain)


@pytest.mark.parametrize(
    ("record_of_gate", "verdict", "reason"),
    [
        (gated(0.5), "REPRODUCED", ""),
        (gated(0.53), "NOT REPRODUCED", ""),
        (gated(1 / 1.94), "INCONCLUSIVE", "the upper confidence limit is not below"),
        (gated(0.3, noise=0.3), "INCONCLUSIVE", "noisy machine: the A/A control"),
        (gated(0.3, "INCONCLUSIVE"), "INCONCLUSIVE", "a reason"),
    ],
)
def test_a_gate_decides_about_a_ratio(tmp_path: Path, record_of_gate: Record, verdict: str, reason: str) -> None:
    """The gate's own statistics decide at the ratio that still reproduces the claim; single times are not used."""
    audit = audited(tmp_path, TWICE, record_of_gate, timed("mine", 10.0), timed("other", 100.0))
    assert (audit.verdict, audit.reason[: len(reason)]) == (verdict, reason)
    assert audit.share
    assert audit.share.low <= audit.share.mean <= audit.share.high


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_claims_verdicts_and_sources(tmp_path: Path) -> None:
    """A rate stands beside the time that it means, and each figure of a time has its record."""
    claims = (
        f"{{variant: mine, case: {SHAPE}, tflops: 50}}, {{variant: none, case: {SHAPE}, us: 1.5}}, "
        f"{{variant: mine, case: {SHAPE}, times_as_fast: 2, rival: other}}"
    )
    written(tmp_path, claims, ", flops: half, sm_mhz: 1500, settings: a test")
    clocks = throttled(1500)
    slow: Speed = msgspec.structs.replace(speed(20.0), device=Timing("graph", (20.0, 20.01), 20.0, 1))
    save_records(
        [
            with_speed(10.25, clocks_during=clocks),
            timed("other", 20.0, speed=msgspec.structs.replace(slow, clocks_during=clocks)),
        ],
        tmp_path / "profiles",
    )
    page = rewrite(WORDS, tmp_path)
    settings = "v1; 2026-01-02; NVIDIA H200; SM clock locked at 1500 MHz; a test; operations: a causal mask halves them"
    assert page.splitlines()[2:] == [
        "Verdicts: 1 REPRODUCED, 1 INCONCLUSIVE, 1 NOT COMPARABLE.",
        "",
        "| kernel | case | claimed | us | of the claim | verdict | source |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        f"| `mine` | `{SHAPE}` | 50 TFLOP/s, 10.7 us | 10.25 | 1.048 (1.024 to 1.071) | REPRODUCED | 1 |",
        f"| `none` | `{SHAPE}` | 1.5 us | - | - | NOT COMPARABLE: not measured yet | 1 |",
        f"| `mine` | `{SHAPE}` | 2 x `other` | 10.25 / 20.00 | 0.976 (0.938 to 1.014) | INCONCLUSIVE | 1 |",
        "",
        "Measured on an NVIDIA H200, 2026-11-29, commit 0a1b2c3d.",
        "",
        f"1. [NVIDIA](https://example.org): {settings}",
        "",
        "<!-- /fa-claims -->",
    ]
    assert problems_of(page, tmp_path) == []
    assert problems_of(page.replace("/ 20.00", "/ 20.05"), tmp_path) == [f"1: mine at {SHAPE}, us: 20.05"]


def test_a_table_without_a_time_has_no_origin(tmp_path: Path) -> None:
    """Claims that were not measured are listed all the same."""
    written(tmp_path)
    page = rewrite(WORDS, tmp_path)
    assert "Verdicts: 1 NOT COMPARABLE." in page
    assert "Measured on" not in page
    assert problems_of(page, tmp_path) == []


def test_only_the_claims_about_a_gpu_are_measured_there(tmp_path: Path) -> None:
    """A kernel is measured at the cases of its own claims, and its rival there, too."""
    other = f"{{variant: third, case: {SMALL_SHAPE}, times_as_fast: 2, rival: other}}"
    path = written(tmp_path, f"{CLAIM}, {other}")
    text = path.read_text(encoding="utf-8")
    more = text.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3").replace("mine", "fourth")
    path.write_text(text.replace("]}]", "]}, ") + more.removeprefix("["), encoding="utf-8")
    shown = contents(f"claims=claims.yaml profiles={H200}", tmp_path)
    assert sorted(shown.pairs or ()) == [("mine", SHAPE), ("other", SMALL_SHAPE), ("third", SMALL_SHAPE)]
    assert (shown.variants, shown.kinds, shown.files) == (("mine", "third", "other"), ("speed",), ("noise.json",))
    assert (shown.shows("mine", SHAPE), shown.shows("mine", SMALL_SHAPE)) == (True, False)
