"""Properties about the values in the tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.data import massive_key, one_hot
from pytest_fa.attention.grouped_heads import key_heads
from pytest_fa.errors import NoTruth, WrongResult
from pytest_fa.gpu.inputs import LINEAR_IN, Inputs, Output, clone, is_poison
from pytest_fa.judge.padding import cleared
from pytest_fa.judge.policies import ulp
from pytest_fa.judge.properties.cut import cut
from pytest_fa.judge.subject import PropertySubject


def hard_data(subject: PropertySubject) -> None:
    """Outputs are right on data that reveal numerical shortcuts: large scores, one-hot rows, shifted keys and others.

    An output is judged by the truth of its own inputs, or of other inputs with which the exact result of attention must
    agree; a log-sum-exp always by that of its own.
    """
    inputs = subject.inputs()
    for name, changed, equivalent in (
        ("scores 30 times as large", subject.changed(inputs, lambda x: x._replace(q=x.q * 30)), None),
        ("scores -30 times as large", subject.changed(inputs, lambda x: x._replace(q=x.q * -30)), None),
        ("one key 100 times as large", subject.changed(inputs, lambda x: massive_key(x, x.k.shape[2] // 2)), None),
        ("pairs of equal keys", subject.changed(inputs, _with_pairs), None),
        ("one-hot rows", subject.changed(inputs, one_hot), None),
        *_far_below_zero(subject, inputs),
        *_ends_of_range(subject, inputs),
        *_shifted(subject, inputs),
        *_reversed(inputs),
    ):
        output = subject.call(changed)
        judged = equivalent if equivalent is not None and subject.is_plain_attention else changed
        subject.require_right("hard_data", output, judged, f" ({name})", called=changed)
    inputs_of_ones = subject.changed(inputs, lambda x: x._replace(v=torch.ones_like(x.v)))
    output = subject.call(inputs_of_ones)
    subject.require_right("hard_data", output, inputs_of_ones, " (V full of ones)")
    if not subject.is_exact:
        return
    out = cleared(parts.padding(inputs_of_ones), output.out)
    exact = subject.exact(inputs_of_ones)  # 1, 0 in rows that see no key, and less than 1 beside a sink
    worst = float((out.double() - exact).abs().max()) if out.numel() else 0.0
    if not worst <= ulp(1.0, out.dtype):
        raise WrongResult("hard_data", f"hard_data (V full of ones): the output is {worst:.3g} off, allowed is 1 ulp")


HardData = tuple[str, Inputs, Inputs | None]  # name, inputs, and inputs with the same exact result if these differ

# A row maximum that starts at a finite number stays there if all scores are below it.
FAR_BELOW = 16.0  # q and -k in all dims but two: scores of -256 sqrt(D)
FREE_DIMS = 2
GRID = 4  # steps in 1: float32 adds products of such numbers without an error
FARTHEST = 1024.0  # q and -k in all dims but two: scores of -2^20 sqrt(D)
FARTHEST_KEYS = 16
FARTHEST_ROWS = 16  # one row of so many has them: weights of exactly 1 in each row would show errors of a fast exp
NEAR_FP16_END, PAST_FP16_END = 62500.0, 200000.0
PAST_FP16_Q = 2.0**18
FP16_SUBNORMAL = 2.0**-17


def _on_grid(tensor: torch.Tensor, steps: int) -> torch.Tensor:
    """The tensor rounded to multiples of 1 / `steps`."""
    return (tensor * steps).round() / steps


def _with_pairs(inputs: Inputs) -> Inputs:
    """Each key with an odd number is that before it, so that most maxima occur twice."""
    k = inputs.k.clone()
    k[:, :, 1::2] = k[:, :, : k.shape[2] // 2 * 2 : 2]
    return inputs._replace(k=k)


def _far_below_zero(subject: PropertySubject, inputs: Inputs) -> Iterator[HardData]:
    """Rows whose scores are all far below zero.

    Numbers of e4m3 are too coarse for them, and scores that are rounded to the dtype may be infinite there.  Float32
    loses what a bias adds to such scores.
    """
    if parts.adds_to_scores(inputs) or inputs.is_quantised:
        return
    if "s" in subject.variant.rounds or inputs.q.shape[3] <= FREE_DIMS:
        return
    dims = inputs.q.shape[3]
    q, k = _on_grid(inputs.q, GRID), _on_grid(inputs.k, GRID)
    q[..., FREE_DIMS:], k[..., FREE_DIMS:] = FAR_BELOW, -FAR_BELOW
    score = -(FAR_BELOW**2) * (dims - FREE_DIMS) * inputs.scale
    yield f"scores near {score:.0f}", inputs._replace(q=q, k=k), None
    # Few keys, which a kernel does not split: float32 rounds the log-sum-exp of each part by which parts are merged.
    # A backward pass gets it rounded in the same way.
    if subject.computes != "gradients" and (few := cut(subject, inputs, FARTHEST_KEYS)) is not None:
        yield _with_farthest_rows(few)


def _with_farthest_rows(inputs: Inputs) -> HardData:
    """Some rows whose scores are equal and far below -65504, the lowest number of fp16.

    A kernel that computes exp2(s * c - max * c) rounds max * c.  In a row of equal scores, this changes no weight.
    """
    q, k = _on_grid(inputs.q, GRID), _on_grid(inputs.k, GRID)
    q[..., FREE_DIMS:], k[..., FREE_DIMS:] = 0.0, -FARTHEST
    q[:, :, ::FARTHEST_ROWS, :FREE_DIMS], q[:, :, ::FARTHEST_ROWS, FREE_DIMS:] = 0.0, FARTHEST
    score = -(FARTHEST**2) * (q.shape[3] - FREE_DIMS) * inputs.scale
    return f"rows with scores of {score:.0f}", inputs._replace(q=q, k=k), None


def _ends_of_range(subject: PropertySubject, inputs: Inputs) -> Iterator[HardData]:
    """Values near the ends of the range of fp16, or past them if the dtype allows it.

    Rows are one-hot where the output has to be as large as V.
    """
    if inputs.is_quantised:
        return
    if inputs.q.dtype == torch.float16:
        largest = NEAR_FP16_END
        yield "V of subnormal numbers", inputs._replace(v=inputs.v * FP16_SUBNORMAL), None
    else:
        largest = PAST_FP16_END
        larger_q = inputs._replace(q=inputs.q * PAST_FP16_Q, k=inputs.k / PAST_FP16_Q)  # the scores stay the same
        yield f"q {PAST_FP16_Q:.0f} times as large", larger_q, inputs
    if subject.has_absolute_bound or subject.computes == "gradients":
        return  # the bound is far below one unit in the last place of such values, or dS past the end of the range
    hot = subject.changed(inputs, one_hot)
    signs = torch.where(inputs.v < 0, -largest, largest).to(inputs.v.dtype)
    yield f"V of {largest:.0f}", inputs._replace(v=signs), None
    yield f"one-hot rows and V of {largest:.0f}", hot._replace(v=signs), None


def _shifted(subject: PropertySubject, inputs: Inputs) -> Iterator[HardData]:
    """A constant added to all keys shifts all scores of a row equally and does not change the result.

    K is rounded to multiples of 1/32 first, so that the addition is exact.  In e4m3 it is not, and the shifted keys are
    judged by their own truth.
    """
    name = "keys shifted by 4"
    if inputs.is_quantised:
        yield name, subject.changed(inputs, lambda x: x._replace(k=x.k + 4)), None
        return
    gridded = inputs._replace(k=_on_grid(inputs.k, 32))
    yield name, gridded._replace(k=gridded.k + 4), None if parts.level_matters(inputs) else gridded


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
    """Other, far larger data in head 1 and in its head of K and V do not change a bit of the other heads' output."""
    inputs = subject.changed(subject.inputs(), clone)
    before = subject.call(inputs).clone()
    key_head = key_heads(inputs)[1]

    def with_larger_head(inputs: Inputs) -> Inputs:
        changed = clone(inputs)
        for tensor, head in zip(changed[:3], (1, key_head, key_head), strict=True):
            tensor[:, head] = tensor[:, head].flip(1) * 16
        return changed

    changed = subject.changed(inputs, with_larger_head)
    _require_same_in_other_heads("head_independence", subject, inputs, before, subject.call(changed), key_head)


