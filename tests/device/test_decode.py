"""The code paths of the decode rungs, and each barrier and check of decode_cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.properties import MAY_REFUSE, PROMISED
from pytest_fa.host.client import Workers
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob
from tests.device.conftest import Built, build_together, is_found_out

SHAPES = (
    "b1h2s1d64-fp16-sk50",  # one block, of which one warp has no keys
    "b1h4s1d128-fp16-kv1-sk130",  # two blocks
    "b1h32s1d128-fp16-kv8-sk1023",  # one cluster of 16 blocks
    "b1h32s4d128-bf16-causal_br-kv8-sk1500",  # 16 rows, of which some see fewer keys
    "b2h8s8d64-fp16-causal_br-kv1-sk777",  # two tiles of 32 rows
    "b1h2s1d128-fp16-kv1-sk20001",  # several clusters
    "b1h8s5d64-bf16-causal_br-kv1-sk30011",  # several clusters and 40 rows
)
OTHER_RUNGS = ("decode_tile", "decode_warps", "decode_one_cluster", "decode_two_steps", "decode_short")
PROPERTIES = ("hard_data", "negative_scale", "zero_scale", "padded_rows", "graph_capture", "streams", "new_data")
# The other rungs differ from decode_cluster in their merges and in the order of their copies.
CHECKED = (
    *(("decode_cluster", name) for name in PROPERTIES if name not in PROMISED),
    *((rung, name) for rung in OTHER_RUNGS for name in ("hard_data", "new_data")),
)


@pytest.mark.parametrize(("rung", "property_name"), CHECKED)
@pytest.mark.parametrize("shape", SHAPES)
def test_properties_hold_on_every_path(
    build_rung: Callable[[str], Built], shape: str, rung: str, property_name: str
) -> None:
    """Properties hold at the shapes that select each way to split the keys."""
    variant, library = build_rung(rung)
    case = parse_case(f"{shape}-seed0")
    job = CaseJob(
        variant, case, library, "cuda", "same_precision", checks_output=True, time=False, property_name=property_name
    )
    result = run_case(job)
    allowed = {"ok", "unsupported"} if property_name in MAY_REFUSE else {"ok"}
    assert result.outcome in allowed, result.message


# 16 rows and one cluster; 32 rows; fewer steps of 16 keys than warps; several clusters.
FAULT_SHAPES = (
    "b1h32s1d128-fp16-kv8-sk4096",
    "b8h32s8d128-fp16-kv8-sk2048",
    "b1h2s1d64-fp16-sk50",
    "b1h4s1d128-fp16-kv1-sk65536",
)
FAULTS = (
    "race_decode_tile",
    "race_decode_k",
    "race_decode_v",
    "race_decode_warp_partial",
    "race_decode_incoming",
    "decode_empty_split",
    "decode_lost_tag",
    "decode_other_count",
)


@pytest.fixture(scope="module")
def faults(shared_cache: Path) -> dict[str, Built]:
    """The builds of the decode rungs that each have one mistake, built in one batch."""
    return build_together(FAULTS, shared_cache)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_barrier_and_check_is_needed(workers: Workers, faults: dict[str, Built], fault: str) -> None:
    """With the mistake, a result is wrong or the device fails, on at least one of four shapes."""
    assert is_found_out(workers, faults[fault], FAULT_SHAPES), "no shape shows it"
