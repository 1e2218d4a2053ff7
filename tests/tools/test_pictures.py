"""Pictures drawn from records: the ladder, TFLOP/s over the length, time by phase, and errors.  Titles are findings."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.catalog.suites import TARGET_SHAPE
from pytest_fa.records.ceilings import read_ceilings, write_ceilings
from pytest_fa.records.checks import Bound
from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Ablation, Record
from pytest_fa.records.timing import Agreement
from pytest_fa.table.picture_style import BAR_COLOR, DARK_COLORS, PAGE_COLOR, REFERENCES, TEXT_COLOR, apart
from tests.factories import CEILINGS, ENVIRONMENT, SMALL_SHAPE, check, record, speed
from tools.docs import schedule_pictures
from tools.docs.error_picture import error_picture
from tools.docs.ladder_picture import ladder_picture
from tools.docs.long_picture import long_picture
from tools.docs.phase_picture import phase_picture
from tools.docs.pictures import NothingToShow, draw, main, read_timed
from tools.docs.scaling_picture import scaling_picture
from tools.docs.schedule_pictures import SCHEDULES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
ABLATIONS = {"without_pv": "P.V", "without_softmax": "softmax"}
ROLES_AND_TIMES = {
    "slow": ("candidate", 100.0),
    "ws_p2": ("candidate", 10.0),
    "ws_p2@STAGES=3": ("candidate", 9.0),
    "without_pv": ("ablation", 8.0),
    "without_softmax": ("ablation", 9.5),
    "sdpa_cudnn": ("baseline", 12.0),
    "noop": ("overhead", 0.6),
}


def timed_records(*shapes: str) -> list[Record]:
    """A timed record of each variant at each shape."""
    return [
        msgspec.structs.replace(
            timed_at(shape, name, us, role), ablation=Ablation(ABLATIONS[name], "ws_p2") if name in ABLATIONS else None
        )
        for name, (role, us) in ROLES_AND_TIMES.items()
        for shape in shapes
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPU's folder with timed records at the target shape and another one, and with ceilings."""
    save_records(timed_records(TARGET_SHAPE, SMALL_SHAPE), tmp_path)
    write_ceilings(CEILINGS, tmp_path)
    return tmp_path / "nvidia-h200"


