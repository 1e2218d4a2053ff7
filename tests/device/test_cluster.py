"""The code paths of cluster_latency (few keys, one pass, masks, several passes), and each of its barriers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.properties import MAY_REFUSE
from pytest_fa.host.client import Workers
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob
from tests.device.conftest import Built, build_together, is_found_out

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


@pytest.mark.parametrize("property_name", PROPERTIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_properties_hold_on_every_path(build_rung: Callable[[str], Built], shape: str, property_name: str) -> None:
    """Numerical properties hold at the shapes that select each of the kernel's code paths."""
    variant, library = build_rung("cluster_latency")
    case = parse_case(f"{shape}-seed0")
    job = CaseJob(
        variant, case, library, "cuda", "same_precision", checks_output=True, time=False, property_name=property_name
    )
    result = run_case(job)
    assert (result.outcome, result.message) == ("ok", "")


STRIDES = ("padded_rows", "expanded_heads", "offset_pointers", "new_shape", "graph_capture", "streams")
WIDE_SHAPES = ("b2h4s77d128-bf16-kv2", "b2h3s200d128-fp16-bshd", "b1h3s400d128-fp16-causal")
# `new_shape` reshapes the tensors, which needs as many key heads as query heads.
WIDE = [(shape, name) for shape in WIDE_SHAPES for name in STRIDES if not (name == "new_shape" and "-kv" in shape)]


@pytest.mark.parametrize(("shape", "property_name"), WIDE)
def test_properties_hold_at_head_dim_128(build_rung: Callable[[str], Built], shape: str, property_name: str) -> None:
    """Properties of strides, captures and streams hold at D = 128; the suites test them at D = 64 only."""
    variant, library = build_rung("cluster_latency")
    case = parse_case(f"{shape}-seed0")
    job = CaseJob(
        variant, case, library, "cuda", "same_precision", checks_output=True, time=False, property_name=property_name
    )
    result = run_case(job)
    allowed = {"ok", "unsupported"} if property_name in MAY_REFUSE else {"ok"}
    assert result.outcome in allowed, result.message


# The barrier of V is not listed: V arrives while exponentials are computed, so that without it one build was wrong on
# all three shapes and another on none.
FAULTS = ("k", "group_partial", "m_and_l", "o")
# With up to 128 keys one block does all the work and sends nothing, so shapes have more.  Where blocks run in several
# waves, some of them start late.
FAULT_SHAPES = ("b1h8s512d64-fp16", "b4h16s512d64-fp16", "b1h8s2048d64-fp16")


@pytest.fixture(scope="module")
def faults(shared_cache: Path) -> dict[str, Built]:
    """The builds of cluster_latency that each lack one barrier, built in one batch."""
    return build_together([f"race_latency_{fault}" for fault in FAULTS], shared_cache)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_barrier_is_needed(workers: Workers, faults: dict[str, Built], fault: str) -> None:
    """Without the barrier, a result is wrong or the device fails, on at least one of three shapes."""
    assert is_found_out(workers, faults[f"race_latency_{fault}"], FAULT_SHAPES), "no shape shows it"
