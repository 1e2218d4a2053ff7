"""Fixtures: `fa_run` for the shipped suite, the others for a user's own tests.

`fa_run` sends jobs to a worker process.  The others offer the worker's own functions in this process: unprotected, so a
crash or a hang takes pytest down with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.markers import gate_of, tolerance_of
from pytest_fa.measure.replay_clock import ReplayClock, replay

if TYPE_CHECKING:
    import torch

    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import BrokenVariant, Variant
    from pytest_fa.judge.truth import Truth
    from pytest_fa.options import Options
    from pytest_fa.report.record import Check, Record, Speed
    from pytest_fa.run.forward import Forward
    from pytest_fa.run.inputs import Inputs
    from pytest_fa.session import Session

T = TypeVar("T")

OPTIONS_KEY: pytest.StashKey[Options] = pytest.StashKey()
SESSION_KEY: pytest.StashKey[Session] = pytest.StashKey()
RECORD_KEY: pytest.StashKey[Record] = pytest.StashKey()
LOST_KEY: pytest.StashKey[str] = pytest.StashKey()  # the test in which this process lost its device, and how


def session_of(config: pytest.Config) -> Session:
    """This run's session, made when it is first needed: a run without kernels never pays for it."""
    if SESSION_KEY not in config.stash:
        from pytest_fa.session import Session  # noqa: PLC0415

        if hasattr(config, "workerinput"):
            from pytest_fa.report.environment import turn_to_gpu  # noqa: PLC0415

            digits = re.search(r"[0-9]+$", config.workerinput["workerid"])
            turn_to_gpu(int(digits[0]) if digits else 0)
        config.stash[SESSION_KEY] = Session(config.stash[OPTIONS_KEY])
    return config.stash[SESSION_KEY]


@pytest.fixture
def fa_variant(request: pytest.FixtureRequest) -> Variant:
    """The variant under test; a test that asks for it runs once for every selected variant."""
    variant: Variant = request.param
    return variant


@pytest.fixture
def fa_case(request: pytest.FixtureRequest) -> Case:
    """The case under test: shape, dtype, mask and seed; a test that asks for it runs once for every selected case."""
    case: Case = request.param
    return case


@pytest.fixture
def fa_property(request: pytest.FixtureRequest) -> str:
    """The property under test, by its name; a test that asks for it runs once for every variant and property."""
    name: str = request.param
    return name


@pytest.fixture
def fa_sanitizer(request: pytest.FixtureRequest) -> str:
    """The tool of `--fa-sanitize`; a test that asks for it runs once for every selected variant and tool."""
    name: str = request.param
    return name


@pytest.fixture
def fa_module(request: pytest.FixtureRequest, fa_variant: Variant) -> Iterator[Forward]:
    """The variant as `f(q, k, v, *, scale, causal, out)`, built and loaded into this process."""
    from pytest_fa.run.module import build_library, open_forward  # noqa: PLC0415  # torch: only for in-process tests

    device, options = _device_of(fa_variant), request.config.stash[OPTIONS_KEY]
    with _device_kept(request, device):
        library = build_library(fa_variant, options.cache, no_build=options.no_build)
        case: Case | None = request.getfixturevalue("fa_case") if "fa_case" in request.fixturenames else None
        with open_forward(fa_variant, library, computes=case.computes if case else None) as forward:
            yield forward


@pytest.fixture
def fa_inputs(request: pytest.FixtureRequest, fa_case: Case) -> Iterator[Inputs]:
    """The case's `q, k, v, scale, causal` on the GPU, or on the CPU without one; refused cases are skipped."""
    import torch  # noqa: PLC0415  # only for in-process tests

    from pytest_fa.report.environment import find_gpu  # noqa: PLC0415
    from pytest_fa.run.inputs import make_inputs  # noqa: PLC0415

    device = "cuda" if find_gpu() else "cpu"
    if "fa_variant" in request.fixturenames:
        variant: Variant = request.getfixturevalue("fa_variant")
        if reason := variant.refuses(fa_case):
            pytest.skip(reason)
        device = _device_of(variant)
    with _device_kept(request, device):
        yield make_inputs(fa_case, torch.device(device))