def test_pictures_are_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command draws what the records have next to them, 800 pixels wide; the same records give identical files."""
    pytest.importorskip("matplotlib")
    save_records([*scaling_records(), *checked_records()], folder.parent)
    assert main([str(folder)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["ladder.svg", "scaling.svg", "phases.svg", "errors.svg"]
    first = [path.read_bytes() for path in paths]
    assert all(b'width="576pt"' in data for data in first)  # 8 inches
    draw(folder, CEILINGS)
    assert [path.read_bytes() for path in paths] == first


def test_the_pictures_follow_the_color_scheme(folder: Path) -> None:
    """Each colour of a picture has another on dark pages, also that of its page; its text can be searched."""
    pytest.importorskip("matplotlib")
    save_records([*scaling_records(), *long_records(), *checked_records()], folder.parent)
    for path in draw(folder, CEILINGS):
        svg = path.read_text(encoding="utf-8")
        style = re.findall(r"<style[^>]*>(.*)</style>", svg)
        assert len(style) == 1, path.name
        light, _, dark = style[0].partition("@media(prefers-color-scheme:dark)")
        rules = r"([fs][0-9a-f]{6}){(?:fill|stroke): (#[0-9a-f]{6})}"
        in_light, in_dark = dict(re.findall(rules, light)), dict(re.findall(rules, dark))
        assert {name: DARK_COLORS[color] for name, color in in_light.items()} == in_dark
        assert "ffffff" in {name[1:] for name in in_light}
        outside = svg.replace(style[0], "")
        assert re.findall(r"(?:fill|stroke): #[0-9a-f]+", outside) == [], path.name
        assert {name for names in re.findall(r'class="([^"]*)"', outside) for name in names.split()} <= set(in_light)
        assert re.search(r"<text [^>]*>[^<]*(?:ws_p2|fast|near|long|SDPA)", svg), path.name


@pytest.mark.nightly
def test_the_committed_pictures_are_of_the_saved_records(tmp_path: Path) -> None:
    """The pictures in `profiles/` are those that its records give with the pinned matplotlib."""
    matplotlib = pytest.importorskip("matplotlib")
    if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "constraints.txt").read_text(encoding="utf-8"):
        pytest.skip("another matplotlib may place text elsewhere")
    for source in sorted((ROOT / "profiles").glob("*/*.jsonl")):
        target = tmp_path / source.parent.name
        target.mkdir(exist_ok=True)
        (target / source.name).symlink_to(source)
    for target in sorted(tmp_path.iterdir()):
        saved = ROOT / "profiles" / target.name
        gpu = read_timed(target)[0].environment.gpu
        pictures = draw(target, read_ceilings(saved.parent, gpu))
        assert sorted(path.name for path in pictures) == sorted(path.name for path in saved.glob("*.svg"))
        old = [path.name for path in pictures if path.read_bytes() != (saved / path.name).read_bytes()]
        assert old == [], f"draw them again: python -m tools.docs.pictures profiles/{target.name}"


def test_what_the_records_lack_is_not_drawn(folder: Path) -> None:
    """Without checks and with one length, only the ladder and the phases are drawn."""
    pytest.importorskip("matplotlib")
    assert [path.name for path in draw(folder, None)] == ["ladder.svg", "phases.svg"]


# -- the ladder -------------------------------------------------------------------------------------------------------


def only_axis(figure: Figure | None) -> Axes:
    """The axis of a figure."""
    assert figure is not None
    (axis,) = figure.axes
    return axis


def test_the_ladder_shows_candidates_and_references(snapshot: SnapshotAssertion) -> None:
    """The fastest is on top; sweeps and ablations are omitted; SDPA and the empty launch have rows of their colour."""
    pytest.importorskip("matplotlib")
    figure = ladder_picture(timed_records(TARGET_SHAPE, SMALL_SHAPE))
    assert figure is not None
    axis = only_axis(figure)
    labels = axis.get_yticklabels()
    assert [label.get_text() for label in labels] == ["empty launch", "ws_p2", "SDPA cuDNN", "slow"]
    assert [text.get_text() for text in axis.texts] == ["0.60", "10.00", "12.00", "100.00"]
    assert [label.get_color() for label in labels] == [
        REFERENCES["noop"][1],
        TEXT_COLOR,
        REFERENCES["sdpa_cudnn"][1],
        TEXT_COLOR,
    ]
    assert axis.get_ylim()[0] > axis.get_ylim()[1]  # row 0 is on top
    assert snapshot == figure.get_suptitle()


def test_a_time_without_the_judge_is_hollow() -> None:
    """The dot of a time that the judge's clock did not measure is hollow, and the axis says what that means."""
    to_hex = pytest.importorskip("matplotlib.colors").to_hex
    records = timed_records(TARGET_SHAPE)
    assert only_axis(ladder_picture(records)).get_xlabel() == ""
    assert records[0].speed is not None
    records[0] = msgspec.structs.replace(records[0], speed=msgspec.structs.replace(records[0].speed, outside=None))
    axis = only_axis(ladder_picture(records))
    assert axis.get_xlabel() == "hollow dot: the judge's clock did not measure this time"
    fills = [to_hex(color) for color in np.asarray(axis.collections[1].get_facecolor())]
    assert fills == [REFERENCES["noop"][1], BAR_COLOR, REFERENCES["sdpa_cudnn"][1], PAGE_COLOR]


def test_a_wrong_or_unconfirmed_time_is_not_drawn() -> None:
    """A time of a wrong kernel, and one that the clocks do not confirm, is in no picture."""
    records = timed_records(TARGET_SHAPE)
    assert records[0].speed is not None
    denied = msgspec.structs.replace(records[0].speed, agreement=Agreement(False, "the clocks differ"))
    records[0] = msgspec.structs.replace(records[0], speed=denied)
    records[1] = msgspec.structs.replace(records[1], outcome=Outcome.WRONG)
    assert ladder_picture(records) is None


