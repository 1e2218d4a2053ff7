"""Right attention with a log-sum-exp that has one mistake, and correct twins."""

from __future__ import annotations

import math

import torch

TILE = 64  # keys
RANGE = 50  # keys of the first of the two calls that `split_and_merge` merges; no other check has so many
LONG_SEQ_K = 512  # number of keys from which `lse_log2_when_long` is wrong


def attend(q, k, v, scale, causal):
    """Return attention in float32, [batch, heads, seq_q, head_dim], and the masked products q k^T without the scale."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    products = q.float() @ k.float().transpose(2, 3)
    if causal != "none":
        shift = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
        hidden = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + shift)
        products = products.masked_fill(hidden, -math.inf)
    scores = scored(products, scale)
    p = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0)  # 0 in rows that see no key
    row_sum = p.sum(-1, keepdim=True).clamp(min=1.0)
    return (p.to(q.dtype).float() @ v.float() / row_sum).to(q.dtype), products


def scored(products, scale):
    """Return the scores; a hidden key stays hidden with any scale."""
    return torch.where(products == -math.inf, products, products * scale)


def writes_lse(lse_of):
    """Make a target whose log-sum-exp is `lse_of(products, scale)`."""

    def forward(q, k, v, *, scale, causal="none", out=None, lse=None):
        result, products = attend(q, k, v, scale, causal)
        if lse is not None:
            lse.copy_(lse_of(products, scale))
        return out.copy_(result)

    return forward


def right_lse(products, scale):
    return torch.logsumexp(scored(products, scale), -1)


right_writes_lse = writes_lse(right_lse)


def right_returns_lse(q, k, v, *, scale, causal="none", out=None, lse=None):
    result, products = attend(q, k, v, scale, causal)
    return result, right_lse(products, scale)


lse_log2 = writes_lse(lambda products, scale: right_lse(products, scale) / math.log(2))
lse_of_a_range = writes_lse(
    lambda products, scale: right_lse(products, scale) + (0.01 if products.shape[3] == RANGE else 0.0)
)
lse_log2_when_long = writes_lse(
    lambda products, scale: right_lse(products, scale) / (math.log(2) if products.shape[3] >= LONG_SEQ_K else 1.0)
)
lse_unscaled = writes_lse(lambda products, _: right_lse(products, 1.0))
lse_without_max = writes_lse(
    lambda products, scale: right_lse(products, scale) - scored(products, scale).amax(-1).nan_to_num(neginf=0.0)
)
lse_without_nan = writes_lse(lambda products, scale: right_lse(products, scale).nan_to_num(-math.inf, neginf=-math.inf))


def lse_skips_nan(q, k, v, *, scale, causal="none", out=None, lse=None):
    result, products = attend(q, k, v, scale, causal)
    if lse is not None:
        right = right_lse(products, scale)
        lse.copy_(torch.where(right.isnan(), lse, right))
    return out.copy_(result)


PREVIOUS = {}


@writes_lse
def lse_one_late(products, scale):
    current = right_lse(products, scale)
    late = PREVIOUS.get(current.shape, current)
    PREVIOUS[current.shape] = current
    return late


@writes_lse
def lse_last_tile(products, scale):
    kept = (products.shape[-1] - 1) // TILE * TILE
    return right_lse(products[..., : kept or None], scale)
