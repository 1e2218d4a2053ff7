"""Properties about what the tensors hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_fa.errors import WrongResult
from pytest_fa.judge.policies import ulp
from pytest_fa.judge.subject import Subject
from pytest_fa.run.inputs import LINEAR_IN, Inputs


def hard_data(subject: Subject) -> None:
    """Data on which shortcuts fail: every kind is judged, or compared with what it must equal."""
    inputs = subject.inputs()
    for name, changed, same_as in (
        ("scores 30 times as large", inputs._replace(q=inputs.q * 30), None),
        ("scores -30 times as large", inputs._replace(q=inputs.q * -30), None),
        ("one-hot rows", _one_hot(inputs), None),
        *_shifted(inputs),
        *_reversed(inputs),
    ):
        subject.require_right("hard_data", subject.call(changed), same_as or changed, f" ({name})")
    of_ones = inputs._replace(v=torch.ones_like(inputs.v))
    ones = subject.call(of_ones)
    subject.require_right("hard_data", ones, of_ones, " (values of one)")
    if not subject.is_exact:
        return
    worst = float((ones.double() - 1).abs().max())
    if not worst <= ulp(1.0, ones.dtype):
        raise WrongResult("hard_data", f"hard_data (values of one): the output is off from one by {worst:.3g}")


HardData = tuple[str, Inputs, Inputs | None]


def _one_hot(inputs: Inputs) -> Inputs:
    """One key in every 37 outweighs all others for its queries, so each row of the output is one row of V."""
    k, q = inputs.k / 8, torch.zeros_like(inputs.q)
    picked = range(0, k.shape[2], 37)
    for index, key in enumerate(picked):
        dim = index % q.shape[3]
        k[:, :, key] = 0
        k[:, :, key, dim] = 60
        q[:, :, index :: len(picked), dim] = 30
    return inputs._replace(q=q, k=k)


def _shifted(inputs: Inputs) -> Iterator[HardData]:
    """One vector is added to all keys: every score of a row moves alike.  K lies on a grid, so the sum is exact."""
    plain = inputs._replace(k=(inputs.k * 32).round() / 32)
    yield "keys shifted by 4", plain._replace(k=plain.k + 4), plain


def _reversed(inputs: Inputs) -> Iterator[HardData]:
    """Without a mask the order of keys means nothing."""
    if inputs.causal == "none":
        yield "keys in reverse order", inputs._replace(k=inputs.k.flip(2), v=inputs.v.flip(2)), inputs


def zero_scale(subject: Subject) -> None:
    """All keys weigh the same; scores are zero."""
    inputs = subject.inputs()._replace(scale=0.0)
    subject.require_right("zero_scale", subject.call(inputs), inputs)


def negative_scale(subject: Subject) -> None:
    """The smallest score has the most weight: a maximum taken before scaling is the wrong one."""
    inputs = subject.inputs()
    turned = inputs._replace(q=inputs.q * 8, scale=-inputs.scale)
    subject.require_right("negative_scale", subject.call(turned), turned)


def head_independence(subject: Subject) -> None:
    """Other, far larger data in head 1: the other heads keep every bit."""
    inputs = subject.inputs()
    before = subject.call(inputs).clone()
    changed = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())
    for each in changed[:3]:
        each[:, 1] = each[:, 1].flip(1) * 16
    _require_same_elsewhere("head_independence", subject, inputs, before, subject.call(changed))


def contained_nan(subject: Subject) -> None:
    """NaN in head 1 of V, or of K for scores: the other heads keep every bit."""
    inputs = subject.inputs()
    before = subject.call(inputs).clone()
    name = LINEAR_IN[subject.computes]
    spoiled: torch.Tensor = getattr(inputs, name).clone()
    spoiled[:, 1] = float("nan")
    after = subject.call(inputs._replace(**{name: spoiled}))  # type: ignore[arg-type]  # a tensor's name
    _require_same_elsewhere("contained_nan", subject, inputs, before, after)


def _require_same_elsewhere(
    name: str, subject: Subject, inputs: Inputs, before: torch.Tensor, after: torch.Tensor
) -> None:
    """Every head but 1 kept its bits; where a variant may differ from call to call, it is still right."""
    others = [each for each in range(before.shape[1]) if each != 1]
    if not subject.variant.deterministic:
        rest = inputs._replace(q=inputs.q[:, others], k=inputs.k[:, others], v=inputs.v[:, others])
        subject.require_right(name, after[:, others], rest)
        return
    differs = before[:, others].view(torch.int16) != after[:, others].view(torch.int16)
    if bool(differs.any()):
        raise WrongResult(name, f"{name}: {int(differs.sum())} elements of other heads changed with head 1")