def test_without_the_target_shape_the_ladder_is_at_another() -> None:
    """Without the target shape, the ladder is at the shape with most candidates; without a candidate, there is none."""
    pytest.importorskip("matplotlib")
    assert "sequence 64" in only_axis(ladder_picture(timed_records(SMALL_SHAPE))).get_title(loc="left")
    assert ladder_picture([each for each in timed_records(SMALL_SHAPE) if each.role != "candidate"]) is None


# -- TFLOP/s over the length ------------------------------------------------------------------------------------------

LENGTHS = {256: 0.5, 512: 0.4, 1024: 0.9, 2048: 1.5}  # length -> time of `fast` divided by that of SDPA


def scaling_records() -> list[Record]:
    """The times of two candidates, of one that dispatches to the first, and of SDPA, at four lengths."""
    times = {"fast": 1.0, "same": 1.01, "slow": 4.0}
    shapes = {length: f"b1h8s{length}d64-fp16" for length in LENGTHS}
    records = [
        timed_at(shapes[length], name, factor * ratio * length)
        for length, ratio in LENGTHS.items()
        for name, factor in times.items()
    ]
    return records + [timed_at(shapes[length], "sdpa_cudnn", float(length), "baseline") for length in LENGTHS]


def timed_at(shape: str, name: str, us: float, role: str = "candidate") -> Record:
    """A time on the H200."""
    return record(name, f"{shape}-seed0", "speed", role=role, speed=speed(us), environment=ENVIRONMENT)


def test_the_lines_say_where_sdpa_is_slower(snapshot: SnapshotAssertion) -> None:
    """The title has the lengths where the fastest candidate is faster and slower; a line on another is left out."""
    pytest.importorskip("matplotlib")
    figure = scaling_picture(scaling_records(), CEILINGS)
    assert figure is not None
    assert snapshot == " ".join(figure.get_suptitle().split())
    axis = only_axis(figure)
    labels = ["fast", "slow", "SDPA cuDNN", "matrix products: 800 TFLOP/s (measured)"]
    assert [text.get_text() for text in axis.texts] == labels
    assert [label.get_text() for label in axis.get_xticklabels()] == ["256", "512", "1024", "2048"]
    rates = [float(rate) for rate in np.asarray(axis.get_lines()[0].get_ydata())]
    assert rates[1] == pytest.approx(4 * 8 * 512 * 512 * 64 / (0.4 * 512) / 1e6)


def long_records() -> list[Record]:
    """The times of a candidate, of cuDNN and, with a mask, of FlashAttention-3, at two lengths of the suite `long`."""
    shapes = [(size, mask) for size in ("b4h16s2048", "b2h16s4096") for mask in ("", "-causal")]
    times = {"long": ("candidate", 90.0), "sdpa_cudnn": ("baseline", 100.0), "flash_attention_3": ("baseline", 80.0)}
    return [
        timed_at(f"{size}d64-fp16{mask}", name, us, role)
        for size, mask in shapes
        for name, (role, us) in times.items()
        if mask or name != "flash_attention_3"
    ]


def test_long_sequences_have_a_panel_for_each_mask(snapshot: SnapshotAssertion) -> None:
    """Each mask has a panel with a line for each variant; the title compares with cuDNN and with FlashAttention-3."""
    pytest.importorskip("matplotlib")
    figure = long_picture(long_records())
    assert figure is not None
    assert snapshot == " ".join(figure.get_suptitle().split())
    assert {axis.get_title(loc="left"): len(axis.get_lines()) for axis in figure.axes} == {
        "head_dim 64": 2,
        "head_dim 64, causal": 3,
    }
    assert [text.get_text() for text in figure.axes[1].texts] == ["long", "SDPA cuDNN", "FlashAttention-3"]
    assert len({line.get_color() for line in figure.axes[1].get_lines()}) == 3
    rates = [float(rate) for rate in np.asarray(figure.axes[0].get_lines()[0].get_ydata())]
    assert rates == pytest.approx([4 * 64 * 2048**2 * 64 / 90e6, 4 * 32 * 4096**2 * 64 / 90e6])


