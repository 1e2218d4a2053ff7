"""Tables by variant and by shape: parents first, changed lines counted, `-` where nothing was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.timing import Clocks
from tests.factories import MANIFEST, OK, WriteVariant, build, record, speed, variant
from tools.docs import shapes_block, variants_block
from tools.docs.block import TableProblem
from tools.docs.variants_block import in_order

REPOSITORY = Path(__file__).parents[2]
SHAPE = "b1h8s512d64-fp16"
LADDER = "columns=rung,changed_lines,checks,device_us,ratios,mma,registers,spills,smem"


def rows_of(table: str) -> list[list[str]]:
    """The cells of a table: its heads, and those of each row, without the line below it."""
    lines = table.partition("\n\n")[0].splitlines()
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [heads, *rows]


def by_variant(root: Path, words: str) -> list[list[str]]:
    """The rows of `fa-variants` for the folders `kernels` and `cpu`."""
    return rows_of(variants_block.block(f"profiles=cpu kernels=kernels {words}", root))


def by_shape(root: Path, words: str) -> list[list[str]]:
    """The rows of `fa-shapes` for the folder `cpu`."""
    return rows_of(shapes_block.block(f"profiles=cpu {words}", root))


def save_times(folder: Path, times_us: dict[str, float]) -> None:
    """Save a record of each variant with its time at SHAPE."""
    save_records([record(name, kind="speed", speed=speed(us)) for name, us in times_us.items()], folder)


# -- a row for each variant -------------------------------------------------------------------------------------------


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
    rows = by_variant(tmp_path, f"cases={SHAPE} against=sdpa_cudnn {LADDER}")
    assert rows[1:] == [
        ["`one`", "-", "not measured", *["-"] * 6],
        ["`two`", "3", "not measured", *["-"] * 6],
        ["`sdpa_cudnn`", "-", "not measured", *["-"] * 6],
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "figures"), [("ws_p2", 10), ("sdpa_cudnn", 6)])
def test_figures_are_those_of_the_records(name: str, figures: int) -> None:
    """The committed records of this repository give complete rows."""
    words = (
        f"profiles=profiles/nvidia-h200 kernels=kernels cases={SHAPE} against=minimal,sdpa_flash,sdpa_cudnn {LADDER}"
    )
    rows = rows_of(variants_block.block(words, REPOSITORY))
    (row,) = [each for each in rows if each[0] == f"`{name}`"]
    assert len(row) == len(rows[0])
    assert len([cell for cell in row if cell != "-"]) == figures


def test_expectations_have_their_measured_times(write_variant: WriteVariant, tmp_path: Path) -> None:
    """Each row has the manifest's `expect`, and a time at the shapes that were measured."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    save_times(tmp_path, {"one": 9.0})
    heads, *rows = by_variant(tmp_path, f"cases={SHAPE},b1h2s64d64-fp16 columns=rung,expected,device_us")
    assert heads[2:] == ["device_us `b1h8s512d64-fp16`", "device_us `b1h2s64d64-fp16`"]
    assert rows == [["`one`", "what the test asserts", "9.00", "-"]]


