"""The fixtures: `fa_run` for the shipped suite, the others for a user's own tests.

`fa_run` runs kernels in a worker process.  The other fixtures run them in pytest's own process, so a crash or a hang of
a kernel ends the whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fa.plugin.first_use import kernel_run_of
from pytest_fa.plugin.replay_clock import ReplayClock

if TYPE_CHECKING:
    import torch

    from pytest_fa.candidate.forward import Forward
    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import Variant
    from pytest_fa.gpu.inputs import Inputs
    from pytest_fa.judge.truth import Truth
    from pytest_fa.plugin.fa_benchmark import FaBenchmark
    from pytest_fa.plugin.fa_run import FaRun
    from pytest_fa.records.checks import Check


@pytest.fixture
def fa_variant(request: pytest.FixtureRequest) -> Variant:
    """The variant under test.  A test with this fixture runs once for every selected variant."""
    variant: Variant = request.param
    return variant


@pytest.fixture
def fa_case(request: pytest.FixtureRequest) -> Case:
    """The case under test: shape, dtype, mask and seed.  A test with this fixture runs once for every selected case."""
    case: Case = request.param
    return case


@pytest.fixture
def fa_property(request: pytest.FixtureRequest) -> str:
    """The name of the property under test.  A test with this fixture runs once for every variant and property."""
    name: str = request.param
    return name


@pytest.fixture
def fa_module(request: pytest.FixtureRequest, fa_variant: Variant) -> Iterator[Forward]:
    """The variant as a function of q, k, v and the keywords of a call, built and loaded into this process."""
    from pytest_fa.plugin.in_process import open_module  # noqa: PLC0415  # torch: only for in-process tests

    with open_module(request, fa_variant) as forward:
        yield forward


@pytest.fixture
def fa_inputs(request: pytest.FixtureRequest, fa_case: Case) -> Iterator[Inputs]:
    """The arguments of a call on the case, on the GPU if there is one.  Refused cases are skipped."""
    from pytest_fa.plugin.in_process import open_inputs  # noqa: PLC0415  # torch: only for in-process tests

    with open_inputs(request, fa_case) as inputs:
        yield inputs


@pytest.fixture
def fa_truth(request: pytest.FixtureRequest, fa_case: Case, fa_inputs: Inputs) -> Truth:
    """Truth for `fa_inputs`: `.out` is float64 attention, `.same_precision` the same-precision reference."""
    from pytest_fa.plugin.in_process import judge_truth  # noqa: PLC0415  # torch: only for in-process tests

    return judge_truth(request, fa_case, fa_inputs)


@pytest.fixture
def fa_check(request: pytest.FixtureRequest, fa_case: Case, fa_inputs: Inputs) -> Callable[[torch.Tensor], Check]:
    """`fa_check(out)` judges an output by the tolerance policy: it returns the check, or fails with every bound.

    It computes truth when it is called, from the current contents of `fa_inputs`.
    """
    from pytest_fa.plugin.in_process import judge_outputs  # noqa: PLC0415  # torch: only for in-process tests

    return lambda out: judge_outputs(request, fa_case, fa_inputs, [out])


@pytest.fixture
def fa_clock(request: pytest.FixtureRequest) -> ReplayClock:
    """The clock that pytest-benchmark uses in this test, which replays device times."""
    clock = ReplayClock()  # `benchmark` reads its timer from the marker when it is created, after this fixture
    mark = request.node.get_closest_marker("benchmark")
    own_arguments = dict(mark.kwargs) if mark else {}
    request.node.add_marker(pytest.mark.benchmark(**{"timer": clock, **own_arguments}), append=False)
    return clock


@pytest.fixture
def fa_benchmark(request: pytest.FixtureRequest, fa_clock: ReplayClock, benchmark: Any) -> FaBenchmark:  # noqa: ANN401
    """Times a kernel on the device, judges the outputs, and passes the samples to pytest-benchmark."""
    return kernel_run_of(request.config).fa_benchmark(request, fa_clock, benchmark)


@pytest.fixture
def fa_run(request: pytest.FixtureRequest, fa_builds: None) -> FaRun:  # noqa: ARG001  # everything is built first
    """Runs and records one test in a worker process: `fa_run.build`, `.correct`, `.property`, `.speed` and others."""
    return kernel_run_of(request.config).fa_run(request.node)


@pytest.fixture(scope="session")
def fa_builds(request: pytest.FixtureRequest) -> None:
    """Builds everything that the selected tests need, in one parallel batch."""
    kernel_run_of(request.config).build()
