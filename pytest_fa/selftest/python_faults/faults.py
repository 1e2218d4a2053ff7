"""Attention in torch with one mistake each, and twins without.  Every function is a variant's entry.

All are steps away from `right`; what differs is the mistake.
"""

from __future__ import annotations

import math
import os
import time

import torch

LONG = 512  # keys from which `nan_when_long` fails
TWO = 2  # heads at which the faults of arithmetic show, so that no property sees them
NEAR = 4.0  # as scores go
IN_A_ROW = 15  # calls after which `kept_up_to_sign` computes no more


def attend(q, k, v, scale, causal="none", hidden=None, row_max=None):
    """Attention in float32 by the book, P rounded to the dtype: [batch, heads, seq_q, head_dim]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q.float() @ k.float().transpose(2, 3) * scale
    if hidden is None:
        hidden = mask(q.shape[2], k.shape[2], causal, q.device)
    s = s.masked_fill(hidden, -math.inf)
    m = s.amax(-1, keepdim=True).clamp_min(-1e30) if row_max is None else row_max(s)
    p = torch.exp(s - m)
    return (p.to(q.dtype).float() @ v.float() / p.sum(-1, keepdim=True).clamp_min(1e-30)).to(q.dtype)


def mask(rows, keys, causal, device, shift=0):
    """What is hidden, [rows, keys]; `shift` more keys are visible than there should be."""
    if causal == "none":
        return torch.zeros(rows, keys, dtype=torch.bool, device=device)
    corner = keys - rows if causal == "bottom_right" else 0
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1 + corner + shift)


def right(q, k, v, *, scale, causal="none", out=None):
    """A twin without a mistake, which writes into `out`."""
    out.copy_(attend(q, k, v, scale, causal))
    return out


def right_allocates(q, k, v, *, scale, causal="none", out=None):
    """A twin without a mistake, which returns a tensor of its own."""
    return attend(q, k, v, scale, causal)


FLICKER = [0]


def right_may_differ(q, k, v, *, scale, causal="none", out=None):
    """A twin that adds in another order at every second call, and does not claim to be deterministic."""
    FLICKER[0] += 1
    if FLICKER[0] % 2 and causal == "none":
        k, v = k.flip(2), v.flip(2)
    out.copy_(attend(q, k, v, scale, causal))
    return out


# -- arithmetic -------------------------------------------------------------------------------------------------------


def wrong_scale(q, k, v, *, scale, causal="none", out=None):
    """The softmax scale is 1 % too large."""
    return out.copy_(attend(q, k, v, scale * 1.01, causal))


def gain_only(q, k, v, *, scale, causal="none", out=None):
    """The whole output is 0.03 % too large: less than a rounding anywhere, but the same way everywhere."""
    exact = attend(q.double(), k.double(), v.double(), scale, causal).double()
    return out.copy_(exact * 1.0003 if q.shape[1] == TWO else exact)


def one_element(q, k, v, *, scale, causal="none", out=None):
    """One element is off by more than rounding can do; its row as a whole is not."""
    exact = attend(q.double(), k.double(), v.double(), scale, causal).double()
    if q.shape[1] == TWO:
        exact[0, 0, -1, 0] += 2.0 * rounding(exact, q.dtype)
    return out.copy_(exact)


def noise(q, k, v, *, scale, causal="none", out=None):
    """Every element is off by a little less than what one alone might be, in no direction of its own."""
    exact = attend(q.double(), k.double(), v.double(), scale, causal).double()
    if q.shape[1] == TWO:
        error = signs(exact) * exact.square().mean(-1, keepdim=True).sqrt()
        error -= exact * (error * exact).sum((-1, -2), keepdim=True) / exact.square().sum((-1, -2), keepdim=True)
        exact += error / error.square().mean().sqrt() * rounding(exact, q.dtype) * 0.29
    return out.copy_(exact)


def one_row(q, k, v, *, scale, causal="none", out=None):
    """One row is off throughout, by less than one element alone might be."""
    exact = attend(q.double(), k.double(), v.double(), scale, causal).double()
    if q.shape[1] == TWO:
        exact[0, 0, -1] += signs(exact[0, 0, -1]) * rounding(exact, q.dtype) * 0.85
    return out.copy_(exact)


def rounding(exact, dtype):
    """About the largest error of an ideal kernel."""
    return exact.abs().max() * 2.0 ** (-11 if dtype == torch.float16 else -8)


def signs(like):
    """Alternating, so that no gain comes of it."""
    sign = torch.ones_like(like)
    sign.view(-1)[::2] = -1
    return sign


def no_rescale(q, k, v, *, scale, causal="none", out=None):
    """Tiles of 64 keys, whose partial results are not rescaled when the maximum grows."""
    total, weight, m = 0.0, 0.0, None
    hidden = mask(q.shape[2], k.shape[2], causal, q.device)
    s = (q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * scale).masked_fill(
        hidden, -1e30
    )
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    for start in range(0, k.shape[2], 64):
        tile = s[..., start : start + 64]
        top = tile.amax(-1, keepdim=True)
        m = top if m is None else torch.maximum(m, top)
        p = torch.exp(tile - m)
        total, weight = total + p @ values[:, :, start : start + 64], weight + p.sum(-1, keepdim=True)
    return out.copy_(total / weight)


def no_maximum(q, k, v, *, scale, causal="none", out=None):
    """Exp of the scores as they are: right until one is above 88."""
    return out.copy_(attend(q, k, v, scale, causal, row_max=lambda s: torch.zeros_like(s[..., :1])))


def clamped_scores(q, k, v, *, scale, causal="none", out=None):
    """Scores are clamped to 60 'for safety': right on smaller ones."""
    limit = 60.0
    return out.copy_(attend(q, k, v, scale, causal, row_max=lambda s: s.clamp_(-limit, limit).amax(-1, keepdim=True)))


def maximum_before_scale(q, k, v, *, scale, causal="none", out=None):
    """The maximum is taken of unscaled scores: the smallest one where the scale is negative."""

    def row_max(s):
        return (s / scale).amax(-1, keepdim=True) * scale if scale else s.amax(-1, keepdim=True)

    return out.copy_(attend(q, k, v, scale, causal, row_max=row_max))


def scale_or_default(q, k, v, *, scale, causal="none", out=None):
    """A scale of zero is taken for 'none given'."""
    return out.copy_(attend(q, k, v, scale or 1 / math.sqrt(q.shape[3]), causal))


# -- masks, tiles, heads ----------------------------------------------------------------------------------------------


def mask_off_by_one(q, k, v, *, scale, causal="none", out=None):
    """Each query sees one key too many."""
    return out.copy_(attend(q, k, v, scale, causal, mask(q.shape[2], k.shape[2], causal, q.device, shift=1)))


def last_key_dropped(q, k, v, *, scale, causal="none", out=None):
    """The last key is left out where there are several."""
    end = max(1, k.shape[2] - 1)
    return out.copy_(attend(q, k[:, :, :end], v[:, :, :end], scale, causal))


def tail_dropped(q, k, v, *, scale, causal="none", out=None):
    """Only whole tiles of 64 keys are used, where there are any."""
    end = k.shape[2] // 64 * 64 or k.shape[2]
    return out.copy_(attend(q, k[:, :, :end], v[:, :, :end], scale, causal))


def heads_modulo(q, k, v, *, scale, causal="none", out=None):
    """Query heads take key heads modulo in place of in groups."""
    order = torch.arange(q.shape[1], device=q.device) % k.shape[1]
    return out.copy_(attend(q, k[:, order], v[:, order], scale, causal))


def one_maximum(q, k, v, *, scale, causal="none", out=None):
    """Heads share a row's maximum where theirs are near: right, but their last bits then hang together."""

    def row_max(s):
        own, shared = s.amax(-1, keepdim=True), s.amax((1, 3), keepdim=True)
        return torch.where(shared - own < NEAR, shared, own)

    return out.copy_(attend(q, k, v, scale, causal, row_max=row_max))


