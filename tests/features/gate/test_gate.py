"""`--fa-gate` end to end on the CPU: the verdict and the exit status for kernels of a known duration."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_fa.features.gate.gated import Gate
from tests.factories import PYTHON_SOURCE
from tests.projects import CASE, SHAPE, NewProject, Project, Run
from tests.tiers import nightly_after

# A correct kernel that waits until MS milliseconds have passed, which is longer than its computation takes.
TIMED_SOURCE = (
    PYTHON_SOURCE.replace("import torch\n", "import time\n\nimport torch\n")
    .replace("    scores =", "    start = time.perf_counter()\n    scores =", 1)
    .replace(
        "    return result if", "    while time.perf_counter() - start < MS / 1000:\n        pass\n    return result if"
    )
)
DURATIONS_MS = {"half": 2.5, "quick": 4.5, "usual": 5.0, "slow": 5.5}
# The ratios of their gates.  Every change gates `half`, because a busy machine can decide the larger difference; the
# nightly run also gates `quick`.
LIMITS = {"half": 0.75, "quick": 0.95}


@pytest.fixture(scope="module")
def timed(new_project: NewProject) -> Project:
    """Four correct kernels of 2.5 to 5.5 ms, and a wrong one."""
    project = new_project("gate")
    for name, duration_ms in DURATIONS_MS.items():
        project.python_variant(name, TIMED_SOURCE.replace("MS /", f"{duration_ms} /"))
    project.python_variant("wrong", TIMED_SOURCE.replace("MS /", "1.0 /").replace("* scale", "* scale * 1.5"))
    return project


REFUSED = "b1h2s64d64-bf16"  # the kernels are for fp16
TRIES = 4  # a busy machine may be too noisy for a verdict; only an INCONCLUSIVE gate is tried again


def gate(project: Project, name: str, ratio: str, cases: str = CASE) -> Run:
    """Gate one variant against the variant `usual`."""
    options = (f"--fa-case={cases}", f"--fa-variant={name}", "--fa-gate-baseline=usual", "-k", "test_gate")
    return project.suite(*options, f"--fa-gate={ratio}")


def decided(project: Project, name: str, limit: float, cases: str = CASE) -> Run:
    """Gate one variant against `usual`, until there is a verdict."""
    for _ in range(TRIES):
        run = gate(project, name, f"{limit}", cases)
        if run.ret != 10:  # the exit status of a gate without a verdict
            break
    return run


class Faster(NamedTuple):
    """A kernel that is faster than `usual`, the ratio of its gate, and the run."""

    name: str
    limit: float
    run: Run


@pytest.fixture(scope="module", params=nightly_after(1, LIMITS))
def faster(request: pytest.FixtureRequest, timed: Project) -> Faster:
    """The gate of a faster kernel, also on a shape that it refuses."""
    name, limit = request.param, LIMITS[request.param]
    return Faster(name, limit, decided(timed, name, limit, f"{CASE},{REFUSED}-seed0"))


def ratio_of(run: Run) -> float:
    """The ratio of the single pair, as the terminal shows it."""
    lines = {each.strip() for each in run.all_lines}
    (line,) = [each for each in lines if each.startswith(f"{SHAPE}: ") and " x usual, 99.5 % interval " in each]
    return float(line.split(": ")[1].split(" x ")[0])


@pytest.mark.alone
def test_a_faster_kernel_passes(faster: Faster) -> None:
    """A kernel that takes half or 0.9 of the baseline's time passes its gate, and the measured ratio is right.

    A load that comes and goes shifts the ratio by a part of the difference, so the tolerance is a part of it, too.
    """
    name, limit, run = faster
    ratio = DURATIONS_MS[name] / DURATIONS_MS["usual"]
    assert (run.ret, run.outcomes) == (0, {f"test_gate[{name}]": "passed"})
    assert ratio_of(run) == pytest.approx(ratio, abs=0.4 * (limit - ratio))
    assert any(line.startswith(f"PASS {name} < {limit} x baseline: ") for line in run.all_lines)


@pytest.mark.nightly
@pytest.mark.alone
def test_ten_percent_slower_fails(timed: Project) -> None:
    """A kernel that takes 1.1 times the baseline's time fails a gate of 0.95."""
    run = decided(timed, "slow", 0.95)
    assert (run.ret, run.outcomes) == (1, {"test_gate[slow]": "failed"})
    assert ratio_of(run) == pytest.approx(1.1, abs=0.02)
    assert any(each.strip().startswith("FAIL slow < 0.95 x baseline: ") for each in run.all_lines)


@pytest.mark.alone
def test_the_cost_is_announced(faster: Faster) -> None:
    """Before the first process, a line announces the number of processes and the time; on a CPU no known noise."""
    name, limit, run = faster
    line, *_ = [line for line in run.all_lines if line.startswith(f"fa: gate {name}")]
    assert line.startswith(f"fa: gate {name} < {limit} x usual: 6 processes (about ")
    assert " or 12 (about " in line
    noise = "the noise of this CPU is not known, so no detectable difference is announced"
    assert line.endswith(f"; {noise}; left out: 1 shapes that {name} refuses")


