"""Simulated kernels with one mistake each, and the words by which the diagnosis must name it.

They compute in float32 as a kernel does, tile by tile where the mistake concerns tiles, and share no code with the
diagnosis, which computes the results of mistakes in float64 from whole rows.  In `tf32_products`, they round the inputs
of both matrix products to tf32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from pytest_fa.gpu.inputs import Inputs, poison
from tests.unit.judge.float32_kernels import Change, unchanged

Kernel = Callable[[Inputs], torch.Tensor]
TILE = 32  # keys per tile of the simulated kernels
PRODUCT_INPUT: ContextVar[Change] = ContextVar("PRODUCT_INPUT", default=unchanged)


@contextmanager
def tf32_products(rounding: Change) -> Iterator[None]:
    """Apply `rounding` to the inputs of the matrix products of all kernels."""
    token = PRODUCT_INPUT.set(rounding)
    try:
        yield
    finally:
        PRODUCT_INPUT.reset(token)


class Mistaken(NamedTuple):
    """A simulated kernel, and parts of sentences of which one must be in the diagnosis if it names a mistake."""

    kernel: Kernel
    names: tuple[str, ...]


def hidden_keys(i: Inputs, causal: str | None = None, wider: int = 0) -> torch.Tensor:
    """The keys that each query does not see, [seq_q, seq_k]."""
    rows, keys = i.q.shape[2], i.k.shape[2]
    causal = causal or i.causal
    if causal == "none":
        return torch.zeros(rows, keys, dtype=torch.bool)
    return torch.ones(rows, keys, dtype=torch.bool).triu(1 + wider + (keys - rows if causal == "bottom_right" else 0))


def scores_of(i: Inputs) -> torch.Tensor:
    """The scores, scale * Q K^T, in float32, [b, h, seq_q, seq_k]."""
    rounded = PRODUCT_INPUT.get()
    k = rounded(i.k.float()).repeat_interleave(i.q.shape[1] // i.k.shape[1], 1)
    return rounded(i.q.float()) @ k.transpose(2, 3) * i.scale


def times_v(p: torch.Tensor, i: Inputs) -> torch.Tensor:
    """P V, with P rounded to the dtype as tensor cores read it, in float32."""
    rounded = PRODUCT_INPUT.get()
    return rounded(p.to(i.v.dtype).float()) @ rounded(i.v.float()).repeat_interleave(i.q.shape[1] // i.v.shape[1], 1)


def attend(
    i: Inputs,
    *,
    hidden: torch.Tensor | None = None,
    divides: int = 1,
    maximum: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Attention in whole rows; `divides` is how often O is divided by the row sum."""
    s = scores_of(i).masked_fill(hidden_keys(i) if hidden is None else hidden, -math.inf)
    m = s.amax(-1, keepdim=True).clamp_min(-1e30) if maximum else 0.0
    p = torch.exp(s - m)
    return (times_v(p, i) / (p.sum(-1, keepdim=True) ** divides).clamp_min(1e-30)).to(out_dtype or i.q.dtype)


