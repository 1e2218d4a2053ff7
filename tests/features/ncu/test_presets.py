"""Presets: each has the counters that the bottleneck needs, on every chip, by names that the chip has."""

from __future__ import annotations

import gzip

import pytest

from pytest_fa.features.ncu import presets
from pytest_fa.features.ncu.plugin import SETS
from pytest_fa.features.ncu.presets import PRESETS, preset
from tests.factories import RECORDED

CHIPS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))
NEEDED = (presets.ACTIVE_MAX, presets.ELAPSED_MAX, presets.MEMORY, presets.XU, presets.FMA, presets.GRID, presets.SMS)


def test_the_options_offer_the_presets() -> None:
    """`--ncu-set` allows exactly the presets that exist."""
    assert PRESETS == SETS


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_counters_of_the_bottleneck(name: str, chip: presets.Capability) -> None:
    """Every preset has all counters that the bottleneck needs, each of them once."""
    metrics = preset(name, chip).metrics
    assert set(NEEDED) <= set(metrics)
    assert len(metrics) == len(set(metrics))
    assert any("tensor" in metric for metric in metrics)


@pytest.mark.parametrize("name", PRESETS)
def test_a_hopper_chip_knows_every_name(name: str) -> None:
    """Every hardware counter is in ncu's list for gh100; that list has no launch facts and no occupancy limits."""
    known = set(gzip.decompress((RECORDED / "gh100_metrics.txt.gz").read_bytes()).decode().split())
    bases = {metric.split(".")[0] for metric in preset(name, (9, 0)).metrics}
    hardware = {base for base in bases if not base.startswith("launch__") and base != presets.OCCUPANCY_LIMIT}
    assert sorted(hardware - known) == []


def test_wgmma_has_counters_of_its_own() -> None:
    """On Hopper, `tensor` has the counter of wgmma instructions and `stalls` their stall reason; other chips do not."""
    gmma = "sm__inst_executed_pipe_tensor_op_gmma.sum"
    assert [gmma in preset("tensor", chip).metrics for chip in CHIPS] == [False, False, False, True, False]
    assert [presets.stall("gmma") in preset("stalls", chip).metrics for chip in CHIPS] == [False] * 3 + [True, False]


def test_source_lines_are_sampled_where_asked() -> None:
    """Only `stalls` and `full` import the source into the report."""
    assert [name for name in PRESETS if "--import-source" in preset(name, (9, 0)).flags] == ["stalls", "full"]
