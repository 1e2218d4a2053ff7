"""Ceilings and pictures: kept, read, and drawn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.__main__ import main
from pytest_fa.catalog.case import parse_case
from pytest_fa.records.ceilings import Ceilings, ceilings_path, read_ceilings, write_ceilings
from pytest_fa.records.log import save_records
from pytest_fa.records.record import Environment, Source
from pytest_fa.records.timing import Timing
from pytest_fa.report.pictures import NothingToShow, draw
from tests.factories import OTHER, record, speed

HERE = Environment("NVIDIA H200", "9.0", "580", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")
CEILINGS = Ceilings(
    copy_gb_per_s=4000.0,
    matmul_tflops={"fp16": 800.0},
    empty_launch_us=0.6,
    timings={"copy": Timing("graph of 10 calls", (1.0, 1.1), 1.05, 10)},
    clocks_during=None,
    environment=HERE,
    source=Source(None, None, "no git"),
    measured_at="2026-01-01T00:00:00+00:00",
)


def test_they_are_kept_by_gpu(tmp_path: Path) -> None:
    """What was written for a GPU is read for that GPU and no other."""
    path = write_ceilings(CEILINGS, tmp_path)
    assert path == ceilings_path(tmp_path, "NVIDIA H200") == tmp_path / "nvidia-h200" / "ceilings.json"
    assert [read_ceilings(tmp_path, gpu) for gpu in ("NVIDIA H200", "NVIDIA L40", None)] == [CEILINGS, None, None]


def test_a_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    """A broken file bounds nothing."""
    write_ceilings(CEILINGS, tmp_path).write_text("{}", encoding="utf-8")
    assert read_ceilings(tmp_path, "NVIDIA H200") is None


def test_the_least_time_is_that_of_the_products() -> None:
    """FLOP over the dtype's rate; a dtype that was not measured bounds nothing."""
    case = parse_case("b1h8s512d64-fp16-seed0")
    assert CEILINGS.least_us(case) == pytest.approx(4 * 8 * 512 * 512 * 64 / 800e12 * 1e6)
    assert CEILINGS.least_us(case.with_dtype("bf16")) == 0.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPU's folder with the records of three variants on two shapes."""
    names = {"mine": ("candidate", 10.0), "sdpa": ("baseline", 12.0), "noop": ("overhead", 0.6)}
    records = [
        record(name, f"{shape}-seed0", "speed", role=role, speed=speed(us), environment=HERE)
        for name, (role, us) in names.items()
        for shape in ("b1h8s512d64-fp16", OTHER)
    ]
    save_records(records, tmp_path)
    write_ceilings(CEILINGS, tmp_path)
    return tmp_path / "nvidia-h200"


def test_pictures_are_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command draws bars and a roofline beside the records; the same records give the same pictures."""
    pytest.importorskip("matplotlib")
    assert main(["pictures", str(folder)]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["bars.svg", "roofline.svg"]
    first = [path.read_bytes() for path in paths]
    assert all(b"<svg" in data and len(data) > 5000 for data in first)
    draw(folder, CEILINGS)
    assert [path.read_bytes() for path in paths] == first


def test_without_ceilings_there_is_no_roof(folder: Path) -> None:
    """Bars need none."""
    pytest.importorskip("matplotlib")
    assert [path.name for path in draw(folder, None)] == ["bars.svg"]


def test_nothing_to_draw_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without timed records is one line and status 2."""
    save_records([record("mine")], tmp_path)
    with pytest.raises(NothingToShow):
        draw(tmp_path / "cpu", None)
    assert main(["pictures", str(tmp_path / "cpu")]) == 2
    assert "no records with times in" in capsys.readouterr().err


def test_ceilings_need_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one the command says so, and writes nothing."""
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["ceilings", "--profiles", str(tmp_path)]) == 2
    assert "has no GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_figures_survive_json() -> None:
    """What is written is what was measured."""
    assert msgspec.json.decode(msgspec.json.encode(CEILINGS), type=Ceilings) == CEILINGS
