"""The ladder's table: parents first, lines counted, figures from records, nothing where nothing was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.records.log import save_records
from pytest_fa.report.ladder import expectation_rows, in_order, ladder_rows, phase_rows
from tests.factories import MANIFEST, WriteVariant, record, speed, variant

SHAPE = "b1h8s512d64-fp16"


def test_each_rung_stands_after_its_parent() -> None:
    """Depth first, children by name, a parent that is not there counts as none."""
    parents = {"c": "b", "b": "a", "a": None, "d": "a", "e": "elsewhere"}
    found = [msgspec.structs.replace(variant(name), parent=parent) for name, parent in parents.items()]
    assert [each.name for each in in_order(found)] == ["a", "b", "c", "d", "e"]


def test_lines_are_counted_and_nothing_is_made_up(write_variant: WriteVariant, tmp_path: Path) -> None:
    """Added and removed lines count alike; a rung without records has no figures."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": "a\nb\nc\n"})
    write_variant("two", manifest=MANIFEST + "parent: one\n", **{"kernel.cu": "a\nx\nc\nd\n"})
    write_variant("wrong", manifest=MANIFEST + "role: wrong\n", **{"kernel.cu": ""})
    rows = ladder_rows(tmp_path / "kernels", tmp_path / "profiles", [SHAPE], ["sdpa_cudnn"])
    assert [row[:4] for row in rows[1:]] == [
        ["`one`", "-", "not measured", "-"],
        ["`two`", "3", "not measured", "-"],
        ["`sdpa_cudnn`", "-", "not measured", "-"],
    ]


@pytest.mark.parametrize(("name", "figures"), [("ws_p2", 10), ("sdpa_cudnn", 6)])
def test_figures_are_those_of_the_records(name: str, figures: int) -> None:
    """The committed records of this repository give a whole row."""
    repository = Path(__file__).parents[3]
    rows = ladder_rows(
        repository / "kernels", repository / "profiles" / "nvidia-h200", [SHAPE], ["sdpa_flash", "sdpa_cudnn"]
    )
    (row,) = [each for each in rows if each[0] == f"`{name}`"]
    assert len(row) == len(rows[0])
    assert len([cell for cell in row if cell != "-"]) == figures


def test_what_was_expected_stands_beside_what_was_measured(write_variant: WriteVariant, tmp_path: Path) -> None:
    """The manifest's own words, and a time only where there is one."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    save_records([record("one", kind="speed", speed=speed(9.0))], tmp_path)
    heads, *rows = expectation_rows(tmp_path / "kernels", tmp_path / "cpu", [SHAPE, "b1h2s64d64-fp16"])
    assert heads[2:] == ["device_us `b1h8s512d64-fp16`", "device_us `b1h2s64d64-fp16`"]
    assert rows == [["`one`", "what the test asserts", "9.00", "-"]]


def test_a_stage_is_what_is_less_without_it(write_variant: WriteVariant, tmp_path: Path) -> None:
    """The difference to the parent's time, of its own ablations alone; no figure where one of both is missing."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    for name, parent in (("bare", "one"), ("idle", "one"), ("strange", "another")):
        ablation = f"role: ablation\nparent: {parent}\nomits: stage of {name}\n"
        write_variant(name, manifest=MANIFEST + ablation, **{"kernel.cu": ""})
    times = {"one": 9.0, "bare": 6.5, "strange": 1.0}
    save_records([record(name, kind="speed", speed=speed(us)) for name, us in times.items()], tmp_path)
    rows = phase_rows(tmp_path / "kernels", tmp_path / "cpu", "one", [SHAPE])
    assert rows[1:] == [
        ["nothing", "`one`", "9.00 us"],
        ["stage of bare", "`bare`", "-2.50 us"],
        ["stage of idle", "`idle`", "-"],
    ]
