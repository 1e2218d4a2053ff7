"""`--fa-gate` end to end on the CPU: kernels of a known duration, processes, verdict, exit status."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_SOURCE
from tests.plugin.conftest import CASE, SHAPE, NewProject, Project, Run

pytestmark = pytest.mark.alone

# The right output, given back after so many milliseconds of busy waiting: longer than the work itself.
TIMED_SOURCE = (
    PYTHON_SOURCE.replace("import torch\n", "import time\n\nimport torch\n")
    .replace("    scores =", "    start = time.perf_counter()\n    scores =", 1)
    .replace(
        "    return result if", "    while time.perf_counter() - start < MS / 1000:\n        pass\n    return result if"
    )
)
DURATIONS_MS = {"quick": 4.5, "usual": 5.0, "slow": 5.5}


@pytest.fixture(scope="module")
def timed(new_project: NewProject) -> Project:
    """Three right kernels of 4.5, 5 and 5.5 ms, and a wrong one."""
    project = new_project("gate")
    for name, duration_ms in DURATIONS_MS.items():
        project.python_variant(name, TIMED_SOURCE.replace("MS /", f"{duration_ms} /"))
    project.python_variant("wrong", TIMED_SOURCE.replace("MS /", "1.0 /").replace("* scale", "* scale * 1.5"))
    return project


TRIES = 4  # a machine that others use may be too noisy for a verdict; a wrong one is never tried again


def gate(project: Project, name: str, *more: str) -> Run:
    """Gate one variant against `usual`."""
    options = (f"--fa-case={CASE}", f"--fa-variant={name}", "--fa-gate-baseline=usual", "-k", "test_gate")
    return project.suite(*options, *more)


def decided(project: Project, name: str) -> Run:
    """The same at 0.95, until it has a verdict."""
    for _ in range(TRIES):
        run = gate(project, name, "--fa-gate=0.95")
        if run.ret != 10:  # the status of a gate without a verdict
            break
    return run


@pytest.fixture(scope="module")
def quick(timed: Project) -> Run:
    """The fast kernel, gated."""
    return decided(timed, "quick")


def ratio_of(run: Run) -> float:
    """The one pair's ratio, as the terminal shows it."""
    (line,) = {each.strip() for each in run.said if each.strip().startswith(f"{SHAPE}  / usual: ")}
    return float(line.split(": ")[1].split(",")[0])


def test_ten_percent_faster_passes(quick: Run) -> None:
    """0.9 of the baseline's time passes a gate of 0.95, and the ratio is what it is."""
    assert (quick.ret, quick.outcomes) == (0, {"test_gate[quick]": "passed"})
    assert ratio_of(quick) == pytest.approx(0.9, abs=0.02)
    assert any(each.startswith("PASS quick < 0.95: ") for each in quick.said)


def test_ten_percent_slower_fails(timed: Project) -> None:
    """1.1 of the baseline's time fails it."""
    run = decided(timed, "slow")
    assert (run.ret, run.outcomes) == (1, {"test_gate[slow]": "failed"})
    assert ratio_of(run) == pytest.approx(1.1, abs=0.02)
    assert any(each.strip().startswith("FAIL slow < 0.95: ") for each in run.said)


def test_the_cost_and_the_power_are_said_first(quick: Run) -> None:
    """Before the first process: how many there may be, how long it takes, which difference it decides."""
    (line,) = [each for each in quick.said if each.startswith("fa: gate quick")]
    assert line.startswith("fa: gate quick < 0.95 x usual: 6 or 12 processes, about ")
    assert "decides differences of 1.0 % (spread of processes: an NVIDIA H200's)" in line


def test_the_record_has_every_block(timed: Project, quick: Run) -> None:
    """Raw blocks, orders' seed, pilot and intervals are kept."""
    assert quick.ret == 0
    *_, record = [each for each in timed.records if each.gate and each.variant == "quick"]
    assert record.gate is not None
    (pair,) = record.gate.pairs
    assert (record.kind, record.outcome, record.gate.verdict) == ("gate", "ok", "PASS")
    assert [len(row) for row in pair.samples.blocks] == [8] * record.gate.processes
    assert (pair.low or 1) < (pair.ratio or 1) < (pair.high or 1) < 0.95
    assert pair.method.startswith("wall clock of ")
    assert set(record.gate.pilot_us[SHAPE]) == {"quick", "usual"}


