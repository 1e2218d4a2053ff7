"""Simulated kernels, right and wrong, and the list of those that each tolerance policy must reject.

They run in torch, also on the CPU, with the roundings of a FlashAttention forward pass: scores and sums in float32, P
rounded before its product with V.  A policy shows that it can fail by rejecting the mistakes below.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pytest_fa.attention.causal import Causal
from pytest_fa.attention.dtypes import Dtype
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Tolerance
from pytest_fa.gpu.inputs import Inputs, make_inputs

E4M3 = torch.float8_e4m3fn
E4M3_P_SCALE = 2.0**8  # P <= 1 becomes <= 256, of at most 448; small P stay normal; usual in fp8 kernels
HEAD_DIM = 64
LONGEST_SQUARE = 4096  # up to this length seq_q is seq_k, so that the first rows of a causal mask average few keys
QUERIES_BEYOND = 256  # seq_q of longer cases, so that a CPU takes at most a second


class Kernel(NamedTuple):
    """The parameters of a simulated kernel and its mistake; the default is a right kernel."""

    tile: int = 64  # BLOCK_N, keys per tile
    splits: int = 1  # parts of the keys, each with its own O, m and l, which are merged at the end
    lazy: float = 0.0  # O is rescaled only where P would exceed 2^lazy; 0: to each new maximum
    p_dtype: torch.dtype | None = None  # the dtype that P is rounded to; None: the inputs' dtype
    scale_factor: float = 1.0
    keys_lost: int = 0  # keys omitted at the end of the sequence
    last_tile_lost: bool = False
    keys_uncounted: int = 0  # keys omitted at the end of the sequence, in the denominator only
    denominator_factor: float = 1.0
    rescales: bool = True
    v_tiles_swapped: bool = False  # the first two tiles of V are exchanged
    diagonal: int = 0  # number of keys that the causal mask shows too many
    row_wrong: bool = False  # the middle query of the first head gets the result of the query before it


MUTATIONS: dict[str, Kernel] = {
    "last key dropped": Kernel(keys_lost=1),
    "last tile dropped": Kernel(last_tile_lost=True),
    "scale 1 % off": Kernel(scale_factor=1.01),
    "denominator misses 16 keys": Kernel(keys_uncounted=16),
    "rescale forgotten": Kernel(rescales=False),
    "V tiles swapped": Kernel(v_tiles_swapped=True),
    "mask off by one": Kernel(diagonal=1),
    "one row wrong": Kernel(row_wrong=True),
}


class Size(NamedTuple):
    """The size of a problem: its number of keys and its mask."""

    seq_k: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.seq_k} causal" if self.causal else str(self.seq_k)

    @property
    def seq_q(self) -> int:
        """The number of queries: seq_k, or fewer for long sequences."""
        return self.seq_k if self.seq_k <= LONGEST_SQUARE else QUERIES_BEYOND


def _sizes(plain: tuple[int, ...], causal: tuple[int, ...]) -> tuple[Size, ...]:
    return (*(Size(seq_k, causal=False) for seq_k in plain), *(Size(seq_k, causal=True) for seq_k in causal))


LENGTHS = (64, 512, 1023, 4096, 16384)
_TILED = LENGTHS[1:]  # 64 keys are a single tile, with which no tile can be swapped and no rescale occurs
_UP_TO_512, _UP_TO_1023, _UP_TO_4096 = LENGTHS[:2], LENGTHS[:3], LENGTHS[:4]

_FP8_DTYPES: tuple[tuple[Tolerance, Dtype], ...] = (("fp8", "fp16"), ("fp8", "bf16"))
_FP8_SHOWS = {
    "last key dropped": _sizes(_UP_TO_1023, (64,)),
    "last tile dropped": _sizes(LENGTHS, _UP_TO_1023),
    "scale 1 % off": _sizes(_TILED, _TILED),
    "denominator misses 16 keys": _sizes(_UP_TO_4096, (64,)),
    "rescale forgotten": _sizes(_TILED, _TILED),
    "V tiles swapped": _sizes(_TILED, _TILED),
    "mask off by one": _sizes((), _UP_TO_4096),
    "one row wrong": _sizes(LENGTHS, LENGTHS),
}

# What must be rejected: policy and dtype -> mutation -> sizes.  A size is listed if the mutation used at least 1.2
# times a bound with each of three seeds.  At the sizes that are not listed, the mistake cannot be found, because:
# - Under a causal mask, only the last query sees the last key, and at most 16 queries see one of the last 16 keys.  The
#   mistake changes these rows by 1/S_k or 16/S_k.  Rounding alone changes a row by more (about 2^-11 of it in fp16,
#   2^-8 in bf16, 2^-5 in fp8).
# - Without a causal mask there is no diagonal.  For a single tile, see `_TILED`; if the only tile is dropped, the
#   output is zero, which is found.
# - Rounding P to e4m3 changes every output by 2.65 %, which is more than 1 or 16 keys among thousands contribute.  At
#   64 keys, a scale that is 1 % off changes the gain by 0.7 %, which 64 queries hardly distinguish from that rounding.
# - `absolute` allows an error of 0.002, where outputs are as small as 1/sqrt(S_k).
MUST_SHOW: dict[tuple[Tolerance, Dtype], dict[str, tuple[Size, ...]]] = {
    ("same_precision", "fp16"): {
        "last key dropped": _sizes(LENGTHS, _UP_TO_1023),  # 4096 causal is found with two seeds of three
        "last tile dropped": _sizes(LENGTHS, LENGTHS),
        "scale 1 % off": _sizes(LENGTHS, LENGTHS),
        "denominator misses 16 keys": _sizes(LENGTHS, _UP_TO_4096),
        "rescale forgotten": _sizes(_TILED, _TILED),
        "V tiles swapped": _sizes(_TILED, _TILED),
        "mask off by one": _sizes((), LENGTHS),
        "one row wrong": _sizes(LENGTHS, LENGTHS),
    },
    ("same_precision", "bf16"): {
        "last key dropped": _sizes(LENGTHS, (64,)),
        "last tile dropped": _sizes(LENGTHS, LENGTHS),
        "scale 1 % off": _sizes(LENGTHS, LENGTHS),
        "denominator misses 16 keys": _sizes(LENGTHS, _UP_TO_1023),
        "rescale forgotten": _sizes(_TILED, _TILED),
        "V tiles swapped": _sizes(_TILED, _TILED),
        "mask off by one": _sizes((), LENGTHS),
        "one row wrong": _sizes(LENGTHS, LENGTHS),
    },
    **dict.fromkeys(_FP8_DTYPES, _FP8_SHOWS),
    ("absolute", "fp16"): {
        "last key dropped": _sizes(_UP_TO_4096, (64,)),
        "last tile dropped": _sizes(LENGTHS, LENGTHS),
        "scale 1 % off": _sizes(_UP_TO_4096, _UP_TO_4096),
        "denominator misses 16 keys": _sizes(_UP_TO_1023, _UP_TO_512),
        "rescale forgotten": _sizes(_TILED, _TILED),
        "V tiles swapped": _sizes(_TILED, _TILED),
        "mask off by one": _sizes((), _UP_TO_4096),
        "one row wrong": _sizes(LENGTHS, LENGTHS),
    },
}


def problem(size: Size, dtype: Dtype, policy: Tolerance, seed: int = 0) -> Inputs:
    """The inputs of a size: one head of N(0, 1) data, rounded to e4m3 for the policy `fp8`.

    The causal mask is aligned bottom-right, so that the last query sees the last key for any number of queries.
    """
    causal: Causal = "bottom_right" if size.causal else "none"
    case = Case(1, 1, size.seq_q, HEAD_DIM, dtype, causal, 1, size.seq_k, "bhsd", seed)
    inputs = make_inputs(case, torch.device("cpu"))
    return dequantised(inputs) if policy == "fp8" else inputs


def dequantised(inputs: Inputs) -> Inputs:
    """The inputs as an fp8 kernel reads them: rounded to e4m3, stored in their original dtype."""
    q, k, v = (tensor.to(E4M3).to(tensor.dtype) for tensor in inputs[:3])
    return Inputs(q, k, v, inputs.scale, inputs.causal)


def simulate(inputs: Inputs, kernel: Kernel) -> torch.Tensor:
    """Compute the output of a simulated kernel, [batch, heads, seq_q, head_dim] in the inputs' dtype."""
    k, v = (tensor.repeat_interleave(inputs.q.shape[1] // tensor.shape[1], dim=1) for tensor in (inputs.k, inputs.v))
    inputs = inputs._replace(k=k, v=v)  # [b, h, seq_k, d]
    tiles = _tiles(inputs, kernel)
    per_split = max(1, math.ceil(len(tiles) / kernel.splits))
    starts = range(0, max(1, len(tiles)), per_split)
    parts = [_attend(inputs, kernel, tiles[start : start + per_split]) for start in starts]
    m = torch.stack([part.m for part in parts]).amax(0)
    weights = [torch.exp(part.m - m.clamp_min(_LOWEST)) for part in parts]
    o = sum((part.o * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(parts[0].o))
    l = sum((part.l * weight for part, weight in zip(parts, weights, strict=True)), torch.zeros_like(m))  # noqa: E741
    out = torch.where(l > 0, o / (l * kernel.denominator_factor), 0.0).to(inputs.q.dtype)
    if kernel.row_wrong:
        row = out.shape[2] // 2
        out[0, 0, row] = out[0, 0, row - 1]
    return out


_LOWEST = torch.finfo(torch.float32).min  # replaces a maximum of -inf in a row that saw no key: exp(-inf - _LOWEST) = 0


class _Part(NamedTuple):
    """The state after a pass over some tiles of keys, in float32: unnormalised O, row maximum m, row sum l."""

    o: torch.Tensor  # [b, h, seq_q, d]
    m: torch.Tensor  # [b, h, seq_q, 1]
    l: torch.Tensor  # [b, h, seq_q, 1]  # noqa: E741  # the papers' names


def _tiles(inputs: Inputs, kernel: Kernel) -> list[tuple[slice, slice]]:
    """For each tile, the range of its keys and the range of the rows of V that it reads."""
    end = inputs.k.shape[2] - kernel.keys_lost
    starts = list(range(0, end, kernel.tile))
    keys = [slice(start, min(start + kernel.tile, end)) for start in starts]
    values = [keys[1], keys[0], *keys[2:]] if kernel.v_tiles_swapped and len(keys) > 1 else keys
    pairs = list(zip(keys, values, strict=True))
    return pairs[:-1] if kernel.last_tile_lost else pairs


def _attend(inputs: Inputs, kernel: Kernel, tiles: list[tuple[slice, slice]]) -> _Part:
    """Online softmax over some tiles of keys."""
    q, k, v = (tensor.float() for tensor in inputs[:3])  # [b, h, s, d]
    o = torch.zeros_like(q)
    m = torch.full_like(q[..., :1], -math.inf)
    l = torch.zeros_like(m)  # noqa: E741  # the papers' name
    counted_end = k.shape[2] - kernel.keys_uncounted
    for keys, values in tiles:
        s = q @ k[:, :, keys].transpose(2, 3) * (inputs.scale * kernel.scale_factor)
        s = _masked(s, inputs, keys, kernel.diagonal)
        largest = s.amax(-1, keepdim=True)
        m_new = torch.where(largest - m > kernel.lazy * math.log(2), largest, m)
        rescale = torch.exp(m - m_new.clamp_min(_LOWEST))
        p = torch.exp(s - m_new.clamp_min(_LOWEST))
        l = l * rescale + p[..., : max(0, counted_end - keys.start)].sum(-1, keepdim=True)  # noqa: E741
        p = _rounded(p, kernel.p_dtype or inputs.q.dtype)[..., : values.stop - values.start]
        o = o * (rescale if kernel.rescales else 1.0) + p @ v[:, :, values]
        m = m_new
    return _Part(o, m, l)


def _masked(s: torch.Tensor, inputs: Inputs, keys: slice, diagonal: int) -> torch.Tensor:
    """S with -inf where the causal mask, shifted by `diagonal` keys, hides a key."""
    if inputs.causal == "none":
        return s
    seq_q, seq_k = inputs.q.shape[2], inputs.k.shape[2]
    shift = diagonal + (0 if inputs.causal == "top_left" else seq_k - seq_q)
    rows = torch.arange(seq_q, device=s.device)[:, None]
    columns = torch.arange(keys.start, keys.stop, device=s.device)[None, :]
    return s.masked_fill(columns > rows + shift, -math.inf)


def _rounded(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """P rounded to `dtype`, as the tensor cores read it, in float32."""
    scale = E4M3_P_SCALE if dtype == E4M3 else 1.0
    return (p * scale).to(dtype).float() / scale
