"""A launch that the runtime refused: the message has the sizes of the call and the limits of this GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.build.cache import StoredBuild
from pytest_fa.candidate import cuda_forward
from pytest_fa.candidate.launch_hint import may_use_smem
from pytest_fa.errors import LaunchError
from tests.factories import build

INVALID = "cudaErrorInvalidValue: invalid argument"
SIZES = "; the call has batch 2, heads 8, kv_heads 4, seq_q 16, seq_k 77, head_dim 64"
MANY = "; the call has batch 1, heads 65,537, kv_heads 65,537, seq_q 16, seq_k 77, head_dim 64"
GRID = "; a grid has at most 65,535 blocks in y and in z, a block 1,024 threads"
TO_X = ": put heads and batch into x, which has up to 2,147,483,647 blocks"
SMEM = (
    "; if the kernel uses dynamic shared memory: this GPU gives a block 49,152 B, static and dynamic together, and "
    "232,448 B after `if (int status = fa_allow_dynamic_smem(args, kernel, bytes)) return status;`"
)


class Properties:
    """The limits of a GPU."""

    shared_memory_per_block = 49_152
    shared_memory_per_block_optin = 232_448
    regs_per_multiprocessor = 65_536


@pytest.fixture
def library(tmp_path: Path) -> str:
    """A library whose only kernel loads from and stores to global memory."""
    return _library(tmp_path, {"LDG": 8, "STG": 2})


def _library(folder: Path, instructions: dict[str, int]) -> str:
    plain = build("sm_90a", kernel=(32, 0, 0))
    kernels = tuple(msgspec.structs.replace(each, instructions=instructions) for each in plain.kernels)
    stored = StoredBuild(msgspec.structs.replace(plain, kernels=kernels), ())
    (folder / "build.json").write_bytes(msgspec.json.encode(stored))
    return str(folder / "kernel.so")


def _message(monkeypatch: pytest.MonkeyPatch, error: str, sizes: tuple[int, int, int], library: str) -> str:
    """The message for a refused launch of a call with `sizes` = (batch, heads, kv_heads)."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    batch, heads, kv_heads = sizes
    q = torch.empty(batch, heads, 16, 64, device="meta")
    k = torch.empty(batch, kv_heads, 77, 64, device="meta")
    problem = cuda_forward.translate_error(RuntimeError(f"launch failed: {error}"), q, k, library)
    assert isinstance(problem, LaunchError)
    return str(problem)


@pytest.mark.parametrize(
    ("error", "sizes", "hint"),
    [
        (INVALID, (2, 8, 4), SIZES + GRID),
        ("cudaErrorInvalidConfiguration: invalid configuration argument", (2, 8, 4), SIZES + GRID),
        (INVALID, (1, 65_537, 65_537), MANY + GRID + TO_X),
        (
            "cudaErrorLaunchOutOfResources: too many resources requested for launch",
            (2, 8, 4),
            (
                "; a block has at most 65,536 registers: write `__launch_bounds__(THREADS)` with the threads of a "
                "block, or launch fewer threads"
            ),
        ),
        ("cudaErrorNoKernelImageForDevice: no kernel image is available", (2, 8, 4), ""),
    ],
)
def test_a_refused_launch_gets_the_limits_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, library: str, error: str, sizes: tuple[int, int, int], hint: str
) -> None:
    """If the runtime refuses a launch, the message has the sizes of the call, this GPU's limits and what to write."""
    assert _message(monkeypatch, error, sizes, library) == f"launch failed: {error}{hint}"


def test_shared_memory_is_named_only_if_a_kernel_uses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The limits of shared memory are part of the message if an instruction of the build accesses it."""
    library = _library(tmp_path, {"LDS": 4, "STG": 2})
    assert _message(monkeypatch, INVALID, (2, 8, 4), library) == f"launch failed: {INVALID}{SIZES}{GRID}{SMEM}"


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ({"LDG": 1, "STG": 1}, False),
        ({"LDG": 1, "STS": 1}, True),
        ({"UTMALDG": 1}, True),
        ({"LD": 1}, True),
        ({}, True),
    ],
)
def test_shared_memory_is_known_from_the_instructions(
    tmp_path: Path, instructions: dict[str, int], *, expected: bool
) -> None:
    """A build may use shared memory if one of its instructions can access it, or if they are not known."""
    assert may_use_smem(_library(tmp_path, instructions)) is expected


def test_a_library_without_a_record_may_use_shared_memory(tmp_path: Path) -> None:
    """Without a readable `build.json` beside the library, nothing is ruled out."""
    (tmp_path / "build.json").write_text("{")
    assert (may_use_smem(str(tmp_path / "kernel.so")), may_use_smem(str(tmp_path / "no" / "kernel.so"))) == (True, True)
