"""The answer of a run: its last lines, with the next command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.outcome import Outcome, State
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Agreement, Speed, Timing
from pytest_fa.session.rerun import rerun_command
from pytest_fa.table.answer import RunFacts, answer_lines
from tests.factories import OK, SHAPE, SMALL_SHAPE, WRONG, build, options, record, speed

NO_GPU = "mine needs a GPU, and this machine has none"


def answer(records: list[Record], why_not_run: str = "", **facts: Any) -> list[str]:
    """The lines of the answer."""
    return [line.text for line in answer_lines(records, RunFacts(why_not_run=why_not_run, **facts))]


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


def test_a_slower_kernel_asks_why(snapshot: SnapshotAssertion) -> None:
    """A correct kernel that is slower than the baseline has its ratio, and the command that says why."""
    assert snapshot == answer([record(check=OK), timed("mine", 14.0), sdpa(10.0)])


def test_a_faster_kernel_is_gated_next(snapshot: SnapshotAssertion) -> None:
    """A kernel that is faster on every shape is gated next; the answer has the least and the largest ratio."""
    records = [timed("mine", 4.0), timed("mine", 9.0, SMALL_SHAPE), sdpa(10.0), sdpa(10.0, SMALL_SHAPE)]
    assert snapshot == answer(records, rerun=("pytest", "--pyargs", "pytest_fa.suite", "--fa-gate=0.9"))


def test_a_wrong_kernel_is_run_again() -> None:
    """A kernel with a wrong result is red, has no ratio, and the next command runs its first failure again."""
    wrong = record(outcome=Outcome.WRONG, check=WRONG, rerun_command="pytest -k this")
    lines = answer_lines([record(check=OK), wrong, timed("mine", 5.0), sdpa(10.0)], RunFacts())
    assert [line.text for line in lines] == ["mine: wrong in 1 of 3", "rerun: pytest -k this"]
    assert lines[0].style == "red"


@pytest.mark.parametrize(
    ("outcome", "text"),
    [(Outcome.LAUNCH_FAILED, "mine: launch failed in 1 of 1"), (Outcome.HUNG, "mine: hung in 1 of 1")],
)
def test_a_failure_is_named(outcome: Any, text: str) -> None:
    """A failure of another kind is named."""
    assert answer([record(outcome=outcome)])[0] == text


def test_a_variant_that_was_only_built_says_why(snapshot: SnapshotAssertion) -> None:
    """Without a GPU the answer has the architectures, the reason why nothing ran, and a command that needs no GPU."""
    builds = (build("sm_80", a=(96, 0, 0)), build("sm_90a", a=(96, 0, 0)))
    assert snapshot == answer([record(kind="build", builds=builds)], NO_GPU)


def test_a_build_that_failed_is_run_again() -> None:
    """A variant that was not built has the command that builds it again."""
    failed = record(kind="build", outcome=Outcome.NOT_BUILT, rerun_command="pytest -k test_build")
    assert answer([failed], NO_GPU) == ["mine: not built", "rerun: pytest -k test_build"]


def test_checks_without_times_are_timed_next(snapshot: SnapshotAssertion) -> None:
    """A run that only checked says so, and how to time."""
    assert snapshot == answer([record(check=OK)])


def test_a_time_without_a_baseline(snapshot: SnapshotAssertion) -> None:
    """Without a baseline the answer has the time."""
    assert snapshot == answer([timed("mine", 14.0)])[0]


def test_a_time_in_e4m3_is_compared_as_in_the_table(snapshot: SnapshotAssertion) -> None:
    """In e4m3 the answer names the baseline that the heading names: one in e4m3, else SDPA in the output's dtype."""
    shape = "b1h2s64d64-e4m3"
    records = [timed("mine", 5.0, shape), sdpa(10.0, "b1h2s64d64-fp16")]
    assert snapshot == answer(records)[0]
    records.append(timed("fa3", 8.0, f"{shape}-out_bf16", role="baseline"))
    assert snapshot == answer(records)[0]


def test_a_time_that_is_not_confirmed_has_no_ratio() -> None:
    """A time that another clock contradicts does not count."""
    unconfirmed = msgspec.structs.replace(speed(1.0), agreement=Agreement(valid=False, reason="throttled"))
    assert answer([timed("mine", 1.0, speed=unconfirmed), sdpa(10.0)])[0] == "mine: 1/1 checks passed; not timed"