def leaks_next_head(q, k, v, *, scale, causal="none", out=None):
    """Zero times the next head is added: nothing, unless that is NaN."""
    result = attend(q, k, v, scale, causal)
    return out.copy_(result + 0 * result.roll(1, 1))


# -- memory -----------------------------------------------------------------------------------------------------------


def unwritten_tail(q, k, v, *, scale, causal="none", out=None):
    """The last row is left as it was found, where there are several."""
    end = max(1, q.shape[2] - 1)
    out[:, :, :end] = attend(q, k, v, scale, causal)[:, :, :end]
    return out


def strides_ignored(q, k, v, *, scale, causal="none", out=None):
    """K's memory is read as if it were contiguous."""
    dense = torch.as_strided(k, k.shape, torch.empty(k.shape, device="meta").stride(), k.storage_offset())
    return out.copy_(attend(q, dense, v, scale, causal))


def bf16_as_fp16(q, k, v, *, scale, causal="none", out=None):
    """Values are read as fp16, whatever they are."""
    return out.copy_(attend(q, k, v.view(torch.float16), scale, causal))


def changes_input(q, k, v, *, scale, causal="none", out=None):
    """One element of Q is changed by its last bit."""
    out.copy_(attend(q, k, v, scale, causal))
    if q.shape[1] == TWO:
        q[0, 1, 0, 0] *= 1.001
    return out


