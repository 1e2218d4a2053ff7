"""The long kernels for windows, other head sizes, soft caps and ragged batches: their code paths and planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fa.host.client import Workers
from tests.device.conftest import Built, is_found_out, judged

WINDOWS = (
    "b2h4s300d64-fp16-win37_21-kv2-sk400-sink-bshd",
    "b1h6s150d64-fp16-causal_br-kv2-sk77-sink",  # the first queries see nothing but the sink, which one head lacks
    "b1h2s130d64-fp16-winm100_o-sk200-sink",  # queries from 100 on see no key
    "b1h64s4096d64-bf16-win127_0-kv8-sink",  # many more work tiles than SMs
    "b2h16s4096d64-fp16-win1023_0-kv4",
    "b3h17s640d64-fp16-causal_br-sk900",
    "b2h4s300d128-bf16-win37_21-kv2-sk400-sink-bshd",
    "b2h16s2048d128-fp16-win127_0-kv8",
    "b1h2s130d64-fp16-win37_21-sk200-scalem0p7-sink",
)
SHAPES = {
    "long_window": WINDOWS,
    "long_next_s": WINDOWS,
    "long_heads": (
        "b2h4s333d80-fp16-win100_30-kv2-sk500-bshd",
        "b1h16s2100d96-bf16-causal",
        "b1h2s700d112-fp16-win64_0-sk300",
        "b1h2s300d192-fp16-causal-sk400-sink",
        "b1h2s500d256-fp16-causal_br-sk100",  # work tiles without keys, whose O is written where Q would be
        "b3h17s640d256-bf16-win60_0-sink",
    ),
    "long_mla": (
        "b2h4s150d192-fp16-win50_0-kv2-sk300-dv128-bshd",
        "b1h2s500d192-fp16-causal_br-sk100-dv128",
        "b3h17s640d192-bf16-causal-dv128",
    ),
    "long_cap": (
        "b1h2s130d128-fp16-win37_0-scalem0p7-cap30",
        "b1h2s70d64-fp16-sk200-cap3000-sink",
        "b3h17s640d64-bf16-causal-cap50",
    ),
    "long_ragged": (
        "b9h4s150d64-fp16-causal_br-kv2-var2-thd",
        "b9h2s257d64-fp16-causal-sk150-var2-thd",  # sequences with fewer keys than queries
        "b9h4s70d128-fp16-causal_br-kv2-sk256-var3-page16-thd",
        "b4h4s70d64-fp16-win37_21-kv2-sk400-var4-page16hnd-sink-bshd",
        "b8h32s1024d128-fp16-causal_br-kv8-var4",
    ),
}
SHAPES["long_sorted"] = SHAPES["long_ragged"]
TILES = {64: 5, 128: 3}  # shapes of work tiles of long_window, by head_dim
WITH_ONE_WARPGROUP = ((64, 3), (64, 4), (128, 2))
PATHS = [(rung, shape) for rung, shapes in SHAPES.items() for shape in shapes]
PROPERTIES = (None, "hard_data", "contained_nan")
# Where each planted fault must show.
FAULTS = {
    "wrong_long_begin_not_masked": "b1h2s70d64-fp16-win37_0-sk200",
    "wrong_long_begin_too_late": "b1h2s70d64-fp16-win37_0-sk400",
    "wrong_long_end_not_masked": "b1h2s70d64-fp16-win37_0-sk200",
    "wrong_long_sink_not_in_max": "b1h6s70d64-fp16-kv2-sink",
    "wrong_long_tail_not_cleared": "b9h2s70d64-fp16-causal_br-kv1-var2-thd",
    "wrong_long_stores_whole": "b9h2s70d64-fp16-sk4096-var3-thd",  # the first sequence ends long after the next ones
}


def complaint(built: Built, shape: str, property_name: str | None = None) -> str:
    """The outcome and the message of a judged case, or of one property; empty if it is right."""
    result = judged(built, shape, property_name=property_name)
    return "" if result.outcome == "ok" else f"{result.outcome}: {result.message}"


@pytest.mark.parametrize("property_name", PROPERTIES)
@pytest.mark.parametrize(("rung", "shape"), PATHS)
def test_every_path_is_right(
    build_rung: Callable[[str], Built], rung: str, shape: str, property_name: str | None
) -> None:
    """Results and numerical properties are right with tails, masks, windows, sinks, caps and lengths."""
    assert complaint(build_rung(rung), shape, property_name) == ""


@pytest.mark.parametrize(
    ("rung", "head_dim", "tile"),
    [("long_window", dim, tile) for dim, tiles in TILES.items() for tile in range(tiles)]
    + [("long_next_s", dim, tile) for dim, tile in WITH_ONE_WARPGROUP],
)
def test_each_shape_of_work_tiles_is_right(
    build_rung: Callable[[str], Built], rung: str, head_dim: int, tile: int
) -> None:
    """So are they with each number of warpgroups and of keys per tile, whichever a call would choose."""
    built = build_rung(f"{rung}@ONLY_SHAPE={tile}")
    shapes = [shape for shape in WINDOWS if f"d{head_dim}-" in shape]
    assert {shape: complaint(built, shape) for shape in shapes} == dict.fromkeys(shapes, "")


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found(workers: Workers, build_rung: Callable[[str], Built], name: str) -> None:
    """A kernel with one mistake in what a window hides, what a sink adds or where a sequence ends is rejected."""
    assert is_found_out(workers, build_rung(name), [FAULTS[name]])