def test_a_time_on_the_cpu_is_saved_next(snapshot: SnapshotAssertion) -> None:
    """Hardware counters explain nothing on the CPU: the next command saves the times to compare with."""
    records = [timed("mine", 20.0, speed=on_cpu(20.0)), sdpa(10.0, speed=on_cpu(10.0))]
    assert snapshot == answer(records)


def test_noise_has_no_ratio(snapshot: SnapshotAssertion) -> None:
    """A ratio that the noise makes meaningless is not in the answer."""
    records = [timed("mine", 20.0, speed=on_cpu(20.0, spread=1.0)), sdpa(10.0, speed=on_cpu(10.0))]
    assert snapshot == answer(records)[0]


def test_a_failed_baseline_is_named(snapshot: SnapshotAssertion) -> None:
    """A baseline that fails is part of the answer."""
    failed = record("sdpa_math", outcome=Outcome.CRASHED, role="baseline", rerun_command="pytest -k math")
    assert snapshot == answer([record(check=OK), failed])


# -- many variants ----------------------------------------------------------------------------------------------------


def test_many_variants_have_one_line(snapshot: SnapshotAssertion) -> None:
    """Twenty variants have one line: how many are right and wrong, and the fastest correct one."""
    right = [timed(f"v{index:02}", 10.0 + index) for index in range(18)]
    wrong = [
        record(f"w{index}", outcome=Outcome.WRONG, check=WRONG, rerun_command=f"pytest {index}") for index in range(2)
    ]
    assert snapshot == answer([*wrong, *reversed(right), sdpa(20.0)])


def test_noise_names_no_fastest(snapshot: SnapshotAssertion) -> None:
    """If the noise does not separate the variants, none is called the fastest."""
    speeds = {f"v{index}": on_cpu(20.0 + index, spread=1.0) for index in range(5)}
    records = [timed(name, 1.0, speed=each) for name, each in speeds.items()]
    assert snapshot == answer(records)[0]


def test_variants_at_other_shapes_are_no_ties() -> None:
    """A variant that shares no shape with the fastest one is not called too noisy to tell from it."""
    records = [timed("a", 10.0), timed("a", 10.0, SMALL_SHAPE), timed("b", 40.0), timed("probe", 1.0, "b1h1s4d4-fp16")]
    assert "; fastest correct: a, " in answer([*records, sdpa(20.0)])[0]


def test_variants_are_compared_where_most_were_timed() -> None:
    """A variant that was timed at more shapes than the others is not the fastest for that, nor is its ratio there."""
    records = [timed("long", 30.0), timed("long", 10.0, SMALL_SHAPE), timed("a", 10.0), timed("b", 20.0), sdpa(20.0)]
    assert f"; fastest correct: a, 0.500 x the time of sdpa_cudnn at {SHAPE}" in answer(records)[0]
    apart = [timed("a", 10.0), timed("b", 20.0, SMALL_SHAPE), sdpa(20.0)]
    assert f"; fastest correct: a, 0.500 x the time of sdpa_cudnn at {SHAPE}" in answer(apart)[0]


def test_noise_between_some() -> None:
    """The number of variants that the noise does not separate from the fastest is part of the answer."""
    speeds = {"a": on_cpu(10.0, 0.1), "b": on_cpu(10.5, 0.1), "c": on_cpu(40.0, 0.1)}
    records = [timed(name, 1.0, speed=each) for name, each in speeds.items()]
    assert "fastest correct: a (too noisy to tell from 1 other), " in answer(records)[0]


def test_an_ablation_is_not_the_fastest() -> None:
    """A kernel that omits a phase does not win."""
    records = [timed("whole", 10.0), timed("without_pv", 5.0, role="ablation")]
    assert "fastest correct: whole, " in answer(records)[0]


def test_no_records_have_no_answer() -> None:
    """Without records, and in a self-test, there is no answer."""
    assert (answer([]), answer([record(kind="selftest")])) == ([], [])


