"""Properties about the values in the tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from pytest_fa.attention import parts
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import LINEAR_IN, Inputs, Output, clone, is_poison
from pytest_fa.judge.policies import ulp
from pytest_fa.judge.subject import PropertySubject


def hard_data(subject: PropertySubject) -> None:
    """Outputs are right on data that reveal numerical shortcuts: large scores, one-hot rows, shifted keys and others.

    An output is judged by the truth of its own inputs, or of other inputs with which the exact result must agree; a
    log-sum-exp always by that of its own.
    """
    inputs = subject.inputs()
    for name, changed, equivalent in (
        ("scores 30 times as large", subject.changed(inputs, lambda x: x._replace(q=x.q * 30)), None),
        ("scores -30 times as large", subject.changed(inputs, lambda x: x._replace(q=x.q * -30)), None),
        ("one-hot rows", subject.changed(inputs, _one_hot), None),
        *_shifted(subject, inputs),
        *_reversed(inputs),
    ):
        output = subject.call(changed)
        subject.require_right("hard_data", output, equivalent or changed, f" ({name})", called=changed)
    inputs_of_ones = subject.changed(inputs, lambda x: x._replace(v=torch.ones_like(x.v)))
    output = subject.call(inputs_of_ones)
    subject.require_right("hard_data", output, inputs_of_ones, " (V full of ones)")
    if not subject.is_exact:
        return
    out = output.out
    rows = out[out.ne(0).any(-1)].double()  # the others see no key, which the check above has judged
    worst = float((rows - 1).abs().max()) if len(rows) else 0.0
    if not worst <= ulp(1.0, out.dtype):
        raise WrongResult("hard_data", f"hard_data (V full of ones): the output is {worst:.3g} off, allowed is 1 ulp")


HardData = tuple[str, Inputs, Inputs | None]  # name, inputs, and inputs with the same exact result if these differ


def _one_hot(inputs: Inputs) -> Inputs:
    """Every 37th key outweighs all others for its queries, so that each row of the output is one row of V.

    With more than 37 keys per dimension, the distance is larger, so that no two such keys share a dimension: the mean
    of two rows of V often lies halfway between two numbers of the output's dtype, and is then rounded by chance.
    """
    k, q = inputs.k / 8, torch.zeros_like(inputs.q)
    keys, dims = k.shape[2:]
    picked = range(0, keys, max(37, math.ceil(keys / dims) | 1))
    for dim, key in enumerate(picked):
        k[:, :, key] = 0
        k[:, :, key, dim] = 60
        q[:, :, dim :: len(picked), dim] = 30
    return inputs._replace(q=q, k=k)


def _shifted(subject: PropertySubject, inputs: Inputs) -> Iterator[HardData]:
    """A constant added to all keys shifts all scores of a row equally and does not change the result.

    K is rounded to multiples of 1/32 first, so that the addition is exact.  In e4m3 it is not, and the shifted keys are
    judged by their own truth.
    """
    name = "keys shifted by 4"
    if inputs.descales is not None:
        yield name, subject.changed(inputs, lambda x: x._replace(k=x.k + 4)), None
        return
    gridded = inputs._replace(k=(inputs.k * 32).round() / 32)
    yield name, gridded._replace(k=gridded.k + 4), gridded


def _reversed(inputs: Inputs) -> Iterator[HardData]:
    """Without a mask and the like, the order of the keys does not change the result."""
    if not parts.order_matters(inputs):
        yield "keys in reverse order", inputs._replace(k=inputs.k.flip(2), v=inputs.v.flip(2)), inputs


def zero_scale(subject: PropertySubject) -> None:
    """With a scale of 0, all keys have the same weight; as an output, scores are zero."""
    inputs = subject.inputs()._replace(scale=0.0)
    subject.require_right("zero_scale", subject.call(inputs), inputs)


def negative_scale(subject: PropertySubject) -> None:
    """With a negative scale, the smallest product has the largest weight.

    This reveals a row maximum that is taken before the scale is applied.
    """
    inputs = subject.inputs()
    negated = subject.changed(inputs, lambda x: x._replace(q=x.q * 8, scale=-x.scale))
    subject.require_right("negative_scale", subject.call(negated), negated)


def head_independence(subject: PropertySubject) -> None:
    """Other, far larger data in head 1 do not change a bit of the other heads' output."""
    inputs = subject.changed(subject.inputs(), clone)
    before = subject.call(inputs).clone()

    def with_larger_head(inputs: Inputs) -> Inputs:
        changed = clone(inputs)
        for tensor in changed[:3]:
            tensor[:, 1] = tensor[:, 1].flip(1) * 16
        return changed

    changed = subject.changed(inputs, with_larger_head)
    _require_same_in_other_heads("head_independence", subject, inputs, before, subject.call(changed))


