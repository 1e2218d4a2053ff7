"""Reading a report with Nsight's own module and from its CSV gives the same kernels and counters."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pytest_fa.features.ncu.ncu_program import read_by_module
from pytest_fa.features.ncu.nsight_report import DURATION, CountedKernel
from pytest_fa.features.ncu.raw_table import read_raw_table
from pytest_fa.table.tool_lines import short_name

needs_module = pytest.mark.skipif(importlib.util.find_spec("ncu_report") is None, reason="ncu_report is not installed")


def test_the_table_has_every_kernel(recorded_kernels: tuple[CountedKernel, ...]) -> None:
    """The CSV gives the name and the duration of every kernel."""
    kernels = [(short_name(kernel.name), kernel.counters[DURATION]) for kernel in recorded_kernels]
    expected = [
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
            9056.0,
        ),
        ("flash_fwd_splitkv_kernel", 7872.0),
        ("flash_fwd_splitkv_combine_kernel", 5504.0),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80", 24480.0),
    ]
    assert expected == kernels


def test_a_figure_with_thousands_is_a_number(recorded_kernels: tuple[CountedKernel, ...]) -> None:
    """`175,830,388,692.58` is read as one number; cells with words or without content are not counters."""
    counters = recorded_kernels[0].counters
    assert counters["dram__bytes.sum.per_second"] == 175_830_388_692.58
    assert "launch__cluster_scheduling_policy" not in counters
    assert "Process ID" not in counters


@pytest.mark.parametrize(
    "text", ["", "==PROF== nothing\n", '"ID","Kernel Name","a__b"\n', '"ID","Kernel Name","a__b"\n"","","%"\n']
)
def test_a_table_without_rows_has_no_kernels(text: str) -> None:
    """Text without a table, and a table without rows, give no kernels and no error."""
    assert read_raw_table(text) == ()


@needs_module
def test_module_and_table_agree(recorded_report: Path, recorded_kernels: tuple[CountedKernel, ...]) -> None:
    """Every counter has the same value in the module and in the CSV, to the CSV's two decimals."""
    module_kernels = read_by_module(recorded_report, "")
    assert module_kernels is not None
    compared = 0
    for by_module, by_table in zip(module_kernels, recorded_kernels, strict=True):
        for name in by_table.counters.keys() & by_module.counters.keys():
            assert by_module.counters[name] == pytest.approx(by_table.counters[name], rel=1e-9, abs=0.006), name
            compared += 1
    assert compared > 4 * 1000


def test_without_the_module_there_is_the_table(recorded_report: Path, tmp_path: Path) -> None:
    """If the module cannot be imported, `read_by_module` returns None, so that the CSV is used."""
    (tmp_path / "ncu_report.py").write_text("raise OSError('another glibc')\n", encoding="utf-8")
    assert read_by_module(recorded_report, str(tmp_path)) is None