def test_the_cause_of_the_first_failure_has_a_line(snapshot: SnapshotAssertion) -> None:
    """Between the answer and the rerun command stands the first line of the first failure, in full."""
    message = "max error is 0.3, allowed is 0.001\nmore"
    wrong = record("mine", outcome=Outcome.WRONG, message=message, rerun_command="pytest -k this")
    assert snapshot == [line.text for line in answer_lines([wrong, wrong], RunFacts())]


# -- failures that are not judgements ---------------------------------------------------------------------------------

PILOT_FAILED = record("mine", kind="gate", outcome=Outcome.WRONG, check=WRONG)
NO_BASELINE = record("mine", kind="gate", outcome=Outcome.INCONCLUSIVE, message="no baseline supports it")
GATE = Gate(0.95, "FAIL", "the ratio is above 0.95", 6, 0, 0, 0.02, None, 1.0, {}, ())


def test_a_gate_that_failed_in_its_pilot_is_no_judgement() -> None:
    """Only judgements are counted; the failure of a gate's pilot is named beside them."""
    wrong = record(outcome=Outcome.WRONG, check=WRONG)
    assert answer([wrong, PILOT_FAILED])[0] == "mine: wrong in 1 of 1; gate: wrong"
    assert answer([record(check=OK), PILOT_FAILED])[0] == "mine: gate: wrong; 1/1 checks passed"


def test_tests_without_a_verdict_are_counted() -> None:
    """An output that could not be judged is neither right nor forgotten."""
    undecided = record("mine", f"{SHAPE}-seed1", outcome=Outcome.INCONCLUSIVE)
    assert answer([record(check=OK), undecided])[0].startswith("mine: 1/1 checks passed; 1 without a verdict")
    other = record("other", check=OK)
    assert "2 correct; 1 without a verdict" in answer([record(check=OK), undecided, other])[0]


def test_a_gate_without_a_verdict_says_so(snapshot: SnapshotAssertion) -> None:
    """A gate that could not be decided is yellow, and has its reason and its rerun command."""
    lines = answer_lines([NO_BASELINE], RunFacts())
    assert snapshot == [line.text for line in lines]
    assert lines[0].style == "yellow"


@pytest.mark.parametrize(
    ("kind", "outcome", "text"),
    [
        ("profile", Outcome.OK, "profiled"),
        ("profile", Outcome.NOT_MEASURED, "not profiled"),
        ("sanitize", Outcome.NOT_MEASURED, "not checked by compute-sanitizer"),
        ("sanitize", Outcome.HAZARD, Outcome.HAZARD),
        ("build", Outcome.OVER_LIMIT, "over limit"),
        ("correct", Outcome.NOT_BUILT, "not built"),
    ],
)
def test_no_part_of_the_answer_is_empty(kind: Any, outcome: Any, text: str) -> None:
    """Behind the name of the variant there is always a result."""
    assert answer([record(kind=kind, outcome=outcome)])[0] == f"mine: {text}"


def test_the_states_of_many_variants(snapshot: SnapshotAssertion) -> None:
    """A variant that was not built or did not run is not called wrong."""
    records = [
        record("a", check=OK),
        record("b", outcome=Outcome.WRONG, check=WRONG),
        record("c", outcome=Outcome.FAILED, message="No module named 'triton'"),
        record("d", outcome=Outcome.NOT_BUILT),
        record("d", kind="build", outcome=Outcome.NOT_BUILT),
        record("e", kind="build"),
        record("h", outcome=Outcome.CHEAT),
        record("f", kind="gate", outcome=Outcome.GATE_FAILED, added={"gate": GATE}),
        record("g", kind="gate", outcome=Outcome.INCONCLUSIVE),
    ]
    counts = "1 correct, 1 cheat, 1 wrong, 1 failed, 1 not built, 1 only built, 2 not judged"
    assert snapshot == answer(records)[0]
    assert all(f"1 {state}" in counts or f"2 {state}" in counts for state in State)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"failed_tests": 44}, "44 tests failed without a result"),
        ({"failed_tests": 1, "failed_files": 2}, "1 test failed without a result; 2 files could not be collected"),
        ({"failed_files": 1}, "1 file could not be collected"),
    ],
)
def test_failures_without_a_record_are_red(facts: dict[str, int], text: str) -> None:
    """A run that failed elsewhere is red, says where, and proposes no next step."""
    built = record(kind="build", builds=(build("sm_80"),))
    (line,) = answer_lines([built], RunFacts(**facts))  # type: ignore[arg-type]  # only these two keys
    assert line == (f"mine: built for sm_80; not timed; {text}", "red")


