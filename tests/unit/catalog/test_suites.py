"""Each named suite holds the cases that its name and comment promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.attention.dtypes import ELEMENT_BYTES
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.suites import DEFAULT_SUITE, SUITES, TARGET_SHAPE


@pytest.mark.parametrize(
    ("suite", "shapes", "seeds"),
    [("smoke", 4, 1), ("history", 4, 3), ("mission", 1, 100), ("edge", 23, 1), ("decode", 20, 1), ("serving", 15, 1)],
)
def test_every_shape_has_all_its_seeds(suite: str, shapes: int, seeds: int) -> None:
    """A suite has each of its shapes with each of its seeds, from 0, and no duplicates."""
    names = {case.shape_id for case in SUITES[suite]}
    expected = {f"{name}-seed{seed}" for name in names for seed in range(seeds)}
    assert (shapes, len(expected)) == (len(names), len(SUITES[suite]))
    assert expected == {case.id for case in SUITES[suite]}


def test_the_suite_mission_is_the_target_shape() -> None:
    """The suite `mission` has only the target shape."""
    assert {"b1h8s512d64-fp16"} == {TARGET_SHAPE} == {case.shape_id for case in SUITES["mission"]}


def test_the_default_suite_has_the_target_shape() -> None:
    """The default suite times the target shape, too."""
    assert TARGET_SHAPE in {case.shape_id for case in SUITES[DEFAULT_SUITE]}


def test_every_case_can_be_selected_by_its_id() -> None:
    """Parsing the id of a case in a suite gives that case."""
    cases = [case for cases in SUITES.values() for case in cases]
    assert cases
    assert [case for case in cases if case != parse_case(case.id)] == []


@pytest.mark.parametrize(
    ("suite", "dtypes"),
    [("smoke", {"fp16", "bf16", "fp32"}), ("edge", {"fp16", "bf16"}), ("decode", {"fp16", "bf16"})],
)
def test_several_dtypes_are_tested(suite: str, dtypes: set[str]) -> None:
    """The suites `smoke`, `edge` and `decode` have cases of fp16 and of bf16, `smoke` also of fp32."""
    assert dtypes == {case.dtype for case in SUITES[suite]}


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
def test_every_edge_is_tested(edge: str) -> None:
    """The suite `edge` has a case for each known source of tail, mask and stride bugs."""
    assert any(EDGES[edge](case) for case in SUITES["edge"])


@pytest.mark.parametrize("tile", [32, 64, 128, 1024])
def test_every_tile_size_has_a_tail(tile: int) -> None:
    """The suite `edge` has a length of one less or one more than each common tile size."""
    assert {tile - 1, tile + 1} & {case.seq_q for case in SUITES["edge"]}


def test_long_cases_are_long() -> None:
    """The suite `long` has cases over 100 GFLOP per call, for head_dim 64 and 128."""
    assert {64, 128} == {case.head_dim for case in SUITES["long"] if case.flops_per_call > 1e11}
    assert min(case.seq_q for case in SUITES["long"]) >= 2048


def test_decode_cases_have_few_queries_and_many_keys() -> None:
    """The suite `decode` has 1 to 8 queries, 1000 to 131,072 keys with odd lengths, and groups of 1, 4 and 8 heads."""
    cases = SUITES["decode"]
    assert {*range(1, 9)} - {6} <= {case.seq_q for case in cases} <= {*range(1, 9)}
    assert (1000, 131072) == (min(case.seq_k for case in cases), max(case.seq_k for case in cases))
    assert {1, 4, 8} == {case.heads // case.kv_heads for case in cases}
    assert sum(case.seq_k % 2 for case in cases) >= 6
    assert all(case.causal == "bottom_right" for case in cases if case.causal != "none")


def test_serving_cases_are_calls_of_three_models() -> None:
    """The suite `serving` has batches of 1 to 64, ragged but those of 1, and less than 4 GB of K and V in each case."""
    cases = SUITES["serving"]
    models = {(case.heads, case.kv_heads, case.head_dim) for case in cases}
    assert {(32, 8, 128), (64, 8, 128), (64, 8, 64)} == models
    assert [case.batch > 1 for case in cases] == [case.value_of("ragged") == 4 for case in cases]
    assert [case.head_dim == 64 for case in cases] == [case.value_of("sink") for case in cases]
    assert (1, 64) == (min(case.batch for case in cases), max(case.batch for case in cases))
    assert (1024, 131072) == (min(case.seq_k for case in cases), max(case.seq_k for case in cases))
    elements = (2 * case.batch * case.kv_heads * case.seq_k * case.head_dim for case in cases)
    assert max(ELEMENT_BYTES["bf16"] * number for number in elements) < 4e9


def test_sdpa_computes_the_serving_cases_without_sinks(tmp_path: Path) -> None:
    """SDPA's backends take the batches of 1, and on gathered copies the ragged ones, as the page of options says."""
    baselines = [each for each in discover((tmp_path,)).variants.values() if each.name.startswith("sdpa_")]
    computed = [case for case in SUITES["serving"] if any(each.refuses(case) is None for each in baselines)]
    assert computed == [case for case in SUITES["serving"] if not case.value_of("sink")]


def test_long_cases_cover_both_masks_at_every_length() -> None:
    """The suite `long` has, for each length and head_dim, a case without a mask and a causal one."""
    cells = {(case.seq_q, case.head_dim, case.causal) for case in SUITES["long"]}
    lengths, head_dims, masks = (2048, 4096, 8192, 16384), (64, 128), ("none", "top_left")
    assert cells == {(length, head_dim, mask) for length in lengths for head_dim in head_dims for mask in masks}


def test_long_cases_have_both_dtypes_at_one_length() -> None:
    """At 2x16x4096, the suite `long` has each head_dim and mask in fp16 and in bf16."""
    cases = [case for case in SUITES["long"] if (case.batch, case.heads, case.seq_q) == (2, 16, 4096)]
    in_dtype = {
        dtype: {(case.head_dim, case.causal) for case in cases if case.dtype == dtype} for dtype in ("fp16", "bf16")
    }
    assert in_dtype["fp16"] == in_dtype["bf16"] == {(dim, mask) for dim in (64, 128) for mask in ("none", "top_left")}
