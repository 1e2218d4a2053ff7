"""Ranges of keys that a wrong dQ lacks or counts twice, and of queries in dK and dV: those that fit best."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_fa.attention.mistake import TILES
from pytest_fa.judge.mistaken_gradients import BackwardCall, GradientMistake, GradientPredictor, GradientStep, Pass

SEARCH_ROWS = 8  # of a gradient, on which ranges are searched
COUNTS = {"missing": 0, "counted twice": 2}
TERMS_OF = {"dq": "key", "dk": "query", "dv": "query"}  # of which a gradient is a sum
LEFT_OF = {"dq": "ds_of_dq", "dk": "ds_of_dk", "dv": "p_of_dv"}  # the step that is multiplied and summed
PLURALS = {"key": "keys", "query": "queries"}


def lost_ranges(name: str, written: torch.Tensor, predictor: GradientPredictor) -> Iterator[GradientMistake]:
    """For each way to count, the range that explains the worst rows of a gradient best.

    `written` is [1, heads, rows, dim] float64, at the places of the predictor.
    """
    error = predictor.places.of(name, predictor.truths[name].out) - written
    head, rows = _worst_rows(error)
    each = predictor.right(name)
    terms = _terms(name, each, predictor.problem, head, rows)  # [rows, terms, dim]
    ranges = _ranges(terms.shape[1], terms.device)
    sums = torch.nn.functional.pad(terms.cumsum(1), (0, 0, 1, 0))
    for words, count in COUNTS.items():
        wanted = error[0, head, rows] / (1 - count)  # [rows, dim]
        start, stop = _best(wanted, sums, ranges)
        yield _range_mistake(name, words, start, stop, terms.shape[1])


def _worst_rows(error: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The head with the largest error, and its worst rows."""
    by_row = error.square().sum(-1)[0]  # [heads, rows]
    head = int(by_row.sum(-1).argmax())
    return head, by_row[head].topk(min(SEARCH_ROWS, by_row.shape[1])).indices


def _terms(name: str, each: Pass, problem: BackwardCall, head: int, rows: torch.Tensor) -> torch.Tensor:
    """The terms of the sums that some rows of a head are, [rows, terms, dim] float64."""
    if name == "dq":
        terms: torch.Tensor = each.scale * each.ds_of_dq[0, head, rows][..., None] * each.k_of_dq[0, head]
        return terms
    heads = problem.readers[head]
    if name == "dk":
        left, right = each.scale * each.ds_of_dk[0, heads][..., rows], each.q_of_dk[0, heads]
    else:
        left, right = each.p_of_dv[0, heads][..., rows], each.dout_of_dv[0, heads]
    return torch.einsum("hqr,hqd->rqd", left, right)


def _ranges(terms: int, device: torch.device) -> torch.Tensor:
    """The first and the last term + 1 of every aligned tile, single term and run of tiles at an end, [ranges, 2]."""
    tiles = [(start, min(start + tile, terms)) for tile in (1, *TILES) for start in range(0, terms, tile)]
    bounds = {*range(TILES[0], terms, TILES[0]), *range(terms - TILES[0], 0, -TILES[0])}
    ends = [each for bound in bounds for each in ((0, bound), (bound, terms))]
    return torch.tensor(sorted({*tiles, *ends} - {(0, terms)} or {(0, terms)}), device=device)


def _best(wanted: torch.Tensor, sums: torch.Tensor, ranges: torch.Tensor) -> tuple[int, int]:
    """The range whose sums are nearest to those that are missing; `sums` are those of the first terms."""
    of_range = sums[:, ranges[:, 1]] - sums[:, ranges[:, 0]]  # [rows, ranges, dim]
    start, stop = ranges[int((of_range - wanted[:, None]).square().sum((0, 2)).argmin())].tolist()
    return int(start), int(stop)


def _range_mistake(name: str, words: str, start: int, stop: int, terms: int) -> GradientMistake:
    """A range of terms that are counted otherwise than once."""
    step = LEFT_OF[name]
    return GradientMistake(
        _words(name, words, start, stop, terms), {step: _counted(name, COUNTS[words], start, stop)}, (name,)
    )


def _counted(name: str, count: int, start: int, stop: int) -> GradientStep:
    from_p = name == "dv"

    def counted(each: Pass) -> torch.Tensor:
        matrix: torch.Tensor = (each.p if from_p else each.ds).clone()
        part = matrix[..., start:stop] if name == "dq" else matrix[..., start:stop, :]
        part *= count
        return matrix

    return counted


def _words(name: str, words: str, start: int, stop: int, terms: int) -> str:
    term, place = TERMS_OF[name], "the tail mask or the last tile"
    names, kept = PLURALS[term], terms - stop + start
    if words == "missing" and stop < terms and start == 0 and kept <= max(TILES):
        return f"{{}} is the sum over the last {kept} {names} alone: the last tile overwrites what the others add"
    if stop == terms:
        which = f"the last {term} is" if stop - start == 1 else f"the last {stop - start} {names} are"
    elif stop - start == 1:
        which, place = f"{term} {start} is", f"the loop over {names}"
    else:
        which, place = f"{names} {start} to {stop - 1} are", f"the loop over tiles of {names}"
    return f"{which} {words} in {{}}: look at {place}"
