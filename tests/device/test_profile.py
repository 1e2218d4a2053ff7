"""Nsight Compute and compute-sanitizer on a GPU: counters are read and known faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_fa.features.ncu.ncu_program import NcuTarget, profile
from pytest_fa.features.ncu.nsight import Nsight
from pytest_fa.features.ncu.nsight_report import DURATION, NsightReport
from pytest_fa.features.ncu.presets import GRID, PRESETS, Preset
from pytest_fa.features.ncu.raw_table import read_raw_table
from pytest_fa.features.ncu.trial import TRIAL_RANGE
from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.features.sanitize.sanitized_cases import sanitizer_case
from pytest_fa.features.sanitize.sanitizer import SanitizedChild, sanitize
from pytest_fa.host.fork_server import child_environment
from pytest_fa.wire.jobs import CaseJob, encode
from tests.device.conftest import BuildSource, Built, job_of


def test_the_probe_counts(profiler: Nsight) -> None:
    """The trial kernel's counters, read from its report, have a grid of one block and a positive duration."""
    assert profiler.trial.status == "ok", profiler.trial
    (kernel,) = profiler.trial.kernels
    assert kernel.counters[GRID] == 1
    assert kernel.counters[DURATION] > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_counts(profiler: Nsight, build_rung: Callable[[str], Built], preset: str) -> None:
    """Each preset counts exactly the variant's own launch, names a bottleneck, and drops no counter on this GPU."""
    report = profiler.run(job_of(build_rung("ws_p2")), preset, None)
    assert (report.status, report.dropped) == ("ok", ()), report
    (kernel,) = report.kernels
    assert "attention_kernel" in kernel.name
    assert kernel.bottleneck is not None
    assert kernel.counters[GRID] == 128


def test_module_and_table_agree(profiler: Nsight, minimal: Built) -> None:
    """Nsight's Python module and its CSV table give the same figures for one report."""
    report = profiler.run(job_of(minimal), "verdict", None)
    assert report.status == "ok", report
    (by_table,) = read_raw_table((profiler.folder / (report.table or "")).read_text(encoding="utf-8"))
    for name, value in report.kernels[0].counters.items():
        assert by_table.counters[name] == pytest.approx(value, rel=1e-6, abs=0.006), name


def test_a_filter_without_kernels_is_reported(profiler: Nsight, tmp_path: Path) -> None:
    """If the NVTX filter selects no kernel, for which Nsight exits with status 0, the status is `no-kernels`."""
    assert profiler.tool is not None
    target = NcuTarget(("-m", "pytest_fa.features.ncu.trial"), "another-range", tmp_path / "missed")
    assert profile(profiler.tool, target, "verdict", Preset((DURATION,))).status == "no-kernels"


def test_an_unknown_counter_is_dropped(profiler: Nsight, tmp_path: Path) -> None:
    """A counter that the GPU lacks is named in `dropped`, and the others are counted."""
    assert profiler.tool is not None
    target = NcuTarget(("-m", "pytest_fa.features.ncu.trial"), TRIAL_RANGE, tmp_path / "unknown")
    report: NsightReport = profile(profiler.tool, target, "verdict", Preset((DURATION, "sm__no_such_thing.sum")))
    assert (report.status, report.dropped) == ("ok", ("sm__no_such_thing.sum",)), report


# -- sanitizers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_sanitizer(tmp_path: Path) -> Callable[[Built, str], Sanitized]:
    """`run_sanitizer(built, tool)`: one call of the build, without torch, under a sanitizer; skips if it cannot run."""

    def run(built: Built, tool: str) -> Sanitized:
        variant, library = built
        job = CaseJob(
            variant, sanitizer_case(variant), library, "cuda", "same_precision", checks_output=False, time=False
        )
        path = tmp_path / "job.json"
        path.write_bytes(msgspec.json.format(encode(job)))
        child = SanitizedChild(
            ("-m", "pytest_fa.features.sanitize.plain_call", str(path)), child_environment(), tmp_path / f"{tool}.log"
        )
        sanitized = sanitize(tool, child)
        if sanitized.status == "not measured":
            pytest.skip(sanitized.message)
        return sanitized

    return run


# One thread reads one element past the end of k.
PAST_THE_END = """
__global__ void past_the_end(const unsigned short* k, unsigned short* out, long long count) { out[0] = k[count]; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  const long long count = args->batch * args->kv_heads * args->seq_k * args->head_dim;
  past_the_end<<<1, 1, 0, stream>>>((const unsigned short*)args->k, (unsigned short*)args->out, count);
  return cudaPeekAtLastError();
}
"""


def test_memcheck_finds_one_element_past_the_end(
    build_source: BuildSource, run_sanitizer: Callable[[Built, str], Sanitized]
) -> None:
    """`memcheck` finds a read of 2 bytes past the end of a tensor, whose allocation has exactly its size."""
    sanitized = run_sanitizer(build_source("past_the_end", PAST_THE_END), "memcheck")
    assert sanitized.status == "found", sanitized
    assert any("Invalid __global__ read of size 2 bytes" in each for each in sanitized.findings), sanitized.findings


@pytest.mark.parametrize("name", ["race_s_read_early", "race_s_by_one_warp"])
def test_racecheck_finds_past_races(
    build_rung: Callable[[str], Built], run_sanitizer: Callable[[Built, str], Sanitized], name: str
) -> None:
    """`racecheck` finds the two races that once remained undetected for months."""
    sanitized = run_sanitizer(build_rung(name), "racecheck")
    assert sanitized.status == "found", sanitized
    assert any("Race reported" in each for each in sanitized.findings), sanitized.findings


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
@pytest.mark.parametrize("name", ["minimal", "stage2", "ws_p1", "ws_p2"])
def test_right_kernels_are_clean(
    build_rung: Callable[[str], Built], run_sanitizer: Callable[[Built, str], Sanitized], name: str, tool: str
) -> None:
    """The sanitizers report nothing for right kernels."""
    sanitized = run_sanitizer(build_rung(name), tool)
    assert (sanitized.status, sanitized.count) == ("clean", 0), sanitized