def test_a_failure_stands_in_place_of_the_time(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A cell says that the newest result is wrong, and when; it counts among the checks, and the time has no ratio."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    save_times(tmp_path, {"one": 9.0, "sdpa_cudnn": 12.0})
    save_records([record("one", check=OK)], tmp_path)
    later = "2026-03-04T00:00:00+00:00"
    save_records([record("one", check=OK, outcome=Outcome.WRONG, measured_at=later)], tmp_path)
    words = f"kernels=kernels cases={SHAPE} variants=one against=sdpa_cudnn columns=rung,checks,device_us,ratios"
    table = variants_block.block(f"profiles=cpu {words}", tmp_path)
    assert rows_of(table)[1:] == [
        ["`one`", "0/1", "wrong (2026-03-04)", "-"],
        ["`sdpa_cudnn`", "not checked", "12.00", "1.000"],
    ]
    assert table.splitlines()[-1] == (
        "Measured on the CPU a CPU, 2026-01-01, without a commit and older than the saving of failures (2026-11-27)."
    )
    property_failed = record("one", id="one-many_heads", kind="property", outcome=Outcome.HUNG, measured_at=later)
    save_records([property_failed], tmp_path / "other")
    save_times(tmp_path / "other", {"one": 9.0})
    other = variants_block.block(
        f"profiles=other/cpu cases={SHAPE} variants=one columns=variant,checks,device_us", tmp_path
    )
    assert rows_of(other)[1] == ["`one`", "0/1", "hung (2026-03-04)"]
    save_records([record("one", check=OK, measured_at="2026-12-05T00:00:00+00:00")], tmp_path)
    assert rows_of(variants_block.block(f"profiles=cpu {words}", tmp_path))[1] == ["`one`", "1/1", "9.00", "0.750"]


def test_expectations_of_named_rungs(write_variant: WriteVariant, tmp_path: Path) -> None:
    """With names, only those rungs have a row, in the order of the ladder."""
    for name, keys in (("one", ""), ("two", "parent: one\n"), ("three", "parent: two\n")):
        write_variant(name, manifest=MANIFEST + keys, **{"kernel.cu": ""})
    rows = by_variant(tmp_path, f"cases={SHAPE} variants=three,one columns=rung,expected,device_us")
    assert [row[0] for row in rows[1:]] == ["`one`", "`three`"]


def test_a_phase_is_the_difference_without_it(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A phase's time is the difference between an ablation and its parent; there is none if a time is missing."""
    write_variant("one", manifest=MANIFEST, **{"kernel.cu": ""})
    for name, parent in (("timed", "one"), ("untimed", "one"), ("unrelated", "another")):
        ablation = f"role: ablation\nparent: {parent}\nomits: phase of {name}\n"
        write_variant(name, manifest=MANIFEST + ablation, **{"kernel.cu": ""})
    save_times(tmp_path, {"one": 9.0, "timed": 6.5, "unrelated": 1.0})
    rows = by_variant(tmp_path, f"ablations_of=one cases={SHAPE} columns=omitted,measured_by,saved_us")
    assert rows == [
        ["omitted phase", "measured by", f"`{SHAPE}`"],
        ["nothing", "`one`", "9.00 us"],
        ["phase of timed", "`timed`", "-2.50 us"],
        ["phase of untimed", "`untimed`", "-"],
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("cases=x columns=saved_us", "the column saved_us needs ablations_of"),
        ("cases=x columns=rung,speed", "a column of fa-variants is 'speed' (allowed: variant, rung, "),
        ("cases= columns=rung", "cases names nothing"),
        ("cases=x columns=expected against=gone", "gone has no manifest"),
    ],
)
def test_a_table_of_variants_refuses(tmp_path: Path, words: str, problem: str) -> None:
    """A column that does not exist or needs another word, no case, and a variant without manifest are named."""
    (tmp_path / "kernels").mkdir()
    with pytest.raises(TableProblem) as raised:
        by_variant(tmp_path, words)
    assert problem in str(raised.value)


# -- a row for each shape ---------------------------------------------------------------------------------------------


def test_a_shape_has_rates_times_and_ratios(tmp_path: Path) -> None:
    """Each shape is a row with TFLOP/s, times and ratios; a time that is missing is a dash."""
    save_times(tmp_path, {"one": 4.0, "base": 8.0})
    words = f"cases={SHAPE},b1h2s64d64-fp16 variants=one,base against=base columns=rates,ratios"
    flops = 4 * 8 * 512 * 512 * 64
    assert by_shape(tmp_path, words)[1:] == [
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
    shapes = ",".join([*launched, "b1h4s128d64-fp16"])
    assert [row[1:] for row in by_shape(tmp_path, f"cases={shapes} variants=one columns=kernel,sm_mhz")] == [
        ["kernel of `one`", "SM MHz"],
        ["`__half, Shape<64, 4, 64>`", "1755"],
        ["`plain`", "1755"],
        ["-", "1755"],
        ["-", "-"],
    ]


@pytest.mark.parametrize("against", ["against=three", ""])
def test_ratios_need_one_of_their_variants(tmp_path: Path, against: str) -> None:
    """If `against` is missing, or not one of the variants, the message names the variants."""
    with pytest.raises(TableProblem, match=r"against is '(three)?' \(allowed: one, two\)"):
        by_shape(tmp_path, f"cases={SHAPE} variants=one,two columns=rates,ratios {against}")
