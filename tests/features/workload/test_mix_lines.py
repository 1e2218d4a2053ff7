"""The line of a variant: the ratio of weighted sums, and what leaves it undecided.  Records and times are made up."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.workload.mix_lines import mix_lines
from pytest_fa.features.workload.workload import WeightedCase
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Agreement, Speed, Timing
from pytest_fa.table.layout import TextLine
from tests.factories import OK, WRONG, record, speed, variant

FIRST, SECOND = "b1h2s64d64-fp16", "b1h8s512d64-fp16"
RAGGED = "b4h2s64d64-fp16-var4"
UNCONFIRMED = msgspec.structs.replace(speed(6.0), agreement=Agreement(valid=False, reason="throttled"))


def on_cpu(device_us: float, spread: float = 0.0) -> Speed:
    """A time on the CPU whose quartiles differ by `spread`, a share of it."""
    samples = tuple(device_us * (1 + spread * step) for step in (-0.5, -0.5, 0.0, 0.5, 0.5))
    timing = Timing("wall clock", samples, device_us, 1)
    return msgspec.structs.replace(speed(device_us), device=timing, call=timing, cold_missing=ON_CPU)


def timed(name: str, time: float | Speed, shape: str, role: str = "candidate") -> Record:
    """The record of a time."""
    given = time if isinstance(time, Speed) else speed(time)
    return record(name, f"{shape}-seed0", "speed", check=OK, speed=given, role=role)


def lines(records: list[Record], *others: Variant, **weights: float) -> list[TextLine]:
    """The lines of `mine` and others over a mix, whose cases may be named `first`, `second` and `ragged`."""
    shapes = {"first": FIRST, "second": SECOND, "ragged": RAGGED}
    mix = [
        WeightedCase(shapes[name], parse_case(f"{shapes[name]}-seed0"), weight)
        for name, weight in (weights or {"first": 3.0, "second": 1.0}).items()
    ]
    chosen = (variant("mine"), *others)
    plan = Plan(
        chosen, (variant("sdpa_cudnn", "baseline"), variant("noop", "overhead")), tuple(each[1] for each in mix)
    )
    return mix_lines("llama.yaml", mix, plan, records)


def the_line(records: list[Record], **weights: float) -> str:
    """The text of the only line; one without a ratio is yellow."""
    ((text, style),) = lines(records, **weights)
    assert style == ("yellow" if " undecided" in text else "")
    return text


def baselines(first: float | Speed = 20.0, second: float | Speed = 10.0) -> list[Record]:
    """The times of one baseline at both shapes."""
    times = ((first, FIRST), (second, SECOND))
    return [timed("sdpa_cudnn", time, shape, "baseline") for time, shape in times]


def test_the_ratio_is_that_of_the_sums() -> None:
    """Weights multiply times: (3 * 10 + 20) / (3 * 20 + 10), and no mean of the ratios 0.5 and 2."""
    records = [timed("mine", 10.0, FIRST), timed("mine", 20.0, SECOND), *baselines()]
    assert the_line(records) == (
        "workload llama.yaml: mine 0.714 of sdpa_cudnn (weighted over 2 of 2 cases: 50.00 us and 70.00 us)"
    )
    assert " 0.714 of sdpa_cudnn (" in the_line(records, first=0.3, second=0.1)


def test_each_case_has_its_fastest_baseline() -> None:
    """The baselines' sum has the fastest correct one of each case, and names them if they differ."""
    wrong = msgspec.structs.replace(timed("sdpa_math", 1.0, SECOND, "baseline"), outcome=Outcome.WRONG)
    records = [timed("mine", 10.0, FIRST), timed("mine", 20.0, SECOND), *baselines(), wrong]
    records += [timed("sdpa_flash", 15.0, FIRST, "baseline"), timed("sdpa_flash", 11.0, SECOND, "baseline")]
    expected = "mine 0.909 of the fastest baseline of each case (sdpa_flash, sdpa_cudnn) (weighted over 2 of 2 cases: "
    assert f"{expected}50.00 us and 55.00 us)" in the_line(records)