def online(
    i: Inputs,
    *,
    tiles: Callable[[int], list[int]] = lambda count: list(range(count)),
    rescales: str = "ol",
    only_last_o: bool = False,
) -> torch.Tensor:
    """Attention tile by tile, over the tiles that `tiles` lists; `rescales` names the sums that are rescaled."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    m = torch.full_like(s[..., :1], -math.inf)
    l, o = torch.zeros_like(m), torch.zeros_like(i.q, dtype=torch.float32)  # noqa: E741
    for tile in tiles(-(-s.shape[-1] // TILE)):
        keys = slice(tile * TILE, (tile + 1) * TILE)
        m_new = torch.maximum(m, s[..., keys].amax(-1, keepdim=True))
        old = torch.exp(m - m_new.clamp_min(-1e30))
        p = torch.exp(s[..., keys] - m_new.clamp_min(-1e30))
        part = times_v(p, i._replace(v=i.v[:, :, keys]))
        l = l * (old if "l" in rescales else 1) + p.sum(-1, keepdim=True)  # noqa: E741
        o = part if only_last_o else o * (old if "o" in rescales else 1) + part
        m = m_new
    return torch.where(l > 0, o / l, 0.0).to(i.q.dtype)


def masked_with_zero(i: Inputs) -> torch.Tensor:
    """Masked scores are zero."""
    p = torch.softmax(scores_of(i).masked_fill(hidden_keys(i), 0.0), -1)
    return times_v(p, i).to(i.q.dtype)


def masked_p(i: Inputs) -> torch.Tensor:
    """The mask is applied to P, after the row sum."""
    s = scores_of(i)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (times_v(p.masked_fill(hidden_keys(i), 0.0), i) / p.sum(-1, keepdim=True)).to(i.q.dtype)


def over_queries(i: Inputs) -> torch.Tensor:
    """The softmax runs over the queries."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    return times_v(torch.softmax(s, 2).nan_to_num(0.0), i).to(i.q.dtype)


def mean_without_key(i: Inputs) -> torch.Tensor:
    """Masked scores are -1e30, so that rows without a key average all keys."""
    s = scores_of(i).masked_fill(hidden_keys(i), -1e30)
    return times_v(torch.softmax(s, -1), i).to(i.q.dtype)


def padded(i: Inputs) -> torch.Tensor:
    """K and V are zero past the end up to a multiple of the tile, and those keys are counted."""
    pad = torch.nn.ZeroPad2d((0, 0, 0, -i.k.shape[2] % TILE))
    longer = i._replace(k=pad(i.k), v=pad(i.v))
    hidden = torch.nn.functional.pad(hidden_keys(i), (0, longer.k.shape[2] - i.k.shape[2]))
    if i.causal != "none":
        hidden[:, i.k.shape[2] :] = torch.arange(i.k.shape[2], longer.k.shape[2]) > torch.arange(i.q.shape[2])[:, None]
    return attend(longer, hidden=hidden) if i.causal != "bottom_right" else attend(i)


def without_last(i: Inputs, count: int) -> torch.Tensor:
    """The last keys are never read."""
    hidden = hidden_keys(i)
    hidden[:, -count:] = True
    return attend(i, hidden=hidden)


