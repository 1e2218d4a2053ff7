"""Explain a wrong output: a map of its error, the likely cause, and whether SDPA's backends are wrong as well.

It runs only after a failure, so that right outputs are judged quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytest_fa.attention import not_judged
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.variant import Rounding
from pytest_fa.gpu.inputs import Inputs, is_poison
from pytest_fa.judge.error_location import location_text
from pytest_fa.judge.explain import WrongOutput, explain_attention, explain_scores
from pytest_fa.judge.nonfinite import explain_nonfinite
from pytest_fa.judge.output_check import limits
from pytest_fa.judge.padding import cleared, explain_padding
from pytest_fa.judge.truth import Truth
from pytest_fa.judge.zeros import explain_zeros
from pytest_fa.records.checks import Check, CrossCheck, Diagnosis, Repeats

MAP_COLUMNS, MAP_ROWS = 48, 16
KEPT = "state is kept between calls, look for what a call leaves in memory that the next one uses"
NOT_COMPARED = "the diagnosis knows only mistakes in plain attention"
MIN_TILE = 16  # queries per column of the error map


def diagnose(
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim or seq_k]
    truth: Truth,
    inputs: Inputs,
    check: Check,
    repeats: Repeats | None,
    cross_checks: tuple[CrossCheck, ...],
    computes: Computes = "attention",
    rounds: tuple[Rounding, ...] = (),
) -> Diagnosis:
    """Explain a wrong output: error map, likely cause, cross-checks and conclusion.

    `rounds` are the roundings that the variant's manifest declares.  Known mistakes are mistakes in attention, so
    that an output that was compared with the user's functions is compared with none of them.
    """
    of_padding = explain_padding(truth.padding, out) if truth.padding else ""
    out, truth = cleared(truth.padding, out), truth._replace(padding=None)
    limit = limits(out, truth, check.policy)
    inputs = inputs.exact().meant()
    bad = ~((out.double() - truth.out).abs() <= limit)  # [b, h, sq, d]
    unknown = NOT_COMPARED if check.against else "no known mistake gives this output"
    return Diagnosis(
        error_map=tuple(_error_map(out, truth, limit)),
        cause=(of_padding if of_padding and not bool(bad.any()) else "")
        or _cause(WrongOutput(out, truth, check.policy, computes), inputs, bad, repeats, rounds)
        or f"wrong {_place(check, bad, computes)}; {unknown}",
        cross_checks=cross_checks,
        conclusion="" if check.against else conclusion(cross_checks),
    )


def kept_state(repeats: Repeats, first: Check, later: Check) -> str:
    """What it means that the output changed once, and then never again; `later` is the verdict on the later output."""
    calls = "the first call is" if (count := repeats.equal_first_calls) == 1 else f"the first {count} calls are"
    verdicts = {True: "right", False: "wrong"}
    too = ", too" if first.passed == later.passed else ""
    other = f"all later calls give one other result, which is {verdicts[later.passed]}{too}"
    return f"{calls} {verdicts[first.passed]}, and {other}: {KEPT}"


def conclusion(cross_checks: tuple[CrossCheck, ...]) -> str:
    """One sentence that says whether only the candidate is wrong, or SDPA's backends as well."""
    right = [backend.name for backend in cross_checks if backend.passed]
    wrong = [backend.name for backend in cross_checks if backend.passed is False]
    if not right and not wrong:
        return "no SDPA backend takes this case, so there is no cross-check"
    if not wrong:
        return f"only the candidate is wrong; passed under the same policy: {', '.join(right)}"
    if not right:
        return f"the candidate is wrong, and under the same policy also: {', '.join(wrong)}"
    return f"the candidate is wrong, and under the same policy also: {', '.join(wrong)}; but passed: {', '.join(right)}"


def _error_map(out: torch.Tensor, truth: Truth, limit: float | torch.Tensor) -> Iterator[str]:
    """The lines of the error map: a header, then one line per head with one character per tile of queries.

    There is none if every element is within its bound: such a map would show no place.
    """
    rows = max(MIN_TILE, math.ceil(out.shape[2] / MAP_COLUMNS))
    error = (out.double() - truth.out).abs()
    used = (error / limit).masked_fill(error == 0, 0.0).amax(-1)  # [b, h, sq]; NaN stays NaN
    tiles = -(-out.shape[2] // rows)
    padded = torch.zeros((*used.shape[:2], tiles * rows), dtype=used.dtype, device=used.device)
    padded[:, :, : out.shape[2]] = used.nan_to_num(nan=math.inf, posinf=math.inf)
    worst = padded.view(*used.shape[:2], tiles, rows).amax(-1).cpu()  # [b, h, tiles]
    if bool((worst <= 1).all()):
        return
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
    wrong: WrongOutput, inputs: Inputs, bad: torch.Tensor, repeats: Repeats | None, rounds: tuple[Rounding, ...]
) -> str:
    """The first explanation that fits; empty if none does."""
    if repeats is not None and repeats.differing:
        words = "the output changes from call to call: a race, or a read of memory that the kernel never wrote"
        return f"{words}, or dropout, which is not judged" if "dropout" in not_judged.rows() else words
    if wrong.truth.against:
        unwritten = int(is_poison(wrong.out).sum())
        return f"{unwritten} of {wrong.out.numel()} elements were never written" if unwritten else ""
    if nonfinite := explain_nonfinite(wrong.out, bad, inputs, wrong.computes):
        return nonfinite
    is_zero = not bool(wrong.out.any())
    if is_zero and (zeros := explain_zeros(wrong.out, wrong.truth, wrong.policy, inputs, wrong.computes)):
        return zeros
    explain = explain_scores if wrong.computes == "scores" else explain_attention
    return str(explain(wrong, inputs, rounds))


def _place(check: Check, bad: torch.Tensor, computes: Computes) -> str:
    """Where an output is wrong; if every element is within its bound, the bounds on the whole output that it breaks."""
    if bool(bad.any()):
        return f"in {location_text(bad, computes)}"
    broken = ", ".join(bound.name for bound in check.bounds if bound.enforced and not bound.holds)
    return f"as a whole, in {broken}, while each element is within its own bound"