def test_each_variant_has_a_line() -> None:
    """A baseline that was selected is compared with the others; what computes no attention has no line."""
    others = (variant("other"), variant("flash", "baseline"), variant("part", "ablation"))
    names = [each.name for each in others]
    records = [timed(name, 10.0, shape) for name in ("mine", *names) for shape in (FIRST, SECOND)]
    records = [msgspec.structs.replace(each, role="baseline") if each.variant == "flash" else each for each in records]
    texts = [
        text.partition(": ")[2].partition(" (")[0] for text, _ in lines([*records, *baselines(40.0, 40.0)], *others)
    ]
    assert texts == ["mine 1.000 of flash", "other 1.000 of flash", "flash 0.250 of sdpa_cudnn"]


FAILED = msgspec.structs.replace(timed("mine", 6.0, SECOND), outcome=Outcome.WRONG, check=WRONG)
NO_VERDICT = record("mine", f"{SECOND}-seed0", outcome=Outcome.INCONCLUSIVE)
NOT_BUILT = record("mine", kind="build", outcome=Outcome.NOT_BUILT)


@pytest.mark.parametrize(
    ("own", "of_baselines", "reason"),
    [
        ([], baselines(), f"1 of 2 cases have a ratio: not timed at {SECOND}"),
        ([FAILED], baselines(), f"1 of 2 cases have a ratio: wrong at {SECOND}"),
        ([timed("mine", 6.0, SECOND), NO_VERDICT], baselines(), f"1 of 2 cases have a ratio: no verdict at {SECOND}"),
        (
            [timed("mine", UNCONFIRMED, SECOND)],
            baselines(),
            f"1 of 2 cases have a ratio: time not confirmed at {SECOND}",
        ),
        ([NOT_BUILT], baselines(), f"0 of 2 cases have a ratio: not built at {FIRST}, {SECOND}"),
        (
            [timed("mine", 6.0, SECOND)],
            baselines()[:1],
            f"1 of 2 cases have a ratio: no baseline timed at {SECOND}; weighted time 36.00 us",
        ),
        (
            [timed("mine", 6.0, SECOND)],
            baselines(on_cpu(9.0), UNCONFIRMED),
            f"0 of 2 cases have a ratio: no baseline timed at {FIRST}, {SECOND}; weighted time 36.00 us",
        ),
    ],
)
def test_a_case_without_a_ratio_leaves_it_undecided(own: list[Record], of_baselines: list[Record], reason: str) -> None:
    """The line names the case and the reason, and has no number over the other cases."""
    line = the_line([timed("mine", 10.0, FIRST), *own, *of_baselines])
    assert line == f"workload llama.yaml: mine undecided, {reason}"


def test_what_nobody_supports_is_named_so() -> None:
    """The line says whether the variant refuses a case, or every baseline does."""
    records = [timed("mine", 10.0, FIRST), *baselines()]
    expected = f"mine undecided, 1 of 2 cases have a ratio: not supported at {RAGGED}"
    assert expected in the_line(records, first=3.0, ragged=1.0)
    records.append(timed("mine", 10.0, RAGGED))
    expected = f"not supported by any baseline at {RAGGED}; weighted time 40.00 us"
    assert expected in the_line(records, first=3.0, ragged=1.0)


def test_noise_of_one_case_leaves_it_undecided() -> None:
    """A case whose own ratio the noise makes meaningless counts in no sum, however small its weight is."""
    noisy = on_cpu(10.0, spread=0.5)
    records = [timed("mine", on_cpu(10.0), FIRST), timed("mine", noisy, SECOND), *baselines(on_cpu(20.0), on_cpu(11.0))]
    assert f"1 of 2 cases have a ratio: noisy at {SECOND}; weighted time 40.00~ us" in the_line(records)
    assert f"noisy at {SECOND}" in the_line(records, first=1e6, second=1.0)


def test_noise_of_the_sums_is_that_of_the_cases() -> None:
    """Ratios that are clear each, on both sides of 1, leave that of the sums noisy; one side leaves it rough."""
    rough = on_cpu(10.0, spread=0.3)
    records = [timed("mine", rough, FIRST), timed("mine", rough, SECOND), *baselines(on_cpu(20.0), on_cpu(5.0))]
    assert "undecided beside sdpa_cudnn, the ratio of the sums is noisy" in the_line(records, first=1.0, second=2.0)
    assert " ~0.5 of sdpa_cudnn (weighted over 2 of 2 cases: " in the_line(records, first=50.0, second=1.0)
    steady = [timed("mine", on_cpu(10.0), FIRST), timed("mine", on_cpu(10.0), SECOND)]
    assert " 0.80 of sdpa_cudnn (" in the_line([*steady, *baselines(on_cpu(20.0), on_cpu(5.0))], first=1.0, second=1.0)