def diagonal_tile(i: Inputs, tiles: int) -> torch.Tensor:
    """The diagonal tile is not masked (1), or left out (0)."""
    rows, keys = i.q.shape[2], i.k.shape[2]
    shift = keys - rows if i.causal == "bottom_right" else 0
    ends = ((torch.arange(rows) + shift) // TILE + tiles) * TILE
    hidden = torch.arange(keys) >= ends[:, None] if i.causal != "none" else hidden_keys(i)
    return attend(i, hidden=hidden)


def in_other_layout(tensor: torch.Tensor) -> torch.Tensor:
    """What is read at the addresses of `tensor` if its layout is taken for the other one."""
    batch, heads, seq, dim = tensor.shape
    memory = torch.as_strided(tensor, (tensor.numel(),), (1,))
    if heads > 1 and tensor.stride(1) < tensor.stride(2):
        return memory.view(batch, heads, seq, dim)
    return memory.view(batch, seq, heads, dim).transpose(1, 2)


def stored_in_other_layout(out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What is read from an output with the strides of `like` into which `out` was written in the other layout."""
    stored = torch.empty_like(like)
    in_other_layout(stored).copy_(out)
    return stored


def misread(i: Inputs) -> Inputs:
    """Q, K and V taken for the other layout."""
    return i._replace(q=in_other_layout(i.q), k=in_other_layout(i.k), v=in_other_layout(i.v))


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of each [S, D] matrix read as [D, S] and transposed."""
    return tensor.reshape(*tensor.shape[:2], tensor.shape[3], tensor.shape[2]).transpose(2, 3)


def over_heads(i: Inputs) -> torch.Tensor:
    """The axes of heads and sequence are exchanged, as by a [b, s, h, d] function that gets [b, h, s, d]."""
    if i.q.shape != i.k.shape:
        return attend(i)
    q, k, v = (tensor.transpose(1, 2) for tensor in i[:3])
    return attend(i._replace(q=q, k=k, v=v)).transpose(1, 2).contiguous()


def modulo(i: Inputs) -> torch.Tensor:
    """Query head h reads key head h % kv_heads."""
    order = torch.arange(i.q.shape[1]) % i.k.shape[1]
    return attend(i._replace(k=i.k[:, order], v=i.v[:, order]))


def square(i: Inputs, kernel: Kernel) -> torch.Tensor:
    """`kernel` where Q has the shape of K, attention elsewhere."""
    return kernel(i) if i.q.shape == i.k.shape else attend(i)


def as_other_dtype(i: Inputs) -> Inputs:
    """The inputs with their bits taken for the other 16-bit dtype; fp32 inputs as they are."""
    if i.q.dtype == torch.float32:
        return i
    other = torch.bfloat16 if i.q.dtype == torch.float16 else torch.float16
    return i._replace(q=i.q.view(other), k=i.k.view(other), v=i.v.view(other))


def unwritten(i: Inputs) -> torch.Tensor:
    """The last 16 queries are never written."""
    out = poison(torch.empty_like(i.q))
    out[:, :, :-16] = attend(i)[:, :, :-16]
    return out


def zero_by_zero(i: Inputs) -> torch.Tensor:
    """Rows without a key are 0/0."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    return times_v(torch.softmax(s, -1), i).to(i.q.dtype)


def scaled(factor: Callable[[Inputs], float]) -> Kernel:
    """The scale is multiplied by a factor."""
    return lambda i: attend(i._replace(scale=i.scale * factor(i)))


def heads_in_order(i: Inputs, order: Callable[[int, int], int], names: str = "kv") -> torch.Tensor:
    """Query head h reads key head `order(h, group)`; tensors that `names` lacks are read as they should be."""
    heads, kv_heads = i.q.shape[1], i.k.shape[1]
    group = heads // kv_heads
    of_heads = {
        True: [order(head, group) % kv_heads for head in range(heads)],
        False: [h // group for h in range(heads)],
    }
    k, v = (getattr(i, name)[:, of_heads[name in names]] for name in "kv")
    return attend(i._replace(k=k, v=v))


def keys_to(i: Inputs, end: int) -> torch.Tensor:
    """The loop over keys ends early; a kernel with fewer keys does not."""
    hidden = hidden_keys(i)
    hidden[:, end:] = True
    return attend(i, hidden=hidden)


def stale_tail(i: Inputs, *, of_k: bool = True, of_v: bool = True) -> torch.Tensor:
    """The last tile keeps keys of the tile before and counts them; a tensor that is not stale is zero there."""
    keys, missing = i.k.shape[2], -i.k.shape[2] % TILE
    if keys < TILE or i.causal != "none":
        return attend(i)
    tails = [tensor[:, :, keys - TILE : keys - TILE + missing] * stale for tensor, stale in ((i.k, of_k), (i.v, of_v))]
    k, v = (torch.cat([tensor, tail], 2) for tensor, tail in zip((i.k, i.v), tails, strict=True))
    return attend(i._replace(k=k, v=v), hidden=torch.zeros(i.q.shape[2], k.shape[2], dtype=torch.bool))


def soft_capped(i: Inputs, cap: float) -> torch.Tensor:
    """The scores are capped by a tanh; they are larger than those of other kernels, so that it matters."""
    s = (cap * torch.tanh(scores_of(i) / cap)).masked_fill(hidden_keys(i), -math.inf)
    return times_v(torch.softmax(s, -1).nan_to_num(0.0), i).to(i.q.dtype)


def with_sink(i: Inputs) -> torch.Tensor:
    """exp(0 - max) is in the row sum."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    m = s.amax(-1, keepdim=True).clamp_min(0.0)
    p = torch.exp(s - m)
    return (times_v(p, i) / (p.sum(-1, keepdim=True) + torch.exp(-m))).to(i.q.dtype)


def with_sinks(i: Inputs, *sinks: float) -> torch.Tensor:
    """A key of its own score for each head takes part in the softmax and has no value; the heads take turns."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    of_heads = torch.tensor([sinks[head % len(sinks)] for head in range(i.q.shape[1])])
    sink = of_heads[:, None, None].expand(*s.shape[:3], 1)
    return times_v(torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1], i).to(i.q.dtype)


def with_alibi(i: Inputs, *, by_distance: bool = True) -> torch.Tensor:
    """A slope of each head times the distance of query and key is subtracted, or times the key's index is added."""
    heads, rows, keys = i.q.shape[1], i.q.shape[2], i.k.shape[2]
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    shift = keys - rows if i.causal == "bottom_right" else 0
    bias = -(torch.arange(rows)[:, None] + shift - torch.arange(keys)).abs() if by_distance else torch.arange(keys)
    s = scores_of(i) + torch.tensor(slopes)[:, None, None] * bias
    return times_v(torch.softmax(s.masked_fill(hidden_keys(i), -math.inf), -1).nan_to_num(0.0), i).to(i.q.dtype)


def windowed(i: Inputs, size: int, ahead: float = math.inf) -> torch.Tensor:
    """Each query sees the last `size` keys up to its own position, and fewer than `ahead` from there on."""
    rows, keys = i.q.shape[2], i.k.shape[2]
    shift = keys - rows if i.causal == "bottom_right" else 0
    distance = torch.arange(rows)[:, None] + shift - torch.arange(keys)
    return attend(i, hidden=hidden_keys(i) | (distance >= size) | (-distance >= ahead))


def zero_at(i: Inputs, *place: Any) -> torch.Tensor:
    """The output is right but for zeros at an index."""
    out = attend(i)
    out[place] = 0
    return out


def toward_zero(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 tensor truncated to a dtype."""
    lost_bits = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}[dtype]
    return (tensor.contiguous().view(torch.int32) >> lost_bits << lost_bits).view(torch.float32).to(dtype)


def truncated(i: Inputs, *, of_p: bool, of_out: bool) -> torch.Tensor:
    """P or the output is truncated."""
    s = scores_of(i).masked_fill(hidden_keys(i), -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(-1e30))
    o = times_v(toward_zero(p, i.q.dtype).float() if of_p else p, i) / p.sum(-1, keepdim=True).clamp_min(1e-30)
    return toward_zero(o, i.q.dtype) if of_out else o.to(i.q.dtype)


def in_16_bits(i: Inputs) -> torch.dtype:
    """The dtype of a 16-bit call, and fp16 in an fp32 one."""
    return torch.float16 if i.q.dtype == torch.float32 else i.q.dtype


def summed(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, step: int) -> torch.Tensor:
    """A matrix product that is rounded after each `step` terms."""
    total = torch.zeros(*left.shape[:3], right.shape[3])
    for start in range(0, left.shape[3], step):
        part = slice(start, start + step)
        total = (total + left[..., part].float() @ right[:, :, part].float()).to(dtype).float()
    return total


def half_sums(i: Inputs, *, of_s: bool, of_o: bool, step: int = 16) -> torch.Tensor:
    """Q K^T or P V is accumulated in 16 bits; in an fp32 kernel, neither is."""
    if i.q.dtype == torch.float32:
        return attend(i)
    group = i.q.shape[1] // i.k.shape[1]
    k, v = i.k.repeat_interleave(group, 1).transpose(2, 3), i.v.repeat_interleave(group, 1)
    s = summed(i.q, k, i.q.dtype, step) * i.scale if of_s else scores_of(i)
    s = s.masked_fill(hidden_keys(i), -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(-1e30))
    o = summed(p.to(i.q.dtype), v, i.q.dtype, step) if of_o else times_v(p, i)
    return (o / p.sum(-1, keepdim=True).clamp_min(1e-30)).to(i.q.dtype)


def rounded_scores(i: Inputs) -> torch.Tensor:
    """The scores are rounded to the dtype; in an fp32 kernel, they are not."""
    s = scores_of(i).to(i.q.dtype).float().masked_fill(hidden_keys(i), -math.inf)
    return times_v(torch.softmax(s, -1).nan_to_num(0.0), i).to(i.q.dtype)


MISTAKES: dict[str, Mistaken] = {
    "scale 1/D": Mistaken(scaled(lambda i: i.scale), ("scale is 1/D",)),
    "scale not applied": Mistaken(scaled(lambda i: 1 / i.scale), ("scale is not applied",)),
    "scale 1 % too large": Mistaken(scaled(lambda _: 1.01), ("1 % too large",)),
    "exp in place of exp2": Mistaken(scaled(lambda _: math.log2(math.e)), ("log2 e once too often",)),
    "exp2 without log2 e": Mistaken(scaled(lambda _: math.log(2)), ("missing its log2 e",)),
    "scale 0.5": Mistaken(scaled(lambda i: 0.5 / i.scale), ("scale is 0.5",)),
    "scale 2/sqrt(D)": Mistaken(scaled(lambda _: 2.0), ("scale is 2/sqrt(D)",)),
    "scale of D = 80": Mistaken(scaled(lambda i: 80**-0.5 / i.scale), ("scale is that of D = 80",)),
    "scale of D = 256": Mistaken(
        scaled(lambda i: 256**-0.5 / i.scale), ("scale is that of D = 256", "scale is 1/(2 sqrt(D))")
    ),
    "scale 3 % too large": Mistaken(scaled(lambda _: 1.03), ("1.03 times the right one",)),
    "scale 1.4 times": Mistaken(scaled(lambda _: 1.4), ("1.4 times the right one",)),
    "mean of V": Mistaken(scaled(lambda _: 0.0), ("mean of V",)),
    "K and V exchanged": Mistaken(lambda i: attend(i._replace(k=i.v, v=i.k)), ("K and V are exchanged",)),
    "Q and K exchanged": Mistaken(
        lambda i: square(i, lambda i: attend(i._replace(q=i.k, k=i.q))), ("Q and K are exchanged",)
    ),
    "K read for V": Mistaken(lambda i: attend(i._replace(v=i.k)), ("K is read in place of V",)),
    "half of D in Q K^T": Mistaken(
        lambda i: attend(i._replace(q=i.q[..., : i.q.shape[3] // 2], k=i.k[..., : i.k.shape[3] // 2])),
        ("sums only the first",),
    ),
    "output transposed": Mistaken(lambda i: attend(i).transpose(2, 3).reshape(i.q.shape), ("output is transposed",)),
    "V transposed": Mistaken(lambda i: attend(i._replace(v=transposed(i.v))), ("V is read transposed",)),
    "K transposed": Mistaken(lambda i: attend(i._replace(k=transposed(i.k))), ("K is read transposed",)),
    "inputs in other layout": Mistaken(lambda i: attend(misread(i)), ("Q, K and V are read",)),
    "output in other layout": Mistaken(lambda i: stored_in_other_layout(attend(i), i.q), ("output is written as b",)),
    "all in other layout": Mistaken(
        lambda i: stored_in_other_layout(attend(misread(i)), i.q), ("output are taken as b", "runs over the heads")
    ),
    # With one head, each query sees its own key only; roundings to TF32 then change V itself.
    "attention over heads": Mistaken(
        over_heads, ("runs over the heads", "output is V itself", "only keys less than 1 away")
    ),
    "heads reversed": Mistaken(lambda i: attend(i).flip(1), ("holds",)),
    "heads mapped modulo": Mistaken(modulo, ("modulo", "reads K and V of head 0")),
    "heads in groups of kv_heads": Mistaken(
        lambda i: heads_in_order(i, lambda h, _: h // i.k.shape[1]), ("the divisor is kv_heads", "modulo", "of head 0")
    ),
    "V of heads mapped modulo": Mistaken(lambda i: heads_in_order(i, lambda h, _: h, "v"), ("key heads of V modulo",)),
    "K and V of head 0": Mistaken(
        lambda i: attend(i._replace(k=i.k[:, :1].expand_as(i.k), v=i.v[:, :1].expand_as(i.v))), ("head 0",)
    ),
    "K and V of batch 0": Mistaken(
        lambda i: attend(i._replace(k=i.k[:1].expand_as(i.k), v=i.v[:1].expand_as(i.v))), ("batch 0",)
    ),
    "rows shifted by 16": Mistaken(lambda i: attend(i).roll(16, 2), ("all rows are shifted",)),
    "two columns exchanged": Mistaken(
        lambda i: attend(i)[..., [0, 2, 1, *range(3, i.q.shape[3])]], ("dim 1 holds dim 2",)
    ),
    "softmax not normalised": Mistaken(lambda i: attend(i, divides=0), ("exp(S - max) V",)),
    "neither maximum nor sum": Mistaken(lambda i: attend(i, divides=0, maximum=False), ("exp(S) V",)),
    "divided twice": Mistaken(lambda i: attend(i, divides=2), ("row sum twice",)),
    "no softmax": Mistaken(
        lambda i: times_v(scores_of(i).masked_fill(hidden_keys(i), 0.0), i).to(i.q.dtype), ("S V: no softmax",)
    ),
    "softmax over queries": Mistaken(over_queries, ("over the queries",)),
    "tail keys counted": Mistaken(padded, ("past the end are counted",)),
    "keys past S_q missing": Mistaken(lambda i: keys_to(i, i.q.shape[2]), ("the keys past S_q are missing",)),
    "last tile has stale keys": Mistaken(stale_tail, ("still has K and V of", "is counted twice", "are counted twice")),
    "last tile has stale V": Mistaken(lambda i: stale_tail(i, of_k=False), ("still has V of",)),
    "last key missing": Mistaken(lambda i: without_last(i, 1), ("the last key is missing",)),
    "last tile missing": Mistaken(
        lambda i: online(i, tiles=lambda count: list(range(count - 1))),
        ("keys are missing", "the diagonal tile of 32 keys is skipped", "only the first"),
    ),
    "first tile missing": Mistaken(
        lambda i: online(i, tiles=lambda count: list(range(1, count))), ("the first 32 keys are missing",)
    ),
    "second tile missing": Mistaken(
        lambda i: online(i, tiles=lambda count: [tile for tile in range(count) if tile != 1]),
        ("keys 32 to 63 are missing", "the last 32 keys are missing", "every second tile"),
    ),
    "tile counted twice": Mistaken(
        lambda i: online(i, tiles=lambda count: [0, 1, 1, *range(2, count)]),
        ("keys 32 to 63 are counted twice", "the last 32 keys are counted twice"),
    ),
    "only the last tile in O": Mistaken(lambda i: online(i, only_last_o=True), ("missing in P V",)),
    "O not rescaled": Mistaken(lambda i: online(i, rescales="l"), ("O is not rescaled",)),
    "row sum not rescaled": Mistaken(lambda i: online(i, rescales="o"), ("row sum is not rescaled",)),
    "nothing rescaled": Mistaken(lambda i: online(i, rescales=""), ("O and the row sum are not rescaled",)),
    "mask forgotten": Mistaken(lambda i: attend(i, hidden=hidden_keys(i, "none")), ("mask is none",)),
    "mask not wanted": Mistaken(
        lambda i: attend(i, hidden=hidden_keys(i, "top_left") if i.causal == "none" else None), ("mask is top left",)
    ),
    "mask at the other corner": Mistaken(
        lambda i: attend(
            i, hidden=hidden_keys(i, {"top_left": "bottom_right", "bottom_right": "top_left"}.get(i.causal))
        ),
        ("mask is bottom right", "mask is top left"),
    ),
    "mask one key wider": Mistaken(lambda i: attend(i, hidden=hidden_keys(i, wider=1)), ("one key too wide",)),
    "mask one key narrower": Mistaken(lambda i: attend(i, hidden=hidden_keys(i, wider=-1)), ("one key too narrow",)),
    "diagonal tile not masked": Mistaken(lambda i: diagonal_tile(i, 1), ("keys is not masked", "mask is none")),
    "diagonal tile skipped": Mistaken(lambda i: diagonal_tile(i, 0), ("keys is skipped", "keys are missing")),
    "masked with zero": Mistaken(masked_with_zero, ("score of zero",)),
    "mask after the row sum": Mistaken(masked_p, ("counted in the row sum",)),
    "mean where no key is seen": Mistaken(mean_without_key, ("get the mean of V",)),
    "0/0 where no key is seen": Mistaken(zero_by_zero, ("see no key: 0/0",)),
    "inputs as other dtype": Mistaken(
        lambda i: attend(as_other_dtype(i), out_dtype=i.q.dtype), ("inputs are read as",)
    ),
    "all as other dtype": Mistaken(
        lambda i: attend(as_other_dtype(i)).view(i.q.dtype), ("inputs and output are taken for",)
    ),
    "soft cap of 5": Mistaken(lambda i: soft_capped(i, 5), ("soft cap of 5",)),
    "attention sink of 0": Mistaken(
        with_sink, ("attention sink of 0", "times what it should be", "a multiple of the right row")
    ),
    "attention sink of 1.5": Mistaken(
        lambda i: with_sinks(i, 1.5),
        ("attention sink of 1.5", "times what it should be", "a multiple of the right row"),
    ),
    "attention sink by head": Mistaken(
        lambda i: with_sinks(i, 1.0, 2.0, 3.0),
        ("attention sink", "times what it should be", "a multiple of the right row"),
    ),
    "ALiBi": Mistaken(with_alibi, ("ALiBi is on",)),
    "ALiBi by key": Mistaken(lambda i: with_alibi(i, by_distance=False), ("ALiBi is on",)),
    "window of 32": Mistaken(lambda i: windowed(i, 32), ("only the last 32 keys",)),
    "window of 50": Mistaken(lambda i: windowed(i, 50), ("only the last 50 keys",)),
    "causal window of 24": Mistaken(lambda i: windowed(i, 24, 1), ("only the last 24 keys",)),
    "window of 32 on both sides": Mistaken(
        lambda i: windowed(i, 32, 32), ("less than 32 away", "only the last 32 keys")
    ),
    "last rows are zero": Mistaken(lambda i: zero_at(i, ..., slice(-16, None), slice(None)), ("output is 0 in",)),
    "last dims are zero": Mistaken(lambda i: zero_at(i, ..., slice(-8, None)), ("output is 0 in",)),
    "odd rows are zero": Mistaken(
        lambda i: zero_at(i, ..., slice(1, None, 2), slice(None)), ("output is 0 in every 2nd query",)
    ),
    "odd heads are zero": Mistaken(
        lambda i: zero_at(i, slice(None), slice(1, None, 2)), ("output is 0 in every 2nd head", "output is 0 in head")
    ),
    "further batches are zero": Mistaken(lambda i: zero_at(i, slice(1, None)), ("output is 0 in batch 1",)),
    "dim 0 is zero": Mistaken(lambda i: zero_at(i, ..., 0), ("output is 0 in",)),
    "clamped": Mistaken(lambda i: attend(i).clamp(-0.05, 0.05), ("clamped at 0.05", "clamped at 0.049")),
    "all a little smaller": Mistaken(
        lambda i: (attend(i, out_dtype=torch.float32) * (1 - torch.finfo(i.q.dtype).eps * 0.6)).to(i.q.dtype),
        ("times what it should be",),
    ),
    "P truncated": Mistaken(lambda i: truncated(i, of_p=True, of_out=False), ("P is truncated",)),
    "output truncated": Mistaken(lambda i: truncated(i, of_p=False, of_out=True), ("output is truncated",)),
    "P and output truncated": Mistaken(
        lambda i: truncated(i, of_p=True, of_out=True), ("P and the output are truncated",)
    ),
    "Q K^T in 16 bits": Mistaken(lambda i: half_sums(i, of_s=True, of_o=False), ("Q K^T is accumulated in", "sums in")),
    "all sums in 16 bits": Mistaken(
        lambda i: half_sums(i, of_s=True, of_o=True), ("Q K^T and P V are accumulated in", "sums in")
    ),
    "all sums in 16 bits, one by one": Mistaken(
        lambda i: half_sums(i, of_s=True, of_o=True, step=1), ("accumulated in", "sums in")
    ),
    "rows never written": Mistaken(unwritten, ("never wrote",)),
    "all 1.01 times": Mistaken(lambda i: (attend(i).float() * 1.01).to(i.q.dtype), ("times what it should be",)),
}


def noise(i: Inputs, seed: int = 7) -> torch.Tensor:
    """Standard normal numbers in the shape of the output."""
    return torch.randn(i.q.shape, generator=torch.Generator().manual_seed(seed))


def with_random_bias(i: Inputs) -> torch.Tensor:
    """A number of its own is added to the score of each query and key."""
    s = scores_of(i)
    s = s + torch.randn(s.shape[2:], generator=torch.Generator().manual_seed(5))
    return times_v(torch.softmax(s.masked_fill(hidden_keys(i), -math.inf), -1).nan_to_num(0.0), i).to(i.q.dtype)


def one_element(i: Inputs) -> torch.Tensor:
    """One element is wrong."""
    out = attend(i)
    out[-1, -1, -1, 3] += 1.0
    return out


def shuffled_rows(i: Inputs) -> torch.Tensor:
    """The rows of each head are in a random order."""
    out = attend(i)
    generator = torch.Generator().manual_seed(0)
    heads = [head[torch.randperm(len(head), generator=generator)] for head in out.flatten(0, 1)]
    return torch.stack(heads).view_as(out)


# Mistakes that the diagnosis does not know.  It must not name a mistake of MISTAKES for them, but may say what is true.
UNLISTED: dict[str, Mistaken] = {
    "small noise": Mistaken(lambda i: (attend(i).float() + 0.02 * noise(i)).to(i.q.dtype), ()),
    "large noise": Mistaken(lambda i: (attend(i).float() + noise(i)).to(i.q.dtype), ()),
    "only noise": Mistaken(lambda i: noise(i).to(i.q.dtype), ()),
    "another data seed": Mistaken(lambda i: attend(i._replace(q=noise(i).to(i.q.dtype))), ()),
    "one element wrong": Mistaken(one_element, ()),
    "rows shuffled": Mistaken(shuffled_rows, ("another order", "holds", "copies of others")),
    "squared": Mistaken(lambda i: (attend(i).float() ** 2).to(i.q.dtype), ()),
    "random bias": Mistaken(with_random_bias, ()),
    "shifted by a constant": Mistaken(lambda i: (attend(i).float() + 0.1).to(i.q.dtype), ()),
    "even rows doubled": Mistaken(
        lambda i: attend(i) * (1 + (torch.arange(i.q.shape[2]) % 2 == 0).to(i.q.dtype))[:, None], ("multiple of",)
    ),
}
