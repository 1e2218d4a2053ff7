"""Right attention that takes malformed calls for others, and a correct twin that refuses them."""

from __future__ import annotations

import math
import os

import torch

from pytest_fa.errors import UnsupportedCase

MATRIX_DIMS = 4  # of q, k, v and the output


def attend(q, k, v, scale, seqlens_k):
    """Return attention without a mask, [batch, heads, seq_q, head_dim]; keys at and behind a length are padding."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    if seqlens_k is not None:
        hidden = (torch.arange(k.shape[2], device=q.device) >= seqlens_k[:, None])[:, None, None]
        scores, v = scores.masked_fill(hidden, -math.inf), v.masked_fill(hidden.transpose(2, 3), 0.0)
    p = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(-1e30))
    return (p @ v / p.sum(-1, keepdim=True).clamp_min(1e-30)).to(q.dtype)


def with_pages(gathered, check):
    """Make a target that checks a call, and gathers a cache by `gathered(cache, block_table)`."""

    def forward(q, k, v, *, scale, causal="none", out=None, seqlens_k=None, block_table=None):
        k = check(q, k, v, out, block_table is not None)
        if block_table is not None:
            k, v = (gathered(x, block_table).transpose(1, 2).flatten(2, 3) for x in (k, v))
        return out.copy_(attend(q, k, v, scale, seqlens_k))

    return forward


def checked(q, k, v, out, has_pages):
    """Return k, which fits the other tensors.  Raises `UnsupportedCase` if one does not."""
    tensors = (q, k, v, out)
    if any(x is None or x.dim() != MATRIX_DIMS or (x.dtype, x.device) != (q.dtype, q.device) for x in tensors):
        raise UnsupportedCase("a tensor is missing, or has another rank, dtype or device than q")
    batch, heads, _, head_dim = q.shape
    fits = k.shape == v.shape and k.shape[3] == head_dim and heads % k.shape[1] == 0 and out.shape == q.shape
    if not fits or (len(k) != batch and not has_pages):
        raise UnsupportedCase("the shapes of q, k, v and the output do not fit together")
    return k


def k_in_dtype_of_q(q, k, *others):
    """Return k with its bits taken for numbers of q's dtype."""
    return checked(q, k.view(q.dtype), *others)


def exits_unless_matrix(q, k, *others):
    """Return k; end the process if it has another rank."""
    if k is not None and k.dim() != MATRIX_DIMS:
        os._exit(1)
    return checked(q, k, *others)


def nan_without_page(cache, block_table):
    """Return the pages of a table, NaN for one that the cache does not have."""
    known = block_table.clamp(0, len(cache) - 1)
    return cache[known].masked_fill((known != block_table)[..., None, None, None], math.nan)


def modulo_pages(cache, block_table):
    """Return the pages of a table, whose entries are taken modulo the number of pages."""
    return cache[block_table % len(cache)]


right_that_checks = with_pages(nan_without_page, checked)
takes_bits_of_k = with_pages(nan_without_page, k_in_dtype_of_q)
exits_for_other_rank = with_pages(nan_without_page, exits_unless_matrix)
wraps_pages = with_pages(modulo_pages, checked)
