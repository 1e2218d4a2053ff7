"""The repository's probes on a GPU: outputs, properties, times, and the launch overhead at their shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.candidate.module import build_library, load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import MAY_REFUSE, declared_against, properties_of, property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UnsupportedCase
from pytest_fa.gpu.inputs import make_inputs, poisoned_output
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.scores import make_scores_truth
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.device.conftest import Built

PROBES = ("probe_gemm_4x4x4", "probe_qk_tile")
CATALOG = discover((Path(__file__).parents[2] / "kernels",)).variants
OWN = [(name, case.shape_id) for name in PROBES for case in CATALOG[name].cases]
PROPERTIES = [(name, property_name) for name in PROBES for property_name in properties_of(CATALOG[name])]


def job_of(variant: Variant, cache: Path, shape: str) -> CaseJob:
    """The job that judges and times a variant at the shape of a probe."""
    (case,) = [case for name in PROBES for case in CATALOG[name].cases if case.shape_id == shape]
    library = build_library(variant, cache)
    return CaseJob(
        variant, case, library, "cuda", "same_precision", checks_output=variant.is_judged, time=True, repeats=100
    )


@pytest.mark.parametrize(("name", "shape"), OWN)
def test_probes_are_right_and_timed(shared_cache: Path, name: str, shape: str) -> None:
    """Each probe is right, its repeats are bitwise equal, and it is timed at each of its own shapes."""
    result = run_case(job_of(CATALOG[name], shared_cache, shape))
    assert (result.outcome, result.message) == ("ok", "")
    assert result.repeats is not None
    assert result.repeats.differing == 0
    assert result.speed is not None
    assert result.speed.order != "branches"


@pytest.mark.parametrize("shape", [*(shape for _, shape in OWN), "b1h1s32d16-fp16-sk128-scores"])
def test_launch_overhead_is_measured_at_their_shapes(shared_cache: Path, shape: str) -> None:
    """`noop` can be timed with a probe's tensors, for any head_dim and any width of the scores."""
    case = parse_case(f"{shape}-seed0")
    library = build_library(CATALOG["noop"], shared_cache)
    result = run_case(CaseJob(CATALOG["noop"], case, library, "cuda", "same_precision", checks_output=False, time=True))
    assert (result.outcome, result.message) == ("ok", "")
    assert result.speed is not None


@pytest.mark.parametrize(("name", "property_name"), PROPERTIES)
def test_probes_hold_their_properties(shared_cache: Path, name: str, property_name: str) -> None:
    """Each property that applies to scores holds, or is refused if it may be refused."""
    variant = CATALOG[name]
    if property_name == "first_call_in_capture" and variant.entry.kind != "cuda":
        pytest.skip("a Python entry has no library that could be loaded again")
    if declared := declared_against(property_name, variant):
        pytest.skip(f"the manifest declares {declared}")
    job = CaseJob(
        variant,
        property_case(variant),
        build_library(variant, shared_cache),
        "cuda",
        "same_precision",
        checks_output=True,
        time=False,
        property_name=property_name,
    )
    result: CaseResult = run_case(job)
    assert result.outcome in (("ok", "unsupported") if property_name in MAY_REFUSE else ("ok",)), result.message


def test_an_output_of_another_shape_is_refused(build_rung: Callable[[str], Built]) -> None:
    """A probe of scores refuses an output of attention's shape, and an attention kernel an output of scores' shape."""
    (case,) = [case for case in CATALOG["probe_qk_tile"].cases if case.dtype == "fp16"]
    inputs = make_inputs(msgspec.structs.replace(case, seq_k=128), torch.device("cuda"))
    probe, rung = load_forward(*build_rung("probe_qk_tile")), load_forward(*build_rung("minimal"))
    scores = probe(inputs.q, inputs.k, inputs.v, scale=inputs.scale)
    torch.testing.assert_close(scores.double(), make_scores_truth(inputs).same_precision, rtol=2e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"out is .*: axis 3 must be 128"):
        probe(inputs.q, inputs.k, inputs.v, scale=inputs.scale, out=poisoned_output(inputs))
    with pytest.raises(ValueError, match=r"out is .*: axis 3 must be 64"):
        rung(inputs.q, inputs.k, inputs.v, scale=inputs.scale, out=poisoned_output(inputs, "scores"))


def test_unsupported_lengths_and_masks_are_refused(build_rung: Callable[[str], Built]) -> None:
    """`probe_qk_tile` refuses lengths that are not multiples of its tile, and a mask, each with a reason."""
    (case,) = [case for case in CATALOG["probe_qk_tile"].cases if case.dtype == "fp16"]
    probe = load_forward(*build_rung("probe_qk_tile"))
    odd = make_inputs(msgspec.structs.replace(case, seq_q=33), torch.device("cuda"))
    with pytest.raises(UnsupportedCase, match="seq_q is 33 and seq_k 64; they must be multiples of 32 and 64"):
        probe(odd.q, odd.k, odd.v, scale=odd.scale)
    whole = make_inputs(case, torch.device("cuda"))
    with pytest.raises(UnsupportedCase, match="scores have no mask"):
        probe(whole.q, whole.k, whole.v, scale=whole.scale, causal="top_left")
