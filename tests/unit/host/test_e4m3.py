"""Jobs on e4m3 inputs: right kernels pass at every stage, and each mistake with descales is wrong."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import GRADIENTS_ONLY, ON_GPU, PROMISED, PROPERTIES
from pytest_fa.catalog.variant import tolerance_for
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, WriteVariant

CASE = "b1h4s150d64-e4m3-kv2-seed0"
PROPERTY_CASE = "b2h3s70d64-e4m3-seed0"
SUPPORTS = "supports: {device: [cpu], dtype: [e4m3], fp8_out: [fp16, bf16], causal: [none, top_left]}\n"
OWN_CALL = 'entry: {kind: python, target: "entry:forward"}\n'
SOURCE = """\
import torch


def forward(q, k, v, *, scale, q_descale, k_descale, v_descale, causal="none", out=None):
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.float().repeat_interleave(group, 1) for tensor in (k, v))
    k_descale, v_descale = (descale.repeat_interleave(group, 1) for descale in (k_descale, v_descale))
    factor = scale * q_descale * k_descale
    scores = q.float() @ k.transpose(2, 3) * factor[..., None, None]
    if causal == "top_left":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = (p * 256).to(torch.float8_e4m3fn).float() / 256
    result = rounded @ v / p.sum(-1, keepdim=True) * v_descale[..., None, None]
    return result.half() if out is None else out.copy_(result)
"""
# As a library names things: [batch, seq, heads, head_dim], descales in a list of their own, an output in bf16.
LIBRARY_SOURCE = (
    SOURCE.replace("def forward", "def right")
    + """

def forward(query, key, value, descale_q, descale_k, descale_v, softmax_scale, causal):
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    result = right(
        q, k, v, scale=softmax_scale, causal="top_left" if causal else "none",
        q_descale=descale_q, k_descale=descale_k, v_descale=descale_v,
        out=torch.empty(q.shape, dtype=torch.bfloat16),
    )
    return result.transpose(1, 2), None
"""
)
LIBRARY_CALL = """\
entry:
  kind: python
  target: "entry:forward"
  call:
    arguments: [q, k, v, q_descale, k_descale, v_descale]
    keywords: {softmax_scale: scale, causal: causal}
    layout: bshd
    returns: 0
