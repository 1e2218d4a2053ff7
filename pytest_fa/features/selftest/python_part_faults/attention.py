"""Attention with every part, one mistake in a part or in a pair of parts, selected by FAULT, and a correct twin.

The `step` of each variant describes its FAULT.  NONE is the twin.
"""

from __future__ import annotations

import math

import torch

TILE = 64  # keys of a tile, and of a split
WIDTH = 64  # columns of V that a kernel for head_dim 64 computes
PADDED_HEAD_DIM = 128
LOWEST = -1e30  # replaces a maximum of -inf: exp(-inf - LOWEST) = 0
LOWEST_BIAS = -1e4  # in place of -inf
KEPT = {}  # by address, lengths as they were at the first call
NO_MASK = ("mask_ignored", "mask_added", "mask_in_pv_only", "bias_times_mask")  # whose scores are those of all keys


def forward(
    q,
    k,
    v,
    *,
    cu_seqlens_q=None,  # [batch + 1]: q and the output are [1, heads, rows, dim], sequences behind one another
    cu_seqlens_k=None,  # the same of k and v
    max_seqlen_q=None,  # which no sequence exceeds
    max_seqlen_k=None,
    out=None,
    lse=None,
    FAULT="NONE",
    **words,
):
    """Write attention and its log-sum-exp; `words` are those of `attend`."""
    if cu_seqlens_q is None:
        return attend(q, k, v, out=out, lse=lse, FAULT=FAULT, **words)
    words["seqlens_q"] = cu_seqlens_q.diff()
    if cu_seqlens_k is not None:
        starts, words["seqlens_k"] = find_starts(FAULT, cu_seqlens_q, cu_seqlens_k, k.shape[2], max_seqlen_k)
        k, v = (sequences(tensor, starts, max_seqlen_k) for tensor in (k, v))
    queries = sequences(q, cu_seqlens_q, max_seqlen_q)
    rows_of_lse = None if lse is None else queries[..., 0].float()
    result = attend(queries, k, v, lse=rows_of_lse, FAULT=FAULT, **words)
    if out is None:
        out = torch.zeros_like(q[..., : v.shape[3]])
    store(FAULT, out[0].transpose(0, 1), result.transpose(1, 2), cu_seqlens_q)
    if lse is not None:
        starts = (
            torch.arange(len(cu_seqlens_q), device=q.device) * max_seqlen_q
            if FAULT == "thd_lse_of_longest"
            else cu_seqlens_q
        )
        store("NONE", lse[0].transpose(0, 1), rows_of_lse.transpose(1, 2), starts, cu_seqlens_q.diff())
    return out


def find_starts(FAULT, of_queries, of_keys, rows, longest):
    """Return where the keys of each sequence begin, and how many it has."""
    if FAULT == "thd_kept_starts":
        of_keys = KEPT.setdefault((of_keys.data_ptr(), of_keys.shape, rows), of_keys.clone())
    starts = {
        "thd_keys_of_next": lambda: of_keys.roll(-1),
        "thd_keys_of_longest": lambda: torch.arange(len(of_keys), device=of_keys.device) * longest,
        "thd_keys_of_queries": lambda: of_queries,
    }
    lengths = of_keys.diff()
    if FAULT == "thd_keys_go_on":
        lengths = torch.full_like(lengths, longest)
    return (starts[FAULT]() if FAULT in starts else of_keys), lengths


def sequences(tensor, starts, longest):
    """Return rows of each sequence, [batch, heads, longest, dim]; those behind its own belong to others."""
    rows = starts[:-1, None] + torch.arange(longest, device=tensor.device)
    return tensor[0][:, rows.clamp_max(tensor.shape[2] - 1)].transpose(0, 1)


