"""The named suites hold what their names and comments say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fa.catalog.case import DTYPES, Case, parse_case
from pytest_fa.catalog.suites import DEFAULT_SUITE, SUITES, TARGET_SHAPE

CASES = [case for cases in SUITES.values() for case in cases]


@pytest.mark.parametrize(
    ("suite", "shapes", "seeds"), [("smoke", 3, 1), ("history", 4, 3), ("mission", 1, 100), ("edge", 23, 1)]
)
def test_every_shape_has_all_its_seeds(suite: str, shapes: int, seeds: int) -> None:
    """A suite is its shapes times its seeds, counted from 0, with no case twice."""
    names = {case.shape_id for case in SUITES[suite]}
    expected = {f"{name}-seed{seed}" for name in names for seed in range(seeds)}
    assert (shapes, len(expected)) == (len(names), len(SUITES[suite]))
    assert expected == {case.id for case in SUITES[suite]}


def test_the_mission_is_one_shape() -> None:
    """The mission suite judges the one shape that the ladder is about."""
    assert {"b1h8s512d64-fp16"} == {TARGET_SHAPE} == {case.shape_id for case in SUITES["mission"]}


def test_history_holds_the_mission_shape() -> None:
    """What the default suite times can be compared with what the mission suite judged."""
    assert TARGET_SHAPE in {case.shape_id for case in SUITES[DEFAULT_SUITE]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_can_be_asked_for_by_its_id(case: Case) -> None:
    """The id of every case in a suite reads back as that case."""
    assert case == parse_case(case.id)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("suite", ["smoke", "edge"])
def test_both_dtypes_are_met(suite: str, dtype: str) -> None:
    """A suite that looks for mistakes looks in every dtype."""
    assert dtype in {case.dtype for case in SUITES[suite]}


EDGES: dict[str, Callable[[Case], bool]] = {
    "one query": lambda case: case.seq_q == 1,
    "fewer keys than queries": lambda case: 0 < case.seq_k < case.seq_q,
    "more keys than queries": lambda case: case.seq_k > case.seq_q,
    "no keys": lambda case: case.seq_k == 0,
    "one key": lambda case: case.seq_k == 1,
    "top-left mask": lambda case: case.causal == "top_left",
    "top-left mask, more keys": lambda case: case.causal == "top_left" and case.seq_k > case.seq_q,
    "rows that see no key": lambda case: case.causal == "bottom_right" and case.seq_k < case.seq_q,
    "bottom-right mask, more keys": lambda case: case.causal == "bottom_right" and case.seq_k > case.seq_q,
    "grouped heads": lambda case: 1 < case.kv_heads < case.heads,
    "one key/value head": lambda case: case.kv_heads == 1 < case.heads,
    "heads after sequence": lambda case: case.layout == "bshd",
    "several batches": lambda case: case.batch > 1,
    "heads that are no power of two": lambda case: case.heads == 3,
}


@pytest.mark.parametrize("edge", EDGES)
def test_every_edge_is_met(edge: str) -> None:
    """The edge suite has a case for each place where tails, masks and strides go wrong."""
    assert any(EDGES[edge](case) for case in SUITES["edge"])


@pytest.mark.parametrize("tile", [32, 64, 128, 1024])
def test_every_tile_size_has_a_tail(tile: int) -> None:
    """The edge suite has a sequence one short of, or one past, every usual tile size."""
    assert {tile - 1, tile + 1} & {case.seq_q for case in SUITES["edge"]}


def test_long_cases_are_long() -> None:
    """The long suite is where the two products outweigh the launch: over 100 GFLOP a call, in both head sizes."""
    assert {64, 128} == {case.head_dim for case in SUITES["long"] if case.flops_per_call > 1e11}
    assert min(case.seq_q for case in SUITES["long"]) >= 2048
