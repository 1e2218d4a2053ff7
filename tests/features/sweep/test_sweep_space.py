"""`sweep` in a manifest: its conditions are a small language of their own, and its space is enumerated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.features.sweep.condition import Condition
from pytest_fa.features.sweep.sweep_space import Sweep, feasible_points, point_text, sweep_problem

DEFINES: dict[str, int | str] = {"M": 64, "STAGES": 2, "MODE": "SERIAL"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("M == 64", True),
        ("M // 16 <= 3", False),
        ("STAGES * M * 256 + 1 <= 227 * 1024", True),
        ("M % 3 == 1 and STAGES - 3 == -1", True),
        ("M < 64 or MODE == 'SERIAL'", True),
        ("not MODE != 'SERIAL'", True),
        ("M in (32, 64)", True),
        ("MODE not in ['TURNS', 'SERIAL']", False),
        ("32 < M < 128", True),
        ("1 < STAGES < 2", False),
    ],
)
def test_a_condition_is_evaluated(text: str, *, expected: bool) -> None:
    """Arithmetic, comparisons, chains, lists and logic mean what they mean in Python."""
    assert expected is Condition(text).holds(DEFINES)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("__import__('os').system('x') == 0", """has "__import__('os').system('x')" (allowed: integers, texts"""),
        ("M.real == 1", "has 'M.real'"),
        ("M[0] == 1", "has 'M[0]'"),
        ("M ** M < 9", "has 'M ** M'"),
        ("(lambda: 1)() == 1", "has '(lambda: 1)()'"),
        ("[x for x in (1,)] == 1", "has '[x for x in (1,)]'"),
        ("M == 0.5", "has '0.5'"),
        ("True == M", "has 'True'"),
        ("M", "has 'M', which is no comparison"),
        ("M + 1", "has 'M + 1', which is no comparison"),
        ("M is 64", "has `is`"),
        ("M in MODE", "has `in MODE`; write a list, such as in (32, 64)"),
        ("M <", "cannot be parsed"),
        ("(" * 150 + "M", "cannot be parsed"),
        ("M < " + "1" * 200, "has 204 characters; at most 200 are allowed"),
    ],
)
def test_what_is_not_on_the_list_is_refused(text: str, complaint: str) -> None:
    """A condition is never executed: calls, attributes, powers and all other Python are refused when it is read."""
    with pytest.raises(UsageProblem) as caught:
        Condition(text)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("M // (STAGES - 2) == 1", "divides by zero at M=64, STAGES=2"),
        ("MODE < 3", "uses the text 'SERIAL' as a number"),
        ("'a' * 9 == M", "uses the text 'a' as a number"),
    ],
)
def test_a_condition_that_has_no_value_is_named(text: str, complaint: str) -> None:
    """A division by zero, or a text in arithmetic, is an error that names the condition."""
    with pytest.raises(UsageProblem) as caught:
        Condition(text).holds(DEFINES)
    assert f"{text!r} {complaint}" in str(caught.value)


def test_the_space_is_enumerated() -> None:
    """Every combination of values is listed once, in the manifest's order, if all conditions hold for it."""
    sweep = Sweep({"M": (32, 64), "STAGES": (2, 3)}, where=("M * STAGES < 192", "MODE == 'SERIAL'"))
    expected = ["M=32@STAGES=2", "M=32@STAGES=3", "M=64@STAGES=2"]
    assert (expected, 4) == ([point_text(each) for each in feasible_points(sweep, DEFINES)], sweep.combinations)


@pytest.mark.parametrize(
    ("sweep", "complaint"),
    [
        (Sweep({"N": (1,)}), "sweep.values has 'N', which is not in defines (they are: M, STAGES, MODE)"),
        (Sweep({"STAGE": (1,)}), "did you mean 'STAGES'?"),
        (Sweep({"M": (1, 2, 1)}), "sweep.values.M has 1 twice"),
        (Sweep({"M": ("a\nb",)}), "the value 'a\\nb' of define M is not allowed"),
        (Sweep({"M": (1,)}, fitness=("instructions",)), "sweep.fitness is [instructions]; device_us comes first"),
        (Sweep({"M": (1,)}, where=("X < 1",)), "sweep.where: 'X < 1' has 'X' (the defines are: M, STAGES, MODE)"),
        (Sweep({"M": (1,)}, where=("M <",)), "sweep.where: 'M <' cannot be parsed"),
        (Sweep({"M": (1,)}, cases=("b1h2",)), "sweep.cases: "),
        (
            Sweep({name: tuple(range(101)) for name in DEFINES}),
            "sweep.values has 1,030,301 combinations; at most 1,000,000 are allowed",
        ),
    ],
)
def test_a_problem_is_named(sweep: Sweep, complaint: str) -> None:
    """Each problem has the key, the value found and what is allowed."""
    assert complaint in str(sweep_problem(sweep, DEFINES))


def test_a_member_has_a_sweep_of_its_own(tmp_path: Path) -> None:
    """A variant of a folder uses its own `sweep`, else that of the folder, with its own defines."""
    manifest = tmp_path / "both" / "variant.yaml"
    manifest.parent.mkdir()
    (manifest.parent / "kernel.cu").touch()
    manifest.write_text(
        "defines: {M: 64}\nsweep: {values: {M: [32, 64]}}\n"
        "variants:\n  one: {}\n  two:\n    defines: {N: 1}\n    sweep: {values: {N: [1, 2]}}\n"
    )
    sweeps = {each.name: Sweep.of(each) for each in read_manifest(manifest, tmp_path)}
    assert {"one": Sweep({"M": (32, 64)}), "two": Sweep({"N": (1, 2)})} == sweeps


def test_an_unknown_key_lists_the_allowed_ones(tmp_path: Path) -> None:
    """The keys of `sweep` are checked as all others are."""
    manifest = tmp_path / "one" / "variant.yaml"
    manifest.parent.mkdir()
    manifest.write_text("defines: {M: 64}\nsweep: {value: {M: [1]}}\n")
    with pytest.raises(ManifestError, match=r"unknown key 'value' in sweep; did you mean 'values'\? \(allowed: values"):
        read_manifest(manifest, tmp_path)


SWEPT = [each for each in discover((Path(__file__).parents[3] / "kernels",)).variants.values() if Sweep.of(each)]


@pytest.mark.parametrize("variant", SWEPT, ids=str)
def test_a_sweep_of_the_ladder_contains_the_variant(variant: Variant) -> None:
    """The space of each sweep is small enough to try all of it, and the variant as it is belongs to it."""
    sweep = Sweep.of(variant)
    assert sweep is not None
    points = feasible_points(sweep, variant.defines)
    assert {name: variant.defines[name] for name in sweep.values} in points
    assert len(points) <= 100
    assert [None] * len(sweep.cases) == [variant.refuses(case) for case in sweep.searched_cases]


def test_the_ladder_has_sweeps() -> None:
    """A middle rung and those that choose among shapes of work tiles can be swept."""
    assert {"fp8_shapes", "long_shapes", "swizzle_async"} == {variant.name for variant in SWEPT}