def store(FAULT, out, result, starts, lengths=None):
    """Write [batch, longest, ...] into [rows, ...], the sequences behind one another; of two, the first one counts."""
    lengths = starts.diff() if lengths is None else lengths
    if FAULT == "thd_last_sequence_lost":
        lengths = torch.cat([lengths[:-1], torch.zeros_like(lengths[-1:])])
    if FAULT == "thd_tile_written_whole":
        lengths = ((lengths + TILE - 1) // TILE * TILE).clamp_max(result.shape[1])
    row = torch.arange(len(out), device=out.device)
    covers = (row >= starts[:-1, None]) & (row < (starts[:-1] + lengths)[:, None])  # [batch, rows]
    sequence = covers.int().argmax(0)
    own = result[sequence, (row - starts[sequence]).clamp(0, result.shape[1] - 1)]
    of_row = (-1, *[1] * (out.dim() - 1))
    out.copy_(torch.where(covers.any(0).view(of_row), own, out))
    if FAULT == "thd_writes_past":
        out.masked_fill_((row >= starts[-1]).view(of_row), 0)


def attend(  # noqa: C901  # a line for each part
    q,  # [batch, heads, seq_q, head_dim]
    k,  # [batch, kv_heads, seq_k, head_dim]
    v,  # [batch, kv_heads, seq_k, head_dim_v]
    *,
    scale,
    causal="none",
    window_left=None,
    window_right=None,
    softcap=0.0,
    attn_bias=None,  # [batch, heads, seq_q, seq_k], as the mask
    alibi_slopes=None,  # [heads], as the sink
    attn_mask=None,
    sink=None,
    seqlens_q=None,  # [batch], as the other one
    seqlens_k=None,
    block_table=None,  # [batch, n]: k and v are [pages, kv_heads, page_size, dim]
    k_scale=None,  # [1], [kv_heads] or [batch, kv_heads, seq_k]; of pages [pages, kv_heads, page_size]
    v_scale=None,
    k_new=None,  # [batch, kv_heads, seq_q, dim], as the other one
    v_new=None,
    out=None,
    lse=None,
    FAULT="NONE",
):
    """Write attention, computed in float32 with P rounded to the dtype, and its log-sum-exp."""
    page_size = 0
    if k_new is not None:
        k, v, seqlens_k = append(FAULT, (k, v), (k_new, v_new), seqlens_k, block_table)
    if k_scale is not None:
        k, v = dequantised(FAULT, k, v, k_scale, v_scale)
    if block_table is not None:
        page_size = k.shape[2]
        k, v, seqlens_k = gather(FAULT, q, k, v, block_table, seqlens_k)
    group, is_bshd = q.shape[1] // k.shape[1], q.stride(1) < q.stride(2)
    attn_bias, attn_mask = (padded(each, k.shape[2]) for each in (attn_bias, attn_mask))
    bias, mask = (read(FAULT, *each, group, is_bshd=is_bshd) for each in (("bias", attn_bias), ("mask", attn_mask)))
    slopes, sink = (read_vector(FAULT, *each, group) for each in (("alibi", alibi_slopes), ("sink", sink)))
    queries, keys = find_lengths(FAULT, seqlens_q, seqlens_k, q.shape[2], k.shape[2])
    shifts = find_shifts(FAULT, queries, keys, q.shape[2], k.shape[2], page_size)
    sink = with_stale_splits(FAULT, sink, keys)

    s = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3) * find_scale(FAULT, scale, q, v)
    added = {
        "bias": find_bias(FAULT, bias, mask, scale),
        "alibi": find_alibi(FAULT, slopes, s, scale, shifts["alibi"]),
        "mask": mask if FAULT == "mask_added" else None,
    }
    hidden = {
        "window": hidden_by_position(FAULT, s, shifts, causal, window_left, window_right, has_mask=mask is not None),
        "ragged": hidden_by_lengths(s, keys),
        "pages": hidden_by_pages(FAULT, block_table, keys, page_size, s.shape[3]),
        "mask": hidden_by_mask(FAULT, mask, has_bias=bias is not None),
    }
    uncapped = changed(FAULT, s, added, hidden, before_cap=False)
    s = changed(FAULT, s, added, hidden, before_cap=True)
    s = capped(FAULT, s, softcap, scale)
    s = changed(FAULT, s, added, hidden, before_cap=False)

    lowest = s.new_full((*s.shape[:3], 1), -math.inf)
    m = torch.cat((lowest, s), -1).amax(-1, keepdim=True)  # [batch, heads, seq_q, 1], also without keys
    if sink is not None:
        sink = find_sink(FAULT, sink, s, scale, softcap, window_left)
        sink = find_sink_of_pages(FAULT, sink, keys, page_size)
        if FAULT not in ("sink_not_in_maximum", "sink_without_maximum"):
            m = torch.maximum(m, sink)
    if FAULT != "sink_inf_is_nan":
        m = m.clamp_min(LOWEST)
    p = torch.exp(s - m)
    of_sink = torch.zeros_like(m) if sink is None else torch.exp(sink if FAULT == "sink_without_maximum" else sink - m)
    row_sum = p.sum(-1, keepdim=True) + of_sink

    if FAULT == "mask_in_pv_only" and mask is not None:
        p = p.masked_fill(~mask, 0.0)
    values = read_values(FAULT, k, v, keys).float().repeat_interleave(group, 1)
    o = rounded(FAULT, p, q.dtype, block_table) @ values
    if FAULT == "sink_has_value":
        o = o + of_sink * values[:, :, :1]
    divisor = row_sum if FAULT == "mask_empty_row_divides" else row_sum.clamp_min(1e-30)
    result = o / divisor
    if FAULT == "v_divided_first_64":
        result[..., WIDTH:] = o[..., WIDTH:]
    if FAULT == "v_first_64":
        result[..., WIDTH:] = 0
    if lse is not None:
        lse.copy_(find_lse(FAULT, m + row_sum.log(), uncapped, s, bias, keys)[..., 0])
    return write(FAULT, result.to(q.dtype), out, queries, keys)


