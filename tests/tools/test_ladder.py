"""The ladder's table: parents first, changed lines counted, figures from records, `-` if nothing was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.records.log import save_records
from pytest_fa.records.timing import Clocks
from tests.factories import MANIFEST, WriteVariant, build, record, speed, variant
from tools.docs.ladder import expectation_rows, in_order, ladder_rows, phase_rows, shape_rows

SHAPE = "b1h8s512d64-fp16"


def test_each_rung_is_below_its_parent() -> None:
    """The order is depth first, with children by name; a parent that does not exist counts as none."""
    parents = {"c": "b", "b": "a", "a": None, "d": "a", "e": "elsewhere"}
    variants = [msgspec.structs.replace(variant(name), parent=parent) for name, parent in parents.items()]
    assert [each.name for each in in_order(variants)] == ["a", "b", "c", "d", "e"]


def test_lines_are_counted_and_missing_figures_are_dashes(write_variant: WriteVariant, tmp_path: Path) -> None:
    """Added and removed lines are both counted; a rung without records has no figures."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": "a\nb\nc\n"})
    write_variant("two", manifest=MANIFEST + "parent: one\n", **{"kernel.cu": "a\nx\nc\nd\n"})
    write_variant("wrong", manifest=MANIFEST + "role: wrong\n", **{"kernel.cu": ""})
    rows = ladder_rows(tmp_path / "kernels", tmp_path / "profiles", [SHAPE], ["sdpa_cudnn"])
    assert [row[:4] for row in rows[1:]] == [
        ["`one`", "-", "not measured", "-"],
        ["`two`", "3", "not measured", "-"],
        ["`sdpa_cudnn`", "-", "not measured", "-"],
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "figures"), [("ws_p2", 10), ("sdpa_cudnn", 6)])
def test_figures_are_those_of_the_records(name: str, figures: int) -> None:
    """The committed records of this repository give complete rows."""
    repository = Path(__file__).parents[2]
    rows = ladder_rows(
        repository / "kernels", repository / "profiles" / "nvidia-h200", [SHAPE], ["sdpa_flash", "sdpa_cudnn"]
    )
    (row,) = [each for each in rows if each[0] == f"`{name}`"]
    assert len(row) == len(rows[0])
    assert len([cell for cell in row if cell != "-"]) == figures


def test_expectations_have_their_measured_times(write_variant: WriteVariant, tmp_path: Path) -> None:
    """Each row has the manifest's `expect`, and a time at the shapes that were measured."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    save_records([record("one", kind="speed", speed=speed(9.0))], tmp_path)
    heads, *rows = expectation_rows(tmp_path / "kernels", tmp_path / "cpu", [SHAPE, "b1h2s64d64-fp16"], [])
    assert heads[2:] == ["device_us `b1h8s512d64-fp16`", "device_us `b1h2s64d64-fp16`"]
    assert rows == [["`one`", "what the test asserts", "9.00", "-"]]


def test_a_phase_is_the_difference_without_it(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A phase's time is the difference between an ablation and its parent; there is none if a time is missing."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    for name, parent in (("timed", "one"), ("untimed", "one"), ("unrelated", "another")):
        ablation = f"role: ablation\nparent: {parent}\nomits: phase of {name}\n"
        write_variant(name, manifest=MANIFEST + ablation, **{"kernel.cu": ""})
    times = {"one": 9.0, "timed": 6.5, "unrelated": 1.0}
    save_records([record(name, kind="speed", speed=speed(us)) for name, us in times.items()], tmp_path)
    rows = phase_rows(tmp_path / "kernels", tmp_path / "cpu", "one", [SHAPE])
    assert rows[1:] == [
        ["nothing", "`one`", "9.00 us"],
        ["phase of timed", "`timed`", "-2.50 us"],
        ["phase of untimed", "`untimed`", "-"],
    ]


def test_expectations_of_named_rungs(write_variant: WriteVariant, tmp_path: Path) -> None:
    """With names, only those rungs have a row, in the order of the ladder."""
    for name, keys in (("one", ""), ("two", "parent: one\n"), ("three", "parent: two\n")):
        write_variant(name, manifest=MANIFEST + keys, **{"kernel.cu": ""})
    rows = expectation_rows(tmp_path / "kernels", tmp_path / "cpu", [SHAPE], ["three", "one"])
    assert [row[0] for row in rows[1:]] == ["`one`", "`three`"]


def test_a_shape_has_rates_times_and_ratios(tmp_path: Path) -> None:
    """Each shape is a row with TFLOP/s, times and ratios; a time that is missing is a dash."""
    times = {"one": 4.0, "base": 8.0}
    save_records([record(name, kind="speed", speed=speed(us)) for name, us in times.items()], tmp_path)
    rows = shape_rows(tmp_path / "cpu", [SHAPE, "b1h2s64d64-fp16"], ["one", "base"], "base")
    flops = 4 * 8 * 512 * 512 * 64
    assert rows[1:] == [
        [f"`{SHAPE}`", f"{flops / 4e6:.0f}", "4.00", f"{flops / 8e6:.0f}", "8.00", "0.500"],
        ["`b1h2s64d64-fp16`", "-", "-", "-", "-", "-"],
    ]


def test_a_shape_may_show_its_kernel_and_the_sm_clock(tmp_path: Path) -> None:
    """Of several kernels of a build, the launched one is shown, by its template arguments."""
    names = ("mine<__half, Shape<64, 4, 64> >", "mine<__half, Shape<64, 1, 64> >", "plain")
    kernels = dict.fromkeys(names, (1, 0, 0))
    clocks = Clocks(1755, 3201, 690.0, 60, 4)
    launched = {SHAPE: (names[0],), "b1h2s64d64-fp16": (names[2],), "b1h2s128d64-fp16": ()}
    records = [
        record(
            "one",
            case=f"{shape}-seed0",
            kind="speed",
            speed=msgspec.structs.replace(speed(4.0, launched=launches), clocks_during=clocks),
            builds=(build("sm_90a", **kernels),),
        )
        for shape, launches in launched.items()
    ]
    save_records(records, tmp_path)
    rows = shape_rows(tmp_path / "cpu", [*launched, "b1h4s128d64-fp16"], ["one"], "one", "one")
    assert [row[3:] for row in rows] == [
        ["kernel of `one`", "SM MHz"],
        ["`__half, Shape<64, 4, 64>`", "1755"],
        ["`plain`", "1755"],
        ["-", "1755"],
        ["-", "-"],
    ]
