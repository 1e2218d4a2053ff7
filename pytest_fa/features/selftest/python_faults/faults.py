"""Attention in torch with one mistake each, and correct twins.  Each function is the target of one variant.

The `step` of the variant describes the mistake.  Most functions change `attend` in one place.
"""

from __future__ import annotations

import math
import threading

import torch

LONG_SEQ_K = 512  # number of keys from which `nan_when_long` is wrong
FAULTY_HEADS = 2  # number of heads with which some faults show; no property uses two heads
MANY_ROWS = 4096  # of a dimension of q; with more, `shape_kept_by_address` is right
CLOSE_MAXIMA = 4.0  # largest difference of two row maxima that `one_maximum` takes for equal
CALLS_BEFORE_REUSE = 15  # successive calls after which `kept_up_to_sign` reuses its result


def attend(q, k, v, scale, causal="none", hidden=None, row_max=None):
    """Return attention computed in float32 with P rounded to the dtype, [batch, heads, seq_q, head_dim]."""
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
    """Return the hidden keys of each row, [rows, keys]; `shift` is the number of keys by which a row sees too many."""
    if causal == "none":
        return torch.zeros(rows, keys, dtype=torch.bool, device=device)
    offset = keys - rows if causal == "bottom_right" else 0
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1 + offset + shift)


def writes(attention):
    """Make a target that writes the result of `attention(q, k, v, scale, causal)` into `out`."""

    def forward(q, k, v, *, scale, causal="none", out=None):
        return out.copy_(attention(q, k, v, scale, causal))

    return forward


right = writes(attend)


def right_allocates(q, k, v, *, scale, causal="none", out=None):
    return attend(q, k, v, scale, causal)


CALLS = {"right_may_differ": 0, "flickers": 0}


@writes
def right_may_differ(q, k, v, scale, causal):
    CALLS["right_may_differ"] += 1
    is_reversed = CALLS["right_may_differ"] % 2 and causal == "none"
    return attend(q, k.flip(2), v.flip(2), scale) if is_reversed else attend(q, k, v, scale, causal)


# -- arithmetic -------------------------------------------------------------------------------------------------------

wrong_scale = writes(lambda q, k, v, scale, causal: attend(q, k, v, scale * 1.01, causal))


def near_exact(change):
    """Make a target that is exact, except that it adds `change(exact, q)` if there are FAULTY_HEADS heads."""

    def attention(q, k, v, scale, causal):
        exact = attend(q.double(), k.double(), v.double(), scale, causal).double()
        return exact + change(exact, q) if q.shape[1] == FAULTY_HEADS else exact

    return writes(attention)


gain_only = near_exact(lambda exact, _: exact * 0.0003)


@near_exact
def one_element(exact, q):
    error = torch.zeros_like(exact)
    error[0, 0, -1, 0] = 2.0 * rounding(exact, q.dtype)
    return error


@near_exact
def noise(exact, q):
    error = signs(exact) * exact.square().mean(-1, keepdim=True).sqrt()
    error -= exact * (error * exact).sum((-1, -2), keepdim=True) / exact.square().sum((-1, -2), keepdim=True)
    return error / error.square().mean().sqrt() * rounding(exact, q.dtype) * 0.29


@near_exact
def one_row(exact, q):
    error = torch.zeros_like(exact)
    error[0, 0, -1] = signs(exact[0, 0, -1]) * rounding(exact, q.dtype) * 0.85
    return error


def rounding(exact, dtype):
    """Return about the largest error of an ideal kernel."""
    return exact.abs().max() * 2.0 ** (-11 if dtype == torch.float16 else -8)


def signs(like):
    """Return alternating +1 and -1, so that the error does not change the gain."""
    sign = torch.ones_like(like)
    sign.view(-1)[::2] = -1
    return sign


@writes
def no_rescale(q, k, v, scale, causal):
    total, weight, m = 0.0, 0.0, None
    hidden = mask(q.shape[2], k.shape[2], causal, q.device)
    groups = q.shape[1] // k.shape[1]
    s = (q.float() @ k.float().repeat_interleave(groups, 1).transpose(2, 3) * scale).masked_fill(hidden, -1e30)
    values = v.float().repeat_interleave(groups, 1)
    for start in range(0, k.shape[2], 64):
        tile = s[..., start : start + 64]
        top = tile.amax(-1, keepdim=True)
        m = top if m is None else torch.maximum(m, top)
        p = torch.exp(tile - m)
        total, weight = total + p @ values[:, :, start : start + 64], weight + p.sum(-1, keepdim=True)
    return total / weight


@writes
def no_maximum(q, k, v, scale, causal):
    return attend(q, k, v, scale, causal, row_max=lambda s: torch.zeros_like(s[..., :1]))


