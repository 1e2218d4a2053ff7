"""Explain a launch that the CUDA runtime refused: the sizes of the call and the limits of this GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from pytest_fa.build.cache import StoredBuild

MAX_BLOCKS = 65_535  # of a grid in y and in z
MAX_BLOCKS_X = 2**31 - 1
MAX_THREADS = 1_024  # of a block
# What SASS calls accesses that can be to shared memory; LD, ST, ATOM and RED use generic addresses.
_TENSOR_CORES = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")  # operands can be in shared memory
SHARED_ACCESSES = frozenset(
    (
        *("LDS", "STS", "LDSM", "STSM", "ATOMS", "LDGSTS", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "SYNCS"),
        *("LD", "ST", "ATOM", "RED"),
        *_TENSOR_CORES,
    )
)


def launch_hint(error: str, q: torch.Tensor, k: torch.Tensor, library: str) -> str:
    """What may be too large in a launch that the runtime refused with `error`; empty if that is not known.

    `q` and `k` are those of the call, [batch, heads, seq, head_dim]; `library` is the path of the build.
    """
    if q.device.type == "cpu":
        return ""
    limits: Any = torch.cuda.get_device_properties(q.device)
    if "cudaErrorInvalidValue" in error or "cudaErrorInvalidConfiguration" in error:
        return f"{_grid_hint(q, k)}{_smem_hint(limits) if may_use_smem(library) else ''}"
    if "cudaErrorLaunchOutOfResources" in error:
        return (
            f"; a block has at most {limits.regs_per_multiprocessor:,} registers: write "
            f"`__launch_bounds__(THREADS)` with the threads of a block, or launch fewer threads"
        )
    return ""


def _grid_hint(q: torch.Tensor, k: torch.Tensor) -> str:
    """The sizes of the call and the limits of a launch; if y or z cannot hold heads and batch, what can."""
    batch, heads, seq_q, head_dim = q.shape
    sizes = {"batch": batch, "heads": heads, "kv_heads": k.shape[1], "seq_q": seq_q, "seq_k": k.shape[2]}
    shown = ", ".join(f"{name} {size:,}" for name, size in {**sizes, "head_dim": head_dim}.items())
    limits = f"a grid has at most {MAX_BLOCKS:,} blocks in y and in z, a block {MAX_THREADS:,} threads"
    text = f"; the call has {shown}; {limits}"
    if batch * heads > MAX_BLOCKS:
        text += f": put heads and batch into x, which has up to {MAX_BLOCKS_X:,} blocks"
    return text


def _smem_hint(limits: Any) -> str:  # noqa: ANN401  # torch does not type it
    return (
        f"; if the kernel uses dynamic shared memory: this GPU gives a block {limits.shared_memory_per_block:,} B, "
        f"static and dynamic together, and {limits.shared_memory_per_block_optin:,} B after "
        f"`if (int status = fa_allow_dynamic_smem(args, kernel, bytes)) return status;`"
    )


def may_use_smem(library: str) -> bool:
    """Whether a kernel of a build can use shared memory, by the instructions that `build.json` beside it lists.

    If they are not known, it can.
    """
    try:
        data = Path(library).with_name("build.json").read_bytes()
        kernels = msgspec.json.decode(data, type=StoredBuild).build.kernels
    except (OSError, msgspec.MsgspecError):
        return True
    return not kernels or any(not each.instructions or SHARED_ACCESSES & set(each.instructions) for each in kernels)
