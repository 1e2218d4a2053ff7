"""Pictures drawn from records: the bars of every shape, the ladder, and the roofline."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pytest_fa.__main__ import main
from pytest_fa.catalog.suites import TARGET_SHAPE
from pytest_fa.records.ceilings import Ceilings, write_ceilings
from pytest_fa.records.log import save_records
from pytest_fa.records.record import Environment, Record, Source
from pytest_fa.records.timing import Timing
from pytest_fa.report.ladder_picture import ladder_picture
from pytest_fa.report.pictures import NothingToShow, draw
from tests.factories import SMALL_SHAPE, record, speed

ENVIRONMENT = Environment("NVIDIA H200", "9.0", "580", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")
CEILINGS = Ceilings(
    copy_gb_per_s=4000.0,
    matmul_tflops={"fp16": 800.0},
    empty_launch_us=0.6,
    timings={"copy": Timing("graph of 10 calls", (1.0, 1.1), 1.05, 10)},
    clocks_during=None,
    environment=ENVIRONMENT,
    source=Source(None, None, "no git"),
    measured_at="2026-01-01T00:00:00+00:00",
)
ROLES_AND_TIMES = {
    "slow": ("candidate", 100.0),
    "ws_p2": ("candidate", 10.0),
    "ws_p2@STAGES=3": ("candidate", 9.0),
    "without_pv": ("ablation", 8.0),
    "sdpa_cudnn": ("baseline", 12.0),
    "noop": ("overhead", 0.6),
}


def timed_records(*shapes: str) -> list[Record]:
    """A timed record of each variant at each shape."""
    return [
        record(name, f"{shape}-seed0", "speed", role=role, speed=speed(us), environment=ENVIRONMENT)
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
    """The command draws three pictures next to the records; the same records give identical files."""
    pytest.importorskip("matplotlib")
    assert main(["pictures", str(folder)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["bars.svg", "ladder.svg", "roofline.svg"]
    first = [path.read_bytes() for path in paths]
    assert all(b"<svg" in data and len(data) > 5000 for data in first)
    draw(folder, CEILINGS)
    assert [path.read_bytes() for path in paths] == first


def test_the_ladder_shows_candidates_and_references() -> None:
    """The fastest candidate is at the bottom; sweeps and ablations are omitted; SDPA and the empty launch are lines."""
    pytest.importorskip("matplotlib")
    figure = ladder_picture(timed_records(TARGET_SHAPE, SMALL_SHAPE))
    assert figure is not None
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["ws_p2", "slow"]
    assert [text.get_text() for text in axis.texts] == ["10.00", "100.00"]
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["SDPA cuDNN: 12.00", "empty launch: 0.60"]


def test_without_the_target_shape_there_is_no_ladder() -> None:
    """Without a candidate at the target shape, no ladder is drawn."""
    assert ladder_picture(timed_records(SMALL_SHAPE)) is None


def test_without_ceilings_no_roofline_is_drawn(folder: Path) -> None:
    """Without ceilings, the roofline is not drawn."""
    pytest.importorskip("matplotlib")
    assert [path.name for path in draw(folder, None)] == ["bars.svg", "ladder.svg"]


def test_a_folder_without_times_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a folder without timed records, the command prints one line and exits with status 2."""
    save_records([record("ws_p2")], tmp_path)
    with pytest.raises(NothingToShow):
        draw(tmp_path / "cpu", None)
    assert main(["pictures", str(tmp_path / "cpu")]) == 2
    assert "no records with times in" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"schema":99}', "\x1b[2J", "NaN"])
def test_a_line_that_is_no_record_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """If a line cannot be read, the command draws nothing, prints one sentence and exits with status 2."""
    with (folder / "ws_p2.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(text)
    assert main(["pictures", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    assert sentence.startswith(f"pytest_fa: {folder}/ws_p2.jsonl: 1 of 3 lines cannot be read; line 3: ")
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix != ".jsonl") == [".json"]


def test_a_fifo_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO among the record files is refused; the command does not wait for a writer."""
    os.mkfifo(folder / "zzz.jsonl")
    assert main(["pictures", str(folder)]) == 2
    assert "zzz.jsonl: it cannot be read: it is a FIFO, not a regular file" in capsys.readouterr().err


def test_ceilings_that_cannot_be_read_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an unreadable ceilings.json, the command prints one sentence and exits with status 2."""
    (folder / "ceilings.json").write_text("{", encoding="utf-8")
    assert main(["pictures", str(folder)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"pytest_fa: {folder}/ceilings.json cannot be read: ")


def test_scores_and_calls_without_work_have_no_roofline(tmp_path: Path) -> None:
    """Records of scores, and of calls with no key, which have no FLOPs, are in the bars but not in the roofline."""
    pytest.importorskip("matplotlib")
    shapes = ("b1h1s4d4-fp16-scores", "b1h1s4d4-fp16-sk0")
    save_records([record("probe", f"{shape}-seed0", "speed", speed=speed(1.0)) for shape in shapes], tmp_path)
    assert [path.name for path in draw(tmp_path / "cpu", CEILINGS)] == ["bars.svg"]


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    """Dollar signs in the names of variants and GPUs, between which matplotlib expects a formula, are drawn as such."""
    pytest.importorskip("matplotlib")
    environment = msgspec.structs.replace(ENVIRONMENT, gpu=r"$\frac{$")
    timed = record(r"a$\frac{$", f"{TARGET_SHAPE}-seed0", "speed", speed=speed(1.0), environment=environment)
    (path,) = save_records([timed], tmp_path)
    assert [picture.name for picture in draw(path.parent, None)] == ["bars.svg", "ladder.svg"]