@contextmanager
def _device_kept(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """Around an in-process test: a device that an earlier test lost is an error that names it, not another failure.

    A sticky error, such as an illegal address, ends a process's work on the GPU for good.
    """
    import torch  # noqa: PLC0415  # only for in-process tests

    from pytest_fa.run.device import is_alive  # noqa: PLC0415

    stash = request.config.stash
    if device != "cpu" and LOST_KEY in stash:
        pytest.fail(f"this process has no GPU any more: {stash[LOST_KEY]}", pytrace=False)
    yield
    if device != "cpu" and LOST_KEY not in stash and not is_alive(torch.device(device)):
        stash[LOST_KEY] = f"its context was lost in {request.node.nodeid}"


def _device_of(variant: Variant) -> str:
    """Where a variant runs on this machine; the test is skipped where it does not."""
    from pytest_fa.report.environment import find_gpu  # noqa: PLC0415

    device = variant.device_for(gpu=find_gpu() is not None)
    if device is None:
        pytest.skip(f"{variant.name} needs a GPU, and this machine has none")
    return device


@pytest.fixture
def fa_truth(request: pytest.FixtureRequest, fa_case: Case, fa_inputs: Inputs) -> Truth:
    """float64 attention on `fa_inputs` (`.out`) and what an ideal kernel of the same precision gives (`.yardstick`)."""
    from pytest_fa.judge.oracle import truth_of  # noqa: PLC0415  # torch: only for in-process tests

    return truth_of(fa_case.computes, fa_inputs, (), _policy(request, fa_case))


def _variant(request: pytest.FixtureRequest) -> Variant | None:
    """The variant under test, where the test asks for one."""
    return request.getfixturevalue("fa_variant") if "fa_variant" in request.fixturenames else None


def _policy(request: pytest.FixtureRequest, case: Case) -> str:
    """The tolerance policy: the option's, else the marker's, else the manifest's, else `measured`: scores' only one."""
    variant = _variant(request)
    marked = _read_marker(tolerance_of, request.node)
    found = request.config.stash[OPTIONS_KEY].tolerance or marked or (variant.tolerance if variant else "measured")
    if case.computes == "scores" and found != "measured":
        pytest.fail(
            f"tolerance {found} judges attention; {case.shape_id} asks for scores (use measured)", pytrace=False
        )
    return found


def _read_marker(read: Callable[[pytest.Item], T], node: pytest.Item) -> T:
    """What a marker says; one that cannot be read fails its test."""
    try:
        return read(node)
    except UsageProblem as problem:
        pytest.fail(str(problem), pytrace=False)


@pytest.fixture
def fa_check(request: pytest.FixtureRequest, fa_case: Case, fa_inputs: Inputs) -> Callable[[torch.Tensor], Check]:
    """`fa_check(out)`: judge an output by the tolerance policy; fails the test with every bound, or returns the check.

    Truth is computed inside, after the kernel has run, from `fa_inputs` as they are by then.
    """
    return lambda out: _judge(request, fa_case, fa_inputs, [out])


def _judge(
    request: pytest.FixtureRequest, case: Case, inputs: Inputs, outputs: Iterable[torch.Tensor], where: str = ""
) -> Check:
    """The check of the last output; the test fails with every bound of the first that is wrong."""
    from pytest_fa.errors import WrongResult  # noqa: PLC0415
    from pytest_fa.judge.check import judge, require_output  # noqa: PLC0415  # torch: only for in-process tests
    from pytest_fa.judge.oracle import truth_of  # noqa: PLC0415
    from pytest_fa.report.failure import check_lines  # noqa: PLC0415
    from pytest_fa.run.inputs import poisoned_output  # noqa: PLC0415

    variant, policy = _variant(request), _policy(request, case)
    truth = truth_of(case.computes, inputs, variant.rounds if variant else (), policy)
    like = poisoned_output(inputs, case.computes)
    for out in outputs:
        try:
            found = judge(require_output(out, like), truth, policy)
        except WrongResult as problem:
            pytest.fail(f"{problem}{where}", pytrace=False)
        if not found.passed:
            pytest.fail(f"wrong result{where}\n" + "\n".join(check_lines(found, case.computes)), pytrace=False)
    return found


@pytest.fixture
def fa_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock that pytest-benchmark reads in this test; it must exist before `benchmark` does."""
    clock = ReplayClock()
    mark = request.node.get_closest_marker("benchmark")
    kept = dict(mark.kwargs) if mark else {}
    request.node.add_marker(pytest.mark.benchmark(**{"timer": clock, **kept}), append=False)
    return clock


class FaBenchmark:
    """Timing through pytest-benchmark: `fa_benchmark(fa_module, fa_case, fa_inputs)`, or `.record` for a `Speed`."""

    def __init__(self, request: pytest.FixtureRequest, clock: ReplayClock, benchmark: Any) -> None:  # noqa: ANN401
        self._request = request
        self._clock = clock
        self._benchmark = benchmark

    def __call__(self, forward: Forward, case: Case, inputs: Inputs) -> Speed:
        """Measure `forward` in this process, hand its device times to pytest-benchmark, and return all figures.

        The test fails where an output of the timed calls is wrong.
        """
        from pytest_fa.measure.measure import measure  # noqa: PLC0415  # torch: only for in-process tests
        from pytest_fa.measure.timing_lock import timing_lock  # noqa: PLC0415

        with timing_lock():
            speed, outputs = measure(forward, case, inputs, case.id)
        variant = _variant(self._request)
        if variant is None or variant.is_judged:
            _judge(self._request, case, inputs, outputs, " in an output of the timed calls")
        self.record(speed, case)
        return speed

    def record(self, speed: Speed, case: Case, **extra: float | str) -> None:
        """Give the samples of `device_us` to pytest-benchmark, grouped by shape, with the other figures beside them."""
        if getattr(self._benchmark, "disabled", False):
            self._benchmark(lambda: None)
            return
        self._benchmark.group = case.shape_id
        replay(self._clock, self._benchmark, speed.device.samples_us)
        self._benchmark.extra_info.update(
            method=speed.device.method,
            call_us=speed.call.median_us,
            tflops=case.flops_per_call / speed.device.median_us / 1e6,
            **extra,
        )


@pytest.fixture
def fa_benchmark(request: pytest.FixtureRequest, fa_clock: ReplayClock, benchmark: Any) -> FaBenchmark:  # noqa: ANN401
    """Honest device timing, its outputs judged, whose samples appear in pytest-benchmark's table and files."""
    return FaBenchmark(request, fa_clock, benchmark)


class FaRun:
    """Sends one item's work where it belongs: to the builder, or to a worker process."""

    def __init__(self, session: Session, node: pytest.Item) -> None:
        self._session = session
        self._node = node

    def build(self, variant: Variant | BrokenVariant) -> Record:
        """Judge the variant's build; fails with the compiler's lines or the broken limits."""
        return self._finish(lambda: self._session.judge_build(variant))

    def correct(self, variant: Variant, case: Case) -> Record:
        """Run and judge; fails with every bound."""
        return self._finish(lambda: self._session.run_case(variant, case, "correct"))

    def property(self, variant: Variant, name: str) -> Record:
        """Hold to a property; fails with what did not hold."""
        return self._finish(lambda: self._session.hold_to_property(variant, name))

    def selftest(self, variant: Variant) -> Record:
        """Try everything on a kernel of the self-test; fails where the checks find too little or too much."""
        from pytest_fa.selftesting import judge_the_judge  # noqa: PLC0415  # only the self-test needs it

        return self._finish(lambda: judge_the_judge(self._session, variant))

    def gate(self, variant: Variant) -> Record:
        """Gate against the baselines; fails with the verdict and every interval."""
        from pytest_fa.gating import hold_gate, question_of  # noqa: PLC0415  # only a gate needs it

        say, session = _progress_line(self._node.config), self._session
        ratio = session.options.gate or _read_marker(gate_of, self._node)
        if ratio is None:
            lack = "fa_run.gate: there is no ratio; give --fa-gate, or mark the test with fa_gate(0.95)"
            pytest.fail(lack, pytrace=False)
        return self._finish(lambda: hold_gate(session, variant, question_of(session, variant, ratio), say))

    def profile(self, variant: Variant, case: Case) -> Record:
        """Count under Nsight Compute; skips, or fails under --ncu-strict, with the reason why nothing was counted."""
        from pytest_fa.profiling import profile_case  # noqa: PLC0415  # only a run with profiles needs it

        say = _progress_line(self._node.config)
        return self._finish(lambda: profile_case(self._session, variant, case, say))

    def sanitize(self, variant: Variant, tool: str, case: Case | None = None) -> Record:
        """Run one tool of compute-sanitizer, on a small case where none is given; fails with what it found."""
        from pytest_fa.catalog.properties import sanitizer_case  # noqa: PLC0415  # only where it was asked for
        from pytest_fa.sanitizing import sanitize_variant  # noqa: PLC0415

        asked = case or sanitizer_case(variant)
        return self._finish(lambda: sanitize_variant(self._session, variant, asked, tool))

    def speed(self, variant: Variant, case: Case) -> Record:
        """Run, judge, time, and judge what was timed."""
        return self._finish(lambda: self._session.run_case(variant, case, "speed"))

    def _finish(self, work: Callable[[], Record]) -> Record:
        from pytest_fa.report.failure import failure_text  # noqa: PLC0415  # only a run with items needs these
        from pytest_fa.session import CannotRun, Refused  # noqa: PLC0415

        record = lack = None
        try:
            record = work()
        except CannotRun as reason:
            lack = reason
        if record is None:
            if self._session.options.require_gpu and not isinstance(lack, Refused):
                pytest.fail(f"{lack} (--fa-require-gpu)", pytrace=False)
            pytest.skip(str(lack))
        self._node.stash[RECORD_KEY] = record
        is_strict = record.kind == "profile" and self._session.options.ncu_strict
        if record.outcome == "not_measured" and not is_strict:
            pytest.skip(record.message)
        if record.outcome != "ok":
            pytest.fail(failure_text(record), pytrace=False)
        return record


@pytest.fixture
def fa_run(request: pytest.FixtureRequest, fa_builds: None) -> FaRun:  # noqa: ARG001  # builds come first
    """`fa_run.build`, `.correct`, `.property`, `.speed`: one item through the builder or a worker process, recorded."""
    return FaRun(session_of(request.config), request.node)


@pytest.fixture(scope="session")
def fa_builds(request: pytest.FixtureRequest) -> None:
    """Everything that the selected items need, built in one parallel batch, with a progress line."""
    from pytest_fa.errors import ToolchainError  # noqa: PLC0415

    session = session_of(request.config)
    try:
        session.build_all(_progress_line(request.config))
    except ToolchainError:
        return  # each item that needs a compiler says so
    except OSError as problem:
        pytest.exit(f"the cache cannot be used (--fa-cache): {problem}", returncode=pytest.ExitCode.USAGE_ERROR)


def _progress_line(config: pytest.Config) -> Callable[[str], None]:
    """Write to the terminal past pytest's capture; silent in xdist workers and under -q."""
    terminal = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    if terminal is None or capture is None or hasattr(config, "workerinput") or config.get_verbosity() < 0:
        return lambda _: None

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(f"fa: {text}")

    return say