def test_a_run_in_which_nothing_ran_is_red() -> None:
    """The exit status of such a run is that of a failure, and its answer is red."""
    built = record(kind="build", builds=(build("sm_80"),))
    assert answer_lines([built], RunFacts(why_not_run=NO_GPU, has_failed=True))[0].style == "red"


# -- what to type next ------------------------------------------------------------------------------------------------

BUILT = record(kind="build", builds=(build("sm_80", a=(96, 0, 0)),))
SELECTION = ("--fa-suite=smoke", "--fa-case=*d64*", "--fa-dtype=bf16")
SUITE = ("pytest", "--pyargs", "pytest_fa.suite")
CPU_RECORDS = [timed("mine", 20.0, speed=on_cpu(20.0)), sdpa(10.0, speed=on_cpu(10.0))]


@pytest.mark.parametrize(
    ("records", "facts"),
    [
        ([BUILT], {"is_static": True}),
        (CPU_RECORDS, {"saves_times": False}),
        ([timed("mine", 14.0), sdpa(10.0), record(kind="profile", outcome=Outcome.NOT_MEASURED)], {}),
        ([record(check=OK), timed("mine", 1.0, speed=None)], {}),
    ],
    ids=["static", "saved", "profiled", "timed"],
)
def test_what_this_run_did_is_not_proposed(records: list[Record], facts: dict[str, Any]) -> None:
    """A run does not propose its own option again, nor one that cannot work."""
    assert len(answer(records, **facts)) == 1


@pytest.mark.parametrize(
    ("records", "heading", "ending"),
    [
        ([BUILT], "to read the machine code", ["--fa-static"]),
        ([record(check=OK)], "next", ["-k", "test_speed"]),
        ([timed("mine", 4.0), sdpa(10.0)], "next", ["--fa-gate=1.0"]),
        ([timed("mine", 14.0), sdpa(10.0)], "why", ["--ncu"]),
        (CPU_RECORDS, "to compare with a later run", ["--benchmark-save=before"]),
    ],
    ids=["build", "correct", "faster", "slower", "cpu"],
)
def test_a_proposed_command_works_as_pasted(
    pytester: pytest.Pytester, records: list[Record], heading: str, ending: list[str]
) -> None:
    """A proposed command has the typed selection and no word that pytest would take for a path."""
    facts: dict[str, Any] = {"rerun": (*SUITE, "--benchmark-disable", "--fa-gate=0.9"), "selection": SELECTION}
    words_before, _, command = answer(records, **facts)[-1].partition(": ")
    words = shlex.split(command)
    assert (words_before, words) == (heading, [*SUITE, "--fa-variant=mine", *SELECTION, *ending])
    assert typed_paths(pytester, words) == ["pytest_fa.suite"]


@pytest.mark.parametrize("kind", ["build", "correct", "property", "speed", "gate", "profile", "sanitize"])
@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.INCONCLUSIVE])
def test_a_rerun_command_works_as_pasted(pytester: pytest.Pytester, tmp_path: Path, kind: Any, outcome: Any) -> None:
    """A rerun command of any test has no word that pytest would take for a path, and none of the run's selection."""
    failed = record(kind=kind, outcome=outcome)
    command = rerun_command(options(tmp_path, rerun=SUITE), kind, "mine", failed.case)
    lines = answer([msgspec.structs.replace(failed, rerun_command=command)], selection=SELECTION)
    words_before, _, printed = lines[-1].partition(": ")
    assert (words_before, printed) == ("rerun", command)
    assert typed_paths(pytester, shlex.split(printed)) == ["pytest_fa.suite"]


def typed_paths(pytester: pytest.Pytester, words: list[str]) -> list[str]:
    """The words of a command line that are neither `pytest`, nor an option, nor the value of one."""
    assert words[0] == "pytest"
    return list(pytester.parseconfig(*words[1:]).known_args_namespace.file_or_dir)