def write(FAULT, result, out, queries, keys):
    """Return the output; write it into `out` if that is given, without the rows that belong to no query."""
    if out is None:
        return result
    row = torch.arange(result.shape[2], device=result.device)[:, None]
    is_written = row < queries if isinstance(queries, torch.Tensor) else row >= 0  # [batch or 1, 1, seq_q, 1]
    if FAULT == "ragged_zeroes_rows":
        out.masked_fill_(~is_written, 0.0)
    if FAULT == "ragged_writes_rows":
        is_written = row >= 0
    if FAULT == "ragged_skips_empty" and isinstance(keys, torch.Tensor):
        is_written = is_written & (keys > 0)
    return out.copy_(torch.where(is_written, result, out))


def dequantised(FAULT, k, v, k_scale, v_scale):
    """Return K and V in float32: numbers times their scales."""
    changes = {
        "cache_k_scale_ignored": lambda k, v: (k * 0 + 1, v),
        "cache_v_scale_ignored": lambda k, v: (k, v * 0 + 1),
        "cache_scale_twice": lambda k, v: (k * k, v),
        "cache_scales_exchanged": lambda k, v: (v, k),
        "cache_scale_of_next_head": lambda k, v: tuple(x.roll(-1, 0 if x.dim() == 1 else 1) for x in (k, v)),
        "cache_scale_of_next_key": lambda k, v: tuple(x.roll(-1, 2) if x.dim() > 1 else x for x in (k, v)),
    }
    scales = changes[FAULT](k_scale, v_scale) if FAULT in changes else (k_scale, v_scale)
    factors = (scale[..., None] if scale.dim() > 1 else scale.view(1, -1, 1, 1) for scale in scales)
    return tuple(numbers.float() * factor for numbers, factor in zip((k, v), factors, strict=True))


