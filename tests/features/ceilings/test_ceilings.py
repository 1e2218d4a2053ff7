"""Ceilings: measured rates of a GPU, saved and read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from pytest_fa.__main__ import main
from pytest_fa.catalog.case import parse_case
from pytest_fa.records.ceilings import Ceilings, ceilings_path, read_ceilings, write_ceilings
from pytest_fa.records.files import UnreadableRecords
from pytest_fa.records.timing import Clocks
from tests.factories import CEILINGS


def test_ceilings_are_saved_by_gpu(tmp_path: Path) -> None:
    """The ceilings of a GPU are read for this GPU, and for no other."""
    path = write_ceilings(CEILINGS, tmp_path)
    assert path == ceilings_path(tmp_path, "NVIDIA H200") == tmp_path / "nvidia-h200" / "ceilings.json"
    assert [read_ceilings(tmp_path, gpu) for gpu in ("NVIDIA H200", "NVIDIA L40", None)] == [CEILINGS, None, None]


REMEDY = "measure them again with `python -m pytest_fa ceilings`"


@pytest.mark.parametrize(
    ("field", "content", "problem"),
    [
        ("copy_gb_per_s", "NaN", "JSON is malformed: invalid character"),
        ("copy_gb_per_s", "0", "Expected `float` >= 1e-09 - at `$.copy_gb_per_s`"),
        ("copy_gb_per_s", "1e308", "Expected `float` < 1000000000000.0 - at `$.copy_gb_per_s`"),
        ("matmul_tflops", "{}", "Expected `object` of length >= 1 - at `$.matmul_tflops`"),
        ("matmul_tflops", '{"fp16":-1}', "Expected `float` >= 1e-09 - at `$.matmul_tflops[...]`"),
        ("environment", "null", "Expected `object`, got `null` - at `$.environment`"),
        ("source", "[" * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, field: str, content: str, problem: str) -> None:
    """A file with an impossible rate is refused with its path, the reason and what to do."""
    encoded = {**msgspec.to_builtins(CEILINGS), "x" if field == "source" else field: "CONTENT"}
    path = write_ceilings(CEILINGS, tmp_path)
    path.write_text(json.dumps(encoded).replace('"CONTENT"', content), encoding="utf-8")
    with pytest.raises(UnreadableRecords) as raised:
        read_ceilings(tmp_path, "NVIDIA H200")
    text = str(raised.value)
    assert text.startswith(f"{path} cannot be read: {problem}")
    assert text.endswith(f"; {REMEDY}")


def test_a_fifo_is_no_ceilings_file(tmp_path: Path) -> None:
    """A FIFO in place of the file is refused at once."""
    path = ceilings_path(tmp_path, None)
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(UnreadableRecords, match="it is a FIFO, not a regular file"):
        read_ceilings(tmp_path, None)


def test_the_least_time_is_that_of_the_matrix_products() -> None:
    """The least time is the FLOP count over the dtype's rate, or 0 if that dtype was not measured."""
    case = parse_case("b1h8s512d64-fp16-seed0")
    assert CEILINGS.least_us(case) == pytest.approx(4 * 8 * 512 * 512 * 64 / 800e12 * 1e6)
    assert CEILINGS.least_us(case.with_dtype("bf16")) == 0.0


@pytest.mark.parametrize(
    ("case", "l2_bytes", "l2_rate", "bytes_us"),
    [
        ("b1h1s1000d64-fp16", 0, None, 4 * 128_000 / 4e6),  # all of it from memory
        ("b1h1s1000d64-fp16", 2**20, None, 0.0),  # it fits into L2, whose rate is not known
        ("b1h1s1000d64-fp16", 2**20, 8000.0, 4 * 128_000 / 8e6),
        ("b1h1s1000d64-fp16", 256_000, 8000.0, 256_000 / 8e6 + 256_000 / 4e6),
        ("b1h1s1000d64-fp16", None, None, 0.0),  # a record that does not have the size of L2
        ("b1h1s1000d64-fp16-causal-sk4000", 0, None, 4 * 128_000 / 4e6),  # the other keys are hidden
        ("b1h1s1000d64-fp16-sk4000", 0, None, 10 * 128_000 / 4e6),
    ],
)
def test_the_least_time_is_also_that_of_the_bytes(
    case: str, l2_bytes: int | None, l2_rate: float | None, bytes_us: float
) -> None:
    """Bytes that may be in L2 take the time of a copy within L2, or none if that is not known, others a copy's."""
    ceilings = msgspec.structs.replace(CEILINGS, l2_copy_gb_per_s=l2_rate)
    floor = ceilings.floor(parse_case(f"{case}-seed0"), l2_bytes)
    assert floor.matrices_us == ceilings.least_us(parse_case(f"{case}-seed0"))
    assert floor.bytes_us == pytest.approx(bytes_us)


@pytest.mark.parametrize(
    ("measured_mhz", "sm_mhz", "share"),
    [
        (1485, 1980, 0.75),
        (1485, 1200, 1.0),
        (1485, 10**9, 1 / 1.5),
        (1485, None, 1.0),
        (None, 1980, 1.0),
        (0, 1980, 1.0),
    ],
)
def test_the_least_time_of_the_products_follows_the_sm_clock(
    measured_mhz: int | None, sm_mhz: int | None, share: float
) -> None:
    """The rate was measured at the clock that the power cap allowed; a call at a higher one may exceed it as far."""
    during = None if measured_mhz is None else Clocks(measured_mhz, 3201, 690.0, 60, 0x04)
    ceilings = msgspec.structs.replace(CEILINGS, clocks_during=during)
    case = parse_case("b1h16s16384d128-fp16-seed0")
    assert ceilings.floor(case, None, sm_mhz).matrices_us == pytest.approx(share * ceilings.least_us(case))


def test_ceilings_need_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU, the command reports this and writes nothing."""
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["ceilings", "--profiles", str(tmp_path)]) == 2
    assert "has no GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ceilings_are_read_back_equal() -> None:
    """Ceilings that are written as JSON are read back equal."""
    assert msgspec.json.decode(msgspec.json.encode(CEILINGS), type=Ceilings) == CEILINGS