@pytest.mark.alone
def test_the_record_has_every_block(timed: Project, faster: Faster) -> None:
    """The record has the raw blocks, the pilot's times and the intervals."""
    name, limit, run = faster
    assert run.ret == 0
    *_, record = [record for record in timed.records if Gate.of(record) and record.variant == name]
    gate = Gate.of(record)
    assert gate is not None
    (pair,) = gate.pairs
    assert (record.kind, record.outcome, gate.verdict) == ("gate", "ok", "PASS")
    assert [len(row) for row in pair.samples.blocks] == [6] * gate.processes
    assert [len(order.blocks) for order in pair.samples.orders] == [6] * gate.processes
    assert (pair.low or 1) < (pair.ratio or 1) < (pair.high or 1) < limit
    assert pair.method.startswith("wall clock of ")
    assert set(gate.pilot_us[SHAPE]) == {name, "usual"}


@pytest.mark.nightly
@pytest.mark.alone
def test_no_verdict_has_an_exit_status_of_its_own(timed: Project) -> None:
    """A gate exactly at the true ratio has no verdict: the test fails, and the exit status of the run is 10."""
    run = gate(timed, "usual", "1.0")
    assert (run.ret, "INCONCLUSIVE usual < 1 x baseline: " in run.text) == (10, True)
    assert any("1 inconclusive" in line for line in run.all_lines)
    assert any(line.startswith("usual: ") and "gate INCONCLUSIVE (< 1 x baseline)" in line for line in run.all_lines)


def test_a_wrong_kernel_is_not_gated(timed: Project) -> None:
    """A candidate that is wrong in the pilot fails with its bounds, and no process of the gate is started."""
    run = gate(timed, "wrong", "0.95")
    assert (run.ret, "\nwrong: " in run.text, "fa: gate" in run.text) == (1, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fa-gate=fast"], "--fa-gate: 'fast' is not a ratio; give 0.01 to 100, such as 0.95"),
        (["--fa-gate=1", "-n2"], "--fa-gate: a gate starts its own processes, one at a time; drop -n"),
        (["--fa-gate=0"], "--fa-gate: '0' is not a ratio; give 0.01 to 100, such as 0.95"),
        (["--fa-gate-baseline=usual"], "--fa-gate-baseline: there is no gate; give --fa-gate=RATIO too"),
        (
            ["--fa-gate=1", "--fa-gate-baseline=usul"],
            "ERROR: --fa-gate-baseline: no variant 'usul'; did you mean 'usual'? (see --fa-list)",
        ),
    ],
)
def test_bad_options_are_named(timed: Project, options: list[str], message: str) -> None:
    """An invalid ratio, a baseline without a gate, or an unknown name is a usage error before anything runs."""
    run = timed.collect("--fa-variant=quick", f"--fa-case={CASE}", *options)
    assert (run.ret, message in run.text) == (4, True), run.text


def test_without_a_gate_there_is_no_item(timed: Project) -> None:
    """Without --fa-gate there is no `test_gate`."""
    assert [each for each in timed.ids("--fa-variant=quick") if "test_gate" in each] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fa-gate-baseline=wrong"], "wrong at b1h2s64d64-fp16: wrong: "),
    ],
)
def test_a_gate_that_cannot_run_has_no_verdict(timed: Project, options: list[str], message: str) -> None:
    """With a wrong baseline, the gate has no verdict and the exit status is 10."""
    run = timed.suite(f"--fa-case={CASE}", "--fa-variant=quick", "--fa-gate=0.95", "-k", "test_gate", *options)
    assert (run.ret, message in run.text) == (10, True), run.text


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--fa-gate-baseline=key:deadbeef", "'key:deadbeef' must name one cached build; it matches none"),
        ("--fa-gate=", "--fa-gate: '' is not a ratio"),
    ],
)
def test_an_unknown_key_is_a_usage_error(timed: Project, option: str, message: str) -> None:
    """A key that matches no build, and an empty ratio, are usage errors."""
    run = timed.collect("--fa-variant=quick", f"--fa-case={CASE}", "--fa-gate=0.95", option)
    assert (run.ret, message in run.text) == (4, True), run.text


@pytest.mark.alone
def test_refused_shapes_are_named(faster: Faster) -> None:
    """A shape that the candidate refuses is not gated, and is listed as excluded."""
    assert faster.run.ret in (0, 10)
    assert f"excluded: {faster.name} does not support {REFUSED}" in faster.run.text


@pytest.mark.nightly
def test_the_rerun_command_has_the_options_of_the_gate(timed: Project) -> None:
    """The rerun command of a gate without a verdict has its case, its ratio and its baseline, once each."""
    run = timed.suite(f"--fa-case={CASE}", "--fa-variant=quick", "--fa-gate=0.95", "--fa-gate-baseline=wrong")
    (line,) = {each.strip() for each in run.all_lines if each.strip().startswith("rerun: ")}
    options = (f"--fa-case={CASE}", "--fa-gate=0.95", "--fa-gate-baseline=wrong")
    assert [line.split().count(option) for option in options] == [1, 1, 1]