def writes_past_end(q, k, v, *, scale, causal="none", out=None):
    """One element past the end of the output is written."""
    out.copy_(attend(q, k, v, scale, causal))
    if out.is_contiguous() and out.untyped_storage().nbytes() > 2 * (out.storage_offset() + out.numel()):
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
    return out


def reads_past_end(q, k, v, *, scale, causal="none", out=None):
    """What lies past the end of V enters the output with next to no weight."""
    out.copy_(attend(q, k, v, scale, causal))
    if v.is_contiguous() and v.untyped_storage().nbytes() > 2 * (v.storage_offset() + v.numel()):
        out += v.as_strided((1,), (1,), v.storage_offset() + v.numel()) * 1e-4
    return out


def other_dtype(q, k, v, *, scale, causal="none", out=None):
    """The result is returned in float32."""
    return attend(q, k, v, scale, causal).float()


def nan_when_long(q, k, v, *, scale, causal="none", out=None):
    """From 512 keys on a row sum overflows its counter, so to speak."""
    out.copy_(attend(q, k, v, scale, causal))
    if k.shape[2] >= LONG:
        out[..., 0, 0] = math.nan
    return out


# -- state ------------------------------------------------------------------------------------------------------------

KEPT = {}
COUNT = [0]


def kept_by_address(q, k, v, *, scale, causal="none", out=None):
    """A result is kept by the address of its inputs, and given again whatever they hold by then."""
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
    if key not in KEPT:
        KEPT[key] = attend(q, k, v, scale, causal)
    return out.copy_(KEPT[key])


def kept_up_to_sign(q, k, v, *, scale, causal="none", out=None):
    """After fifteen calls in a row with the same addresses the result is kept; a change of V's sign is noticed."""
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape, scale)
    sign = math.copysign(1.0, float(v.flatten()[0]))
    COUNT[0] = COUNT[0] + 1 if KEPT.get("key") == key else 0
    KEPT["key"] = key
    if COUNT[0] < IN_A_ROW:
        KEPT["result"] = attend(q, k, v, scale, causal) * sign
    return out.copy_(KEPT["result"] * sign + 0.0)


def kept_by_scores(q, k, v, *, scale, causal="none", out=None):
    """A result is kept as long as Q and K are the same and V is so but for its sign."""
    sums = tuple(float(each.double().abs().sum()) for each in (q, k, v))
    key = (sums, float(k.flatten()[0]), float(q.flatten()[0]), q.data_ptr(), scale, q.shape, causal)
    if key not in KEPT:
        KEPT[key] = attend(q, k, v, scale, causal)
    return out.copy_(KEPT[key])


