"""The common mistakes of backward kernels, each with the words for it and the steps that it replaces.

Words have a place, `{}`, for the names of the gradients that have the mistake, if it may be in each of them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.mistake import ChangeScores, Mistake
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.mistaken_gradients import NAMES, STEPS, BackwardCall, GradientMistake, GradientStep, Pass, p_of
from pytest_fa.judge.truth import block_positions

LN2 = math.log(2)
OF_DS = ("dq", "dk")
HALVES = (16, 32, 64, 128)  # dims of a part of a row, and rows of a tile
MOST_HEADS = 16  # of which each is tried
ChangeRows = Callable[[torch.Tensor], torch.Tensor]


def backward_mistakes(problem: BackwardCall) -> Iterator[GradientMistake]:
    """Every known mistake that can change the gradients of a call."""
    yield from _delta_mistakes(problem)
    yield from _dlse_mistakes(problem)
    yield from _factors(problem)
    yield from _of_p(problem)
    yield from _of_parts(problem)
    yield from _slope_mistakes(problem)
    yield from _of_groups(problem)
    yield from _operand_mistakes(problem)


# -- dS ---------------------------------------------------------------------------------------------------------------


def _delta_mistakes(problem: BackwardCall) -> Iterator[GradientMistake]:
    delta = "delta = rowsum(dO * O)"

    def mistake(words: str, step: GradientStep) -> GradientMistake:
        return GradientMistake(words, {"delta": step}, OF_DS)

    yield mistake(f"{delta} is missing in dS = P (dP - delta)", lambda each: 0 * STEPS["delta"](each))
    yield mistake(f"{delta} is added to dP, it must be subtracted", lambda each: -STEPS["delta"](each))
    for words, change in _neighbours(problem):
        yield mistake(f"{delta} is that of {words}: look at its index", partial(_of_rows, "delta", change))
    scale = problem.inputs.scale
    yield mistake(f"{delta} is multiplied by the softmax scale", lambda each: scale * STEPS["delta"](each))
    yield mistake(f"{delta} is divided by the softmax scale", lambda each: STEPS["delta"](each) / scale)
    dims = problem.out.shape[3]
    for kept in (size for size in HALVES if size < dims):
        words = f"{delta} sums only the first {kept} of {dims} dims: look at the reduction"
        yield mistake(words, lambda each, kept=kept: _inner(each.dout[..., :kept], each.out[..., :kept]))  # type: ignore[misc]
    for words, one, other in (("dO * dO", "dout", "dout"), ("O * O", "out", "out")):
        yield mistake(
            f"delta is rowsum({words}), it must be rowsum(dO * O)",
            lambda each, one=one, other=other: _inner(getattr(each, one), getattr(each, other)),  # type: ignore[misc]
        )
    yield GradientMistake("P is missing in dS = P (dP - delta)", {"p_of_ds": _ones}, OF_DS)
    if problem.dout.shape[2] == problem.k.shape[2]:
        words = "dS is transposed in {}: look at the order of its rows and columns"
        yield GradientMistake(words, {"ds_of_dq": partial(_turned, "ds"), "ds_of_dk": partial(_turned, "ds")}, OF_DS)
        words = "P is transposed in {}: look at the order of its rows and columns"
        yield GradientMistake(words, {"p_of_dv": partial(_turned, "p")}, ("dv",))


def _ones(each: Pass) -> torch.Tensor:
    return torch.ones_like(each.p).masked_fill(each.hidden, 0.0)


def _turned(name: str, each: Pass) -> torch.Tensor:
    """A matrix of the same places with queries and keys exchanged."""
    matrix: torch.Tensor = getattr(Pass(each.problem, each.keys, each.queries, {}, each.dtype), name)
    return matrix.mT


def _inner(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).sum(-1, keepdim=True)


def _of_rows(name: str, change: ChangeRows, each: Pass) -> torch.Tensor:
    """A figure of rows, changed as a whole."""
    return each.at_queries(change(getattr(each.problem, name)))


def _neighbours(problem: BackwardCall) -> Iterator[tuple[str, ChangeRows]]:
    """Figures of rows, [1, heads, seq_q, 1], at other places."""
    heads, queries = problem.out.shape[1:3]
    if queries > 1:
        yield "the next row", lambda rows: rows.roll(-1, 2)
        yield "the row before", lambda rows: rows.roll(1, 2)
        yield "row 0 in every row", lambda rows: rows[:, :, :1].expand_as(rows)
        for tile in (size for size in HALVES if size < queries):
            words = f"the first {tile} rows in every tile of {tile} rows"
            yield words, lambda rows, tile=tile: rows[:, :, torch.arange(queries, device=rows.device) % tile]  # type: ignore[misc]
    if heads > 1:
        yield "the next head", lambda rows: rows.roll(-1, 1)
        yield "head 0 in every head", lambda rows: rows[:, :1].expand_as(rows)


def _dlse_mistakes(problem: BackwardCall) -> Iterator[GradientMistake]:
    if not bool(problem.dlse.any()):
        return
    for words, factor in (
        ("dlse, the gradient of the log-sum-exp, is ignored: dS = P (dP - delta + dlse)", 0.0),
        ("dlse, the gradient of the log-sum-exp, is subtracted: dS = P (dP - delta + dlse)", -1.0),
        ("dlse, the gradient of the log-sum-exp, is multiplied by the softmax scale", problem.inputs.scale),
        ("dlse, the gradient of the log-sum-exp, is divided by ln 2", 1 / LN2),
        ("dlse, the gradient of the log-sum-exp, is multiplied by ln 2", LN2),
    ):
        step = {"dlse": lambda each, factor=factor: factor * STEPS["dlse"](each)}
        yield GradientMistake(words, step, OF_DS)


# -- factors ----------------------------------------------------------------------------------------------------------


class WrongFactor(NamedTuple):
    """A factor that some gradients may have in place of 1, and words with a place for their names."""

    words: str
    factor: float
    names: tuple[str, ...]


def wrong_factors(problem: BackwardCall) -> Iterator[WrongFactor]:
    """The factors of a call that are not 1."""
    scale, group = problem.inputs.scale, len(problem.readers[0]) if problem.readers else 1
    of_exp2 = "a factor of log2 e is too much in {}: the scale of exp2 is used in place of the softmax scale"
    for factor in (
        WrongFactor("all zeros in {}: the kernel writes zeros, or the result is never written", 0.0, NAMES),
        WrongFactor("the softmax scale is missing in {}", 1 / scale if scale else 1.0, OF_DS),
        WrongFactor("the softmax scale is applied twice in {}", scale, OF_DS),
        WrongFactor(of_exp2, 1 / LN2, OF_DS),
        WrongFactor("a factor of log2 e is missing in {}: only the scores of exp2 have it", LN2, OF_DS),
        WrongFactor("the softmax scale is a factor of {}, and must not be", scale, ("dv",)),
        WrongFactor("wrong sign of {}", -1.0, NAMES),
        WrongFactor("twice the right values in {}: added to a buffer that is not zeroed, or added twice", 2.0, NAMES),
        WrongFactor("half of the right values in {}", 0.5, NAMES),
        WrongFactor("the mean over the heads of a group in {}, it must be their sum", 1 / group, ("dk", "dv")),
        WrongFactor("the sum over the heads of a group is too large by their number in {}", float(group), ("dk", "dv")),
    ):
        if factor.factor != 1.0:
            yield factor


def _factors(problem: BackwardCall) -> Iterator[GradientMistake]:
    for words, factor, names in wrong_factors(problem):
        yield GradientMistake(words, names=names, arrange=lambda right, factor=factor: factor * right)  # type: ignore[misc]


# -- P ----------------------------------------------------------------------------------------------------------------


def _of_p(problem: BackwardCall) -> Iterator[GradientMistake]:
    """P = exp(S - L) with another L, in another base or not normalised."""

    def mistake(words: str, step: GradientStep) -> GradientMistake:
        return GradientMistake(words, {"p": step})

    is_base2 = problem.inputs.convention("lse") == "base2"
    as_other = "the log-sum-exp, which is {}, is taken for one in {}: P = {}"
    in_base2 = "exp2(S log2 e - L)"
    words = as_other.format("in base 2", "natural logarithms", f"{in_base2} is right")
    if not is_base2:
        words = as_other.format("in natural logarithms", "base 2", "exp(S - L) is right")
        words = f"{words}; if base 2 is meant, declare `conventions: {{lse: base2}}`"
    taken = (1 / LN2) if is_base2 else LN2
    yield mistake(words, lambda each: p_of(each, each.scores, taken * each.lse))
    words = "P is recomputed from a log-sum-exp that is multiplied by {} once too often"
    yield mistake(
        words.format("ln 2" if is_base2 else "log2 e"), lambda each: p_of(each, each.scores, each.lse / taken)
    )
    words = "P is exp2(S - L), it must be exp(S - L): look for log2 e in the scale"
    yield mistake(words, lambda each: p_of(each, LN2 * each.scores, LN2 * each.lse))
    words = "P is exp2 of scores without log2 e, beside a log-sum-exp with it"
    yield mistake(words, lambda each: p_of(each, LN2 * each.scores, each.lse))
    words = "P is exp of scores with log2 e, it must be exp2"
    yield mistake(words, lambda each: p_of(each, each.scores / LN2, each.lse / LN2))
    words = "P is exp(S) without the log-sum-exp: it must be exp(S - L)"
    yield mistake(words, lambda each: p_of(each, each.scores, 0.0))
    words = "P is exp(S - max), not normalised: it must be exp(S - L)"
    yield GradientMistake(words, {"p": lambda each: p_of(each, each.scores, each.at_queries(each.problem.row_max))})
    for words, change in _neighbours(problem):
        step = partial(_with_lse_of, change)
        yield mistake(f"the log-sum-exp in P = exp(S - L) is that of {words}: look at its index", step)
    words = "the softmax scale is missing in the scores, of which P = exp(S - L) is made"
    yield GradientMistake(words, {"products": lambda each: each.q @ each.k.mT})
    words = "the softmax scale is applied twice in the scores, of which P = exp(S - L) is made"
    yield GradientMistake(words, {"products": lambda each: each.scale**2 * (each.q @ each.k.mT)})
    if parts.sinks(problem.inputs, block_positions(problem.inputs, slice(0, 1))) is not None:
        yield mistake("P leaves out the sink: use the log-sum-exp of the call, which has it", _without_sink)


def _with_lse_of(change: ChangeRows, each: Pass) -> torch.Tensor:
    return p_of(each, each.scores, each.at_queries(change(each.problem.lse)))


def _without_sink(each: Pass) -> torch.Tensor:
    return p_of(each, each.scores, each.at_queries(each.problem.lse_of_keys))


# -- parts of attention -----------------------------------------------------------------------------------------------


def _of_parts(problem: BackwardCall) -> Iterator[GradientMistake]:
    """Mistakes in masks, biases and the like, beside the right log-sum-exp."""
    for mistake in parts.mistakes(problem.inputs):
        steps = _steps_of(mistake)
        if steps or (mistake.change and _keeps_sizes(mistake.change(problem.inputs), problem.inputs)):
            yield GradientMistake(mistake.words, steps, change=mistake.change)
        if mistake.hide and mistake.score:  # keys that -inf hides may stay hidden
            yield GradientMistake(mistake.words, _steps_of(mistake._replace(hide=None)))


def _steps_of(mistake: Mistake) -> dict[str, GradientStep]:
    """The steps that a mistake of a forward pass replaces."""
    steps: dict[str, GradientStep] = {}
    if (shift := mistake.shift) is not None:
        steps["positions"] = lambda each: STEPS["positions"](each)._replace(shift=_as_shift(shift, each))
    if (hide := mistake.hide) is not None:
        steps["hidden"] = lambda each: hide(each.positions)
    if (score := mistake.score) is not None:
        steps["scores"] = lambda each: score(each.products, each.positions)
        steps["slope"] = partial(_slope_of, score)
    return steps


def _as_shift(shift: int | torch.Tensor, each: Pass) -> torch.Tensor:
    return torch.zeros((1, 1, 1, 1), dtype=torch.long, device=each.keys.device) + shift


def _slope_of(score: ChangeScores, each: Pass) -> torch.Tensor:
    """The derivative of wrong scores."""
    slope: torch.Tensor
    with torch.enable_grad():
        products = each.products.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(score(products, each.positions).sum(), products)
    return slope


def _keeps_sizes(changed: Inputs, inputs: Inputs) -> bool:
    pairs = ((changed.q, inputs.q), (changed.k[:, 0], inputs.k[:, 0]), (changed.v[:, 0], inputs.v[:, 0]))
    return all(one.shape == other.shape for one, other in pairs)


def _slope_mistakes(problem: BackwardCall) -> Iterator[GradientMistake]:
    if not (cap := problem.inputs.word("softcap")):
        return
    derivative = "the derivative of the soft cap, 1 - tanh(S / cap)^2,"
    for words, step in (
        (f"{derivative} is missing in dS", lambda _: 1.0),
        (f"{derivative} is computed of the scores after the cap", lambda each: 1 - (each.scores / cap).tanh().square()),
        (f"{derivative} is multiplied by the cap", lambda each: cap * STEPS["slope"](each)),
        (f"{derivative} is divided by the cap", lambda each: STEPS["slope"](each) / cap),
        ("the derivative of the soft cap is 1 - tanh(S / cap), without the square", lambda each: 1 - _tanh(each)),
        (
            "the derivative of the soft cap is tanh(S / cap)^2, it must be 1 - tanh(S / cap)^2",
            lambda each: _tanh(each) ** 2,
        ),
    ):
        yield GradientMistake(words, {"slope": step}, OF_DS)


def _tanh(each: Pass) -> torch.Tensor:
    tanh: torch.Tensor = (each.products / each.inputs.word("softcap")).tanh()
    return tanh


# -- heads ------------------------------------------------------------------------------------------------------------


def _of_groups(problem: BackwardCall) -> Iterator[GradientMistake]:
    """The sums over the heads of Q that share one of K and V."""
    readers, heads = problem.readers, problem.out.shape[1]
    if len(readers) == heads:
        return
    for which, chosen in (("last", slice(-1, None)), ("first", slice(1))):
        words = f"only the {which} head of each group is in {{}}: add up all heads that share a key head"
        yield _summed(words, [each[chosen] for each in readers])
    for head in range(heads) if heads <= MOST_HEADS else ():
        words = f"head {head} of Q is missing in {{}}: look at the loop over the heads of a group"
        yield _summed(words, [[each for each in group if each != head] for group in readers])
    for words, order in _other_readers(readers, heads):
        yield _summed(f"the heads of Q are summed by {words}, in {{}}", order)
        of_query = [next(key for key, group in enumerate(order) if head in group) for head in range(heads)]
        place = [readers[key][0] for key in of_query]  # of K and V for each head of Q
        in_dq = {"k_of_dq": partial(_in_order, "k", place)}
        yield GradientMistake(f"dQ = dS K reads K of the key head by {words}", in_dq, ("dq",))
        reads: dict[str, GradientStep] = {name: partial(_in_order, name, place) for name in ("k", "v")}
        yield GradientMistake(
            f"the heads of Q are mapped to key heads by {words}", {**reads, **_summed("", order).steps}
        )


def _other_readers(readers: list[list[int]], heads: int) -> Iterator[tuple[str, list[list[int]]]]:
    """For each key head, the heads of Q that read it in a wrong order."""
    keys, group = len(readers), heads // len(readers)
    modulo = [list(range(key, heads, keys)) for key in range(keys)]
    blocks = [list(range(key * group, (key + 1) * group)) for key in range(keys)]
    for words, order in (("h % kv_heads, not h // group", modulo), ("h // group, not h % kv_heads", blocks)):
        if order != readers:
            yield words, order
            return


def _summed(words: str, order: list[list[int]]) -> GradientMistake:
    """Other heads of Q for each key head."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        return torch.stack([gradient[:, heads].sum(1) for heads in order], 1)

    return GradientMistake(words, {"summed": lambda _: summed}, ("dk", "dv"))


