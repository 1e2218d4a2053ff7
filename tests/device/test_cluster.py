"""cluster_latency where its code differs: few keys, one pass, masks, several passes; and without each barrier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import MAY_REFUSE
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.built import Build
from pytest_fa.worker.client import Workers
from pytest_fa.worker.jobs import CaseJob
from pytest_fa.worker.pipeline import run_case
from tests.device.conftest import Built

SHAPES = (
    "b1h2s64d64-fp16",
    "b1h2s100d64-bf16",
    "b1h2s128d64-fp16",
    "b1h2s512d64-fp16",
    "b1h2s512d64-bf16-causal",
    "b1h2s300d64-bf16",
    "b1h2s700d64-fp16",
    "b1h2s600d64-fp16-causal_br-sk1100",
    "b1h2s200d64-bf16-sk250",
    "b1h2s256d64-fp16",
    "b4h8s300d64-fp16-sk512",  # one pass, but more blocks than SMs
    "b1h2s100d128-fp16",
    "b1h2s256d128-bf16-causal",
    "b1h2s512d128-fp16",
    "b1h2s600d128-fp16-causal_br-sk1100",
)
PROPERTIES = ("hard_data", "negative_scale", "zero_scale", "contained_nan")


@pytest.mark.parametrize("held", PROPERTIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_properties_hold_on_every_path(build_rung: Callable[[str], Built], shape: str, held: str) -> None:
    """Both blocks and groups have keys, the row max rises from pass to pass, nothing is masked, or all is one tile."""
    variant, library = build_rung("cluster_latency")
    case = parse_case(f"{shape}-seed0")
    job = CaseJob(variant, case, library, "cuda", "same_precision", judge=True, time=False, property_name=held)
    result = run_case(job)
    assert (result.outcome, result.message) == ("ok", "")


STRIDES = ("padded_rows", "expanded_heads", "offset_pointers", "new_shape", "graph_capture", "streams")
WIDE_SHAPES = ("b2h4s77d128-bf16-kv2", "b2h3s200d128-fp16-bshd", "b1h3s400d128-fp16-causal")
# `new_shape` cuts its other shape from one with as many key heads as heads.
WIDE = [(shape, held) for shape in WIDE_SHAPES for held in STRIDES if not (held == "new_shape" and "-kv" in shape)]


@pytest.mark.parametrize(("shape", "held"), WIDE)
def test_wide_heads_hold_what_suites_ask_of_narrow_ones(
    build_rung: Callable[[str], Built], shape: str, held: str
) -> None:
    """Suites try a rung at D = 64: strides, captures and streams at D = 128 are tried here."""
    variant, library = build_rung("cluster_latency")
    case = parse_case(f"{shape}-seed0")
    job = CaseJob(variant, case, library, "cuda", "same_precision", judge=True, time=False, property_name=held)
    result = run_case(job)
    allowed = {"ok", "unsupported"} if held in MAY_REFUSE else {"ok"}
    assert result.outcome in allowed, result.message


# V comes while exponentials are computed: without its barrier one build was wrong on all three shapes, another on none.
FAULTS = ("k", "given", "m_and_l", "o")
# Few keys are one block's, which sends nothing; where many blocks follow one another, some of them start late.
FAULT_SHAPES = ("b1h8s512d64-fp16", "b4h16s512d64-fp16", "b1h8s2048d64-fp16")


@pytest.fixture(scope="module")
def faults(shared_cache: Path) -> dict[str, Built]:
    """cluster_latency without one barrier each, built in one batch."""
    catalog = discover((Path(__file__).parents[2] / "kernels",)).variants
    requests = [(catalog[f"race_latency_{each}"], native_arch(catalog[f"race_latency_{each}"])) for each in FAULTS]
    outcomes = ensure(requests, shared_cache).outcomes
    found: dict[str, tuple[Variant, str]] = {}
    for variant, arch in requests:
        outcome = outcomes[(variant.name, arch)]
        assert isinstance(outcome, Build), outcome
        found[variant.name] = (variant, str(shared_cache / outcome.library))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_each_barrier_is_needed(faults: dict[str, Built], fault: str) -> None:
    """Without it a result is wrong or the device fails, on one of three shapes at least."""
    variant, library = faults[f"race_latency_{fault}"]
    cases = [parse_case(f"{shape}-seed0") for shape in FAULT_SHAPES]
    jobs = [CaseJob(variant, case, library, "cuda", "same_precision", judge=True, time=False) for case in cases]
    with Workers() as workers:
        outcomes = [workers.run(job).outcome for job in jobs]
    assert {"wrong", "device_error"} & {*outcomes}, outcomes
