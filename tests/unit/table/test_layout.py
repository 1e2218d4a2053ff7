"""The table at several widths of a terminal; `--snapshot-update` writes the screens anew."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU
from pytest_fa.table.layout import COLD_FIRST, LEGEND, SHAPE_COLUMNS, TextLine, table_lines
from pytest_fa.table.rows import NOTHING, Row, RowGroup, make_groups, notes
from tests.factories import OK, SHAPE, WRONG, build, record, speed

SAVED = Path(__file__).parents[2] / "recorded" / "profiles" / "nvidia-h200"
WIDTHS = (80, 100, 120, 200)
SHAPES = ("b1h2s64d64-fp16", SHAPE)
VARIANTS = ("minimal", "ws_p2", "swizzle_async", "cluster_latency", "noop", "sdpa_flash", "sdpa_cudnn", "sdpa_math")


def saved_groups() -> list[RowGroup]:
    """The groups of recorded runs on an H200, and of a variant that is wrong in one of them."""
    records = [each for name in VARIANTS for each in read_records(SAVED / f"{name}.jsonl")]
    of_shapes = [each for each in records if each.case and each.case.shape_id in SHAPES]
    wrong = record("race_s_read_early", outcome=Outcome.WRONG, check=WRONG)
    return make_groups([*of_shapes, wrong], read_ceilings(SAVED.parent, "NVIDIA H200"))


def texts(lines: list[TextLine]) -> list[str]:
    """The texts of these lines."""
    return [line.text for line in lines]


def row(variant: str, device_us: str = "10.00", **cells: str) -> Row:
    """A row of a variant that was timed."""
    return Row(variant, SHAPE, **{"checks": "ok 1/1", "device_us": device_us, "versus_baseline": "1.500", **cells})


def shape_of(*rows: Row, heading: str = SHAPE) -> RowGroup:
    """The group of these rows."""
    return RowGroup("shape", heading, rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_recorded_runs(width: int, snapshot: SnapshotAssertion) -> None:
    """The table of recorded runs fits each width, and has the text of its golden file."""
    lines = texts(table_lines(saved_groups(), width))
    assert max(map(len, lines)) <= width
    assert snapshot(name=f"table-{width}") == "\n".join(lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_is_cut(width: int) -> None:
    """Every figure on a narrow screen is one of the figures of the wide table."""
    wide, narrow = (set(" ".join(texts(table_lines(saved_groups(), each))).split()) for each in (1000, width))
    assert narrow - wide == set()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_most_important_columns_stay(width: int) -> None:
    """Variant, checks, device time and ratio are shown at every width; the widest table has every filled column."""
    header = table_lines(saved_groups(), width)[0].text
    assert [name for name in ("variant", "checks", "device_us", "x baseline") if name not in header] == []
    filled = [column for column in SHAPE_COLUMNS if column.header not in ("GB/s", "% copy", "peak KiB")]
    assert all(column.header in table_lines(saved_groups(), 200)[0].text for column in filled)


SMALL_DECODE, LARGE_DECODE = "b1h32s1d128-fp16-kv8-sk4096", "b8h32s1d128-fp16-kv8-sk4096"  # 17 and 134 MB
H200_L2_BYTES = 50 * 1024 * 1024


def decode_group(shape: str, device_us: float) -> RowGroup:
    """The group of a shape with one query, timed on a GPU with the L2 and the rates of an H200."""
    timed = msgspec.structs.replace(speed(device_us), l2_bytes=H200_L2_BYTES, cold=speed(2 * device_us).device)
    case = f"{shape}-seed0"
    records = [record(case=case, check=OK), record(kind="speed", case=case, speed=timed)]
    return make_groups(records, read_ceilings(SAVED.parent, "NVIDIA H200"))[0]


def cells(group: RowGroup, width: int = 200) -> dict[str, str]:
    """The cells of the group's only row by their headers."""
    lines = texts(table_lines([group], width))
    names, figures = (re.split(r" {2,}", line.strip()) for line in (lines[0], lines[2]))
    return dict(zip(names, figures, strict=True))


def test_a_shape_bound_by_bytes_has_its_bandwidth() -> None:
    """Where the bytes take longer than the products, GB/s and the percentage of a copy stand instead of % peak."""
    shown = cells(decode_group(LARGE_DECODE, 40.0))
    assert {"GB/s": "3359", "% copy": "78.9"} == {name: shown[name] for name in ("GB/s", "% copy")}
    assert "% peak" not in shown


def test_a_shape_bound_by_products_has_no_bandwidth() -> None:
    """Where the products or an empty launch take longer than the bytes, no GB/s is shown and no cold time is first."""
    assert {NOTHING} == {
        cell for group in saved_groups() for line in group.rows for cell in (line.gb_per_s, line.percent_of_copy)
    }
    assert not any(group.fits_l2 for group in saved_groups())