def _in_order(name: str, place: list[int], each: Pass) -> torch.Tensor:
    """K or V of other heads."""
    return each.at_keys(getattr(each.problem, name)[:, place])


# -- operands ---------------------------------------------------------------------------------------------------------


def _operand_mistakes(problem: BackwardCall) -> Iterator[GradientMistake]:
    """Operands of the five products that are others, or at other places."""
    if problem.k.shape[3] == problem.v.shape[3]:
        for words, step, names in (
            ("dP = dO V^T reads K in place of V", {"dp": lambda each: each.dout @ each.k.mT}, OF_DS),
            ("dQ = dS K reads V in place of K", {"k_of_dq": lambda each: each.v}, ("dq",)),
            ("dK = dS^T Q reads dO in place of Q", {"q_of_dk": lambda each: each.dout}, ("dk",)),
            ("dK = dS^T Q reads O in place of Q", {"q_of_dk": lambda each: each.out}, ("dk",)),
            ("dV = P^T dO reads Q in place of dO", {"dout_of_dv": lambda each: each.q}, ("dv",)),
        ):
            yield GradientMistake(f"{words}: look at the pointers", step, names)
    for words, step, names in (
        ("dP = dO V^T reads O in place of dO", {"dp": lambda each: each.out @ each.v.mT}, OF_DS),
        ("dV = P^T dO reads O in place of dO", {"dout_of_dv": lambda each: each.out}, ("dv",)),
        ("dV has dS in place of P: it is P^T dO", {"p_of_dv": lambda each: each.ds}, ("dv",)),
        ("dK has P in place of dS: it is scale dS^T Q", {"ds_of_dk": lambda each: each.p}, ("dk",)),
        ("dQ has P in place of dS: it is scale dS K", {"ds_of_dq": lambda each: each.p}, ("dq",)),
    ):
        yield GradientMistake(f"{words}: look at the operands", step, names)
    for words, change in _neighbours(problem):
        dp = {"dp": lambda each, change=change: each.at_queries(change(each.problem.dout)) @ each.v.mT}
        yield GradientMistake(f"dP = dO V^T reads dO of {words}: look at its index", dp, OF_DS)
        dv = {"dout_of_dv": partial(_of_rows, "dout", change)}
        yield GradientMistake(f"dV = P^T dO reads dO of {words}: look at its index", dv, ("dv",))