def contained_nan(subject: PropertySubject) -> None:
    """NaN in head 1 of V (for scores: of K) does not change a bit of the other heads' output, and head 1 becomes NaN.

    Every output is NaN in each row that sees a key or a query with NaN.
    """
    inputs = subject.inputs()
    before = subject.call(inputs).clone()
    name = LINEAR_IN[subject.computes]
    with_nan: torch.Tensor = getattr(inputs, name).clone()
    with_nan[:, 1] = float("nan")
    after = subject.call(inputs._replace(**{name: with_nan}))
    _require_same_in_other_heads("contained_nan", subject, inputs, before, after, key_head=1)
    sees_keys = subject.exact(inputs).ne(0).any(-1, keepdim=True)  # [batch, heads, seq_q, 1]
    expected = subject.exact(inputs._replace(**{name: with_nan})).isnan() & sees_keys
    if (own := subject.variant.own_truth) and not bool(expected.any()):
        raise NoTruth(
            f"your reference {own.title} returns no NaN for a NaN in V; it must not hide one, as nan_to_num does"
        )
    _require_nan(after, expected, f"{name.upper()} of head 1")
    place = min(inputs.q.shape[2], inputs.k.shape[2]) // 2  # under each mask, there is a row that sees this key
    for what in ("key", "query"):
        changed = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone())
        (changed.k if what == "key" else changed.q)[:, 1, place] = float("nan")
        output = subject.call(changed)
        _require_nan(output, subject.exact(changed).isnan(), f"{what} {place} of head 1")
        for more, exact in subject.exact_rows(changed).items():
            _require_nan_rows(exact, output, more, f"{what} {place} of head 1")