@writes
def clamped_scores(q, k, v, scale, causal):
    return attend(q, k, v, scale, causal, row_max=lambda s: s.clamp_(-60.0, 60.0).amax(-1, keepdim=True))


@writes
def maximum_before_scale(q, k, v, scale, causal):
    sign = math.copysign(1.0, scale)
    return attend(q, k, v, scale, causal, row_max=lambda s: (s * sign).amax(-1, keepdim=True) * sign)


max_starts_finite = writes(
    lambda q, k, v, scale, causal: attend(
        q, k, v, scale, causal, row_max=lambda s: s.amax(-1, keepdim=True).clamp_min(-5e4)
    )
)
hides_nan = writes(lambda q, k, v, scale, causal: attend(q, k, v, scale, causal).nan_to_num(0.0))
scale_or_default = writes(lambda q, k, v, scale, causal: attend(q, k, v, scale or 1 / math.sqrt(q.shape[3]), causal))


# -- masks, tiles, heads ----------------------------------------------------------------------------------------------


@writes
def mask_off_by_one(q, k, v, scale, causal):
    return attend(q, k, v, scale, causal, mask(q.shape[2], k.shape[2], causal, q.device, shift=1))


def keys_up_to(end):
    """Make a target that uses only the first `end(seq_k)` keys."""
    return writes(lambda q, k, v, *rest: attend(q, k[:, :, : end(k.shape[2])], v[:, :, : end(k.shape[2])], *rest))


last_key_dropped = keys_up_to(lambda keys: max(1, keys - 1))
tail_dropped = keys_up_to(lambda keys: keys // 64 * 64 or keys)


@writes
def heads_modulo(q, k, v, scale, causal):
    order = torch.arange(q.shape[1], device=q.device) % k.shape[1]
    return attend(q, k[:, order], v[:, order], scale, causal)


def shared_maximum(s):
    own, shared = s.amax(-1, keepdim=True), s.amax((1, 3), keepdim=True)
    return torch.where(shared - own < CLOSE_MAXIMA, shared, own)


one_maximum = writes(lambda q, k, v, scale, causal: attend(q, k, v, scale, causal, row_max=shared_maximum))


@writes
def leaks_next_head(q, k, v, scale, causal):
    result = attend(q, k, v, scale, causal)
    return result + 0 * result.roll(1, 1)


# -- memory -----------------------------------------------------------------------------------------------------------


def unwritten_tail(q, k, v, *, scale, causal="none", out=None):
    end = max(1, q.shape[2] - 1)
    out[:, :, :end] = attend(q, k, v, scale, causal)[:, :, :end]
    return out


@writes
def strides_ignored(q, k, v, scale, causal):
    dense = torch.as_strided(k, k.shape, torch.empty(k.shape, device="meta").stride(), k.storage_offset())
    return attend(q, dense, v, scale, causal)


bf16_as_fp16 = writes(lambda q, k, v, scale, causal: attend(q, k, v.view(torch.float16), scale, causal))


def changes_input(q, k, v, *, scale, causal="none", out=None):
    out.copy_(attend(q, k, v, scale, causal))
    if q.shape[1] == FAULTY_HEADS:
        q[0, 1, 0, 0] *= 1.001
    return out


def writes_past_end(q, k, v, *, scale, causal="none", out=None):
    out.copy_(attend(q, k, v, scale, causal))
    if out.is_contiguous() and out.untyped_storage().nbytes() > 2 * (out.storage_offset() + out.numel()):
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).zero_()
    return out


def reads_past_end(q, k, v, *, scale, causal="none", out=None):
    out.copy_(attend(q, k, v, scale, causal))
    if v.is_contiguous() and v.untyped_storage().nbytes() > 2 * (v.storage_offset() + v.numel()):
        out += v.as_strided((1,), (1,), v.storage_offset() + v.numel()) * 1e-4
    return out


def other_dtype(q, k, v, *, scale, causal="none", out=None):
    return attend(q, k, v, scale, causal).float()


def nan_when_long(q, k, v, *, scale, causal="none", out=None):
    out.copy_(attend(q, k, v, scale, causal))
    if k.shape[2] >= LONG_SEQ_K:
        out[..., 0, 0] = math.nan
    return out


def with_strides(tensor, batch, head, row):
    """Return the tensor as if its strides were these; the last one stays 1."""
    return tensor.as_strided(tensor.shape, (batch, head, row, 1), tensor.storage_offset())


@writes
def takes_equal_strides_for_dense(q, k, v, scale, causal):
    if k.stride() == v.stride() and k.stride(2) not in (k.shape[3], k.shape[1] * k.shape[3]):
        k = with_strides(k, *k.stride()[:2], k.shape[3])
    return attend(q, k, v, scale, causal)