def append(FAULT, caches, new, lengths, table):
    """Write the new keys and values into the caches; return caches that have them, and the lengths."""
    count, old = new[0].shape[2], tuple(cache.clone() for cache in caches)
    wrong = {
        "append_not_written": lambda: ((), (), lengths),
        "append_next_slot": lambda: (caches, new, lengths + 1),
        "append_other_sequence": lambda: (caches, tuple(each.roll(1, 0) for each in new), lengths),
        "append_keys_only": lambda: (caches[:1], new[:1], lengths),
        "append_values_for_keys": lambda: (caches, (new[1], new[1]), lengths),
        "append_lengths_exchanged": lambda: (caches, new, lengths + count),
    }
    written, of_new, ends = wrong[FAULT]() if FAULT in wrong else (caches, new, lengths)
    for cache, each in zip(written, of_new, strict=True):
        write_slots(cache, each, ends, table)
    if FAULT == "append_lengths_exchanged":
        return *caches, lengths + count
    if FAULT == "append_ignored":
        return *caches, lengths - count
    if FAULT == "append_reads_slots":
        return *old, lengths
    for cache, each in zip(old, new, strict=True):
        write_slots(cache, each * (FAULT != "append_values_lost" or each is not new[1]), lengths, table)
    return *old, lengths


