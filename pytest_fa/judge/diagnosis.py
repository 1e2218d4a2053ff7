"""Explain a wrong output: a map of its error, the likely cause, and whether SDPA's backends are wrong as well.

It runs only after a failure, so that right outputs are judged quickly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from pytest_fa.catalog.case import AXES, Computes
from pytest_fa.judge.scores import score_mistakes
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.records.judged import Check, CrossCheck, Diagnosis, Repeats
from pytest_fa.run.inputs import Inputs, bits_of

MAP_COLUMNS, MAP_ROWS = 48, 16
LEAST_TILE = 16  # queries per column of the error map
LARGEST_REMAINDER = 0.05  # a mistake explains an output if at most this fraction of the error's RMS remains
MOST_SCORES = 2**27  # mistakes are tried only on cases with at most this many scores
LOG2_E = math.log2(math.e)
SCALE_FACTORS = (
    (1.01, "1 % too large"),
    (0.99, "1 % too small"),
    (LOG2_E, "multiplied by log2 e once too often"),
    (1 / LOG2_E, "missing its log2 e"),
)


def diagnose(
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim or seq_k]
    truth: Truth,
    inputs: Inputs,
    check: Check,
    repeats: Repeats | None,
    cross_checks: tuple[CrossCheck, ...],
    computes: Computes = "attention",
) -> Diagnosis:
    """Explain a wrong output: error map, likely cause, cross-checks and conclusion."""
    limit = next((bound.allowed for bound in check.bounds if bound.name == "max"), 2 * check.same_precision_max_error)
    bad = ~((out.double() - truth.out).abs() <= limit)  # [b, h, sq, d]
    return Diagnosis(
        error_map=tuple(_error_map(out, truth, limit)),
        cause=_cause(out, truth, inputs, bad, repeats, computes),
        cross_checks=cross_checks,
        conclusion=conclusion(cross_checks),
    )


def conclusion(cross_checks: tuple[CrossCheck, ...]) -> str:
    """One sentence that says whether only the candidate is wrong, or SDPA's backends as well."""
    right = [backend.name for backend in cross_checks if backend.passed]
    wrong = [backend.name for backend in cross_checks if backend.passed is False]
    if not right and not wrong:
        return "no SDPA backend takes this case, so there is no cross-check"
    if not wrong:
        return f"only the candidate is wrong; right under the same policy: {', '.join(right)}"
    if not right:
        return f"the candidate is wrong, and under the same policy also: {', '.join(wrong)}"
    return f"the candidate is wrong, and under the same policy also: {', '.join(wrong)}; but right: {', '.join(right)}"


