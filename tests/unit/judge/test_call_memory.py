"""The memory of one call: what torch's allocator and the judge say of it, and the limits of a manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.candidate.cuda_forward import CudaForward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Limits
from pytest_fa.errors import OverLimit
from pytest_fa.gpu.device import peak_bytes_of
from pytest_fa.gpu.inputs import make_inputs, poisoned_output
from pytest_fa.judge.call_memory import CallMemory, require_within
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.connection import LocalConnection
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseResult
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, cpu_job

GPU = torch.device("cuda", 0)
CASE = parse_case("b1h2s16d64-fp16-seed0")


class Allocator:
    """The figures of torch's caching allocator, of which 1000 bytes are in use."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.used_bytes, self.peak_bytes = 1000, 5000  # an earlier call had more
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda _: self.used_bytes)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak_bytes)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: self.take(0, peak_bytes=0))

    def take(self, size_bytes: int, *, peak_bytes: int | None = None) -> None:
        """Allocate, or free where the size is negative."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.used_bytes, self.peak_bytes if peak_bytes is None else peak_bytes)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """An allocator in place of torch's."""
    return Allocator(monkeypatch)


class Asks(CudaForward):
    """A CUDA source that asks for a workspace of 64 bytes, and whose call takes 300 bytes for a while."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.calls = allocator, 0

    def workspace_bytes(self, *_: torch.Tensor, **__: object) -> int:
        """The size of the workspace."""
        return 64

    def __call__(self, *_: torch.Tensor, out: torch.Tensor | None = None, **__: object) -> torch.Tensor:
        """Take memory and free it."""
        assert out is not None
        self.calls += 1
        self.allocator.take(300)
        self.allocator.take(-300)
        return out


def memory_of(forward: CudaForward, device: torch.device) -> CallMemory:
    """The memory of one call, on tensors of the CPU, of a candidate on a device."""
    candidate = Candidate.of_function(forward, "cpu")
    assert isinstance(candidate._connection, LocalConnection)
    candidate.device = candidate._connection.agent.device = device
    inputs = make_inputs(CASE, torch.device("cpu"))
    return candidate.memory_of(inputs, poisoned_output(inputs))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((), 0), ((300,), 300), ((300, -300, 200), 300), ((200, -100, 300), 400), ((-500, 200), 0)],
    ids=["nothing", "kept", "freed", "twice", "less than before"],
)
def test_the_peak_of_a_call_is_what_it_adds(allocator: Allocator, sizes: tuple[int, ...], expected: int) -> None:
    """Neither what was in use before, nor the peak of an earlier call counts, and freed memory counts once."""

    def call() -> None:
        for size in sizes:
            allocator.take(size)

    assert peak_bytes_of(call, GPU) == expected


def test_the_workspace_is_part_of_the_peak(allocator: Allocator) -> None:
    """The judge knows the workspace that it lends, which the candidate's allocator does not see."""
    assert memory_of(Asks(allocator), GPU) == CallMemory(workspace_bytes=64, peak_bytes=364)


def test_nothing_is_measured_on_the_cpu(allocator: Allocator) -> None:
    """On the CPU, no further call is made; there is no workspace, and the peak is not known."""
    forward = Asks(allocator)
    assert (memory_of(forward, torch.device("cpu")), forward.calls) == (CallMemory(0, None), 0)


# -- limits -----------------------------------------------------------------------------------------------------------

TOO_LARGE = "{0} is {1}, the limit is {2}: use less, or raise limits.{0} in the manifest"
UNKNOWN = "limits.peak_bytes cannot be checked on the CPU, where memory is not measured: "


@pytest.mark.parametrize(
    ("limits", "memory", "message"),
    [
        ({"workspace_bytes": 63}, CallMemory(64, 364), TOO_LARGE.format("workspace_bytes", 64, 63)),
        ({"peak_bytes": 363}, CallMemory(64, 364), TOO_LARGE.format("peak_bytes", 364, 363)),
        ({"peak_bytes": 0}, CallMemory(0, None), UNKNOWN + "judge it on a GPU, or leave the limit out"),
    ],
)
def test_a_broken_limit_is_one_sentence(limits: dict[str, int], memory: CallMemory, message: str) -> None:
    """It says what is too large, the value found and the value allowed, or why there is none, and what to do."""
    with pytest.raises(OverLimit) as raised:
        require_within(memory, Limits(**limits))  # type: ignore[arg-type]  # none is `instructions`
    assert str(raised.value) == message


@pytest.mark.parametrize("limits", [Limits(), Limits(workspace_bytes=64, peak_bytes=364), Limits(spill_bytes=0)])
def test_a_kept_limit_raises_nothing(limits: Limits) -> None:
    """A figure equal to its limit is allowed, and a figure without a limit is not checked."""
    require_within(CallMemory(64, 364), limits)


@pytest.fixture
def judged(write_variant: WriteVariant, tmp_path: Path) -> Callable[..., CaseResult]:
    """`judged(limits)`: the result of a right kernel on the CPU, or of another source, with these limits."""

    def judge(limits: str, source: str = PYTHON_SOURCE) -> CaseResult:
        manifest = f"{PYTHON_MANIFEST}limits: {limits}\n"
        folder = write_variant("limited", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return run_case(cpu_job(variant, CASE.id, time=True))

    return judge


def verdict(result: CaseResult) -> tuple[Any, ...]:
    """Outcome, checks, figures, and whether the kernel was timed."""
    return result.outcome, result.caught_by, result.workspace_bytes, result.peak_bytes, result.speed is not None


def test_a_case_on_the_cpu_has_no_peak(judged: Callable[..., CaseResult]) -> None:
    """Its workspace can be checked, and limits of its memory cannot: then the case fails instead of passing."""
    assert verdict(judged("{workspace_bytes: 0}")) == ("ok", (), 0, None, True)
    assert verdict(judged("{peak_bytes: 1000}")) == ("over_limit", ("limits",), 0, None, False)


def test_a_case_above_a_limit_fails(judged: Callable[..., CaseResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not timed, and its figures are kept."""
    monkeypatch.setattr(Candidate, "memory_of", lambda *_: CallMemory(64, 364))
    assert verdict(judged("{workspace_bytes: 64, peak_bytes: 364}")) == ("ok", (), 64, 364, True)
    result = judged("{peak_bytes: 363}")
    assert verdict(result) == ("over_limit", ("limits",), 64, 364, False)
    assert [stage.name for stage in result.stages if stage.state == "failed"] == ["correct"]


def test_a_wrong_output_is_the_worse_news(judged: Callable[..., CaseResult]) -> None:
    """What is wrong and above a limit is wrong."""
    assert judged("{peak_bytes: 0}", PYTHON_SOURCE.replace("* scale", "* scale * 2")).outcome == "wrong"