def test_no_verdict_has_an_exit_status_of_its_own(timed: Project) -> None:
    """A gate exactly at the ratio has no verdict: the test fails, and the run ends with 10."""
    run = gate(timed, "usual", "--fa-gate=1.0")
    assert (run.ret, "INCONCLUSIVE usual < 1: " in run.text) == (10, True)
    assert "1 inconclusive" in run.said[-1]


def test_a_wrong_kernel_is_not_gated(timed: Project) -> None:
    """A candidate that is wrong in the pilot fails with its bounds, and no process is started."""
    run = gate(timed, "wrong", "--fa-gate=0.95")
    assert (run.ret, "wrong result" in run.text, "fa: gate" in run.text) == (1, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fa-gate=fast"], "--fa-gate: 'fast' is no ratio; give 0.01 to 100, such as 0.95"),
        (["--fa-gate=1", "-n2"], "--fa-gate: a gate starts its own processes, one at a time; drop -n"),
        (["--fa-gate=0"], "--fa-gate: '0' is no ratio; give 0.01 to 100, such as 0.95"),
        (["--fa-gate-baseline=usual"], "--fa-gate-baseline: there is no gate; give --fa-gate=RATIO too"),
        (["--fa-gate=1", "--fa-gate-baseline=usul"], "no variant 'usul'; did you mean 'usual'? (see --fa-list)"),
    ],
)
def test_bad_options_are_named(timed: Project, options: list[str], message: str) -> None:
    """A ratio that is none, a baseline without a gate, an unknown name: one line, before anything runs."""
    run = timed.suite("--fa-variant=quick", f"--fa-case={CASE}", *options)
    assert (run.ret, message in run.text) == (4, True), run.text


def test_without_a_gate_there_is_no_item(timed: Project) -> None:
    """`test_gate` appears where a gate was asked for."""
    assert [each for each in timed.ids("--fa-variant=quick") if "test_gate" in each] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fa-gate-baseline=wrong"], "wrong at b1h2s64d64-fp16: wrong: "),
        (["--fa-gate-baseline=usual", "--benchmark-disable"], "a gate needs timings"),
    ],
)
def test_a_gate_that_cannot_be_held_is_no_success(timed: Project, options: list[str], message: str) -> None:
    """A baseline that is wrong, or no timings at all: no verdict, and the status says so."""
    run = timed.suite(f"--fa-case={CASE}", "--fa-variant=quick", "--fa-gate=0.95", "-k", "test_gate", *options)
    assert (run.ret, message in run.text) == (10, True), run.text


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--fa-gate-baseline=key:deadbeef", "'key:deadbeef' must name one build in the cache; it names none"),
        ("--fa-gate=", "--fa-gate: '' is no ratio"),
    ],
)
def test_what_is_not_there_ends_the_run(timed: Project, option: str, message: str) -> None:
    """A key that names no build and an empty ratio are usage errors."""
    run = timed.suite("--fa-variant=quick", f"--fa-case={CASE}", "--fa-gate=0.95", option)
    assert (run.ret, message in run.text) == (4, True), run.text


def test_refused_shapes_are_named(timed: Project) -> None:
    """A shape that the candidate does not take is not gated, and said to be left out."""
    cases = f"--fa-case={CASE},b1h2s64d64-bf16-seed0"
    run = timed.suite("--fa-variant=quick", cases, "--fa-gate=0.95", "--fa-gate-baseline=usual", "-k", "test_gate")
    assert run.ret in (0, 10)
    assert "left out: quick does not support b1h2s64d64-bf16" in run.text


def test_the_repeat_line_asks_the_same(timed: Project) -> None:
    """What a gate without a verdict says to run again names its case, its ratio and its baseline, once each."""
    run = timed.suite(f"--fa-case={CASE}", "--fa-variant=quick", "--fa-gate=0.95", "--fa-gate-baseline=wrong")
    (line,) = [each for each in run.said if each.strip().startswith("repeat: ")]
    asked = (f"--fa-case={CASE}", "--fa-gate=0.95", "--fa-gate-baseline=wrong")
    assert [line.split().count(each) for each in asked] == [1, 1, 1]
