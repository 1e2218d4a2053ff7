"""Backward functions, and attention with autograd: what they return, and a clear error for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CASE = "b1h2s32d64-fp16-bwd-seed0"
SHAPE = "torch.float16 [1, 2, 32, 64]"
HEAD = """\
import torch


def gradients(dout, q, k, v, out, lse, scale):
    dtype = q.dtype
    dout, q, k, v, out = (tensor.float() for tensor in (dout, q, k, v, out))
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return tuple(gradient.to(dtype) for gradient in (ds @ k, ds.mT @ q, p.mT @ dout))


def attention(q, k, v, scale):
    return (torch.softmax(q.float() @ k.float().mT * scale, -1) @ v.float()).to(q.dtype)


"""
BACKWARD = f"""\
{HEAD}def entry(dout, q, k, v, out, lse, *, scale, causal="none", dq, dk, dv):
    found = gradients(dout, q, k, v, out, lse, scale)
"""
AUTOGRAD = f"""\
{HEAD}def entry(q, k, v, *, scale, causal="none"):
"""
CALLED = f"""\
{HEAD}def entry(dout, q, k, v, out, lse, scale, *buffers):
    found = gradients(dout, q, k, v, out, lse, scale)
"""
ENTRY = 'entry: {kind: python, target: "kernel:entry"%s}\n'
SUPPORTS = "supports: {device: [cpu], causal: [none]}\n"
GRADIENTS = f"computes: gradients\n{SUPPORTS}"
BY_AUTOGRAD = ENTRY % ", autograd: true" + GRADIENTS
INPUTS = "dout, q, k, v, out, lse, scale"
OR_MORE = "[dq, dk, dv], which dbias and dsink may follow"
OR_WRITE = "return (dq, dk, dv), or write into them and return None"
OTHER_AXES = "(heads and keys are exchanged: return `dk.transpose(-3, -2)`)"
OR_RETURN = "or write `returns: [dq, dk, dv]` in entry.call if the function returns it"
IN_BASE_2 = "lse * 0.6931471805599453"  # natural, of one in base 2
VariantOf = Callable[..., Variant]


def call_line(arguments: str = INPUTS, more: str = "") -> str:
    """The entry of a function that is called with these arguments."""
    return ENTRY % f", call: {{arguments: [{arguments}]{more}}}"


RETURNED = call_line(more=", returns: [dq, dk, dv]") + GRADIENTS


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(keys, source)`: a variant with these keys in its manifest."""

    def make(keys: str, source: str = BACKWARD) -> Variant:
        folder = write_variant("mine", manifest=MANIFEST + keys, **{"kernel.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def judged(variant: Variant, case: str = CASE) -> CaseResult:
    """The verdict on one case."""
    return run_case(cpu_job(variant, case, repeats=0))


RIGHT = {
    "written": (ENTRY % "" + GRADIENTS, f"{BACKWARD}    for to, each in zip((dq, dk, dv), found): to.copy_(each)\n"),
    "returned": (ENTRY % "" + GRADIENTS, f"{BACKWARD}    return found\n"),
    "buffers returned": (
        ENTRY % "" + GRADIENTS,
        f"{BACKWARD}    return [to.copy_(each) for to, each in zip((dq, dk, dv), found)]\n",
    ),
    "called and returned": (RETURNED, f"{CALLED}    return found\n"),
    "called and written": (
        call_line(f"{INPUTS}, dq, dk, dv") + GRADIENTS,
        f"{CALLED}    for to, each in zip(buffers, found): to.copy_(each)\n",
    ),
    "called, one returned": (
        call_line(f"{INPUTS}, dk, dv", ", returns: [dq]") + GRADIENTS,
        f"{CALLED}    for to, each in zip(buffers, found[1:]): to.copy_(each)\n    return found[:1]\n",
    ),
    "autograd": (BY_AUTOGRAD, f"{AUTOGRAD}    return attention(q, k, v, scale)\n"),
    "autograd, called": (
        ENTRY % ", autograd: true, call: {arguments: [q, k, v, scale], returns: 1}" + GRADIENTS,
        f"{HEAD}def entry(q, k, v, scale):\n    return None, attention(q, k, v, scale)\n",
    ),
}


@pytest.mark.parametrize("way", RIGHT)
def test_gradients_come_in_each_way(variant_of: VariantOf, way: str) -> None:
    """Gradients may be written, returned, or left to autograd, with `entry.call` or without."""
    assert judged(variant_of(*RIGHT[way])).message == ""


# A function with the gradients of a bias and a sink.
OF_PARTS = """\
import torch


def gradients(dout, q, k, v, out, lse, scale, attn_bias, sink):
    dtype = q.dtype
    dout, q, k, v, out = (tensor.float() for tensor in (dout, q, k, v, out))
    lse = lse.clamp_min(-1e30)  # some rows see nothing
    p = torch.exp(q @ k.mT * scale + attn_bias.float() - lse[..., None])
    delta = (dout * out).sum(-1, keepdim=True)
    ds = p * (dout @ v.mT - delta)
    dsink = -(torch.exp(sink.view(-1, 1, 1) - lse[..., None]) * delta).sum((0, 2, 3))
    found = [each.to(dtype) for each in (scale * ds @ k, scale * ds.mT @ q, p.mT @ dout, ds.sum(0, keepdim=True))]
    return (*found, dsink)


def attention(q, k, v, *, scale, attn_bias, sink, causal="none"):
    scores = q.float() @ k.float().mT * scale + attn_bias.float()
    all_scores = torch.cat([sink.clamp_min(-1e30).view(-1, 1, 1).expand(*scores.shape[:3], 1), scores], -1)
    return (all_scores.softmax(-1)[..., 1:] @ v.float()).to(q.dtype)


def entry(dout, q, k, v, out, lse, *, scale, attn_bias, sink, dq, dk, dv, dbias, dsink, causal="none"):
    found = gradients(dout, q, k, v, out, lse, scale, attn_bias, sink)
    for to, each in zip((dq, dk, dv, dbias, dsink), found):
        if to is not None: to.copy_(each)  # timed calls ask for dq, dk and dv


def returning(dout, q, k, v, out, lse, *, scale, attn_bias, sink, causal="none", **buffers):
    return gradients(dout, q, k, v, out, lse, scale, attn_bias, sink)


def mixed(dout, q, k, v, out, lse, scale, attn_bias, sink, dsink, dq):
    found = gradients(dout, q, k, v, out, lse, scale, attn_bias, sink)
    dq.copy_(found[0]), dsink.copy_(found[4])
    return found[1:4]
"""
OF_PARTS_KEYS = (
    "computes: gradients\nreturns: [dq, dk, dv, dbias, dsink]\n"
    "supports: {device: [cpu], causal: [none], bias: true, sink: true}\n"
)
MIXED = f"call: {{arguments: [{INPUTS}, attn_bias, sink, dsink, dq], returns: [dk, dv, dbias]}}"
WAYS_OF_PARTS = {"entry": "", "returning": "", "attention": ", autograd: true", "mixed": f", {MIXED}"}


@pytest.mark.parametrize("way", WAYS_OF_PARTS)
def test_gradients_of_a_bias_and_a_sink_come_in_each_way(variant_of: VariantOf, way: str) -> None:
    """The bias is the same in all batches, over which its gradient is summed."""
    entry = f'entry: {{kind: python, target: "kernel:{way}"{WAYS_OF_PARTS[way]}}}\n'
    variant = variant_of(entry + OF_PARTS_KEYS, OF_PARTS)
    result = run_case(cpu_job(variant, "b2h2s20d64-fp16-biashq-sink-bwd-seed1", repeats=2, time=way == "entry"))
    assert result.message == ""
    assert result.check
    assert {bound.name.partition(" ")[0] for bound in result.check.bounds} == {"dq", "dk", "dv", "dbias", "dsink"}


WRONG_OF_PARTS = {
    "of all batches": (
        "ds.sum(0, keepdim=True)",
        "ds",
        "dbias is torch.float16 [2, 2, 20, 20], it must be torch.float16 [1, 2, 20, 20]",
    ),
    "in 16 bits": (
        "(*found, dsink)",
        "(*found, dsink.to(dtype))",
        "dsink is torch.float16 [2], it must be torch.float32 [2] (return `dsink.to(torch.float32)`)",
    ),
    "too few": (
        "(*found, dsink)",
        "found",
        "the function returned a list of 4; return (dq, dk, dv, dbias, dsink), or write into them and return None",
    ),
}


@pytest.mark.parametrize("name", WRONG_OF_PARTS)
def test_what_is_no_gradient_of_a_bias_or_a_sink_is_named(variant_of: VariantOf, name: str) -> None:
    """A message has the shape that the gradient must have."""
    right, wrong, message = WRONG_OF_PARTS[name]
    keys = ENTRY.replace("kernel:entry", "kernel:returning") % "" + OF_PARTS_KEYS
    result = judged(variant_of(keys, OF_PARTS.replace(right, wrong)), "b2h2s20d64-fp16-biashq-sink-bwd-seed1")
    assert (result.message, result.check) == (message, None)


WRONG_RETURNS = {
    "one tensor": ("return found[0]", f"the function returned a Tensor; {OR_WRITE}"),
    "two": ("return found[:2]", f"the function returned a tuple of 2; {OR_WRITE}"),
    "one is None": ("return found[0], None, found[2]", f"the function returned None for dk; {OR_WRITE}"),
    "a number": ("return found[0], found[1], 3", f"dv is 3, it must be {SHAPE}"),
    "fewer rows": (
        "return found[0], found[1][:, :, :5], found[2]",
        f"dk is torch.float16 [1, 2, 5, 64], it must be {SHAPE}",
    ),
    "other axes": (
        "return found[0], found[1].transpose(1, 2), found[2]",
        f"dk is torch.float16 [1, 32, 2, 64], it must be {SHAPE} {OTHER_AXES}",
    ),
    "another dtype": (
        "return found[0], found[1], found[2].float()",
        f"dv is torch.float32 [1, 2, 32, 64], it must be {SHAPE} (return `dv.to(q.dtype)`)",
    ),
}


@pytest.mark.parametrize("name", WRONG_RETURNS)
def test_what_is_no_gradient_is_named(variant_of: VariantOf, name: str) -> None:
    """A message has the gradient, what it is, and what it must be or what to write."""
    line, message = WRONG_RETURNS[name]
    result = judged(variant_of(ENTRY % "" + GRADIENTS, f"{BACKWARD}    {line}\n"))
    assert (result.message, result.check) == (message, None)


@pytest.mark.parametrize(
    ("line", "found"),
    [("found[0]", "a Tensor"), ("found[:2]", "a tuple of 2 elements")],
)
def test_a_call_that_returns_fewer_is_named(variant_of: VariantOf, line: str, found: str) -> None:
    """With `entry.call.returns`, the message names that key."""
    result = judged(variant_of(RETURNED, f"{CALLED}    return {line}\n"))
    assert result.message == f"entry.call.returns is [dq, dk, dv], but the function returned {found}"


def test_a_gradient_that_is_not_written_is_named(variant_of: VariantOf) -> None:
    """The diagnosis names the buffer that still has its poison."""
    result = judged(variant_of(ENTRY % "" + GRADIENTS, f"{BACKWARD}    dq.copy_(found[0]), dk.copy_(found[1])\n"))
    assert result.caught_by == ("finite",)
    assert "of dv are NaN" in result.message
    assert result.diagnosis
    assert result.diagnosis.cause.startswith("the kernel never wrote dv in every batch, key head, key and dim")


NO_GRADIENT = "the function is called for its gradients, but its result has no gradient: it computes under `torch.no_g"
WRONG_FORWARDS = {
    "no_grad": ("with torch.no_grad(): return attention(q, k, v, scale)", NO_GRADIENT),
    "detached": ("return attention(q, k, v, scale).detach()", NO_GRADIENT),
    "without k": (
        "return attention(q, k.detach(), v, scale)",
        "the function gives no dk: its result does not depend on k",
    ),
    "a tuple": ("return attention(q, k, v, scale), None", "the output is a tuple (return item 0 alone, or write"),
    "another dtype": (
        "return attention(q.float(), k, v, scale)",
        f"the output is torch.float32 [1, 2, 32, 64], it must be {SHAPE} (write `return out.to(q.dtype)`)",
    ),
    "other axes": (
        "return attention(q, k, v, scale).transpose(1, 2)",
        f"the output is torch.float16 [1, 32, 2, 64], it must be {SHAPE} (heads and queries are exchanged: write",
    ),
}


@pytest.mark.parametrize("name", WRONG_FORWARDS)
def test_a_forward_without_a_gradient_is_named(variant_of: VariantOf, name: str) -> None:
    """With `autograd: true`, the message says what the function's result lacks."""
    line, message = WRONG_FORWARDS[name]
    result = judged(variant_of(BY_AUTOGRAD, f"{AUTOGRAD}    {line}\n"))
    assert result.message.startswith(message)


def test_a_function_under_autograd_gets_no_buffer(variant_of: VariantOf) -> None:
    """A function that needs `out` is told how it is called."""
    source = f'{HEAD}def entry(q, k, v, *, scale, causal="none", out):\n    return out\n'
    result = judged(variant_of(BY_AUTOGRAD, source))
    assert "it is called as f(q, k, v, scale=scale, causal=causal)" in result.message
    assert "missing a required argument: 'out'" in result.message


def test_a_backward_function_with_too_few_parameters_is_named(variant_of: VariantOf) -> None:
    """The message has the call and the parameters."""
    result = judged(variant_of(ENTRY % "" + GRADIENTS, f"{HEAD}def entry(q, k, v, dout):\n    pass\n"))
    called = "f(dout, q, k, v, out, lse, scale=scale, causal=causal, dq=dq, dk=dk, dv=dv)"
    assert f"it is called as {called}, but its parameters are (q, k, v, dout)" in result.message


MANIFESTS = {
    "autograd of attention": (
        ENTRY % ", autograd: true" + SUPPORTS,
        "entry.autograd is true, but computes is 'attention'; write `computes: gradients`, or drop autograd",
    ),
    "returns out": (
        ENTRY % "" + GRADIENTS + "returns: [out]\n",
        f"returns is [out], but computes is 'gradients'; write {OR_MORE}, or drop returns",
    ),
    "no dout": (
        call_line("q, k, v, out, lse, dq, dk, dv") + GRADIENTS,
        "entry.call does not pass 'dout'; add it to arguments or keywords",
    ),
    "no dk": (
        call_line(f"{INPUTS}, dq, dv") + GRADIENTS,
        f"entry.call names no 'dk'; add it to arguments if the function writes it, {OR_RETURN}",
    ),
    "dq twice": (
        call_line(f"{INPUTS}, dq", ", returns: [dq, dk, dv]") + GRADIENTS,
        "entry.call passes 'dq' and names it in returns; use only one of the two",
    ),
    "autograd and returns": (
        ENTRY % ", autograd: true, call: {arguments: [q, k, v, scale], returns: [dq, dk, dv]}" + GRADIENTS,
        "entry.call has 'dq', which is for a backward function; drop it, or drop autograd",
    ),
    "dlse not passed": (
        RETURNED.replace("device:", "dlse: true, device:"),
        "entry.call does not pass 'dlse', but supports.dlse is true; pass it",
    ),
    "not deterministic in out": (
        ENTRY % "" + GRADIENTS + "deterministic: {out: false}\n",
        "mine: deterministic has 'out'; mine returns dq, dk, dv",
    ),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_contradicts_itself_is_refused(variant_of: VariantOf, name: str) -> None:
    """The message has the key, the value found, and what to write."""
    keys, message = MANIFESTS[name]
    with pytest.raises(ManifestError) as refused:
        variant_of(keys)
    assert str(refused.value).partition("variant.yaml: ")[2] == message


CONVENTIONS = {
    "base 2 declared, natural read": (
        "conventions: {lse: base2}\n",
        "lse",
        "the log-sum-exp, which is in base 2, is taken for one in natural logarithms: P = exp2(S log2 e - L) is right",
    ),
    "base 2 read, natural declared": (
        "",
        IN_BASE_2,
        (
            "the log-sum-exp, which is in natural logarithms, is taken for one in base 2: P = exp(S - L) is right; "
            "if base 2 is meant, declare `conventions: {lse: base2}`"
        ),
    ),
    "base 2": ("conventions: {lse: base2}\n", IN_BASE_2, ""),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_log_sum_exp_in_another_base_is_named(variant_of: VariantOf, name: str) -> None:
    """A kernel gets the log-sum-exp in the base that it declares; if it reads the other one, the diagnosis says so."""
    keys, read, cause = CONVENTIONS[name]
    source = f"{BACKWARD}    return found\n".replace("out, lse, scale)\n    return", f"out, {read}, scale)\n    return")
    result = judged(variant_of(ENTRY % "" + GRADIENTS + keys, source))
    assert (result.diagnosis.cause if result.diagnosis else "") == cause
    assert result.outcome == ("wrong" if cause else "ok")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("b1h2s32d64-fp32-bwd-seed0", "gradients are judged in fp16 and bf16; drop -bwd, or write one of these"),
        ("b1h2s32d64-fp16-dlse-seed0", "only a backward pass has it; write -bwd, or drop -dlse"),
        ("b5h2s32d64-fp16-var5-page16-bwd-seed0", "a cache has no gradient; drop -page"),
    ],
)
def test_a_case_that_has_no_gradients_is_refused(case: str, message: str) -> None:
    """The message says why, and what to drop or write."""
    with pytest.raises(UsageProblem) as refused:
        parse_case(case)
    assert str(refused.value) == f"case '{case}': {message}"


def test_a_variant_refuses_what_it_does_not_compute(variant_of: VariantOf) -> None:
    """Attention refuses a backward case, a backward pass one of attention."""
    attention, backward = parse_case("b1h2s32d64-fp16-seed0"), parse_case(CASE)
    plain, of_gradients = variant_of(ENTRY % "" + SUPPORTS), variant_of(ENTRY % "" + GRADIENTS)
    words = "mine does not support b1h2s32d64-fp16{}: it computes {}, the case requires {}"
    assert plain.refuses(backward) == words.format("-bwd", "attention", "gradients")
    assert of_gradients.refuses(attention) == words.format("", "gradients", "attention")
    assert plain.refuses(attention) is None is of_gradients.refuses(backward)
