"""The further outputs of a call, a number for each row: truth, verdict, and the likely cause of a wrong one.

What is true, how far a kernel may be from it, and which mistakes there are, says the part of attention that has the
output.  This module computes it in blocks of queries, so that the scores of long sequences fit into memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.grouped_heads import repeated
from pytest_fa.attention.mistake import MAX_NAMES
from pytest_fa.attention.part import Part
from pytest_fa.attention.rows import RowTruth, ScoreBlock
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.judge.padding import cleared
from pytest_fa.judge.truth import block_positions, hidden_keys, rows_per_block
from pytest_fa.records.checks import Bound, LseCheck, RowIndex

TOLERANCE = 2e-3  # of a mistake's value, besides the bound of the row: P may be rounded differently in it
FITTING_SHARE = 0.98  # of the rows
SEPARATION = 2.0  # a mistake changes a row if its value is this many tolerances from the true one
LEAST_CHANGED = 0.5  # of the wrong rows, by a mistake that explains them


def make_row_truth(
    part: Part, inputs: Inputs, rounds: tuple[Rounding, ...] = (), policy: str = "same_precision"
) -> RowTruth:
    """Compute a further output and its bounds."""
    inputs = inputs.exact().meant()
    k, block_rows, seq_q = _keys(inputs), rows_per_block(inputs), inputs.q.shape[2]
    slices = [slice(start, min(start + block_rows, seq_q)) for start in range(0, seq_q, block_rows)]
    blocks = (part.row_figures(_block(inputs, k, rows, rounds, policy)) for rows in slices)
    truth = part.row_truth([torch.cat(tensors, dim=2) for tensors in zip(*blocks, strict=True)], rounds, policy)
    padding = parts.padding(inputs)
    exact, allowed = cleared(padding, truth.exact, -math.inf), cleared(padding, truth.allowed)
    return truth._replace(exact=exact, allowed=allowed, conventions=inputs.conventions, padding=padding)


def check_rows(name: str, rows: torch.Tensor, truth: RowTruth) -> tuple[Bound, LseCheck]:
    """Compare a further output, [batch, heads, seq_q] float32, with its truth.

    A row without keys must be -inf and a row whose truth is NaN must be NaN; every other row must be finite.
    """
    got = _meant(parts.outputs()[name], rows, truth, truth.conventions)
    same = (got == truth.exact) | (got.isnan() & truth.exact.isnan())  # -inf is equal to -inf
    error = (got - truth.exact).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    used = (error / truth.allowed).masked_fill(error == 0, 0.0)
    bad, worst = ~(error <= truth.allowed), int(used.argmax())
    value, allowed = float(error.flatten()[worst]), float(truth.allowed.flatten()[worst])
    head, query = divmod(worst, rows.shape[2])
    place: RowIndex = (*divmod(head, rows.shape[1]), query)
    check = LseCheck(
        bad_count=int(bad.sum()),
        row_count=rows.numel(),
        worst=place,
        worst_got=_text(float(got.flatten()[worst])),
        worst_want=_text(float(truth.exact.flatten()[worst])),
    )
    return Bound(name, value if math.isfinite(value) else None, allowed, value <= allowed), check


def explain_rows(part: Part, rows: torch.Tensor, truth: RowTruth, inputs: Inputs) -> str:
    """The one or two mistakes that give this output, [batch, heads, seq_q] float32; else in which rows it is wrong."""
    if cause := _other_convention(part, rows, truth):  # first: in another order, padding is at other places
        return cause
    if bool((unwritten := cleared(truth.padding, is_poison(rows), value=False)).any()):
        return f"the {part.output_title} of {int(unwritten.sum())} of {rows.numel()} rows is not written"
    rows = _meant(part, rows, truth, truth.conventions)
    inputs = inputs.exact().meant()
    count = min(rows_per_block(inputs), rows.shape[2])
    last = slice(rows.shape[2] - count, rows.shape[2])  # the last queries see the most keys
    written, exact, allowed = (tensor[:, :, last].double() for tensor in (rows, truth.exact, truth.allowed))
    known = part.row_mistakes(_block(inputs, _keys(inputs), last), exact)
    block = RowTruth(exact, allowed)
    causes = tuple(dict.fromkeys(cause for value, cause in known if _explains(written, value, block)))
    return "; or ".join(causes) if 1 <= len(causes) <= MAX_NAMES else _where(part.output_title, rows, truth)


def _meant(part: Part, rows: torch.Tensor, truth: RowTruth, conventions: Mapping[str, str]) -> torch.Tensor:
    """What an output, [batch, heads, seq_q], means in some conventions; its padding is that of the truth."""
    return cleared(truth.padding, part.rows_meant(rows, truth.exact, conventions), truth.exact)


def _explains(rows: torch.Tensor, value: torch.Tensor, truth: RowTruth) -> bool:
    """Whether rows have a mistake's values: nearly all rows do, nearly all wrong ones, and nearly all it changes.

    It must change most of the wrong ones by more than the tolerance leaves open.
    """
    allowed = truth.allowed + TOLERANCE
    is_compared = truth.exact.isfinite() & ~value.isnan()
    fits = (rows == value) | ((rows - value).abs() <= allowed)
    wrong = is_compared & ~((rows - truth.exact).abs() <= truth.allowed)
    changed = is_compared & ((value - truth.exact).abs() > SEPARATION * allowed)
    return all(_share(fits, of) >= FITTING_SHARE for of in (is_compared, wrong, changed)) and (
        _share(changed, wrong) >= LEAST_CHANGED
    )


def _share(rows: torch.Tensor, of: torch.Tensor) -> float:
    """The share of some rows that are among others; 0 if there are none."""
    return float(rows[of].double().mean()) if bool(of.any()) else 0.0


def _keys(inputs: Inputs) -> torch.Tensor:
    return repeated(inputs.k.double(), inputs.q.shape[1])


def _block(
    inputs: Inputs, k: torch.Tensor, rows: slice, rounds: tuple[Rounding, ...] = (), policy: str = ""
) -> ScoreBlock:
    """Some queries of a call; `k` is in float64, [batch, heads, seq_k, head_dim]."""
    hidden, positions = hidden_keys(inputs, rows), block_positions(inputs, rows)

    def seen_in(inputs: Inputs, products: torch.Tensor, but: Part | None = None) -> torch.Tensor:
        scores = parts.changed_scores(inputs, products, positions, but=but)
        return scores if hidden is None else scores.masked_fill(hidden, -math.inf)

    q, sinks = inputs.q[:, :, rows].double(), parts.sinks(inputs, positions)
    seen, stored = (partial(seen_in, each) for each in (inputs, inputs._replace(rounds=rounds)))
    return ScoreBlock(
        *(q, k, inputs.scale, seen, inputs.output_dtype, rounds, policy, sinks, inputs.conventions, stored),
        seen_without={part.in_scores: partial(seen_in, inputs, but=part) for part in parts.parts_in_scores(inputs)},
    )


def _other_convention(part: Part, rows: torch.Tensor, truth: RowTruth) -> str:
    """What a kernel does whose output is right in other conventions than the declared ones; empty if there are none."""
    declared, memory = truth.conventions, rows.permute(part.row_axes(truth.conventions))
    keys = [key for key, convention in part.conventions.items() if not convention.is_seen_in]
    choices = [tuple(part.conventions[key].values) for key in keys]
    tried: list[dict[str, str]] = []
    for values in itertools.product(*choices):
        pairs = zip(keys, values, strict=True)
        tried.append({key: value for key, value in pairs if value != declared.get(key, choices[keys.index(key)][0])})
    for changes in sorted(tried, key=len)[1:]:  # the first one changes nothing
        others = {**declared, **changes}
        axes = part.row_axes(others)
        other = memory.reshape([rows.shape[axis] for axis in axes]).permute(axes)
        got = _meant(part, other, truth, others)
        if bool((((got - truth.exact).abs() <= truth.allowed) | (got == truth.exact)).all()):
            return "; ".join(part.conventions[key].advice(key, declared.get(key), changes[key]) for key in changes)
    return ""


def _where(title: str, rows: torch.Tensor, truth: RowTruth) -> str:
    """In which rows an output is wrong."""
    bad = ~((rows.double() - truth.exact).abs() <= truth.allowed) & (rows.double() != truth.exact)
    no_keys = truth.exact == -math.inf
    if bool(bad.any()) and not bool((bad & ~no_keys).any()):
        return f"the {title} of rows without keys must be -inf"
    queries = bad.any(0).any(0).nonzero().flatten()
    first, last = (int(queries[0]), int(queries[-1])) if len(queries) else (0, 0)
    return f"wrong in {int(bad.sum())} rows, of queries {first} to {last}; no known mistake gives this {title}"


def _text(value: float) -> str:
    """A value for a record, which has no NaN and no infinity as numbers."""
    return f"{value:.6g}"