def _require_nan(output: Output, expected: torch.Tensor, where: str) -> None:
    """Raise `WrongResult` unless the output has NaN wherever `expected` is true.

    A NaN that the kernel did not write is found by its bits: they are those with which the output was filled.
    """
    out = output.out
    missing = expected & ~(out.isnan() & ~is_poison(out))
    if not missing.any():
        return
    first = tuple(missing.nonzero()[0].tolist())
    value = "not written" if is_poison(out)[first] else f"{float(out[first]):.6g}"
    message = f"{int(missing.sum())} elements of the output are not NaN; element {first} is {value}"
    raise WrongResult("contained_nan", f"contained_nan (NaN in {where}): {message}: the kernel hides a NaN")


def _require_nan_rows(exact: torch.Tensor, output: Output, more: str, where: str) -> None:
    """Raise `WrongResult` unless a further output has NaN in each row that sees a NaN of the inputs.

    A kernel that tests the row sum with `l > 0` returns -inf, as for a row that sees no key.
    """
    rows = output.more[more]
    has_nan = rows.isnan() & ~is_poison(rows)
    wrong = exact.isnan() & ~has_nan  # [batch, heads, seq_q]
    if not wrong.any():
        return
    row = tuple(wrong.nonzero()[0].tolist())
    value = "not written" if is_poison(rows)[row] else f"{float(rows[row]):.6g}"
    message = f"the {parts.title_of(more)} of {int(wrong.sum())} rows is not NaN; in row {row} it is {value}"
    remedy = "test the row sum with `== 0`, not with `> 0`"
    raise WrongResult("contained_nan", f"contained_nan (NaN in {where}): {message}; {remedy}")


def _require_same_in_other_heads(
    name: str, subject: PropertySubject, inputs: Inputs, before: Output, after: Output, key_head: int
) -> None:
    """Raise `WrongResult` if the output changed of a head that uses neither head 1 of Q nor `key_head` of K and V.

    Outputs of a deterministic variant are compared bit by bit; other variants' outputs are judged.
    """
    heads_of_keys = key_heads(inputs)
    heads = [head for head in range(before.out.shape[1]) if head != 1 and heads_of_keys[head] != key_head]
    others = [head for head in range(inputs.k.shape[1]) if head not in (key_head, heads_of_keys[1])]  # of K and V
    if not subject.variant.deterministic:
        kv_heads = [heads_of_keys[head] for head in heads]
        if subject.computes == "gradients":  # which are sums over all heads of a group
            heads, kv_heads = [head for head in heads if heads_of_keys[head] in others], others
        exact = inputs.exact()
        extra = exact.extra_at(heads=torch.tensor(heads, device=exact.q.device))
        of_heads = exact._replace(q=exact.q[:, heads], k=exact.k[:, kv_heads], v=exact.v[:, kv_heads], extra=extra)
        subject.require_right(name, after.of_heads(heads, others), of_heads)
        return
    if count := before.of_heads(heads, others).differs(after.of_heads(heads, others)):
        raise WrongResult(name, f"{name}: {count} elements of the other heads changed with head 1's inputs")