@pytest.mark.parametrize("width", [80, 200])
def test_the_cold_time_is_first_where_the_keys_fit_l2(width: int) -> None:
    """If the bytes decide and fit into L2, cold_us stands before device_us, with a sentence that says why."""
    small, large = decode_group(SMALL_DECODE, 6.0), decode_group(LARGE_DECODE, 40.0)
    assert list(cells(small, width)).index("cold_us") == list(cells(small, width)).index("device_us") - 1
    assert COLD_FIRST == tuple(texts(table_lines([small], width))[-2:])
    assert list(cells(large)).index("cold_us") == list(cells(large)).index("device_us") + 1
    assert not set(COLD_FIRST) & set(texts(table_lines([large], width)))


def test_a_column_without_figures_is_left_out() -> None:
    """A column in which no row has a figure is not shown."""
    header = table_lines([shape_of(row("mine"))], 200)[0].text
    assert header.split() == ["variant", "checks", "device_us", "x", "baseline"]


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_name_has_a_line_of_its_own(width: int) -> None:
    """A name that is too long for its column is shown in full above its figures."""
    name = "cluster_latency@BLOCK_M=64@BLOCK_N=128@STAGES=2@PRODUCERS=1"
    *_, name_line, figures = texts(table_lines([shape_of(row(name))], width))
    assert (name_line.strip(), figures.split()) == (name, ["ok", "1/1", "10.00", "1.500"])


def test_what_is_wrong_is_red() -> None:
    """The lines of failures are red, and no others."""
    rows = [row("good"), row("bad", checks="WRONG 1/3"), row("new", checks="not checked")]
    lines = table_lines([shape_of(*rows)], 80)
    assert [line.text.split()[0] for line in lines if line.style == "red"] == ["bad"]


def test_builds_have_their_own_columns(snapshot: SnapshotAssertion) -> None:
    """Variants that were only built are shown with their resources and build times, and without empty columns."""
    builds = (build("sm_80", a=(96, 0, 0)), build("sm_90a", a=(168, 4, 8), b=(40, 0, 0)))
    records = [record("built", kind="build", builds=builds), record("bad", kind="build", outcome=Outcome.NOT_BUILT)]
    lines = texts(table_lines(make_groups(records), 80))
    assert lines[0].split() == ["variant", "arch", "result", "regs", "spill", "B", "smem", "B", "seconds"]
    assert snapshot(name="builds-80") == "\n".join(lines)


# -- many rows --------------------------------------------------------------------------------------------------------


def test_twenty_variants_on_four_shapes_fit_one_screen() -> None:
    """Twenty variants on four shapes have at most 70 lines, which leaves 30 of 100 to pytest; -v shows every row."""
    groups = [
        shape_of(
            row("sdpa_flash", "5.00", role="baseline"),
            *(row(f"v{index:02}", f"{10 + index}.00") for index in range(20)),
            row("noop", "0.70", role="overhead"),
            heading=f"shape{shape}",
        )
        for shape in range(4)
    ]
    assert len(table_lines(groups, 80, every_row=False)) <= 70
    assert len(table_lines(groups, 80, every_row=True)) == 1 + 4 * (1 + 22)


def test_the_fastest_the_wrong_and_the_best_baseline_are_shown() -> None:
    """Of many rows, the fastest candidates, the fastest baseline and all that are wrong are shown, then a count."""
    group = shape_of(
        *(row(f"v{index:02}", f"{10 + index}.00") for index in range(60)),
        row("sdpa_flash", "80.00", role="baseline"),
        row("sdpa_math", "90.00", role="baseline"),
        *(row(f"bad{index}", NOTHING, checks="WRONG 1/1") for index in range(3)),
    )
    names = [text.split()[0] for text in texts(table_lines([group], 80, every_row=False))]
    expected = ["variant", SHAPE, *(f"v{index:02}" for index in range(44)), "sdpa_flash", "bad0", "bad1", "bad2", "..."]
    assert expected == names
    assert texts(table_lines([group], 80, every_row=False))[-1].strip() == "... 17 more, 54.00 to 90.00 us"


# -- the legend -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [column.header for column in SHAPE_COLUMNS if column.header != "TFLOP/s"])
def test_the_headers_are_explained(header: str) -> None:
    """The legend explains the headers of the table that are not common terms."""
    assert re.search(rf"(^|, |  ){re.escape(header)}[:,]", "\n".join(LEGEND), re.MULTILINE)


def test_brackets_in_a_name_are_shown() -> None:
    """Square brackets in a name, which some libraries take for a style, are printed as they are."""
    assert "[red]mine" in texts(table_lines([shape_of(row("[red]mine"))], 80))[-1]


def test_a_cpu_table_fits(snapshot: SnapshotAssertion) -> None:
    """A run on the CPU has no columns of the GPU."""
    own = msgspec.structs.replace(speed(20.0, 20.0), cold_missing=ON_CPU, cpu_threads=1)
    base = msgspec.structs.replace(speed(10.0, 10.0), cold_missing=ON_CPU, cpu_threads=1)
    records: list[Record] = [
        record("mine", kind="speed", check=OK, speed=own),
        record("sdpa_flash", kind="speed", role="baseline", check=OK, speed=base),
    ]
    assert notes(records) == []
    assert snapshot(name="cpu-80") == "\n".join(texts(table_lines(make_groups(records), 80)))
