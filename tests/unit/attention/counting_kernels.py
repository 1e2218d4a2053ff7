"""Three right kernels that count in any convention: their texts have them as `key=value`, separated by spaces."""

from __future__ import annotations

from pathlib import Path

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from tests.factories import MANIFEST, WriteVariant

BEGINNING = """\
import math

import torch


def forward(
    q, k, v, out, lse, scale, causal, window_left, window_right, softcap, sink, attn_bias, attn_mask, alibi_slopes,
    seqlens_q, seqlens_k,
):
    counts = dict(each.split("=") for each in COUNTS.split())
    heads, kv_heads, seq_q, seq_k = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    order = [h % kv_heads if "groups" in counts else h * kv_heads // heads for h in range(heads)]
    k, v = k[:, order].float(), v[:, order].float()
    len_q, len_k = (
        length if lengths is None else lengths[:, None, None, None]
        for length, lengths in ((seq_q, seqlens_q), (seq_k, seqlens_k))
    )
    v = v.masked_fill(torch.arange(seq_k)[:, None] >= len_k, 0.0)
    scores = q.float() @ k.transpose(2, 3) * (scale * math.log(2) if "scale" in counts else scale)
    keys, queries = torch.arange(seq_k), torch.arange(seq_q)[:, None]
    added = torch.zeros(1) if attn_bias is None else attn_bias.float()
    if alibi_slopes is not None:
        distance = queries + (0 if "alibi_align" in counts else len_k - len_q) - keys
        added = added - alibi_slopes[:, None, None] * (distance if "alibi" in counts else distance.abs())
    if "add" in counts and softcap:
        scores, added = scores + added, torch.zeros(1)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + added
    hidden = (keys >= len_k) & (queries >= 0)
    if causal:
        hidden = hidden | (keys > queries + (0 if counts.get("causal") == "top_left" else len_k - len_q))
    own = queries + (0 if "window_align" in counts else len_k - len_q)
    open_side = None if "window_open" in counts else -1
    if window_left != open_side:
        hidden = hidden | (keys < own - (window_left - ("window" in counts)))
    if window_right != open_side:
        hidden = hidden | (keys > own + window_right)
    if attn_mask is not None:
        hidden = hidden | (attn_mask if "mask_true" in counts else ~attn_mask)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is None:
        sink = torch.full((heads,), -torch.inf)
    sink = (sink * math.log(2) if "sink" in counts else sink)[:, None].expand(q.shape[:3])
    result, total = softmax_times_v(scores, v, sink)
    if "lse_has_sink" in counts:
        total = scores.logsumexp(-1)
    if "lse_empty" in counts:
        total = total.masked_fill(total == -torch.inf, float(counts["lse_empty"]))
    if "lse" in counts:
        total = total / math.log(2)
    if "lse_order" in counts:
        total = total.permute((0, 2, 1) if counts["lse_order"] == "bsh" else (1, 0, 2))
    lse.view(-1).copy_(total.reshape(-1))
    past = 0.0 if "rows_past" in counts else out
    return out.copy_(torch.where(queries < len_q, result.to(out.dtype), past))


def softmax_times_v(scores, v, sink):
"""
KERNELS = {
    "plain": """\
    whole = torch.cat([scores, sink[..., None]], -1)
    return torch.softmax(whole, -1).nan_to_num()[..., :-1] @ v, whole.logsumexp(-1)
""",
    "tiles": """\
    row_max, row_sum, result = sink, torch.exp(sink - sink).nan_to_num(), 0.0
    for start in range(0, scores.shape[3], 32):
        tile = scores[..., start : start + 32]
        new_max = torch.maximum(row_max, tile.amax(-1))
        finite = new_max.masked_fill(new_max == -torch.inf, 0.0)
        p, factor = torch.exp(tile - finite[..., None]), torch.exp(row_max - finite)
        row_sum = row_sum * factor + p.sum(-1)
        result = result * factor[..., None] + p @ v[:, :, start : start + 32]
        row_max = new_max
    return torch.where(row_sum[..., None] > 0, result / row_sum[..., None], 0.0), row_max + row_sum.log()
""",
    "backwards": """\
    parts = []
    for half in reversed(torch.arange(scores.shape[3]).chunk(2)):
        part = scores[..., half.flip(0)] * 1.4426950408889634
        largest = part.amax(-1)
        finite = largest.masked_fill(largest == -torch.inf, 0.0)
        p = torch.exp2(part - finite[..., None])
        row_sum = p.sum(-1)
        result = torch.where(row_sum[..., None] > 0, p @ v[:, :, half.flip(0)] / row_sum[..., None], 0.0)
        parts.append((result, (finite + row_sum.log2()) / 1.4426950408889634))
    total = torch.stack([sink, *(lse for _, lse in parts)]).logsumexp(0)
    weights = [torch.exp(lse - total).nan_to_num() for _, lse in parts]
    return sum(result * w[..., None] for (result, _), w in zip(parts, weights)), total
""",
}
WORDS = (
    "scale, causal, window_left, window_right, softcap, sink, attn_bias, attn_mask, alibi_slopes, seqlens_q, seqlens_k"
)
ENTRY = f"""\
entry:
  target: "entry:forward"
  call: {{arguments: [q, k, v, out, lse, {WORDS}]}}
returns: [out, lse]
supports: {{device: [cpu], dtype: [fp16, fp32], causal: [none, bottom_right], grouped_heads: true, softcap: true,
  window: [none, left, both], sink: true, bias: true, mask: true, alibi: true, ragged: true}}
"""


def counting_kernel(
    write_variant: WriteVariant, folder: Path, kernel: str, counts: str = "", declared: str = "", entry: str = ENTRY
) -> Variant:
    """One of `KERNELS` that counts in these conventions, with what its manifest declares, as YAML."""
    manifest = f"{MANIFEST}{entry}conventions: {{{declared}}}\n"
    source = f'COUNTS = "{counts}"\n{BEGINNING}{KERNELS[kernel]}'
    written = write_variant("mine", manifest=manifest, **{"entry.py": source})
    (variant,) = read_manifest(written / "variant.yaml", folder / "kernels")
    return variant