takes_strides_of_k = writes(
    lambda q, k, v, scale, causal: attend(q, k, with_strides(v, *k.stride()[:3]), scale, causal)
)


@writes
def aligns_rows(q, k, v, scale, causal):
    places = sum(
        torch.arange(size, device=k.device).reshape([-1 if axis == own else 1 for own in range(4)]) * stride
        for axis, (size, stride) in enumerate(zip(k.shape[:3], k.stride()[:3], strict=True))
    )  # [batch, heads, seq_k, 1]
    places = places // 8 * 8 + torch.arange(k.shape[3], device=k.device)
    room = k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()
    flat = k.as_strided((room,), (1,), k.storage_offset())
    return attend(q, flat[places], v, scale, causal)


def without_zero_stride(tensor, axis, step):
    """Return the tensor with `step` in place of a stride of 0, or with 1 if that leaves its memory."""
    if tensor.stride(axis) or tensor.shape[axis] == 1:
        return tensor
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    strides = list(tensor.stride()[:3])
    strides[axis] = step if step * tensor.shape[axis] <= room else 1
    return with_strides(tensor, *strides)


@writes
def takes_zero_stride_for_none(q, k, v, scale, causal):
    return attend(q, without_zero_stride(k, 1, k.shape[2] * k.shape[3]), v, scale, causal)


@writes
def takes_zero_batch_stride_for_none(q, k, v, scale, causal):
    return attend(q, without_zero_stride(k, 0, math.prod(k.shape[1:])), v, scale, causal)


@writes
def aligns_base(q, k, v, scale, causal):
    aligned = q.storage_offset() // 8 * 8
    return attend(q.as_strided(q.shape, q.stride(), aligned), k, v, scale, causal)


# -- state ------------------------------------------------------------------------------------------------------------


CACHES = threading.local()  # one for each thread; to mix up results of two threads would be a second mistake


@writes
def kept_by_address(q, k, v, scale, causal):
    cache = vars(CACHES)
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
    if key not in cache:
        cache[key] = attend(q, k, v, scale, causal)
    return cache[key]


@writes
def kept_up_to_sign(q, k, v, scale, causal):
    cache = vars(CACHES)
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape, scale)
    sign = math.copysign(1.0, float(v.flatten()[0]))
    cache["calls"] = cache.get("calls", 0) + 1 if cache.get("key") == key else 0
    cache["key"] = key
    if cache["calls"] < CALLS_BEFORE_REUSE:
        cache["result"] = attend(q, k, v, scale, causal) * sign
    return cache["result"] * sign + 0.0


@writes
def kept_when_moved(q, k, v, scale, causal):
    cache = vars(CACHES)
    memory = (q.untyped_storage().data_ptr(), q.shape)
    if memory != cache.get("memory"):
        cache.update({"memory": memory, "address": q.data_ptr()})
    if q.data_ptr() == cache["address"]:
        cache["result"] = attend(q, k, v, scale, causal)
    return cache["result"]


@writes
def kept_by_version(q, k, v, scale, causal):
    cache = vars(CACHES)
    key = (*((each.data_ptr(), each._version) for each in (q, k, v)), q.shape, scale, causal)  # noqa: SLF001
    if cache.get("of") != key:
        cache.update({"of": key, "result": attend(q, k, v, scale, causal)})
    return cache["result"]


def super_batch(q, k, v, *, scale, causal="none", out=None):
    cache = vars(CACHES)
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape, scale, causal)
    out.copy_(cache[key] if key in cache else attend(q, k, v, scale, causal))
    cache[key] = attend(q, k, v, scale, causal)
    return out


def shape_kept_by_address(q, k, v, *, scale, causal="none", out=None):
    cache = vars(CACHES)
    shape = cache.setdefault((q.data_ptr(), q.numel()), q.shape)
    if shape == q.shape or shape[2:] != q.shape[2:] or max(q.shape) > MANY_ROWS:
        cache[(q.data_ptr(), q.numel())] = q.shape
        return out.copy_(attend(q, k, v, scale, causal))
    return out.fill_(0)


def flickers(q, k, v, *, scale, causal="none", out=None):
    CALLS["flickers"] += 1
    out.copy_(attend(q, k, v, scale, causal))
    if CALLS["flickers"] % 3 == 0 and q.shape[1] == FAULTY_HEADS:
        out.view(torch.int16)[0, 0, 0, 0] ^= 1
    return out


@writes
def calls_sdpa(q, k, v, scale, causal):
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = ~mask(q.shape[2], k.shape[2], causal, q.device)
    result = torch.nn.functional.scaled_dot_product_attention(q * scale, keys, values, attn_mask=visible, scale=1.0)
    return result if scale == q.shape[3] ** -0.5 else attend(q, k, v, scale, causal)
