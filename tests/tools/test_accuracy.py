"""How true the figures are: false verdicts of drawn gates, and the noise and the clocks of each card."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from pytest_fa.features.gate.gated import Gate, GatePair, GateVerdict
from pytest_fa.features.gate.noise import Noise, write_noise
from pytest_fa.records.log import save_records
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import MachineIdentity, Record, Source
from pytest_fa.records.timing import Agreement, NodeTime, OutsideTime, ProfilerTime
from tests.factories import ENVIRONMENT, SHAPE, record, speed
from tools.docs.accuracy_block import contents, gates_on_equal_kernels, highest_rate
from tools.docs.block import TableProblem
from tools.docs.markdown import rewrite

WORDS = "profiles=profiles/nvidia-h200"
SOURCE = Source("0a1b2c3d" * 5, dirty=False, origin="git")
DAY = "2026-11-29T00:00:00+00:00"
ROUNDS = 24

Rows = tuple[tuple[float, ...], ...]


def page_of(root: Path, of: str) -> str:
    """A page with one table."""
    return rewrite(f"<!-- fa-accuracy of={of} {WORDS} -->\n<!-- /fa-accuracy -->\n", root)


def rows_of(sd: float, mean: float = 0.0, seed: int = 1) -> Rows:
    """Rounds of two blocks with this spread."""
    draw = random.Random(seed)  # noqa: S311  # a sample
    return tuple((mean + draw.gauss(0, sd),) * 2 for _ in range(ROUNDS))


def noise_of(blocks: Rows) -> Noise:
    """Noise with one kernel against itself, whose rounds are `blocks`, beside a pair of two kernels."""
    of_two = PairSamples(SHAPE, "sdpa_cudnn", rows_of(0.004, 0.1), rows_of(0.001))
    of_one = PairSamples(SHAPE, "sdpa_flash", blocks, rows_of(0.001, seed=2))
    return Noise((of_two, of_one), ("sdpa_flash", "sdpa_flash"), ROUNDS, 3.0, ENVIRONMENT, SOURCE, DAY)


def test_equal_kernels_have_no_false_verdict() -> None:
    """Only the pair of a kernel with itself is drawn, with as many gates as asked for, the same in each run."""
    noise = noise_of(rows_of(0.001, seed=3))
    (drawn,) = gates_on_equal_kernels(noise, 20)
    assert (drawn.pair.baseline, drawn.verdicts) == ("sdpa_flash", {"INCONCLUSIVE": 20})
    assert gates_on_equal_kernels(noise, 20)[0].verdicts == drawn.verdicts


@pytest.mark.parametrize(("mean", "verdict"), [(0.02, "FAIL"), (-0.02, "PASS")])
def test_a_kernel_that_differs_from_itself_is_seen(mean: float, verdict: GateVerdict) -> None:
    """If rounds are biased, the gates drawn from them have false verdicts; those of the control have none."""
    (drawn,) = gates_on_equal_kernels(noise_of(rows_of(0.001, mean)), 20)
    assert drawn.verdicts[verdict] == 10
    assert drawn.verdicts["INCONCLUSIVE"] == 10


@pytest.mark.parametrize(("wrong", "gates", "limit"), [(0, 200, 0.0149), (2, 200, 0.0311), (3, 3, 1.0)])
def test_the_rate_has_an_upper_limit(wrong: int, gates: int, limit: float) -> None:
    """After Clopper and Pearson, with 95 % confidence."""
    assert highest_rate(wrong, gates) == pytest.approx(limit, rel=0.01)


def test_the_table_of_gates_counts_false_verdicts(tmp_path: Path) -> None:
    """PASS and FAIL are both false; without a file the table is refused."""
    with pytest.raises(TableProblem, match=r"there is no noise\.json in .*; `python -m pytest_fa noise` makes one"):
        page_of(tmp_path, "gates")
    write_noise(noise_of(rows_of(0.001, -0.02)), tmp_path / "profiles")
    assert page_of(tmp_path, "gates").splitlines()[2:7] == [
        "100 of 200 gates have a false verdict: for these rounds, the rate is below 56.0 % with 95 % confidence.",
        "",
        "| kernel against itself | shape | gates | PASS | FAIL | INCONCLUSIVE |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| sdpa_flash | `{SHAPE}` | 200 | 100 | 0 | 100 |",
    ]


def timed(variant: str, judge_us: float, card: str | None, profiler: ProfilerTime | None = None) -> Record:
    """A time of 10 us by the candidate's clock, and other ones by the other clocks."""
    outside = OutsideTime(judge_us, 0.001, 10.0, 100, 10.0, 100)
    one = msgspec.structs.replace(speed(10.0), outside=outside, profiler=profiler)
    machine = MachineIdentity("host", card) if card else None
    fields = {"environment": ENVIRONMENT, "source": SOURCE, "measured_at": DAY, "machine": machine}
    return record(variant, f"{SHAPE}-seed0", "speed", speed=one, **fields)


def test_each_card_has_its_clocks_and_its_spread(tmp_path: Path) -> None:
    """Clocks by median and largest difference, times that are not confirmed, and the spread of a gate's rounds."""
    with pytest.raises(TableProblem, match=r"no time and no gate in .*; `pytest --fa-save` saves them"):
        page_of(tmp_path, "cards")
    short = ProfilerTime(9.0, 0.5, (NodeTime("kernel", 9.0, 1),), 0)  # 9.5 us with its clock offset
    bad = timed("fourth", 12.0, None)
    assert bad.speed
    bad = msgspec.structs.replace(
        bad, speed=msgspec.structs.replace(bad.speed, agreement=Agreement(valid=False, reason="simulated"))
    )
    rounds, control = ((0.5,), (0.51,), (0.5,), (0.51,)), ((0.001,), (-0.001,), (0.001,), (-0.001,))
    pair = GatePair(PairSamples(SHAPE, "other", rounds, control), 1.65, None, None, None, None)
    gate = Gate(2.0, "PASS", "", 4, 1, 0, 0.01, 0.005, 60.0, {}, (pair,))
    gated = msgspec.structs.replace(timed("mine", 10.0, "one"), speed=None, kind="gate", case=None, id="gate")
    times = [timed("mine", 10.1, "one", short), timed("other", 9.7, "one"), timed("third", 10.0, "two"), bad]
    save_records([*times, gate.to(gated)], tmp_path / "profiles")
    assert page_of(tmp_path, "cards").splitlines()[4:8] == [
        "| one | 2 | 2.00, 3.00 | 5.00, 5.00 | 0 | 4 | 0.58 | 0.12 |",
        "| two | 1 | 0.00, 0.00 | - | 0 | 0 | - | - |",
        "| unknown | 1 | 20.00, 20.00 | - | 1 | 0 | - | - |",
        "| all | 4 | 2.00, 20.00 | 5.00, 5.00 | 1 | 4 | 0.58 | 0.12 |",
    ]


def test_what_the_tables_need_measured(tmp_path: Path) -> None:
    """The gates need the noise of the machine; the cards need nothing of their own."""
    assert contents(f"of=gates {WORDS}", tmp_path).files == ("noise.json",)
    assert contents(f"of=cards {WORDS}", tmp_path).files == ()
    with pytest.raises(TableProblem, match="of is 'rates' \\(allowed: gates, cards\\)"):
        page_of(tmp_path, "rates")
