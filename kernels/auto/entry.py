"""auto: picks a variant for each call and calls it.

step:    the variant that was measured fastest on the nearest shape, among those that take the call
because: no one kernel is best at 64 keys and at 16384, with a mask and without, on every GPU
expect:  the best variant's time on the device; one look-up more per call

What was measured stands in `choices.json`, which `python kernels/auto/choices.py` makes from `profiles/`.
Where nothing was measured, and where a kernel refuses, the next of `FALLBACKS` is asked.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import BuildError, UnsupportedCase
from pytest_fa.options import default_cache
from pytest_fa.run.forward import Forward
from pytest_fa.run.module import build_library, load_forward

FOLDER = Path(__file__).parent
FALLBACKS = ("split_warps", "swizzle_async", "mma_regs", "wmma", "minimal", "reference")
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Choice(NamedTuple):
    """A variant and why it is asked."""

    variant: str
    why: str


Key = tuple[torch.Size, torch.Size, torch.dtype, torch.device, str]
_chosen: dict[Key, list[Forward]] = {}


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first choice's output, or the next one's where a kernel refuses these addresses or strides.

    Raises `UnsupportedCase` where none takes the call.
    """
    key = (q.shape, k.shape, q.dtype, q.device, causal)
    forwards = _chosen.get(key)
    if forwards is None:
        forwards = _chosen[key] = [_loaded(choice.variant) for choice in choose(q, k, causal)[:1]]
    try:
        return forwards[0](q, k, v, scale=scale, causal=causal, out=out)
    except (UnsupportedCase, IndexError):
        return _next_best(q, k, v, scale, causal, out)


def explain(q: torch.Tensor, k: torch.Tensor, causal: str = "none") -> str:
    """The choices for such a call, first to last, each with its reason."""
    return "\n".join(f"{choice.variant}: {choice.why}" for choice in choose(q, k, causal))


def choose(q: torch.Tensor, k: torch.Tensor, causal: str) -> list[Choice]:
    """The variants that take such a call: by the nearest measured shape, fastest first, then the fallbacks."""
    case = _case(q, k, causal)
    gpu = torch.cuda.get_device_name(q.device) if q.device.type == "cuda" else "cpu"
    measured = _nearest(case, gpu)
    named = [choice.variant for choice in measured]
    rest = [Choice(name, f"not measured on {gpu}; the portable order") for name in FALLBACKS if name not in named]
    return [choice for choice in (*measured, *rest) if _takes(choice.variant, case, q.device.type)]


def _next_best(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, out: torch.Tensor | None
) -> torch.Tensor:
    """What the second and later choices give."""
    reasons = []
    for choice in choose(q, k, causal)[1:]:
        try:
            return _loaded(choice.variant)(q, k, v, scale=scale, causal=causal, out=out)
        except UnsupportedCase as reason:
            reasons.append(f"{choice.variant}: {reason}")
    raise UnsupportedCase("; ".join(reasons) or f"no variant takes {_case(q, k, causal).shape_id}")


def _nearest(case: Case, gpu: str) -> list[Choice]:
    """The variants of the measured case that is nearest in rows and keys, fastest first.

    Where this dtype or mask was not measured, fp16 and no mask speak for it.
    """
    tables = _choices().get(gpu, {})
    kinds = [f"{dtype}-d{case.head_dim}-{causal}" for causal in (case.causal, "none") for dtype in (case.dtype, "fp16")]
    table = next((tables[kind] for kind in kinds if kind in tables), [])

    def distance(row: dict[str, float]) -> float:
        rows = case.batch * case.heads * case.seq_q
        return abs(math.log2(row["rows"] / rows)) + abs(math.log2(row["seq_k"] / max(1, case.seq_k)))

    if not table:
        return []
    row = min(table, key=distance)
    return [
        Choice(name, f"{us:.2f} us on {row['case']}, {gpu}: the nearest measured")
        for name, us in row["device_us"].items()
    ]


def _takes(name: str, case: Case, device: str) -> bool:
    """Whether the variant is there, takes the case, and has an architecture for this machine's GPU."""
    variant = _variants().get(name)
    if variant is None or variant.refuses(case) is not None or device not in variant.supports.device:
        return False
    try:
        return not variant.is_built or bool(native_arch(variant))
    except BuildError:
        return False


def _case(q: torch.Tensor, k: torch.Tensor, causal: str) -> Case:
    batch, heads, seq_q, head_dim = q.shape
    return Case(batch, heads, seq_q, head_dim, DTYPES[q.dtype], causal, k.shape[1], k.shape[2], "bhsd", 0)  # type: ignore[arg-type]


@functools.cache
def _variants() -> dict[str, Variant]:
    return discover((FOLDER.parent,)).variants


@functools.cache
def _choices() -> dict[str, dict[str, list[dict]]]:
    return json.loads((FOLDER / "choices.json").read_text(encoding="utf-8"))


@functools.cache
def _loaded(name: str) -> Forward:
    """A leaf that is in the cache is taken as it is, so that no compiler is needed; else it is built."""
    variant = _variants()[name]
    build: Callable[..., str | None] = functools.partial(build_library, variant, default_cache())
    try:
        library = build(no_build=True)
    except BuildError:
        library = build()
    return load_forward(variant, library)