def _error_map(out: torch.Tensor, truth: Truth, limit: float) -> Iterator[str]:
    """The lines of the error map: a header, then one line per head with one character per tile of queries."""
    rows = max(LEAST_TILE, math.ceil(out.shape[2] / MAP_COLUMNS))
    used = ((out.double() - truth.out).abs() / limit).amax(-1)  # [b, h, sq]; NaN stays NaN
    tiles = -(-out.shape[2] // rows)
    padded = torch.zeros((*used.shape[:2], tiles * rows), dtype=used.dtype, device=used.device)
    padded[:, :, : out.shape[2]] = used.nan_to_num(nan=math.inf, posinf=math.inf)
    worst = padded.view(*used.shape[:2], tiles, rows).amax(-1).cpu()  # [b, h, tiles]
    legend = "'.': within the bound, digit d: at least 2^(d-1) times the bound, N: not finite"
    yield f"error by head and tile of {rows} queries ({legend})"
    for index, row in enumerate(worst.flatten(0, 1)[:MAP_ROWS].tolist()):
        batch, head = divmod(index, out.shape[1])
        yield f"batch {batch} head {head:2d}  {''.join(_mark(used) for used in row)}"
    if (hidden := worst.shape[0] * worst.shape[1] - MAP_ROWS) > 0:
        yield f"and {hidden} more heads"


def _mark(used: float) -> str:
    """One character for a tile whose largest error is `used` times the bound; see the legend."""
    if not math.isfinite(used):
        return "N"
    return "." if used <= 1 else str(min(9, 1 + int(math.log2(used))))


def _cause(
    out: torch.Tensor, truth: Truth, inputs: Inputs, bad: torch.Tensor, repeats: Repeats | None, computes: Computes
) -> str:
    """The first explanation that fits; empty if none does."""
    poison = bits_of(torch.full_like(out, float("nan")))
    if repeats is not None and repeats.differing:
        cause = "the output changes from call to call: a race, or a read of memory that the kernel never wrote"
    elif not bool(bad.any()):
        cause = ""
    elif bool((bits_of(out) == poison)[bad].all()):
        cause = f"the kernel never wrote {_where(bad, computes)}: the NaN poison is still there"
    elif not bool(out.isfinite().all()):
        place = _where(bad, computes)
        cause = f"not finite in {place}: a read of unwritten memory, a read out of bounds, or an overflow"
    else:
        cause = _mistake(out, truth, inputs, computes) or f"wrong in {_where(bad, computes)}"
    return cause


def _mistake(out: torch.Tensor, truth: Truth, inputs: Inputs, computes: Computes) -> str:
    """The known mistake that gives this output; empty if none of them does."""
    if out[..., 0].numel() * inputs.k.shape[2] <= MOST_SCORES:
        for name, wrong in score_mistakes(inputs) if computes == "scores" else _attention_mistakes(inputs):
            if _explains(wrong(), out, truth):
                return name
    gain = float((out.double() * truth.out).sum() / truth.out.square().sum())
    return f"the whole output is {gain:.4g} times what it should be" if _explains(gain * truth.out, out, truth) else ""


def _explains(wrong: torch.Tensor, out: torch.Tensor, truth: Truth) -> bool:
    """Whether `out` is much closer to the result of a mistake, `wrong`, than to truth."""
    remaining = (out.double() - wrong).square().mean().sqrt()
    return bool(remaining <= LARGEST_REMAINDER * (out.double() - truth.out).square().mean().sqrt())


def _attention_mistakes(inputs: Inputs) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Common mistakes of attention, each with a function that computes the output it would give."""
    q, k, v, scale, causal = inputs
    keys = k.shape[2]

    def result(changed: Inputs) -> Callable[[], torch.Tensor]:
        return lambda: make_truth(changed).out

    if causal != "bottom_right":
        for lost in sorted({1, 16, keys % 16, keys % 32, keys % 64, keys % 128} - {0}):
            if lost < keys:
                shorter = inputs._replace(k=k[:, :, :-lost], v=v[:, :, :-lost])
                yield f"the last {lost} keys are missing: look at the tail mask or the last tile", result(shorter)
    for factor, words in SCALE_FACTORS:
        yield f"the softmax scale is {words}", result(inputs._replace(scale=scale * factor))
    yield "the softmax scale is not applied", result(inputs._replace(scale=1.0))
    for wrong_mask in (mask for mask in ("none", "top_left", "bottom_right") if mask != causal):
        yield (
            f"the mask is {wrong_mask.replace('_', ' ')} where it should be {causal.replace('_', ' ')}",
            result(inputs._replace(causal=wrong_mask)),
        )
    if causal == "top_left" and keys > 1:
        yield "the causal mask is one key too wide", lambda: _one_key_wider(inputs)
    if k.shape[1] not in (1, q.shape[1]):
        order = torch.arange(q.shape[1], device=q.device) % k.shape[1]
        yield (
            "query heads are mapped to key heads modulo, not in groups",
            result(inputs._replace(k=k[:, order], v=v[:, order])),
        )


def _one_key_wider(inputs: Inputs) -> torch.Tensor:
    """Attention in which query i sees keys up to i + 1.

    One query is inserted before the first, so that query i becomes query i + 1 and the mask shows it one key more.
    """
    shifted = torch.cat([inputs.q[:, :, :1], inputs.q], dim=2)  # [b, h, sq + 1, d]
    return make_truth(inputs._replace(q=shifted)).out[:, :, 1:]


def _where(bad: torch.Tensor, computes: Computes) -> str:
    """Which part of [batch, heads, seq_q, head_dim or seq_k] is bad, in words."""
    parts = []
    for axis, name in enumerate(AXES[computes]):
        other_axes = tuple(each for each in range(4) if each != axis)
        is_bad = bad.any(dim=other_axes[0], keepdim=True)
        for other_axis in other_axes[1:]:
            is_bad = is_bad.any(dim=other_axis, keepdim=True)
        indices = is_bad.flatten().nonzero().flatten().tolist()
        if len(indices) < bad.shape[axis]:
            parts.append(_span(name, indices, bad.shape[axis]))
    return ", ".join(parts) or "every {}, {}, {} and {}".format(*AXES[computes])


def _span(name: str, indices: list[int], size: int) -> str:
    """The bad indices of one axis of length `size`, in words: one index, a range, a regular pattern or a count."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return f"{name} {first} of {size}"
    steps = {after - before for before, after in itertools.pairwise(indices)}
    if steps == {1}:
        return f"{name} {first} to {last} of {size}"
    if len(steps) == 1:
        return f"every {steps.pop()}th {name} from {first}"
    return f"{len(indices)} of {size} {name} indices"
