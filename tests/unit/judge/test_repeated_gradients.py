"""Repeats of a backward call: each gradient is compared, and only those may differ that the manifest names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job

CASE = "b1h2s32d64-fp16-bwd-seed0"
KEYS = (
    'computes: gradients\nentry: {kind: python, target: "entry:backward"}\n'
    "supports: {device: [cpu], causal: [none]}\ndeterministic: %s\n"
)
SOURCE = """\
import torch

CALLS = 0


def backward(dout, q, k, v, out, lse, *, scale, causal="none", dq, dk, dv):
    global CALLS
    CALLS += 1
    dout, q, k, v, out = (tensor.float() for tensor in (dout, q, k, v, out))
    p = torch.exp(q @ k.mT * scale - lse[..., None])
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    for buffer, gradient in ((dq, ds @ k), (dk, ds.mT @ q), (dv, p.mT @ dout)):
        buffer.copy_(gradient)
    if CALLS %% 4 == 3:
        %s
"""
FLICKERS = "{}.view(torch.int16)[0, 1, 5, 2] ^= 1"
Judge = Callable[..., CaseResult]


@pytest.fixture
def judged(write_variant: WriteVariant, tmp_path: Path) -> Judge:
    """`judged(deterministic, line)`: the verdict on 12 repeats of a kernel with this line in every fourth call."""

    def run(deterministic: str, line: str) -> CaseResult:
        folder = write_variant("mine", manifest=MANIFEST + KEYS % deterministic, **{"entry.py": SOURCE % line})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return run_case(cpu_job(variant, CASE, repeats=12))

    return run


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
@pytest.mark.parametrize("declared", ["{{{}: false}}", "false"])
def test_a_gradient_that_may_differ(judged: Judge, name: str, declared: str) -> None:
    """The differences are recorded, and are no fault."""
    result = judged(declared.format(name), FLICKERS.format(name))
    assert (result.outcome, result.message) == ("ok", "")
    assert result.repeats
    assert result.repeats.differing == (3 if name == "dq" else 0)
    assert result.repeats.gradients_differing == {each: 3 if name == each else 0 for each in ("dk", "dv")}


@pytest.mark.parametrize(
    ("declared", "name", "message"),
    [
        ("true", "dq", "3 of 12 repeats differ from the first call bit by bit"),
        ("{dk: false, dv: false}", "dq", "3 of 12 repeats differ from the first call bit by bit"),
        ("{dq: false}", "dk", "the dk of 3 of 12 repeats differs from the first call bit by bit"),
        ("{dq: false, dk: true}", "dk", "the dk of 3 of 12 repeats differs from the first call bit by bit"),
        ("{dq: false, dk: false}", "dv", "the dv of 3 of 12 repeats differs from the first call bit by bit"),
    ],
)
def test_a_gradient_that_must_not_differ(judged: Judge, declared: str, name: str, message: str) -> None:
    """Another gradient than those that the manifest names is wrong if one bit of it changes."""
    result = judged(declared, FLICKERS.format(name))
    assert (result.outcome, result.caught_by, result.message) == ("wrong", ("repeats",), message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dq[0, 1, 5] *= 2", "dq max error "),
        ("dq.zero_()", "dq max error "),
        ("dq[0, 1, 5, 2] = float('nan')", "1 of 4096 elements of dq are NaN or Inf"),
    ],
)
def test_a_gradient_that_may_differ_must_be_right(judged: Judge, line: str, message: str) -> None:
    """The repeat that differs most is judged by the truth."""
    result = judged("{dq: false}", line)
    assert (result.outcome, result.caught_by) == ("wrong", ("repeats",))
    assert result.message.startswith(message)
    assert result.message.endswith(" in a repeat")


OF_SINK = """\
    lse = lse.clamp_min(-1e30)
    dsink.copy_(-(torch.exp(sink[:, None, None] - lse[..., None]) * (dout * out).sum(-1, keepdim=True)).sum((0, 2, 3)))
"""


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("true", "the dsink of 3 of 12 repeats differs from the first call bit by bit"),
        ("{dq: false}", "the dsink of 3 of 12 repeats differs from the first call bit by bit"),
        ("{dsink: false}", ""),
    ],
)
def test_the_gradient_of_a_sink_is_repeated(
    write_variant: WriteVariant, tmp_path: Path, declared: str, message: str
) -> None:
    """It is compared bit by bit unless the manifest says that it may differ."""
    keys = KEYS.replace("causal: [none]", "causal: [none], sink: true") % declared + "returns: [dq, dk, dv, dsink]\n"
    source = SOURCE.replace("dq, dk, dv)", "dq, dk, dv, sink, dsink)", 1) % "dsink.view(torch.int32)[0] ^= 1"
    source = source.replace("    if CALLS", f"{OF_SINK}    if CALLS")
    folder = write_variant("mine", manifest=MANIFEST + keys, **{"entry.py": source})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    result = run_case(cpu_job(variant, "b1h2s32d64-fp16-sink-bwd-seed0", repeats=12))
    assert result.message == message
    assert result.repeats
    assert result.repeats.gradients_differing == {"dk": 0, "dv": 0, "dsink": 3}


def test_dk_that_may_differ_must_be_right(judged: Judge) -> None:
    """So is each further gradient."""
    result = judged("{dk: false}", "dk[0, 1, 5] *= 2")
    assert (result.outcome, result.caught_by) == ("wrong", ("repeats",))
    assert result.message.startswith("dk max error ")
