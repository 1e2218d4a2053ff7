"""Simulated e4m3 kernels, right and wrong, on quantised inputs.

They run in torch, also on the CPU, with the roundings of a kernel whose two matrix products read e4m3: P is scaled into
the range of e4m3 and rounded, and S, O and the row sum are added in float32 or like a sum of e4m3 products in Hopper's
matrix units, which is `e4m3_sums`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, Output, make_inputs
from pytest_fa.gpu.quantised import E4M3, E4M3_MAX, Descales
from tests.unit.judge.e4m3_sums import hopper_matmul

GROUP = 16  # keys whose order a kernel may permute in P and in V alike
_LOWEST = torch.finfo(torch.float32).min  # replaces a maximum of -inf in a row that saw no key
ALL_KEYS = 2**30


class Fp8Kernel(NamedTuple):
    """The parameters of a simulated kernel and its mistake; the default is a right kernel."""

    tile: int = 64  # keys per tile
    splits: int = 1  # parts of the keys, which are merged at the end
    reverse: bool = False  # the tiles are visited from the last to the first
    p_scale: float = 256.0  # factor of P <= 1 before it is rounded to e4m3
    lazy_log2: float = 0.0  # the row maximum is raised only if a score exceeds it by this, in powers of two
    exp_in_fp16: bool = False  # the argument and the result of exp2 are fp16
    s_in_13_bits: bool = False
    accumulates: int = 0  # keys after which O in 13 bits is added to float32; 0: O is in float32
    sum_accumulates: int = 0  # the same for the row sum of rounded P; 0: that of exact P is in float32
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
    "13 bits, every 128 keys": Fp8Kernel(tile=128, accumulates=128),
    "13 bits, every 192 keys": Fp8Kernel(tile=192, accumulates=192),
    "13 bits, every 96 keys, row sum too": Fp8Kernel(tile=96, accumulates=96, sum_accumulates=96),
    "the same, S too, maximum raised lazily": Fp8Kernel(
        tile=96, p_scale=16.0, lazy_log2=4.0, s_in_13_bits=True, accumulates=96, sum_accumulates=96
    ),
}

WRONG: dict[str, Fp8Kernel] = {
    "descales of another head": Fp8Kernel(descale_shift=1),
    "descale of K missing": Fp8Kernel(omits_k_descale=True),
    "P not scaled": Fp8Kernel(p_scale=1.0),
    "P normalised and not scaled": Fp8Kernel(tile=ALL_KEYS, p_scale=1.0, divides_p=True),
    "no saturation": Fp8Kernel(p_scale=512.0, saturates=False),
    "P scaled past 448": Fp8Kernel(p_scale=512.0),
    "two keys of 16 swapped": Fp8Kernel(swaps_keys=True),
    "V transposed wrongly": Fp8Kernel(v_transpose="rows"),
    "13 bits, every 512 keys": Fp8Kernel(tile=128, accumulates=512),
    "13 bits for all keys": Fp8Kernel(tile=128, accumulates=ALL_KEYS),
    "13 bits for all keys, row sum every 512": Fp8Kernel(tile=128, accumulates=ALL_KEYS, sum_accumulates=512),
}


class _State(NamedTuple):
    """The state after some keys, in float32: unnormalised O, row maximum m, row sum l."""

    o: torch.Tensor  # [b, h, seq_q, d]
    m: torch.Tensor  # [b, h, seq_q, 1], in powers of two
    l: torch.Tensor  # [b, h, seq_q, 1]  # noqa: E741  # the papers' name


def simulate_fp8(inputs: Inputs, kernel: Fp8Kernel) -> torch.Tensor:
    """Compute the output of a simulated kernel, [batch, heads, seq_q, head_dim] in the output's dtype."""
    return simulate_fp8_with_lse(inputs, kernel).out


def simulate_fp8_with_lse(inputs: Inputs, kernel: Fp8Kernel) -> Output:
    """Compute the output and the log-sum-exp of a simulated kernel."""
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
    lse = (m + torch.log2(l / kernel.p_scale)) * math.log(2)
    return Output(out.to(inputs.output_dtype), {"lse": lse[..., 0]})


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
    inner = state  # what is not yet added to float32
    for index, keys in enumerate(tiles):
        s = _masked(_scores(q, k[:, :, keys], kernel) * factor, inputs, keys)
        m, rescale = _raised(state.m, s, kernel)
        argument = s - m.clamp_min(_LOWEST)
        p = torch.exp2(argument.half()).half().float() if kernel.exp_in_fp16 else torch.exp2(argument)
        if kernel.divides_p:  # all keys are one tile
            p = p / p.sum(-1, keepdim=True)
        state, inner = (_State(part.o * rescale, m, part.l * rescale) for part in (state, inner))
        inner = _added(inner, p * kernel.p_scale, v[:, :, keys], kernel)
        end = 0 if index == len(tiles) - 1 else (index + 1) * kernel.tile
        state, inner = _levelled(state, inner, end, kernel)
    return state


