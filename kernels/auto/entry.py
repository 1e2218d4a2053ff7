"""auto: choose a variant for each call, and call it.

step:    calls the variant that was measured fastest on the nearest shape, among those that support the call
because: no single kernel is fastest at 64 keys and at 16384 keys, with a mask and without, on every GPU
expect:  the device time of the selected variant; call_us slightly longer, because of the look-up

The measured times are in `choices.json`, which `python kernels/auto/choices.py` writes from the records in `profiles/`.
If nothing was measured on this GPU, or if a kernel refuses the call, the variants of `FALLBACKS` are tried in order.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from pytest_fa.build.target import native_arch
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import build_library, load_forward
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import BuildError, UnsupportedCase
from pytest_fa.options.options import default_cache

FOLDER = Path(__file__).parent
FALLBACKS = ("split_warps", "swizzle_async", "mma_regs", "wmma", "minimal", "reference")
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Choice(NamedTuple):
    """A variant, and the reason for choosing it."""

    variant: str
    why: str


Key = tuple[torch.Size, torch.Size, torch.dtype, torch.device, str]
_first_choices: dict[Key, list[Forward]] = {}  # an empty list if no variant supports such a call


def forward(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    *,
    scale: float,
    causal: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output, [batch, heads, seq_q, head_dim]; write it into `out` if that is given.

    If the first choice refuses these addresses or strides, the next choices are tried.

    Raises `UnsupportedCase` if no variant supports the call.
    """
    key = (q.shape, k.shape, q.dtype, q.device, causal)
    forwards = _first_choices.get(key)
    if forwards is None:
        forwards = _first_choices[key] = [_loaded(choice.variant) for choice in choose(q, k, causal)[:1]]
    try:
        return forwards[0](q, k, v, scale=scale, causal=causal, out=out)
    except (UnsupportedCase, IndexError):
        return _try_other_choices(q, k, v, scale, causal, out)


def explain(q: torch.Tensor, k: torch.Tensor, causal: str = "none") -> str:
    """Return the choices for such a call, one per line, in order and with their reasons."""
    return "\n".join(f"{choice.variant}: {choice.why}" for choice in choose(q, k, causal))


def choose(q: torch.Tensor, k: torch.Tensor, causal: str) -> list[Choice]:
    """Return the variants that support such a call.

    Those of the nearest measured shape come first, fastest first, and then the fallbacks.
    """
    case = _case(q, k, causal)
    gpu = torch.cuda.get_device_name(q.device) if q.device.type == "cuda" else "cpu"
    measured = _nearest_measured(case, gpu)
    names = [choice.variant for choice in measured]
    why = f"not measured on {gpu}; fallback"
    fallbacks = [Choice(name, why) for name in FALLBACKS if name not in names]
    return [choice for choice in (*measured, *fallbacks) if _supports(choice.variant, case, q.device.type)]


def _try_other_choices(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, out: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of the first variant, from the second choice on, that does not refuse the call."""
    reasons = []
    for choice in choose(q, k, causal)[1:]:
        try:
            return _loaded(choice.variant)(q, k, v, scale=scale, causal=causal, out=out)
        except UnsupportedCase as refusal:
            reasons.append(f"{choice.variant}: {refusal}")
    raise UnsupportedCase("; ".join(reasons) or f"no variant supports {_case(q, k, causal).shape_id}")


def _nearest_measured(case: Case, gpu: str) -> list[Choice]:
    """Return the variants of the measured case that is nearest in rows and keys, fastest first.

    A case with another dtype or mask than the call counts as farther away, each by a factor of two.  Calls with few
    queries have tables of their own; if there is none, they are treated like others.
    """
    tables = _choices().get(gpu, {})

    def distance(row: dict[str, float]) -> float:
        rows = case.batch * case.heads * case.seq_q
        return abs(math.log2(row["rows"] / rows)) + abs(math.log2(row["seq_k"] / max(1, case.seq_k)))

    masks = dict.fromkeys((case.causal, *(("top_left",) if case.causal == "bottom_right" else ()), "none"))
    candidates: list[tuple[float, dict]] = []
    for size in ("-few", "") if case.has_few_queries else ("",):
        candidates = candidates or [
            (distance(row) + (dtype != case.dtype) + (causal != case.causal), row)
            for causal in masks
            for dtype in dict.fromkeys((case.dtype, "fp16"))
            for row in tables.get(f"{dtype}-d{case.head_dim}-{causal}{size}", [])
        ]
    if not candidates:
        return []
    row = min(candidates, key=operator.itemgetter(0))[1]
    return [
        Choice(name, f"{us:.2f} us on {row['case']}, the nearest case measured on {gpu}")
        for name, us in row["device_us"].items()
    ]


def _supports(name: str, case: Case, device: str) -> bool:
    """Return whether the variant exists, supports the case, and can be built for the GPU of this machine."""
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
    """Load a variant; a cached build is used if there is one, so that no compiler is needed."""
    variant = _variants()[name]
    build: Callable[..., str | None] = functools.partial(build_library, variant, default_cache())
    try:
        library = build(no_build=True)
    except BuildError:
        library = build()
    return load_forward(variant, library)