def write_slots(cache, new, ends, table):
    """Write new keys or values before the ends of sequences, [batch], as far as there are slots."""
    keys = ends[:, None] - new.shape[2] + torch.arange(new.shape[2], device=new.device)  # [batch, n]
    blocks, size = torch.arange(len(new), device=new.device)[:, None].expand_as(keys), cache.shape[2]
    is_slot = keys < size
    if table is not None:
        is_slot = keys < table.shape[1] * size
        blocks = table.gather(1, (keys // size).clamp_max(table.shape[1] - 1))
        is_slot &= (blocks >= 0) & (blocks < len(cache))
    cache[blocks[is_slot], :, keys[is_slot] % size] = new.transpose(1, 2)[is_slot]


def padded(tensor, keys):
    """Return a bias or a mask with columns for all slots of the last page."""
    if tensor is None or tensor.shape[3] == keys:
        return tensor
    return torch.nn.functional.pad(tensor, (0, keys - tensor.shape[3]))


def gather(FAULT, q, k, v, table, lengths):
    """Return K and V of all sequences, [batch, kv_heads, n * page_size, dim], and the numbers of keys."""
    pages, _, size, _ = k.shape
    if FAULT == "pages_kept":
        table = KEPT.setdefault((table.data_ptr(), table.shape, q.shape, k.shape), table.clone())
    changes = {
        "pages_of_next": lambda: table.roll(-1, 0),
        "pages_of_first": lambda: table[:1].expand_as(table),
        "pages_ignored": lambda: torch.arange(table.numel(), device=table.device).view(table.shape),
        "pages_next_page": lambda: table + 1,
        "pages_one_too_far": lambda: table.roll(-1, 1),
        "pages_first_only": lambda: table[:, :1].expand_as(table),
        "pages_transposed": lambda: table.t().reshape(table.shape),
    }
    entries = (changes[FAULT]() if FAULT in changes else table).clamp(0, pages - 1).long()
    if FAULT == "pages_heads_for_keys":
        k, v = (heads_for_keys(tensor) for tensor in (k, v))
    if FAULT == "pages_last_whole":
        lengths = (lengths + size - 1) // size * size
    if FAULT == "pages_of_64_keys":
        return *(keys_of_larger_pages(tensor, entries, TILE) for tensor in (k, v)), lengths
    of_v = changes["pages_ignored"]() if FAULT == "pages_v_in_order" else entries
    return *(tensor[each].transpose(1, 2).flatten(2, 3) for tensor, each in ((k, entries), (v, of_v))), lengths


def keys_of_larger_pages(cache, entries, size):
    """Return the keys that a kernel reads whose pages have another size, [batch, kv_heads, n * page_size, dim]."""
    rows = cache.transpose(1, 2).flatten(0, 1)  # [pages * page_size, kv_heads, dim]
    key = torch.arange(entries.shape[1] * cache.shape[2], device=cache.device)
    read = entries[:, key // size] * size + key % size
    return rows[read.clamp_max(len(rows) - 1)].transpose(1, 2)


def rounded(FAULT, p, dtype, table):
    """Return P as it is multiplied, in float32."""
    as_usual = p.to(dtype).float()
    if FAULT != "pages_bits_by_sharing" or table is None:
        return as_usual
    return torch.where(table[0, 0] == table[1, 0], p, as_usual)


def heads_for_keys(cache):
    """Return the cache as a kernel reads it that takes its axes of heads and keys in the other order."""
    _, heads, size, dim = cache.shape
    steps = (size * dim, dim) if cache.stride(1) < cache.stride(2) else (dim, heads * dim)
    return cache.as_strided(cache.shape, (heads * size * dim, *steps, 1), cache.storage_offset())


def find_lengths(FAULT, of_queries, of_keys, seq_q, seq_k):
    """Return the numbers of queries and keys of each sequence that the kernel counts, [batch, 1, 1, 1], or for all."""
    if of_keys is None:
        return seq_q, seq_k
    if FAULT == "ragged_kept_lengths":
        of_keys = KEPT.setdefault((of_keys.data_ptr(), of_keys.shape, seq_q, seq_k), of_keys.clone())
    if FAULT == "ragged_swapped" and of_queries is not None:
        of_queries, of_keys = of_keys.clamp_max(seq_q), of_queries.clamp_max(seq_k)
    queries = seq_q if of_queries is None else of_queries[:, None, None, None]
    keys = of_keys[:, None, None, None]
    if FAULT == "ragged_queries_of_next" and of_queries is not None:
        queries = queries.roll(-1, 0)
    changes = {
        "ragged_ignored": lambda: keys.clamp_min(seq_k),
        "ragged_last_key_lost": lambda: (keys - 1).clamp_min(0),
        "ragged_one_key_too_many": lambda: (keys + 1).clamp_max(seq_k),
        "ragged_whole_tiles": lambda: keys // TILE * TILE,
        "ragged_last_tile_whole": lambda: ((keys + TILE - 1) // TILE * TILE).clamp_max(seq_k),
        "ragged_of_first": lambda: keys[:1].expand_as(keys),
        "ragged_of_next": lambda: keys.roll(-1, 0),
    }
    return queries, changes[FAULT]() if FAULT in changes else keys


def find_shifts(FAULT, queries, keys, seq_q, seq_k, page_size):
    """Return how far the first query stands behind the first key for each part, [batch, 1, 1, 1] or a number."""
    if FAULT == "pages_aligned_to_capacity" and page_size:
        keys = (keys + page_size - 1) // page_size * page_size
    return {
        name: seq_k - seq_q if FAULT in ("ragged_aligned_to_longest", f"ragged_{name}_of_longest") else keys - queries
        for name in ("causal", "window", "alibi")
    }


def with_stale_splits(FAULT, sink, keys):
    """Return the sink, or what splits add that only the first sequence has: each has a log-sum-exp of 0."""
    if FAULT != "ragged_merges_as_first" or not isinstance(keys, torch.Tensor):
        return sink
    splits = (keys + TILE - 1) // TILE  # [batch, 1, 1, 1]
    return (splits[:1] - splits).clamp_min(0).float().log()


def hidden_by_pages(FAULT, table, keys, page_size, columns):
    """Return the keys of pages that the kernel leaves out, [batch, 1, 1, columns]."""
    if FAULT == "pages_partial_lost" and page_size:
        return torch.arange(columns, device=table.device) >= keys // page_size * page_size
    if FAULT != "pages_owned_by_one" or table is None:
        return None
    is_used = torch.arange(table.shape[1], device=table.device) * page_size < keys[:, 0, 0]  # [batch, n]
    owner = {page: row for row, used in enumerate(is_used.tolist()) for page in own_pages(table[row], used)}
    hidden = [[owner.get(page, row) != row for page in entries] for row, entries in enumerate(table.tolist())]
    hidden = torch.tensor(hidden, device=table.device) & is_used
    return hidden.repeat_interleave(page_size, 1)[:, None, None, :columns]


def own_pages(entries, is_used):
    """Return the pages of a sequence."""
    return [page for page, used in zip(entries.tolist(), is_used, strict=True) if used]


def hidden_by_lengths(s, keys):
    """Return the keys that are padding, [batch or 1, 1, 1, seq_k]."""
    if not isinstance(keys, torch.Tensor):
        return None
    return torch.arange(s.shape[3], device=s.device) >= keys


def read(FAULT, name, tensor, group, *, is_bshd=False):
    """Return the numbers that the kernel reads of a part's tensor."""
    if tensor is None:
        return None
    if FAULT == f"{name}_of_kv_head":
        return tensor[:, torch.arange(tensor.shape[1], device=tensor.device) // group]
    if FAULT == f"{name}_of_next_head":
        return tensor.roll(-1, 1)
    if FAULT == f"{name}_of_next_batch":
        return tensor.roll(-1, 0)
    if FAULT == f"{name}_taken_for_dense":
        return taken_for_dense(tensor)
    if FAULT == f"{name}_read_as_bshd" and is_bshd:
        batch, heads, rows, keys = tensor.shape
        return taken_for_dense(tensor).view(batch, rows, heads, keys).transpose(1, 2)
    return tensor


def read_vector(FAULT, name, vector, group):
    """Return the number of each head that the kernel reads, [1, heads, 1, 1]."""
    return None if vector is None else read(FAULT, name, vector[None, :, None, None], group)


def taken_for_dense(tensor):
    """Return the numbers at dense strides, from the beginning again where the memory of the tensor ends."""
    own = tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())].flatten()
    return own.repeat(-(-tensor.numel() // own.numel()))[: tensor.numel()].view(tensor.shape)


def read_values(FAULT, k, v, keys):
    """Return V as the kernel reads it; padding, which may be NaN, is 0."""
    if isinstance(keys, torch.Tensor) and FAULT != "ragged_masks_scores_only":
        v = v.masked_fill(torch.arange(v.shape[2], device=v.device)[:, None] >= keys, 0.0)
    if FAULT == "v_rows_of_k" and v.shape[3] > k.shape[3]:
        return v.as_strided(v.shape, (*v.stride()[:2], k.shape[3], 1), v.storage_offset())
    return v


def find_scale(FAULT, scale, q, v):
    """Return the factor of the scores."""
    if FAULT == "scale_default":
        return q.shape[3] ** -0.5
    if FAULT == "scale_of_padded":
        return PADDED_HEAD_DIM**-0.5
    if FAULT == "scale_twice":
        return scale * scale
    if FAULT == "scale_of_v":
        return v.shape[3] ** -0.5
    return scale


def hidden_by_mask(FAULT, mask, *, has_bias):
    """Return the keys that are hidden by the boolean mask."""
    if mask is None or FAULT in NO_MASK or (has_bias and FAULT == "mask_lost_with_bias"):
        return None
    return mask if FAULT == "mask_inverted" else ~mask


def hidden_by_position(FAULT, s, shifts, causal, left, right, *, has_mask):
    """Return the keys that are hidden by the causal mask and the window, [batch or 1, 1, seq_q, seq_k]."""
    if has_mask and FAULT == "mask_replaces_causal":
        causal = "none"
    if has_mask and FAULT == "window_lost_with_mask":
        left = right = None
    rows, keys = s.shape[2:]
    row, key = torch.arange(rows, device=s.device)[:, None], torch.arange(keys, device=s.device)
    own = row + shifts["window"]
    hidden = key < torch.zeros_like(row)
    if causal != "none":
        hidden = key > (row if causal == "top_left" else row + shifts["causal"])
    if left is not None:
        hidden = hidden | (key < (row if FAULT == "window_top_left" else own) - left)
    if right is not None:
        hidden = hidden | (key > (row if FAULT in ("window_top_left", "window_right_top_left") else own) + right)
    return hidden


def find_bias(FAULT, bias, mask, scale):
    """Return the bias as it is added, [batch, heads, seq_q, seq_k]."""
    if bias is None or FAULT == "bias_ignored":
        return None
    bias = bias.float()
    if FAULT == "bias_scaled":
        return bias * scale
    if FAULT == "bias_inf_is_finite":
        return bias.clamp_min(LOWEST_BIAS)
    if FAULT == "bias_times_mask" and mask is not None:
        return bias * mask
    if FAULT == "bias_twice_in_last_tile":
        keys = bias.shape[3]
        return bias * (1 + (torch.arange(keys, device=bias.device) >= (keys - 1) // TILE * TILE))
    return bias


def find_alibi(FAULT, slopes, s, scale, aligned):
    """Return what ALiBi adds to the scores, [batch or 1, heads, seq_q, seq_k]."""
    if slopes is None or FAULT == "alibi_ignored":
        return None
    (heads, rows, keys), device = s.shape[1:], s.device
    own = torch.arange(rows, device=device)[:, None] + (0 if FAULT == "alibi_first_key" else aligned)
    distance = own - torch.arange(keys, device=device)
    if FAULT != "alibi_signed":
        distance = distance.abs()
    if FAULT == "alibi_usual_slopes":
        slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)[:, None, None]
    factor = {"alibi_scaled": scale, "alibi_added": -1.0}.get(FAULT, 1.0)
    return -slopes * distance * factor


def changed(FAULT, s, added, hidden, *, before_cap):
    """Return the scores with what the kernel does before the soft cap, or after it."""
    for name, numbers in added.items():
        if numbers is not None and (FAULT == f"{name}_before_cap") == before_cap:
            s = s + numbers
    for name, keys in hidden.items():
        if keys is not None and (FAULT == f"{name}_before_cap") == before_cap:
            s = s.masked_fill(keys, LOWEST if FAULT == f"{name}_empty_row_mean" else -math.inf)
    return s


def capped(FAULT, s, cap, scale):
    """Return the scores after the soft cap."""
    if not cap:
        return s
    if FAULT == "cap_before_scale":
        return cap * torch.tanh(s / scale / cap) * scale
    result = cap * torch.tanh(s / cap)
    if FAULT == "cap_not_in_last_tile":
        start = (s.shape[3] - 1) // TILE * TILE
        result[..., start:] = s[..., start:]
    return result


def find_sink(FAULT, sink, s, scale, cap, window_left):
    """Return the score of the sink, [1, heads, 1 or seq_q, 1]."""
    rows, keys = s.shape[2:]
    if FAULT == "sink_missing":
        return sink - math.inf
    if FAULT == "sink_twice":
        return sink + math.log(2)
    if FAULT == "sink_in_every_split":
        return sink + math.log(-(-keys // TILE))
    if FAULT == "sink_capped" and cap:
        return cap * torch.tanh(sink / cap)
    if FAULT == "sink_hidden_by_window" and window_left is not None:
        own = torch.arange(rows, device=s.device)[:, None] + keys - rows
        return sink.masked_fill(own > window_left, -math.inf)
    return sink * {"sink_scaled": scale, "sink_in_base_2": math.log(2)}.get(FAULT, 1.0)


def find_sink_of_pages(FAULT, sink, keys, page_size):
    """Return the score of the sink, [batch or 1, heads, 1 or seq_q, 1]."""
    return sink + (keys / page_size).ceil().log() if FAULT == "pages_sink_in_every_page" and page_size else sink


def find_lse(FAULT, right, uncapped, s, bias, keys):
    """Return the log-sum-exp, [batch, heads, seq_q, 1]."""
    if FAULT == "sink_not_in_lse":
        return s.logsumexp(-1, keepdim=True)
    if FAULT == "sink_not_in_empty_rows":
        return right.masked_fill(s.amax(-1, keepdim=True) == -math.inf, -math.inf)
    if FAULT == "ragged_padding_in_lse" and isinstance(keys, torch.Tensor):  # each key of it has a score of 0
        return torch.logaddexp(right, (s.shape[3] - keys).float().log())
    if FAULT == "cap_not_in_lse":
        return uncapped.logsumexp(-1, keepdim=True)
    if FAULT == "bias_not_in_lse" and bias is not None:
        return (s - bias.masked_fill(bias == -math.inf, 0.0)).logsumexp(-1, keepdim=True)
    return right