def _scores(q: torch.Tensor, k: torch.Tensor, kernel: Fp8Kernel) -> torch.Tensor:
    """S of a tile, without its factor."""
    return hopper_matmul(q, k.transpose(2, 3)) if kernel.s_in_13_bits else q @ k.transpose(2, 3)


def _raised(m: torch.Tensor, s: torch.Tensor, kernel: Fp8Kernel) -> tuple[torch.Tensor, torch.Tensor]:
    """The new row maximum and the factor by which O and l shrink; a lazy kernel often keeps the old maximum."""
    largest = s.amax(-1, keepdim=True)
    m_new = torch.maximum(m, largest)
    m_new = torch.where(largest > m + kernel.lazy_log2, m_new, m)
    return m_new, torch.exp2(m - m_new.clamp_min(_LOWEST))


def _added(inner: _State, p: torch.Tensor, v: torch.Tensor, kernel: Fp8Kernel) -> _State:
    """O and l after one tile."""
    rounded = _to_e4m3(p, kernel)
    if not kernel.accumulates:
        return _State(inner.o + rounded @ v, inner.m, inner.l + p.sum(-1, keepdim=True))
    if not kernel.sum_accumulates:
        return _State(hopper_matmul(rounded, v, inner.o), inner.m, inner.l + p.sum(-1, keepdim=True))
    with_ones = torch.cat([v, torch.ones_like(v[..., :1])], dim=3)
    total = hopper_matmul(rounded, with_ones, torch.cat([inner.o, inner.l], dim=3))
    return _State(total[..., :-1], inner.m, total[..., -1:])


def _levelled(state: _State, inner: _State, end: int, kernel: Fp8Kernel) -> tuple[_State, _State]:
    """The sums in float32 and the inner ones after `end` keys, or after all keys, for which `end` is 0."""
    is_full = (end % (keys or 1) == 0 for keys in (kernel.accumulates, kernel.sum_accumulates))
    o, l = (1.0 if full else 0.0 for full in is_full)  # noqa: E741  # the papers' name
    added = _State(state.o + inner.o * o, state.m, state.l + inner.l * l)
    return added, _State(inner.o * (1 - o), inner.m, inner.l * (1 - l))


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

TABLE_CASES = {
    "512 keys": "b1h4s512d64-e4m3",
    "512 keys, an outlier in a head": "b1h4s512d64-e4m3-outlier",
    "4096 keys": "b1h1s512d64-e4m3-sk4096",
    "4096 keys, V full of ones": "b1h1s512d64-e4m3-sk4096",
    "16384 keys": "b1h1s128d64-e4m3-sk16384",
}
_PLAIN, _OUTLIER, _LONG, _ONES, _LONGEST = TABLE_CASES
_RANDOM_V = (_PLAIN, _OUTLIER, _LONG, _LONGEST)


def table_inputs(name: str) -> Inputs:
    """The inputs of a case of the table with seed 0."""
    inputs = make_inputs(parse_case(f"{TABLE_CASES[name]}-seed0"), torch.device("cpu"))
    return with_v_of_ones(inputs) if name == _ONES else inputs


def with_v_of_ones(inputs: Inputs) -> Inputs:
    """The inputs with V full of ones, quantised again."""
    exact = inputs.exact()
    return exact._replace(v=torch.ones_like(exact.v)).quantised()


# Where each mistake must be rejected.  A case with one head has no other head's descale.  P <= 1 that is rounded
# without a scale loses what is below 2^-10; that matters only where one key outweighs all others together.  Wrong rows
# of V are equal rows if V is full of ones.  Sums of 13 bits become too small only if their addends have one sign.
MUST_SHOW: dict[str, tuple[str, ...]] = {
    "descales of another head": (_PLAIN, _OUTLIER),
    "descale of K missing": tuple(TABLE_CASES),
    "P not scaled": (_OUTLIER,),
    "P normalised and not scaled": tuple(TABLE_CASES),
    "no saturation": tuple(TABLE_CASES),
    "P scaled past 448": tuple(TABLE_CASES),
    "two keys of 16 swapped": _RANDOM_V,
    "V transposed wrongly": _RANDOM_V,
    "13 bits, every 512 keys": (_ONES,),
    "13 bits for all keys": (_ONES,),
    "13 bits for all keys, row sum every 512": (_ONES,),
}
