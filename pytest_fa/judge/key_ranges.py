"""Ranges of keys that a kernel omits, counts twice, or counts in one of its two sums only."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_fa.attention.mistake import TILES, Mistake, Weigh, exponentials
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.mistaken import Predictor, Selection

SEARCH_ROWS = 8  # queries on which `likely_ranges` searches
_STEP = TILES[0]

# kind -> how often P V and the row sum count the keys of the range
COUNTS = {"missing": (0, 0), "twice": (2, 2), "missing in PV": (0, 1), "missing in the sum": (1, 0)}
_WORDS = {
    "missing": "{keys} missing: look at {place}",
    "twice": "{keys} counted twice: look at {place}",
    "missing in PV": "{keys} missing in P V, but not in the row sum: look at the load of V",
    "missing in the sum": "{keys} missing in the row sum, but not in P V: look at the row sum",
}


def key_range_mistake(kind: str, start: int, stop: int, inputs: Inputs) -> Mistake:
    """The mistake `kind`, one of `COUNTS`, for the keys from `start` to `stop` - 1."""
    keys = inputs.k.shape[2]
    if stop == keys:
        names = "the last key is" if keys - start == 1 else f"the last {keys - start} keys are"
        place = "the tail mask or the last tile"
    elif start == 0:
        names, place = f"the first {stop} keys are", "the first tile"
    else:
        names, place = f"keys {start} to {stop - 1} are", "the loop over key tiles"
    return Mistake(_WORDS[kind].format(keys=names, place=place), weigh=_counted(*COUNTS[kind], start, stop))


def _counted(in_pv: int, in_sum: int, start: int, stop: int) -> Weigh:
    def weigh(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = exponentials(scores, hidden)
        of_sum = p.clone()
        p[..., start:stop] *= in_pv
        of_sum[..., start:stop] *= in_sum
        return p, of_sum.sum(-1, keepdim=True)

    return weigh


def likely_ranges(
    predictor: Predictor,
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim] float64
) -> Iterator[Mistake]:
    """For each kind, the tile of keys that explains the worst rows of an output best.

    Every aligned tile of every usual size is tried on the worst rows of the worst head, with sums of P V over blocks of
    16 keys.
    """
    inputs = predictor.inputs
    if inputs.k.shape[2] <= _STEP:
        return
    selection = _worst_rows(out, predictor.truth.out)
    sums, sinks = _sums_by_block(predictor, selection), predictor.sink_weights(selection)[0, 0]
    rows = selection.of(out)[0, 0]  # [rows, d]
    ranges = _tiles(inputs.k.shape[2], inputs.q.device)
    for kind, counts in COUNTS.items():
        start, stop = _best_range(rows, sums, ranges, counts, sinks)
        if not (stop == inputs.k.shape[2] and kind == "missing" and start == 0):
            yield key_range_mistake(kind, start, stop, inputs)


def _worst_rows(out: torch.Tensor, truth: torch.Tensor) -> Selection:
    by_row = (out - truth).square().sum(-1)  # [b, h, seq_q]
    batch, head = divmod(int(by_row.sum(-1).argmax()), out.shape[1])
    queries = by_row[batch, head].topk(min(SEARCH_ROWS, out.shape[2])).indices
    return Selection(queries.new_tensor([batch]), queries.new_tensor([head]), queries)


def _sums_by_block(predictor: Predictor, selection: Selection) -> torch.Tensor:
    """Sums of P [V, 1] over the keys before each block of 16 keys, [rows, blocks + 1, head_dim + 1]."""
    inputs = predictor.inputs
    p = predictor.weights(selection)[0, 0]  # [rows, keys]
    kv_head = selection.heads // (inputs.q.shape[1] // inputs.k.shape[1])
    v = inputs.v[selection.batches, kv_head][0].double()  # [keys, d]
    v = torch.cat([v, torch.ones_like(v[:, :1])], 1)
    missing = -len(v) % _STEP
    p = torch.nn.functional.pad(p, (0, missing)).view(len(p), -1, _STEP)
    v = torch.nn.functional.pad(v, (0, 0, 0, missing)).view(-1, _STEP, v.shape[1])
    blocks = torch.einsum("rbk,bkd->rbd", p, v)
    return torch.nn.functional.pad(blocks.cumsum(1), (0, 0, 1, 0))


def _tiles(keys: int, device: torch.device) -> torch.Tensor:
    """The first and the last key + 1 of every aligned tile, [tiles, 2]."""
    starts = torch.cat([torch.arange(0, keys, tile, device=device) for tile in TILES])
    sizes = torch.cat([torch.full((-(-keys // tile),), tile, device=device) for tile in TILES])
    return torch.stack([starts, (starts + sizes).clamp_max(keys)], 1)


def _best_range(
    rows: torch.Tensor, sums: torch.Tensor, ranges: torch.Tensor, counts: tuple[int, int], sinks: torch.Tensor
) -> tuple[int, int]:
    """The range with the smallest remaining error, if P V and the row sum count its keys `counts` times."""
    total = sums[:, -1:]  # [rows, 1, d + 1]
    of_range = sums[:, -(-ranges[:, 1] // _STEP)] - sums[:, ranges[:, 0] // _STEP]  # [rows, ranges, d + 1]
    numerator = total[..., :-1] + (counts[0] - 1) * of_range[..., :-1]
    divisor = total[..., -1:] + (counts[1] - 1) * of_range[..., -1:] + sinks[:, None, None]
    divisor = divisor.clamp_min(1e-300)
    remaining = (numerator / divisor - rows[:, None]).square().sum((0, 2))
    start, stop = ranges[int(remaining.argmin())].tolist()
    return int(start), int(stop)
