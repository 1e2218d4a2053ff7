"""The kernels for long sequences: their code paths (tails, masks, one tile, more work tiles than SMs) and barriers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_fa.host.client import Workers
from tests.device.conftest import Built, build_together, is_found_out, judged

RUNGS = (
    "long_block",
    "long_producer",
    "long_persistent",
    "long_store",
    "long_ring",
    "long_turns",
    "long_overlap",
    "long_max",
    "long_shapes",
    "long_causal",
    "long_fitted",
    "long_list",
    "long_next_q",
    "long_tail",
    "long_from_end",
)
# The number of warpgroups is the one that long_shapes chooses on a GPU with 132 SMs.
SHAPES = (
    "b1h2s1d64-fp16-sk127",  # one warpgroup; one query, one key tile
    "b1h2s65d64-fp16-sk129",  # one warpgroup; two key tiles
    "b1h2s300d64-bf16-causal-sk1100",
    "b1h2s1100d64-fp16-causal_br-sk600",  # the first queries see no key
    "b3h17s640d64-fp16-causal_br-sk900",  # two warpgroups; more work tiles than SMs, of different lengths
    "b1h16s2100d64-fp16-sk700",  # three warpgroups
    "b2h16s1023d64-fp16-kv4-sk1537",  # four warpgroups
    "b2h3s129d128-fp16-bshd",
    "b1h2s513d128-bf16-causal",
    "b3h17s640d128-fp16-causal_br-sk900",
    "b4h16s1100d128-fp16-causal",  # three warpgroups
    "b4h16s2048d128-fp16-causal",  # three warpgroups; long_list lists the work tiles
    "b1h8s1000d128-bf16-sk8192",  # long_tail divides the keys of work tiles
    "b1h8s4000d128-fp16",  # the same, after a complete round
)
# Heads that end inside a box of 64 columns.
HEADS_SHAPES = (
    "b2h4s333d80-fp16-kv2-sk500-bshd",
    "b1h2s1100d112-fp16-causal_br-sk600",  # the first queries see no key
    "b4h16s1100d96-bf16-causal",
    "b1h8s1000d96-bf16-sk8192",  # the keys of work tiles are divided
    "b1h8s4000d80-fp16",  # the same, after a complete round
)
PATHS = [
    *((rung, shape) for rung in RUNGS for shape in SHAPES),
    *(("long_heads_tail", shape) for shape in HEADS_SHAPES),
]
PROPERTIES = ("hard_data", "negative_scale", "zero_scale", "contained_nan")


@pytest.mark.parametrize("property_name", PROPERTIES)
@pytest.mark.parametrize(("rung", "shape"), PATHS)
def test_properties_hold_on_every_path(
    build_rung: Callable[[str], Built], rung: str, shape: str, property_name: str
) -> None:
    """Numerical properties hold at the shapes that select each of the kernel's code paths."""
    result = judged(build_rung(rung), shape, property_name=property_name)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("rung", RUNGS)
def test_as_many_work_tiles_as_multiprocessors(build_rung: Callable[[str], Built], rung: str, more: int) -> None:
    """Results are right if there is one work tile less than multiprocessors, as many, or one more."""
    # With two warpgroups per block, the 100 queries of a head are one work tile.
    heads = torch.cuda.get_device_properties(0).multi_processor_count + more
    result = judged(build_rung(rung), f"b1h{heads}s100d64-fp16-causal_br-sk400")
    assert (result.outcome, result.message) == ("ok", "")


FAULTS = ("q_full", "k_full", "v_full", "q_empty", "k_empty", "v_empty", "o_written", "part_stored")
# Many key tiles, and more work tiles than SMs, so that buffers are used again.
FAULT_SHAPES = ("b4h16s512d64-fp16", "b1h8s4096d64-fp16", "b2h16s4096d64-fp16-causal")
SPLIT_SHAPES = ("b4h16s2048d128-fp16", "b1h8s4096d128-fp16", "b1h8s1000d128-fp16-sk8192")


@pytest.fixture(scope="module")
def faults(shared_cache: Path) -> dict[str, Built]:
    """The builds that each lack one barrier, built in one batch."""
    return build_together([f"race_long_{fault}" for fault in FAULTS], shared_cache)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_barrier_is_needed(workers: Workers, faults: dict[str, Built], fault: str) -> None:
    """Without the barrier, a result is wrong or the device fails, on at least one of three shapes."""
    shapes = SPLIT_SHAPES if fault == "part_stored" else FAULT_SHAPES
    assert is_found_out(workers, faults[f"race_long_{fault}"], shapes), "no shape shows it"