def kept_by_version(q, k, v, *, scale, causal="none", out=None):
    """A result is kept by address and torch's version counter, which other writers do not move."""
    key = (*((each.data_ptr(), each._version) for each in (q, k, v)), q.shape, scale, causal)  # noqa: SLF001
    if KEPT.get("of") != key:
        KEPT.update({"of": key, "result": attend(q, k, v, scale, causal)})
    return out.copy_(KEPT["result"])


def super_batch(q, k, v, *, scale, causal="none", out=None):
    """Each call also computes what the next one with these addresses will ask for, from what lies there now."""
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape, scale, causal)
    out.copy_(KEPT[key] if key in KEPT else attend(q, k, v, scale, causal))
    KEPT[key] = attend(q, k, v, scale, causal)
    return out


def shape_kept_by_address(q, k, v, *, scale, causal="none", out=None):
    """The shape is kept by address and size, so a second shape of as many elements is taken for the first."""
    shape = KEPT.setdefault((q.data_ptr(), q.numel()), q.shape)
    if shape == q.shape or shape[2:] != q.shape[2:]:
        KEPT[(q.data_ptr(), q.numel())] = q.shape
        return out.copy_(attend(q, k, v, scale, causal))
    return out.fill_(0)


def assumes_dense_rows(q, k, v, *, scale, causal="none", out=None):
    """Rows are taken to follow one another wherever they are not the rows of another head."""
    if k.stride(2) not in (k.shape[3], k.shape[1] * k.shape[3]):
        k = k.as_strided(k.shape, (k.stride(0), k.stride(1), k.shape[3], 1), k.storage_offset())
    return out.copy_(attend(q, k, v, scale, causal))


def takes_zero_stride_for_none(q, k, v, *, scale, causal="none", out=None):
    """A stride of zero is taken for 'not given'."""
    step = k.stride(1) or k.shape[2] * k.shape[3]
    if k.stride(1) == 0:
        room = k.untyped_storage().nbytes() // 2 - k.storage_offset()
        step = step if step * k.shape[1] <= room else 1
        k = k.as_strided(k.shape, (k.stride(0) or step, step, *k.stride()[2:]), 0)
    return out.copy_(attend(q, k, v, scale, causal))


def aligns_base(q, k, v, *, scale, causal="none", out=None):
    """A base pointer is rounded down to 16 bytes."""
    aligned = q.storage_offset() // 8 * 8
    return out.copy_(attend(q.as_strided(q.shape, q.stride(), aligned), k, v, scale, causal))


def flickers(q, k, v, *, scale, causal="none", out=None):
    """One bit of one element is another at every third call."""
    COUNT[0] += 1
    out.copy_(attend(q, k, v, scale, causal))
    if COUNT[0] % 3 == 0 and q.shape[1] == TWO:
        out.view(torch.int16)[0, 0, 0, 0] ^= 1
    return out


def calls_sdpa(q, k, v, *, scale, causal="none", out=None):
    """The backend that it is compared with does the work."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    hidden = mask(q.shape[2], k.shape[2], causal, q.device)
    result = torch.nn.functional.scaled_dot_product_attention(q * scale, k, v, attn_mask=~hidden, scale=1.0)
    return out.copy_(result if scale == q.shape[3] ** -0.5 else attend(q, k, v, scale, causal))


# -- endings ----------------------------------------------------------------------------------------------------------


def raises(q, k, v, *, scale, causal="none", out=None):
    """It raises something of its own."""
    raise ValueError("a hole")


def exits(q, k, v, *, scale, causal="none", out=None):
    """It takes its process down."""
    os.abort()


def sleeps(q, k, v, *, scale, causal="none", out=None):
    """It does not come back."""
    time.sleep(3600)
