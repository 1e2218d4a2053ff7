"""The warp-specialised trio is right on NaN-filled shared memory; without a barrier it is not, and that is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.built import Build
from pytest_fa.worker.jobs import CaseJob, CaseResult
from pytest_fa.worker.pipeline import run_case
from tests.device.conftest import Built

RUNS = 20
TARGET_CASE = "b1h8s512d64-fp16"
CROWDED = "b4h16s512d64-fp16"  # several blocks share a multiprocessor, so that warps drift apart
GOOD = ("stage2", "ws_p1", "ws_p2")
RACES = ("race_s_read_early", "race_s_by_one_warp")

# Without KV_EMPTY a producer laps its consumers and both wait for ever, and in stage2 nobody was ever seen to be that
# fast; ROWS_FOUND matters only where fewer warps compute S than there are.
BARRIERS = ("K_FULL", "V_FULL", "S_STORED", "P_STORED", "L_STORED", "O_STORED")
OMISSIONS = [f"ws_p1@OMIT_BARRIER={barrier}" for barrier in BARRIERS]


@pytest.fixture(scope="module")
def builds(shared_cache: Path) -> dict[str, Built]:
    """The trio, its races and the omissions, built for this GPU in one batch."""
    catalog = discover((Path(__file__).parents[2] / "kernels",))
    chosen = select_variants(catalog, (*GOOD, *RACES, *OMISSIONS))
    variants = [each for each in chosen if isinstance(each, Variant)]
    requests = [(each, native_arch(each)) for each in variants]
    outcomes = ensure(requests, shared_cache).outcomes
    found = {}
    for variant, arch in requests:
        outcome = outcomes[(variant.name, arch)]
        assert isinstance(outcome, Build), outcome
        found[variant.name] = (variant, str(shared_cache / outcome.library))
    return found


def run(built: Built, shape: str, seed: int, repeats: int | None) -> CaseResult:
    """One judged run."""
    variant, library = built
    case = parse_case(f"{shape}-seed{seed}")
    return run_case(CaseJob(variant, case, library, "cuda", "same_precision", judge=True, time=False, repeats=repeats))


@pytest.mark.parametrize("name", RACES)
def test_races_are_caught_by_dirty_shared_memory(builds: dict[str, Built], name: str) -> None:
    """A tile of scores that is read before it was written is NaN in at least 19 of 20 first calls."""
    results = [run(builds[name], TARGET_CASE, seed, 0) for seed in range(RUNS)]
    caught = [each for each in results if each.outcome == "wrong" and "NaN" in each.message]
    assert len(caught) >= RUNS - 1


@pytest.mark.parametrize("name", RACES)
def test_races_change_from_call_to_call(builds: dict[str, Built], name: str) -> None:
    """The repeats differ, which tells a race from an error that is always the same."""
    results = [run(builds[name], CROWDED, seed, 20) for seed in range(RUNS)]
    assert sum(each.repeats is not None and each.repeats.differing > 0 for each in results) >= RUNS - 1


@pytest.mark.parametrize("name", GOOD)
def test_good_sources_are_never_blamed(builds: dict[str, Built], name: str) -> None:
    """None of 20 runs of the source with all its barriers is caught, alone on a multiprocessor or in a crowd."""
    results = [run(builds[name], shape, seed, 100) for shape in (TARGET_CASE, CROWDED) for seed in range(RUNS)]
    assert [each.message for each in results] == [""] * 2 * RUNS


@pytest.mark.parametrize("name", OMISSIONS)
def test_barriers_are_needed(builds: dict[str, Built], name: str) -> None:
    """A build without one of the barriers is caught when other kernels keep part of the GPU busy."""
    outcomes = {run(builds[name], TARGET_CASE, seed, 200).outcome for seed in range(3)}
    assert outcomes == {"wrong"}
