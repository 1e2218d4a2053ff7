"""Presets: the counters of the verdict in each, on every chip, by names that the chip has."""

from __future__ import annotations

import gzip

import pytest

from pytest_fa import options
from pytest_fa.profile import presets
from pytest_fa.profile.presets import PRESETS, preset
from tests.factories import RECORDED

CHIPS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))
NEEDED = (presets.ACTIVE_MAX, presets.ELAPSED_MAX, presets.MEMORY, presets.XU, presets.FMA, presets.GRID, presets.SMS)


def test_the_options_offer_the_presets() -> None:
    """`--ncu-set` allows what there is."""
    assert PRESETS == options.NCU_SETS


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_what_a_verdict_takes(name: str, chip: presets.Capability) -> None:
    """Whatever is asked for, the sentence can be made, and no counter is asked for twice."""
    found = preset(name, chip).metrics
    assert set(NEEDED) <= set(found)
    assert len(found) == len(set(found))
    assert any("tensor" in each for each in found)


@pytest.mark.parametrize("name", PRESETS)
def test_a_hopper_chip_knows_every_name(name: str) -> None:
    """Each hardware counter stands in the list that ncu printed for gh100 (launch facts and limits are not listed)."""
    known = set(gzip.decompress((RECORDED / "gh100_metrics.txt.gz").read_bytes()).decode().split())
    asked = {each.split(".")[0] for each in preset(name, (9, 0)).metrics}
    listed = {each for each in asked if not each.startswith("launch__") and each != presets.OCCUPANCY_LIMIT}
    assert sorted(listed - known) == []


def test_wgmma_has_counters_of_its_own() -> None:
    """The HMMA counter reads 0 for wgmma: Hopper gets both, and its stall reason."""
    gmma = "sm__inst_executed_pipe_tensor_op_gmma.sum"
    assert [gmma in preset("tensor", chip).metrics for chip in CHIPS] == [False, False, False, True, False]
    assert [presets.stall("gmma") in preset("stalls", chip).metrics for chip in CHIPS] == [False] * 3 + [True, False]


def test_source_lines_are_sampled_where_asked() -> None:
    """`stalls` and `full` bring the source along; the others stay small."""
    assert [name for name in PRESETS if "--import-source" in preset(name, (9, 0)).flags] == ["stalls", "full"]
