"""Which tests share a worker of pytest-xdist: a candidate and its baselines, or the checks of one variant."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.plugin.xdist_hooks import part_of, timed_shape_of, timed_shapes

VARIANTS = {"mine", "mine@BLOCK_M=64", "mine@X=1", "mine@X=-1"}
SUITE = "pytest_fa/suite/test_attention.py"
FIRST_SHAPE = "b1h8s512d64-fp16"
FIRST = {"b1h8s512d64-fp16-seed3", "b1h8s512d64-fp16-causal_br-kv2-seed3"}


@pytest.mark.parametrize(
    ("test", "shape"),
    [
        ("test_speed[mine-b1h8s512d64-fp16]", "b1h8s512d64-fp16"),
        ("test_speed[sdpa_cudnn-b1h8s512d64-fp16]", "b1h8s512d64-fp16"),
        ("test_profile[mine-b1h8s512d64-fp16]", "b1h8s512d64-fp16"),
        ("test_speed[mine@BLOCK_M=64-b1h8s512d64-fp16-causal_br-kv2]", "b1h8s512d64-fp16-causal_br-kv2"),
        ("test_correct[mine-b1h8s512d64-fp16-seed3]", "b1h8s512d64-fp16"),
        ("test_correct[mine-b1h8s512d64-fp16-causal_br-kv2-seed3]", "b1h8s512d64-fp16-causal_br-kv2"),
        ("test_correct[mine-b1h8s512d64-fp16-seed4]", None),
        ("test_correct[mine-b1h8s64d64-fp16-seed3]", None),
        ("test_build[mine]", None),
        ("test_property[mine-streams]", None),
        ("test_gate[mine]", None),
        ("tests/test_own.py::test_own", None),
    ],
)
def test_what_shares_a_worker(test: str, shape: str | None) -> None:
    """Timed tests of one shape and the check of its first seed stay together."""
    timed = {"b1h8s512d64-fp16", "b1h8s512d64-fp16-causal_br-kv2"}
    assert timed_shape_of(test, timed, {*FIRST, "b1h8s64d64-fp16-seed3"}) == shape


@pytest.mark.parametrize(
    ("test", "shapes"),
    [
        (f"{SUITE}::test_speed[mine-b1h8s512d64-fp16]", {FIRST_SHAPE}),
        (f"../lib/{SUITE}::test_profile[mine-b1h8s512d64-fp16]", {FIRST_SHAPE}),
        ("tests/test_own.py::test_correct[mine-b1h8s512d64-fp16-seed3]", {FIRST_SHAPE}),
        ("tests/test_attention.py::test_correct[mine-b1h8s512d64-fp16-seed3]", {FIRST_SHAPE}),
        (f"../lib/{SUITE}::test_correct[mine-b1h8s512d64-fp16-seed3]", set()),
        ("test_attention.py::test_correct[mine-b1h8s512d64-fp16-seed3]", set()),
        (f"{SUITE}::test_property[mine-streams]", set()),
        (f"{SUITE}::test_build[mine]", set()),
    ],
)
def test_what_may_be_timed(test: str, shapes: set[str]) -> None:
    """The suite's checks time nothing; any other test of a shape may."""
    others = [f"{SUITE}::test_build[mine]", f"{SUITE}::test_correct[mine-b1h2s1d64-fp16-seed0]"]
    assert timed_shapes([*others, test]) == shapes


@pytest.mark.parametrize(
    ("test", "variant"),
    [
        ("test_correct[mine-b1h8s512d64-fp16-seed3]", "mine"),
        ("test_correct[mine@BLOCK_M=64-b1h8s512d64-fp16-causal_br-kv2-seed3]", "mine@BLOCK_M=64"),
        ("test_property[mine-streams]", "mine"),
        ("test_property[mine@X=1-head_independence]", "mine@X=1"),
        ("test_build[mine]", "mine"),
        ("test_build[mine@X=-1]", "mine@X=-1"),
        ("test_sanitize[mine-memcheck]", "mine"),
    ],
)
def test_checks_of_one_variant_stay_together(test: str, variant: str) -> None:
    """Each test that is not timed belongs to a part of its variant."""
    assert part_of(test, VARIANTS, 1) == f"{variant} 0"


def test_the_tests_of_a_variant_are_in_several_parts() -> None:
    """Every part gets some of its cases and properties, and the same ones for every variant."""
    cases = [f"{FIRST_SHAPE}-seed{number}]" for number in range(100)]
    parts = {name: [part_of(f"test_correct[{name}-{case}", {"a", "b"}, 4) for case in cases] for name in "ab"}
    sizes = [parts["a"].count(f"a {number}") for number in range(4)]
    assert (sum(sizes), min(sizes) >= 10) == (100, True)
    assert [part.split()[1] for part in parts["a"]] == [part.split()[1] for part in parts["b"]]
    properties = {part_of(f"test_property[a-{name}]", {"a"}, 4) for name in PROPERTIES}
    assert properties == {f"a {number}" for number in range(4)}


@pytest.mark.parametrize("test", ["test_own.py::test_own", "test_own.py::test_own[cpu-1]", "test_own.py::test_own[0]"])
def test_tests_of_the_users_own_go_alone(test: str) -> None:
    """They have the worker that is free, whatever their parameters are called."""
    assert part_of(test, VARIANTS, 4) == test
