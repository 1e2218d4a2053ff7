"""The answer of a run: its last lines, with the next command."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Agreement, Speed, Timing
from pytest_fa.report.answer import answer_lines
from tests.factories import OK, SHAPE, SMALL_SHAPE, WRONG, build, record, speed

NO_GPU = "mine needs a GPU, and this machine has none"


def answer(records: list[Record], why_not_run: str = "", rerun: tuple[str, ...] = ("pytest",)) -> list[str]:
    """The lines of the answer."""
    return [line.text for line in answer_lines(records, why_not_run, rerun)]


def timed(variant: str, device_us: float, shape: str = SHAPE, **changes: Any) -> Record:
    """The record of a variant that was timed at a shape."""
    return record(variant, f"{shape}-seed0", "speed", **{"check": OK, "speed": speed(device_us), **changes})


def sdpa(device_us: float, shape: str = SHAPE, **changes: Any) -> Record:
    """The record of a baseline."""
    return timed("sdpa_cudnn", device_us, shape, role="baseline", **changes)


def on_cpu(device_us: float, spread: float = 0.0) -> Speed:
    """A time on the CPU, whose samples differ by `spread`, a share of it."""
    samples = tuple(device_us * (1 + spread * step) for step in (-0.5, -0.5, 0.0, 0.5, 0.5))
    timing = Timing("wall clock", samples, device_us, 1)
    return msgspec.structs.replace(speed(device_us), device=timing, call=timing, cold_missing=ON_CPU)


# -- one variant ------------------------------------------------------------------------------------------------------


def test_a_slower_kernel_asks_why() -> None:
    """A correct kernel that is slower than the baseline has its ratio, and the command that says why."""
    assert answer([record(check=OK), timed("mine", 14.0), sdpa(10.0)]) == [
        f"mine: right in 2 of 2; 1.400 x the time of sdpa_cudnn at {SHAPE}",
        "why: pytest --fa-variant=mine --ncu",
    ]


def test_a_faster_kernel_is_gated_next() -> None:
    """A kernel that is faster on every shape is gated next; the answer has the least and the largest ratio."""
    records = [timed("mine", 4.0), timed("mine", 9.0, SMALL_SHAPE), sdpa(10.0), sdpa(10.0, SMALL_SHAPE)]
    assert answer(records, rerun=("pytest", "--pyargs", "pytest_fa.suite", "--fa-gate=0.9")) == [
        f"mine: right in 2 of 2; 0.400 x (at {SHAPE}) to 0.900 x (at {SMALL_SHAPE}) the time of the fastest baseline",
        "next: pytest --pyargs pytest_fa.suite --fa-variant=mine --fa-gate=1.0",
    ]


def test_a_wrong_kernel_is_run_again() -> None:
    """A kernel with a wrong result is red, has no ratio, and the next command runs its first failure again."""
    wrong = record(outcome="wrong", check=WRONG, rerun_command="pytest -k this")
    lines = answer_lines([record(check=OK), wrong, timed("mine", 5.0), sdpa(10.0)], "", ("pytest",))
    assert [line.text for line in lines] == ["mine: wrong in 1 of 3", "rerun: pytest -k this"]
    assert lines[0].style == "red"


@pytest.mark.parametrize(
    ("outcome", "text"), [("launch_failed", "mine: launch failed in 1 of 1"), ("hung", "mine: hung in 1 of 1")]
)
def test_a_failure_is_named(outcome: Any, text: str) -> None:
    """A failure of another kind is named."""
    assert answer([record(outcome=outcome)])[0] == text


def test_a_variant_that_was_only_built_says_why() -> None:
    """Without a GPU the answer has the architectures, the reason why nothing ran, and a command that needs no GPU."""
    builds = (build("sm_80", a=(96, 0, 0)), build("sm_90a", a=(96, 0, 0)))
    assert answer([record(kind="build", builds=builds)], NO_GPU) == [
        "mine: built for sm_80, sm_90a; not run: needs a GPU, and this machine has none",
        "next: pytest --fa-variant=mine --fa-static, which reads the machine code",
    ]


def test_a_build_that_failed_is_run_again() -> None:
    """A variant that was not built has the command that builds it again."""
    failed = record(kind="build", outcome="not_built", rerun_command="pytest -k test_build")
    assert answer([failed], NO_GPU) == ["mine: not built", "rerun: pytest -k test_build"]


def test_checks_without_times_are_timed_next() -> None:
    """A run that only checked says so, and how to time."""
    assert answer([record(check=OK)]) == [
        "mine: right in 1 of 1; not timed",
        "next: pytest --fa-variant=mine -k test_speed",
    ]


def test_a_time_without_a_baseline() -> None:
    """Without a baseline the answer has the time."""
    assert answer([timed("mine", 14.0)])[0] == f"mine: right in 1 of 1; 14.00 us at {SHAPE}, without a baseline"


def test_a_time_that_is_not_confirmed_has_no_ratio() -> None:
    """A time that another clock contradicts does not count."""
    unconfirmed = msgspec.structs.replace(speed(1.0), agreement=Agreement(valid=False, reason="throttled"))
    assert answer([timed("mine", 1.0, speed=unconfirmed), sdpa(10.0)])[0] == "mine: right in 1 of 1; not timed"


def test_a_time_on_the_cpu_is_saved_next() -> None:
    """Hardware counters explain nothing on the CPU: the next command saves the times to compare with."""
    records = [timed("mine", 20.0, speed=on_cpu(20.0)), sdpa(10.0, speed=on_cpu(10.0))]
    assert answer(records) == [
        f"mine: right in 1 of 1; 2.00 x the time of sdpa_cudnn at {SHAPE}",
        "next: pytest --fa-variant=mine --benchmark-save=before, and --benchmark-compare after a change",
    ]


def test_noise_has_no_ratio() -> None:
    """A ratio that the noise makes meaningless is not in the answer."""
    records = [timed("mine", 20.0, speed=on_cpu(20.0, spread=1.0)), sdpa(10.0, speed=on_cpu(10.0))]
    assert answer(records)[0] == "mine: right in 1 of 1; too noisy for a ratio to the baseline"


def test_a_failed_baseline_is_named() -> None:
    """A baseline that fails is part of the answer."""
    failed = record("sdpa_math", outcome="crashed", role="baseline", rerun_command="pytest -k math")
    assert answer([record(check=OK), failed]) == [
        "mine: right in 1 of 1; not timed; sdpa_math failed",
        "rerun: pytest -k math",
    ]


# -- many variants ----------------------------------------------------------------------------------------------------


def test_many_variants_have_one_line() -> None:
    """Twenty variants have one line: how many are right and wrong, and the fastest right one."""
    right = [timed(f"v{index:02}", 10.0 + index) for index in range(18)]
    wrong = [record(f"w{index}", outcome="wrong", check=WRONG, rerun_command=f"pytest {index}") for index in range(2)]
    assert answer([*wrong, *reversed(right), sdpa(20.0)]) == [
        f"20 variants: 18 right, 2 wrong; fastest right: v00, 0.500 x the time of sdpa_cudnn at {SHAPE}",
        "rerun: pytest 0",
    ]


def test_noise_names_no_fastest() -> None:
    """If the noise does not separate the variants, none is called the fastest."""
    speeds = {f"v{index}": on_cpu(20.0 + index, spread=1.0) for index in range(5)}
    records = [timed(name, 1.0, speed=each) for name, each in speeds.items()]
    assert answer(records)[0] == "5 variants: 5 right; the times are too noisy to say which is the fastest"


def test_noise_between_some() -> None:
    """The number of variants that the noise does not separate from the fastest is part of the answer."""
    speeds = {"a": on_cpu(10.0, 0.1), "b": on_cpu(10.5, 0.1), "c": on_cpu(40.0, 0.1)}
    records = [timed(name, 1.0, speed=each) for name, each in speeds.items()]
    assert "fastest right: a (too noisy to tell from 1 other), " in answer(records)[0]


def test_an_ablation_is_not_the_fastest() -> None:
    """A kernel that omits a phase does not win."""
    records = [timed("whole", 10.0), timed("without_pv", 5.0, role="ablation")]
    assert "fastest right: whole, " in answer(records)[0]


def test_no_records_have_no_answer() -> None:
    """Without records, and in a self-test, there is no answer."""
    assert (answer([]), answer([record(kind="selftest")])) == ([], [])


def test_the_cause_of_the_first_failure_has_a_line() -> None:
    """Between the answer and the rerun command stands the first line of the first failure, in full."""
    message = "max error is 0.3, allowed is 0.001\nmore"
    wrong = record("mine", outcome="wrong", message=message, rerun_command="pytest -k this")
    assert [line.text for line in answer_lines([wrong, wrong], "", ("pytest",))] == [
        "mine: wrong in 2 of 2",
        f"mine-{SHAPE}-seed0: wrong: max error is 0.3, allowed is 0.001",
        "rerun: pytest -k this",
    ]
