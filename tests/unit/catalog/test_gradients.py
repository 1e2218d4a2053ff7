"""A manifest of a backward pass: a value that it cannot have is refused with the line to write."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from tests.factories import WriteVariant

FUNCTION = "entry: {target: 'entry:backward'}\n"
GRADIENTS = f"computes: gradients\n{FUNCTION}"
BY_AUTOGRAD = "computes: gradients\nentry: {target: 'entry:forward', autograd: true"
INPUTS = "arguments: [dout, q, k, v, out, lse]"

WITH_SINK = (
    f"computes: gradients\nsupports: {{sink: true}}\nentry: {{target: 'entry:backward', call: {{{INPUTS[:-1]}, sink"
)


def read(write_variant: WriteVariant, text: str) -> list[Variant]:
    """The variants of a manifest."""
    folder = write_variant("mine", manifest=text)
    return read_manifest(folder / "variant.yaml", folder.parent)


def test_what_a_backward_pass_returns_and_what_may_differ(write_variant: WriteVariant) -> None:
    """It returns all gradients; each of them, or all, may be declared to differ from call to call."""
    members = "variants:\n  one: {deterministic: {dq: false, dk: true}}\n  all: {deterministic: false}\n  none: {}\n"
    variants = read(write_variant, GRADIENTS + members)
    assert [each.returns for each in variants] == [("dq", "dk", "dv")] * 3
    assert [each.may_differ for each in variants] == [("dq",), ("dq", "dk", "dv"), ()]
    assert [each.deterministic for each in variants] == [False, False, True]


def test_gradients_of_a_bias_and_a_sink_are_declared(write_variant: WriteVariant) -> None:
    """A manifest adds those that the kernel gives, and each of them may differ from call to call."""
    members = "variants:\n  one: {deterministic: {dsink: false}}\n  two: {returns: [dq, dk, dv, dbias]}\n"
    text = f"{GRADIENTS}supports: {{sink: true, bias: true}}\nreturns: [dq, dk, dv, dsink]\n{members}"
    variants = read(write_variant, text)
    assert [each.returns for each in variants] == [("dq", "dk", "dv", "dsink"), ("dq", "dk", "dv", "dbias")]
    assert [each.may_differ for each in variants] == [("dsink",), ()]


def test_a_member_may_compute_gradients(write_variant: WriteVariant) -> None:
    """A folder may have both passes."""
    text = f"{FUNCTION}variants:\n  there: {{}}\n  back: {{computes: gradients}}\n"
    variants = read(write_variant, text)
    assert [(each.computes, each.returns) for each in variants] == [
        ("attention", ("out",)),
        ("gradients", ("dq", "dk", "dv")),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"computes: backward\n{FUNCTION}", "computes is 'backward'; write `computes: gradients`; allowed: attention"),
        (
            f"supports: {{backward: true}}\n{FUNCTION}",
            "unknown key 'backward' in supports; write `computes: gradients`",
        ),
        (f"grads: true\n{FUNCTION}", "unknown key 'grads' in the manifest; write `computes: gradients`"),
        (
            f"supports: {{dsink: true}}\n{FUNCTION}",
            "unknown key 'dsink' in supports; write `computes: gradients`",
        ),
        (f"supports: {{dlse: true}}\n{FUNCTION}", "supports.dlse is true, but computes is 'attention'; write"),
        (
            f"entry: {{target: 'entry:backward', call: {{{INPUTS}}}}}\n",
            "entry.call has 'dout', which is for a backward function; write `computes: gradients`",
        ),
        (f"{BY_AUTOGRAD}, call: {{arguments: [q, k, v, dq]}}}}\n", "entry.call has 'dq', which is for a backward"),
        (f"{BY_AUTOGRAD}}}\nsupports: {{dlse: true}}\n", "supports.dlse is true, but entry.autograd is true"),
        (
            "entry: {target: 'entry:forward', autograd: true}\n",
            "entry.autograd is true, but computes is 'attention'; write `computes: gradients`, or drop autograd",
        ),
        (
            f"computes: gradients\nentry: {{target: 'entry:backward', call: {{{INPUTS}}}}}\n",
            "entry.call names no 'dq'; add it to arguments if the function writes it",
        ),
        (
            f"computes: gradients\nentry: {{target: 'entry:backward', call: {{{INPUTS.replace('lse', 'dq')}}}}}\n",
            "entry.call does not pass 'lse'",
        ),
        (
            f"{GRADIENTS}returns: [dq, dk, dv, dsink]\n",
            "returns is [dq, dk, dv, dsink], but supports.sink is false; write `sink: true`, or drop dsink",
        ),
        (
            f"{GRADIENTS}supports: {{sink: true, bias: true}}\nreturns: [dq, dk, dv, dsink, dbias]\n",
            "write [dq, dk, dv], which dbias and dsink may follow, or drop returns",
        ),
        (
            f"{FUNCTION}returns: [out, dsink]\n",
            "returns is [out, dsink], but computes is 'attention'; write `computes: gradients`",
        ),
        (
            f"{WITH_SINK}, dq, dk, dv]}}}}\nreturns: [dq, dk, dv, dsink]\n",
            "entry.call names no 'dsink'; add it to arguments if the function writes it, or write `returns: [dq, dk, d",
        ),
        (
            f"{WITH_SINK}, dq, dk, dv, dsink]}}}}\n",
            "entry.call has 'dsink', but returns is [dq, dk, dv]; write `returns: [dq, dk, dv, dsink]` at the top",
        ),
        (f"{GRADIENTS}deterministic: {{out: false}}\n", "deterministic has 'out'; mine returns dq, dk, dv"),
        (f"{GRADIENTS}supports: {{dtype: [fp16, fp32]}}\n", "supports.dtype has 'fp32', but gradients are judged with"),
        (
            f"{GRADIENTS}supports: {{layout: [packed], self_attention_only: true}}\n",
            "supports.layout has 'packed', but",
        ),
        (f"{GRADIENTS}supports: {{ragged: [keys], pages: true}}\n", "supports.pages is claimed, but a cache has no"),
        (f"{GRADIENTS}invariant: [chunk]\n", "invariant has 'chunk', but gradients are judged with batch and position"),
        (f"{GRADIENTS}tolerance: absolute\n", "tolerance is 'absolute', but computes is 'gradients'; it must be"),
    ],
)
def test_a_contradiction_is_refused(write_variant: WriteVariant, text: str, problem: str) -> None:
    """The message has the values found, and what to write."""
    with pytest.raises(ManifestError) as raised:
        read(write_variant, text)
    assert problem in str(raised.value)