def contained_nan(subject: PropertySubject) -> None:
    """NaN in head 1 of V (for scores: of K) does not change a bit of the other heads' output.

    The further outputs that the variant returns are NaN in each row with a NaN score.
    """
    inputs = subject.inputs()
    before = subject.call(inputs).clone()
    name = LINEAR_IN[subject.computes]
    with_nan: torch.Tensor = getattr(inputs, name).clone()
    with_nan[:, 1] = float("nan")
    after = subject.call(inputs._replace(**{name: with_nan}))
    _require_same_in_other_heads("contained_nan", subject, inputs, before, after)
    for output in subject.more_outputs:
        _require_nan_rows(subject, inputs, output, "key")
        _require_nan_rows(subject, inputs, output, "query")


def _require_nan_rows(subject: PropertySubject, inputs: Inputs, output: str, what: str) -> None:
    """Put a NaN into a key or a query of head 1.  Each row that sees it must have NaN in a further output.

    Raises `WrongResult` if one has not.
    A kernel that tests the row sum with `l > 0` returns -inf, as for a row that sees no key.  One that does not write
    such a row is found by the bits of its NaN: they are those with which the output was filled.
    """
    place = min(inputs.q.shape[2], inputs.k.shape[2]) // 2  # under each mask, there is a row that sees this key
    with_nan = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone())
    (with_nan.k if what == "key" else with_nan.q)[:, 1, place] = float("nan")
    rows = subject.call(with_nan).more[output]
    has_nan = rows.isnan() & ~is_poison(rows)
    wrong = subject.exact_rows(output, with_nan).isnan() & ~has_nan  # [batch, heads, seq_q]
    if not wrong.any():
        return
    row = tuple(wrong.nonzero()[0].tolist())
    value = "not written" if is_poison(rows)[row] else f"{float(rows[row]):.6g}"
    message = f"the {parts.title_of(output)} of {int(wrong.sum())} rows is not NaN; in row {row} it is {value}"
    remedy = "test the row sum with `== 0`, not with `> 0`"
    raise WrongResult("contained_nan", f"contained_nan (NaN in {what} {place} of head 1): {message}; {remedy}")


def _require_same_in_other_heads(
    name: str, subject: PropertySubject, inputs: Inputs, before: Output, after: Output
) -> None:
    """Raise `WrongResult` if the output changed of a head that uses neither head 1 of Q nor head 1 of K and V.

    Outputs of a deterministic variant are compared bit by bit; other variants' outputs are judged.
    """
    group = inputs.q.shape[1] // inputs.k.shape[1]  # the query heads that share a head of K and V
    heads = [head for head in range(before.out.shape[1]) if head != 1 and head // group != 1]
    if not subject.variant.deterministic:
        kv_heads = [head // group for head in heads]
        exact = inputs.exact()
        of_heads = exact._replace(q=exact.q[:, heads], k=exact.k[:, kv_heads], v=exact.v[:, kv_heads])
        subject.require_right(name, after.of_heads(heads), of_heads)
        return
    if count := before.of_heads(heads).differs(after.of_heads(heads)):
        raise WrongResult(name, f"{name}: {count} elements of the other heads changed with head 1's inputs")
