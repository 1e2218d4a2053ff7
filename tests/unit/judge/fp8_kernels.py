"""Simulated e4m3 kernels, right and wrong, on quantised inputs.

They run in torch, also on the CPU, with the roundings of a kernel whose two matrix products read e4m3: scores in
float32, P scaled into the range of e4m3 and rounded, O accumulated in float32 or in the 13 mantissa bits that Hopper's
matrix units keep of a sum of e4m3 products.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pytest_fa.run.inputs import Inputs
from pytest_fa.run.quantised import E4M3, E4M3_MAX, Descales

KEYS_PER_STEP = 32  # of a matrix instruction in e4m3
GROUP = 16  # keys whose order a kernel may permute in P and in V alike
_LOWEST = torch.finfo(torch.float32).min  # replaces a maximum of -inf in a row that saw no key
_DROPPED_BITS = 23 - 13  # of a float32, of which the accumulator keeps 13


class Fp8Kernel(NamedTuple):
    """The parameters of a simulated kernel and its mistake; the default is a right kernel."""

    tile: int = 64  # keys per tile
    splits: int = 1  # parts of the keys, which are merged at the end
    reverse: bool = False  # the tiles are visited from the last to the first
    p_scale: float = 256.0  # factor of P <= 1 before it is rounded to e4m3
    lazy_log2: float = 0.0  # the row maximum is raised only if a score exceeds it by this, in powers of two
    exp_in_fp16: bool = False  # the argument and the result of exp2 are fp16
    accumulates: int = 0  # keys after which a sum of 13 bits is added to float32; 0: all sums are in float32
    sum_of_rounded_p: bool = False  # the row sum adds P as it is rounded, in the same accumulator as O
    divides_p: bool = False  # P is divided by its row sum before it is rounded
    descale_shift: int = 0  # the descales of K and V are those of the head this many places further on
    omits_k_descale: bool = False
    saturates: bool = True  # numbers above 448 become 448; otherwise they become NaN
    swaps_keys: bool = False  # keys 1 and 2 of each group of 16 of V are exchanged
    v_transpose: str = "right"  # or `rows`: 8 x 8 blocks of V are transposed


RIGHT: dict[str, Fp8Kernel] = {
    "tiles of 64": Fp8Kernel(),
    "tiles of 128": Fp8Kernel(tile=128),
    "tiles of 176": Fp8Kernel(tile=176),
    "last tile first": Fp8Kernel(reverse=True),
    "keys split in 4": Fp8Kernel(splits=4),
    "P times 448": Fp8Kernel(p_scale=448.0),
    "maximum raised lazily": Fp8Kernel(p_scale=16.0, lazy_log2=4.0),
    "exp2 in fp16": Fp8Kernel(exp_in_fp16=True),
    "two accumulators, tiles of 128": Fp8Kernel(tile=128, accumulates=128),
    "two accumulators, every 512 keys": Fp8Kernel(tile=128, accumulates=512),
    "row sum in the accumulator of O": Fp8Kernel(tile=128, accumulates=2**30, sum_of_rounded_p=True),
}

WRONG: dict[str, Fp8Kernel] = {
    "descales of another head": Fp8Kernel(descale_shift=1),
    "descale of K missing": Fp8Kernel(omits_k_descale=True),
    "P not scaled": Fp8Kernel(p_scale=1.0),
    "P normalised and not scaled": Fp8Kernel(tile=2**30, p_scale=1.0, divides_p=True),
    "no saturation": Fp8Kernel(p_scale=512.0, saturates=False),
    "P scaled past 448": Fp8Kernel(p_scale=512.0),
    "two keys of 16 swapped": Fp8Kernel(swaps_keys=True),
    "V transposed wrongly": Fp8Kernel(v_transpose="rows"),
    "13 bits for all keys": Fp8Kernel(tile=128, accumulates=2**30),
}


class _State(NamedTuple):
    """The state after some keys, in float32: unnormalised O, row maximum m, row sum l."""

    o: torch.Tensor  # [b, h, seq_q, d]
    m: torch.Tensor  # [b, h, seq_q, 1], in powers of two
    l: torch.Tensor  # [b, h, seq_q, 1]  # noqa: E741  # the papers' name


def simulate_fp8(inputs: Inputs, kernel: Fp8Kernel) -> torch.Tensor:
    """Compute the output of a simulated kernel, [batch, heads, seq_q, head_dim] in the output's dtype."""
    inputs = _per_query_head(inputs, kernel)
    length = inputs.k.shape[2]
    starts = list(range(0, length, kernel.tile))
    if kernel.reverse:
        starts.reverse()
    per_split = max(1, math.ceil(len(starts) / kernel.splits))
    groups = [starts[first : first + per_split] for first in range(0, max(1, len(starts)), per_split)]
    parts = [_attend(inputs, kernel, [slice(s, min(s + kernel.tile, length)) for s in group]) for group in groups]
    m = torch.stack([part.m for part in parts]).amax(0)
    weights = [torch.exp2(part.m - m.clamp_min(_LOWEST)) for part in parts]
    o = sum((part.o * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(parts[0].o))
    l = sum((part.l * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(m))  # noqa: E741
    assert inputs.descales is not None
    out = torch.where(l > 0, o / l, 0.0) * inputs.descales.v[..., None, None]
    return out.to(inputs.output_dtype)


def _per_query_head(inputs: Inputs, kernel: Fp8Kernel) -> Inputs:
    """K, V and their descales for each query head, in float32, with the mistakes of a kernel's operands."""
    assert inputs.descales is not None
    group = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (tensor.float().repeat_interleave(group, dim=1) for tensor in (inputs.k, inputs.v))
    q_descale, k_descale, v_descale = inputs.descales
    k_descale, v_descale = (descale.repeat_interleave(group, dim=1) for descale in (k_descale, v_descale))
    if kernel.descale_shift:
        k_descale, v_descale = (descale.roll(-kernel.descale_shift, dims=1) for descale in (k_descale, v_descale))
    if kernel.omits_k_descale:
        k_descale = torch.ones_like(k_descale)
    v = _swapped(v) if kernel.swaps_keys else v
    v = _blocks_transposed(v) if kernel.v_transpose == "rows" else v
    return inputs._replace(q=inputs.q.float(), k=k, v=v, descales=Descales(q_descale, k_descale, v_descale))


def _swapped(v: torch.Tensor) -> torch.Tensor:
    """V with keys 1 and 2 of each whole group of 16 exchanged."""
    order = torch.arange(v.shape[2])
    first = order[: v.shape[2] // GROUP * GROUP].view(-1, GROUP)
    first[:, [1, 2]] = first[:, [2, 1]]
    return v[:, :, order]


def _blocks_transposed(v: torch.Tensor) -> torch.Tensor:
    """V with each whole block of 8 keys x 8 columns transposed."""
    batch, heads, keys, dim = v.shape
    whole = v[:, :, : keys // 8 * 8].reshape(batch, heads, keys // 8, 8, dim // 8, 8).transpose(3, 5)
    return torch.cat([whole.reshape(batch, heads, -1, dim), v[:, :, keys // 8 * 8 :]], dim=2)


def _attend(inputs: Inputs, kernel: Fp8Kernel, tiles: list[slice]) -> _State:
    """Online softmax over some tiles of keys."""
    q, k, v = inputs[:3]
    assert inputs.descales is not None
    factor = inputs.scale * math.log2(math.e) * (inputs.descales.q * inputs.descales.k)[..., None, None]
    state = _State(torch.zeros_like(q), torch.full_like(q[..., :1], -math.inf), torch.zeros_like(q[..., :1]))
    inner = _State(torch.zeros_like(q), state.m, torch.zeros_like(state.l))  # the accumulator of 13 bits
    for index, keys in enumerate(tiles):
        s = _masked(q @ k[:, :, keys].transpose(2, 3) * factor, inputs, keys)
        m, rescale = _raised(state.m, s, kernel)
        argument = s - m.clamp_min(_LOWEST)
        p = torch.exp2(argument.half()).half().float() if kernel.exp_in_fp16 else torch.exp2(argument)
        if kernel.divides_p:  # all keys are one tile
            p = p / p.sum(-1, keepdim=True)
        rounded = _to_e4m3(p * kernel.p_scale, kernel)
        state = _State(state.o * rescale, m, state.l * rescale)
        if not kernel.accumulates:
            row_sum = p.sum(-1, keepdim=True) * kernel.p_scale
            state = _State(state.o + rounded @ v[:, :, keys], m, state.l + row_sum)
            continue
        inner = _State(_cut(inner.o * rescale), m, inner.l * rescale)
        inner = _accumulated(inner, rounded, v[:, :, keys], p * kernel.p_scale, kernel)
        is_full = (index + 1) * kernel.tile % kernel.accumulates == 0
        if is_full or index == len(tiles) - 1:
            state = _State(state.o + inner.o, m, state.l + inner.l)
            inner = _State(torch.zeros_like(q), m, torch.zeros_like(state.l))
    return state


def _raised(m: torch.Tensor, s: torch.Tensor, kernel: Fp8Kernel) -> tuple[torch.Tensor, torch.Tensor]:
    """The new row maximum and the factor by which O and l shrink; a lazy kernel often keeps the old maximum."""
    largest = s.amax(-1, keepdim=True)
    m_new = torch.maximum(m, largest)
    m_new = torch.where(largest > m + kernel.lazy_log2, m_new, m)
    return m_new, torch.exp2(m - m_new.clamp_min(_LOWEST))


def _accumulated(inner: _State, p: torch.Tensor, v: torch.Tensor, exact_p: torch.Tensor, kernel: Fp8Kernel) -> _State:
    """O after the steps of one tile, each of which is cut to 13 bits; l the same way, or in float32."""
    o, l = inner.o, inner.l  # noqa: E741  # the papers' name
    for start in range(0, p.shape[-1], KEYS_PER_STEP):
        step = slice(start, min(start + KEYS_PER_STEP, p.shape[-1]))
        o = _cut(o + p[..., step] @ v[:, :, step])
        if kernel.sum_of_rounded_p:
            l = _cut(l + p[..., step].sum(-1, keepdim=True))  # noqa: E741
    return _State(o, inner.m, l if kernel.sum_of_rounded_p else l + exact_p.sum(-1, keepdim=True))


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 with 13 bits after the leading one; the others are cut off."""
    return (tensor.view(torch.int32) & -(1 << _DROPPED_BITS)).view(torch.float32)


def _to_e4m3(p: torch.Tensor, kernel: Fp8Kernel) -> torch.Tensor:
    """Numbers as the matrix unit reads them, in float32; without saturation, those that round above 448 are NaN."""
    rounded = p.clamp_max(E4M3_MAX).to(E4M3).float()
    return rounded if kernel.saturates else rounded.masked_fill(p > E4M3_MAX + 16, math.nan)


def _masked(s: torch.Tensor, inputs: Inputs, keys: slice) -> torch.Tensor:
    """S with -inf where the causal mask hides a key."""
    if inputs.causal == "none":
        return s
    shift = 0 if inputs.causal == "top_left" else inputs.k.shape[2] - inputs.q.shape[2]
    rows = torch.arange(inputs.q.shape[2])[:, None]
    return s.masked_fill(torch.arange(keys.start, keys.stop)[None, :] > rows + shift, -math.inf)


# -- the table --------------------------------------------------------------------------------------------------------

TABLE_CASES = (
    "b1h4s512d64-e4m3",
    "b1h4s512d64-e4m3-outlier",
    "b1h1s2048d64-e4m3-sk4096",
    "b1h1s256d64-e4m3-sk16384",
)
_PLAIN, _OUTLIER, _LONG, _LONGEST = TABLE_CASES

# Where each mistake must be rejected.  A case with one head has no other head's descale.  P <= 1 that is rounded
# without a scale loses what is below 2^-10; that matters only where one key outweighs all others together.  Sums of 13
# bits are too inexact only if they are long.
MUST_SHOW: dict[str, tuple[str, ...]] = {
    "descales of another head": (_PLAIN, _OUTLIER),
    "descale of K missing": TABLE_CASES,
    "P not scaled": (_OUTLIER,),
    "P normalised and not scaled": TABLE_CASES,
    "no saturation": TABLE_CASES,
    "P scaled past 448": TABLE_CASES,
    "two keys of 16 swapped": TABLE_CASES,
    "V transposed wrongly": TABLE_CASES,
    "13 bits for all keys": (_LONG, _LONGEST),
}