def test_a_time_that_is_missing_is_counted() -> None:
    """Where a rival has no confirmed time, the title says at how many shapes."""
    pytest.importorskip("matplotlib")
    figure = long_picture(long_records())
    assert figure is not None
    words = "at 0 of 4 shapes (1.12 x its time; no confirmed time at 2)"
    assert words in " ".join(figure.get_suptitle().split())


def test_a_length_that_was_not_measured_interrupts_a_line() -> None:
    """No line is drawn over a length that was not measured; the axis says so."""
    pytest.importorskip("matplotlib")
    records = [each for each in scaling_records() if each.case and each.case.seq_q != 1024]
    axis = only_axis(scaling_picture(records, None))
    lines = [[int(length) for length in np.asarray(line.get_xdata())] for line in axis.get_lines()]
    assert lines == [[256, 512], [2048]] * 3
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels == ["256", "512", "1024\nnot measured", "2048"]


def test_one_long_length_is_no_picture() -> None:
    """Without two lengths of a candidate at one head_dim and mask, long sequences have no picture."""
    assert long_picture(long_records()[:5]) is None
    assert long_picture(scaling_records()) is None


def test_two_lengths_are_no_line() -> None:
    """With fewer than three lengths there is no such picture."""
    assert scaling_picture(scaling_records()[:6], None) is None


@pytest.mark.parametrize(("places", "expected"), [([0.0, 0.0], [-0.5, 0.5]), ([3.0, 0.0], [3.0, 0.0]), ([], [])])
def test_labels_are_apart(places: list[float], expected: list[float]) -> None:
    """Labels at the same height are moved apart around their mean; those that are apart stay."""
    assert apart(places, 1.0) == expected


# -- phases and errors ------------------------------------------------------------------------------------------------


def test_the_phases_name_the_longest(snapshot: SnapshotAssertion) -> None:
    """The title names the phase whose omission saves the most, with its share; each bar has its figure."""
    pytest.importorskip("matplotlib")
    figure = phase_picture(timed_records(TARGET_SHAPE))
    assert figure is not None
    assert snapshot == figure.get_suptitle()
    axis = only_axis(figure)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["softmax", "P.V"]
    assert [text.get_text() for text in axis.texts] == ["0.50", "2.00"]
    assert phase_picture([each for each in timed_records(TARGET_SHAPE) if not each.ablation]) is None


def checked_records() -> list[Record]:
    """Three checks of two variants, all of which hold."""
    used = [("near", "fp16", 0.8), ("near", "bf16", 0.5), ("far", "fp16", 0.1)]
    return [
        record(name, f"b1h2s64d64-{dtype}-seed0", check=check(Bound("max", share, 1.0, True)), environment=ENVIRONMENT)
        for name, dtype, share in used
    ]


def test_the_errors_name_the_closest(snapshot: SnapshotAssertion) -> None:
    """The title names the variant that comes closest to its bound; one that exceeds it is named instead."""
    pytest.importorskip("matplotlib")
    figure = error_picture(checked_records())
    assert figure is not None
    assert snapshot == figure.get_suptitle()
    bad = record("bad", check=check(Bound("finite", 3.0, 0.0, False), Bound("max", None, 1.0, False)))
    worse = error_picture([*checked_records(), bad])
    assert worse is not None
    assert worse.get_suptitle() == "1 of 3 variants exceed a bound: bad"
    assert "finite, exceeded" in [text.get_text() for text in only_axis(worse).texts]
    assert error_picture(timed_records(TARGET_SHAPE)) is None


def test_a_failure_without_an_error_is_in_the_title() -> None:
    """The title does not say that all are right if a kernel crashed, which has no dot."""
    pytest.importorskip("matplotlib")
    figure = error_picture([*checked_records(), record("dead", outcome=Outcome.CRASHED)])
    assert figure is not None
    assert figure.get_suptitle() == "1 result failed without an output to compare: dead"


