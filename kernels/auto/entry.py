"""auto: choose a rung for each problem, and call it.

step:    calls the rung that is expected to be the fastest for the problem, by what was measured and by its work
because: no single kernel is fastest at 64 keys and at 16384 keys, with a mask and without, on every GPU
expect:  the time of the fastest rung; call_us as that of the rung, because a choice is made once per problem

Expected times are those of `costs.py`.  Where a rung refuses the call, the next one is tried.  The variants of `OTHERS`
come last, in order.  A call in e4m3, the CPU, and a GPU that no rung runs on get only these.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytest_fa.build.target import native_arch
from pytest_fa.candidate.cuda_forward import CudaForward
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import build_library, load_forward
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import BuildError, FaError, ToolchainError, UnsupportedCase
from pytest_fa.gpu.guards import Workspaces
from pytest_fa.options.options import default_cache

from .costs import costs_of
from .problem import Problem

FOLDER = Path(__file__).parent
PORTABLE = "portable, for where no rung runs"
PORTABLES = ("split_warps", "swizzle_async", "mma_regs", "wmma", "minimal", "reference", "fp8_mma", "reference_e4m3")
OTHERS = {"fp8_stages": "for e4m3; it chooses among work tiles itself", **dict.fromkeys(PORTABLES, PORTABLE)}
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}


class Choice(NamedTuple):
    """A variant, and the reason for choosing it."""

    variant: str
    why: str


class Loaded(NamedTuple):
    """A variant that can be called, and its library if it is a CUDA kernel."""

    forward: Forward
    library: str | None


def __getattr__(name: str) -> Forward:
    """`forward`, made when it is first asked for.

    On a GPU it is the C entry, without Python around it; there, only the first call of a problem comes to
    `choose_and_call`.
    """
    if name != "forward":
        raise AttributeError(name)
    try:
        return _dispatch().forward if torch.cuda.is_available() else choose_and_call
    except FaError:  # it is not built, and there is no compiler
        return choose_and_call


def choose_and_call(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,
    **words: Any,  # noqa: ANN401  # of the parts of attention; a variant that lacks one refuses it
) -> torch.Tensor:
    """Return the output of the first choice that takes the call, [batch, heads, seq_q, head_dim].

    On a GPU, later calls of the problem go to it without Python.  Raises `UnsupportedCase` if no variant takes it.
    """
    reasons = []
    for choice in choose(q, k, causal):
        if "lse" in words and "lse" not in variants()[choice.variant].returns:
            continue
        try:
            loaded = loaded_variant(choice.variant)
            result = loaded.forward(q, k, v, scale=scale, causal=causal, out=out, **words)
        except (UnsupportedCase, BuildError, ToolchainError) as problem:
            reasons.append(f"{choice.variant}: {problem}")
            continue
        if q.is_cuda and loaded.library:
            _send_to(loaded.library)
        return result
    raise UnsupportedCase("; ".join(reasons) or f"no variant supports {_case(q, k, causal).shape_id}")


def explain(q: torch.Tensor, k: torch.Tensor, causal: str = "none") -> str:
    """Return the choices for such a call, one per line, in order and with their reasons."""
    return "\n".join(f"{choice.variant}: {choice.why}" for choice in choose(q, k, causal))


def choose(q: torch.Tensor, k: torch.Tensor, causal: str) -> list[Choice]:
    """Return the variants that support such a call: the rungs with costs, fastest first, and then the others."""
    case = _case(q, k, causal)
    rungs = _rungs(Problem.of(case), q.device) if q.is_cuda else []
    names = [choice.variant for choice in rungs]
    others = [Choice(name, why) for name, why in OTHERS.items() if name not in names]
    return [choice for choice in (*rungs, *others) if _supports(choice.variant, case, q.device.type)]


def _rungs(problem: Problem, device: torch.device) -> list[Choice]:
    """The rungs for the problem, fastest first, whether they run on the GPU or not."""
    properties = torch.cuda.get_device_properties(device)
    return _ranked(problem.coarse(), properties.name, properties.multi_processor_count)


@functools.lru_cache(maxsize=4096)
def _ranked(problem: Problem, gpu: str, sms: int) -> list[Choice]:
    costs = costs_of(gpu, sms)
    ranked = costs.ranked(problem) if costs else []
    source = f"expected by the times measured on {costs.gpu}" if costs else ""
    return [Choice(each.rung, f"{each.us:.2f} us, {'measured' if each.is_measured else source}") for each in ranked]


def _send_to(library: str) -> None:
    """Let `dispatch` send calls of the problem that it refused last to the kernel of a library."""
    rung, dispatch = ctypes.CDLL(library), ctypes.CDLL(_dispatch().library)
    workspace_bytes = getattr(rung, "fa_workspace_bytes", None)  # exported only by a rung that needs a workspace
    dispatch.fa_dispatch_choose(rung.fa_forward, workspace_bytes)


def _supports(name: str, case: Case, device: str) -> bool:
    """Return whether the variant exists, supports the case, and can be built for the GPU of this machine."""
    variant = variants().get(name)
    if variant is None or variant.refuses(case) is not None or device not in variant.supports.device:
        return False
    try:
        return not variant.is_built or bool(native_arch(variant))
    except BuildError:
        return False


def _case(q: torch.Tensor, k: torch.Tensor, causal: str) -> Case:
    batch, heads, seq_q, head_dim = q.shape
    dtype = DTYPES.get(q.dtype)
    if dtype is None:
        raise UnsupportedCase(f"q is {q.dtype}; auto supports {', '.join(map(str, DTYPES))}")
    return Case(batch, heads, seq_q, head_dim, dtype, causal, k.shape[1], k.shape[2], "bhsd", 0)  # type: ignore[arg-type]


@functools.cache
def variants() -> dict[str, Variant]:
    """The variants beside `auto`."""
    return discover((FOLDER.parent,)).variants


@functools.cache
def _dispatch() -> Loaded:
    library = _built(discover((FOLDER,), with_installed=False).variants["dispatch"])
    assert library is not None  # noqa: S101  # it is a CUDA source
    return Loaded(CudaForward(library, Workspaces(), "attention", choose_and_call), library)


@functools.cache
def loaded_variant(name: str) -> Loaded:
    """A variant that is loaded once."""
    variant = variants()[name]
    library = _built(variant)
    return Loaded(load_forward(variant, library), library if variant.entry.kind == "cuda" else None)


def _built(variant: Variant) -> str | None:
    """The library of a variant; a cached build is used if there is one, so that no compiler is needed."""
    build: Callable[..., str | None] = functools.partial(build_library, variant, default_cache())
    try:
        return build(no_build=True)
    except BuildError:
        return build()