"""
E4m3JobOf = Callable[..., CaseJob]


@pytest.fixture
def e4m3_job_of(write_variant: WriteVariant, tmp_path: Path) -> E4m3JobOf:
    """`e4m3_job_of(source)`: a job for the CPU that judges the kernel in `source` by the policy `fp8`."""
    numbers = itertools.count()

    def make(source: str = SOURCE, entry: str = OWN_CALL, case: str = CASE, **fields: object) -> CaseJob:
        folder = write_variant(f"e4m3_{next(numbers)}", manifest=MANIFEST + entry + SUPPORTS, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        job = CaseJob(variant, parse_case(case), None, "cpu", "fp8", checks_output=True, time=False)
        return msgspec.structs.replace(job, **fields)

    return make


def broken_bounds(result: CaseResult) -> list[str]:
    """The enforced bounds that an output breaks."""
    assert result.check is not None
    return [bound.name for bound in result.check.bounds if bound.enforced and not bound.holds]


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        "b2h4s77d64-e4m3-causal-out_bf16-outlier-seed1",
        "b1h2s64d64-e4m3-bshd-zero_head-seed0",
        "b1h2s64d64-e4m3-tiny-seed0",
    ],
)
def test_a_right_kernel(e4m3_job_of: E4m3JobOf, case: str) -> None:
    """A right kernel is ok at every stage, its repeats agree, and its timed calls are right on data of their own."""
    result = run_case(e4m3_job_of(case=case, repeats=3, time=True))
    assert (result.outcome, result.message) == ("ok", "")
    assert {stage.state for stage in result.stages} == {"ok"}
    assert result.speed is not None


def test_a_library_needs_only_a_manifest(e4m3_job_of: E4m3JobOf) -> None:
    """`entry.call` passes e4m3 tensors in the other layout and the descales, and selects the output in bf16."""
    result = run_case(e4m3_job_of(LIBRARY_SOURCE, LIBRARY_CALL, case="b1h4s150d64-e4m3-kv2-out_bf16-seed0"))
    assert (result.outcome, result.message) == ("ok", "")


def test_an_output_in_another_dtype(e4m3_job_of: E4m3JobOf) -> None:
    """An output in bf16 is wrong where the case has fp16."""
    result = run_case(e4m3_job_of(LIBRARY_SOURCE, LIBRARY_CALL))
    assert (result.outcome, result.caught_by) == ("wrong", ("output",))
    assert result.message.startswith("the output is torch.bfloat16 [1, 4, 150, 64], it must be torch.float16")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("scale * q_descale * k_descale", "scale * q_descale"),
        ("scale * q_descale * k_descale", "scale * q_descale.roll(1, 1) * k_descale"),
        ("* v_descale[..., None, None]", "* v_descale[:, :1, None, None]"),
        (
            "(p * 256).to(torch.float8_e4m3fn).float() / 256",
            "(p / p.sum(-1, keepdim=True)).to(torch.float8_e4m3fn).float() * p.sum(-1, keepdim=True)",
        ),
        ("(p * 256).to(torch.float8_e4m3fn).float() / 256", "(p * 1024).to(torch.float8_e4m3fn).float() / 1024"),
    ],
    ids=["no descale of K", "another head's Q", "first head's V", "normalised P", "P past 448"],
)
def test_a_mistake_is_wrong(e4m3_job_of: E4m3JobOf, right: str, wrong: str) -> None:
    """Each mistake breaks a bound, and the message of the failure is complete."""
    assert right in SOURCE
    result = run_case(e4m3_job_of(SOURCE.replace(right, wrong)))
    assert result.outcome == "wrong"
    assert broken_bounds(result) or result.caught_by == ("finite",)
    assert result.diagnosis is not None


def test_an_unscaled_p_is_wrong_beside_an_outlier(e4m3_job_of: E4m3JobOf) -> None:
    """P that is rounded without a scale is right on N(0, 1) data and wrong where one key outweighs all others."""
    source = SOURCE.replace("(p * 256).to(torch.float8_e4m3fn).float() / 256", "p.to(torch.float8_e4m3fn).float()")
    cases = ("b1h4s512d64-e4m3-seed0", "b1h4s512d64-e4m3-outlier-seed0")
    assert [run_case(e4m3_job_of(source, case=case)).outcome for case in cases] == ["ok", "wrong"]


def test_a_kernel_that_changes_a_descale(e4m3_job_of: E4m3JobOf) -> None:
    """A descale is an input that a kernel must not change."""
    result = run_case(e4m3_job_of(SOURCE.replace("    group =", "    v_descale.mul_(2)\n    group =")))
    assert (result.outcome, result.message) == ("wrong", "the kernel changed its input v_descale")


def test_a_kernel_with_p_in_16_bits_is_judged_by_its_output(e4m3_job_of: E4m3JobOf) -> None:
    """By the policy `same_precision`, P must keep the precision of the output: e4m3 is wrong and fp16 is right."""
    in_fp16 = SOURCE.replace("(p * 256).to(torch.float8_e4m3fn).float() / 256", "p.half().float()")
    results = [run_case(e4m3_job_of(source, policy="same_precision")) for source in (SOURCE, in_fp16)]
    assert [result.outcome for result in results] == ["wrong", "ok"]


@pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in ON_GPU | PROMISED | GRADIENTS_ONLY])
@pytest.mark.parametrize("policy", ["fp8", "same_precision"])
def test_properties(e4m3_job_of: E4m3JobOf, name: str, policy: str) -> None:
    """A right kernel has every property that needs no GPU."""
    source = (
        SOURCE
        if policy == "fp8"
        else SOURCE.replace("(p * 256).to(torch.float8_e4m3fn).float() / 256", "p.half().float()")
    )
    result = run_case(e4m3_job_of(source, case=PROPERTY_CASE, property_name=name, policy=policy))
    assert (result.outcome, result.message) == ("ok", "")


def test_a_kernel_that_keeps_its_descales(e4m3_job_of: E4m3JobOf) -> None:
    """Descales of V that are kept from the first call are found when the data change."""
    kept = "    v_descale = KEPT.setdefault(v.data_ptr(), v_descale.clone())\n    group ="
    source = SOURCE.replace("    group =", kept) + "\n\nKEPT = {}\n"
    result = run_case(e4m3_job_of(source, case=PROPERTY_CASE, property_name="new_data"))
    assert result.outcome == "wrong"


def test_a_variant_that_compiles_is_judged(e4m3_job_of: E4m3JobOf) -> None:
    """A variant that has loaded a compiler is asked with tensors in e4m3, too."""
    loads = "import sys\nimport types\n\nsys.modules['taichi'] = types.ModuleType('taichi')\n"
    result = run_case(e4m3_job_of(loads + SOURCE))
    del sys.modules["taichi"]
    assert (result.outcome, result.message) == ("ok", "")
    assert result.compile_seconds > 0


@pytest.mark.parametrize(("dtype", "policy"), [("e4m3", "fp8"), ("fp16", "same_precision"), ("bf16", "same_precision")])
def test_the_policy_of_e4m3_judges_no_other_dtype(dtype: str, policy: str) -> None:
    """A manifest's `fp8` does not loosen the bounds of cases in another dtype; the other policies hold for each."""
    assert tolerance_for("fp8", dtype) == policy
    assert tolerance_for("same_precision", dtype) == "same_precision"