def test_the_error_picture_has_a_dot_for_every_dtype() -> None:
    """A variant that is checked in one dtype has one dot, with the name of the dtype in the legend."""
    pytest.importorskip("matplotlib")
    for dtype in DTYPES:
        figure = error_picture([record("one", f"b1h2s64d64-{dtype}-seed0", check=check(Bound("max", 0.5, 1.0, True)))])
        assert figure is not None
        axis = only_axis(figure)
        legend = axis.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == [dtype]


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_folder_without_times_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a folder without timed records, the command prints one line and exits with status 2."""
    save_records([record("ws_p2")], tmp_path)
    with pytest.raises(NothingToShow):
        draw(tmp_path / "cpu", None)
    assert main([str(tmp_path / "cpu")]) == 2
    assert "no records with times in" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"schema":99}', "\x1b[2J", "NaN"])
def test_a_line_that_is_no_record_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """If a line cannot be read, the command draws nothing, prints one sentence and exits with status 2."""
    with (folder / "ws_p2.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(text)
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    assert sentence.startswith(f"{folder}/ws_p2.jsonl: 1 of ")
    assert " lines cannot be read; line " in sentence
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix != ".jsonl") == [".json"]


def test_a_fifo_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO among the record files is refused; the command does not wait for a writer."""
    os.mkfifo(folder / "zzz.jsonl")
    assert main([str(folder)]) == 2
    assert "zzz.jsonl: it cannot be read: it is a FIFO, not a regular file" in capsys.readouterr().err


def test_ceilings_that_cannot_be_read_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an unreadable ceilings.json, the command prints one sentence and exits with status 2."""
    (folder / "ceilings.json").write_text("{", encoding="utf-8")
    assert main([str(folder)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"{folder}/ceilings.json cannot be read: ")


def test_scores_and_calls_without_work_have_no_line(tmp_path: Path) -> None:
    """Records of scores, and of calls with no key, which have no FLOPs, are in the ladder alone."""
    pytest.importorskip("matplotlib")
    shapes = ("b1h1s4d4-fp16-scores", "b1h1s4d4-fp16-sk0")
    save_records([record("probe", f"{shape}-seed0", "speed", speed=speed(1.0)) for shape in shapes], tmp_path)
    assert [path.name for path in draw(tmp_path / "cpu", CEILINGS)] == ["ladder.svg"]


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    """Dollar signs in the names of variants and GPUs, between which matplotlib expects a formula, are drawn as such."""
    pytest.importorskip("matplotlib")
    name, environment = r"a$\frac{$", msgspec.structs.replace(ENVIRONMENT, gpu=r"$\frac{$")
    records = [msgspec.structs.replace(each, variant=name) for each in scaling_records() if each.variant == "fast"]
    records += [msgspec.structs.replace(each, variant=name) for each in checked_records() if each.variant == "far"]
    records.append(timed_at(TARGET_SHAPE, "other", 1.0))
    records[-1] = msgspec.structs.replace(records[-1], ablation=Ablation(r"$\frac{$", name))
    saved = save_records([msgspec.structs.replace(each, environment=environment) for each in records], tmp_path)
    names = [picture.name for picture in draw(saved[0].parent, None)]
    assert names == ["ladder.svg", "scaling.svg", "phases.svg", "errors.svg"]


def test_schedules_have_boxes_that_do_not_overlap(tmp_path: Path) -> None:
    """A lane does one thing at a time, and each schedule becomes a picture with its texts."""
    for schedule in SCHEDULES.values():
        for _, boxes in schedule.lanes:
            assert all(first.end <= second.start + 1e-9 for first, second in itertools.pairwise(boxes))
    pytest.importorskip("matplotlib")
    assert schedule_pictures.main([str(tmp_path)]) == 0
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == SCHEDULES.keys()
    assert "exchange rows" in drawn["cluster_latency"]
    saved = {name: (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8") for name in SCHEDULES}
    assert saved == drawn


def test_schedules_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the usage is shown."""
    assert schedule_pictures.main([str(tmp_path / "none")]) == 2
    assert "python -m tools.docs.schedule_pictures" in capsys.readouterr().err
