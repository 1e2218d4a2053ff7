"""Fixtures: `fa_run` for the shipped suite, the others for a user's own tests.

`fa_run` sends jobs to a worker process.  The others offer the worker's own functions in this process: unprotected, so a
crash or a hang takes pytest down with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.measure.replay_clock import ReplayClock
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.in_process import FaBenchmark, device_kept, device_or_skip, judge_outputs, policy_of
from pytest_fa.plugin.state import OPTIONS_KEY, progress_line, session_of

if TYPE_CHECKING:
    import torch

    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import Variant
    from pytest_fa.judge.truth import Truth
    from pytest_fa.records.judged import Check
    from pytest_fa.run.forward import Forward
    from pytest_fa.run.inputs import Inputs


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

    device, options = device_or_skip(fa_variant), request.config.stash[OPTIONS_KEY]
    with device_kept(request, device):
        library = build_library(fa_variant, options.cache, no_build=options.no_build)
        case: Case | None = request.getfixturevalue("fa_case") if "fa_case" in request.fixturenames else None
        with open_forward(fa_variant, library, computes=case.computes if case else None) as forward:
            yield forward


@pytest.fixture
def fa_inputs(request: pytest.FixtureRequest, fa_case: Case) -> Iterator[Inputs]:
    """The case's `q, k, v, scale, causal` on the GPU, or on the CPU without one; refused cases are skipped."""
    import torch  # noqa: PLC0415  # only for in-process tests

    from pytest_fa.records.environment import find_gpu  # noqa: PLC0415
    from pytest_fa.run.inputs import make_inputs  # noqa: PLC0415

    device = "cuda" if find_gpu() else "cpu"
    if "fa_variant" in request.fixturenames:
        variant: Variant = request.getfixturevalue("fa_variant")
        if reason := variant.refuses(fa_case):
            pytest.skip(reason)
        device = device_or_skip(variant)
    with device_kept(request, device):
        yield make_inputs(fa_case, torch.device(device))


@pytest.fixture
def fa_truth(request: pytest.FixtureRequest, fa_case: Case, fa_inputs: Inputs) -> Truth:
    """float64 attention on `fa_inputs` (`.out`) and what an ideal kernel of the same precision gives (`.same-precision reference`)."""
    from pytest_fa.judge.oracle import truth_of  # noqa: PLC0415  # torch: only for in-process tests

    return truth_of(fa_case.computes, fa_inputs, (), policy_of(request, fa_case))


@pytest.fixture
def fa_check(request: pytest.FixtureRequest, fa_case: Case, fa_inputs: Inputs) -> Callable[[torch.Tensor], Check]:
    """`fa_check(out)`: judge an output by the tolerance policy; fails the test with every bound, or returns the check.

    Truth is computed inside, after the kernel has run, from `fa_inputs` as they are by then.
    """
    return lambda out: judge_outputs(request, fa_case, fa_inputs, [out])


@pytest.fixture
def fa_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock that pytest-benchmark reads in this test; it must exist before `benchmark` does."""
    clock = ReplayClock()
    mark = request.node.get_closest_marker("benchmark")
    kept = dict(mark.kwargs) if mark else {}
    request.node.add_marker(pytest.mark.benchmark(**{"timer": clock, **kept}), append=False)
    return clock


@pytest.fixture
def fa_benchmark(request: pytest.FixtureRequest, fa_clock: ReplayClock, benchmark: Any) -> FaBenchmark:  # noqa: ANN401
    """Honest device timing, its outputs judged, whose samples appear in pytest-benchmark's table and files."""
    return FaBenchmark(request, fa_clock, benchmark)


@pytest.fixture
def fa_run(request: pytest.FixtureRequest, fa_builds: None) -> FaRun:  # noqa: ARG001  # builds come first
    """`fa_run.build`, `.correct`, `.property`, `.speed`: one item through the builder or a worker process, recorded."""
    return FaRun(request.node)


@pytest.fixture(scope="session")
def fa_builds(request: pytest.FixtureRequest) -> None:
    """Everything that the selected items need, built in one parallel batch, with a progress line."""
    from pytest_fa.errors import ToolchainError  # noqa: PLC0415

    try:
        session_of(request.config).start(progress_line(request.config))
    except ToolchainError:
        return  # each item that needs a compiler says so
    except OSError as problem:
        pytest.exit(f"the cache cannot be used (--fa-cache): {problem}", returncode=pytest.ExitCode.USAGE_ERROR)
