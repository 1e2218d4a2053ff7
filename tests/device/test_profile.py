"""Nsight Compute and compute-sanitizer on a real GPU: counters come back, planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.properties import sanitizer_case
from pytest_fa.profile.ncu import NcuTarget, profile
from pytest_fa.profile.nsight import Nsight
from pytest_fa.profile.presets import GRID, PRESETS, Preset
from pytest_fa.profile.raw_table import read_raw_table
from pytest_fa.records.tool_results import DURATION, NsightReport, Sanitized
from pytest_fa.sanitize.sanitizer import SanitizedChild, sanitize
from pytest_fa.worker.client import child_environment
from pytest_fa.worker.jobs import CaseJob, encode
from tests.device.conftest import BuildSource, Built, job_of


def test_the_probe_counts(profiler: Nsight) -> None:
    """One block, some time, read back from a real report."""
    assert profiler.trial.status == "ok", profiler.trial
    (kernel,) = profiler.trial.kernels
    assert kernel.counters[GRID] == 1
    assert kernel.counters[DURATION] > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_counts(profiler: Nsight, build_rung: Callable[[str], Built], preset: str) -> None:
    """The kernel's own launch and nothing else, with a verdict, and no counter that this chip lacks."""
    found = profiler.run(job_of(build_rung("ws_p2")), preset, None)
    assert (found.status, found.dropped) == ("ok", ()), found
    (kernel,) = found.kernels
    assert "attention_kernel" in kernel.name
    assert kernel.bottleneck is not None
    assert kernel.counters[GRID] == 128


def test_module_and_table_agree(profiler: Nsight, minimal: Built) -> None:
    """Nsight's module and its CSV give the same figures of a fresh report."""
    found = profiler.run(job_of(minimal), "verdict", None)
    assert found.status == "ok", found
    (by_table,) = read_raw_table((profiler.folder / (found.table or "")).read_text(encoding="utf-8"))
    for name, value in found.kernels[0].counters.items():
        assert by_table.counters[name] == pytest.approx(value, rel=1e-6, abs=0.006), name


def test_a_filter_that_misses_is_known(profiler: Nsight, tmp_path: Path) -> None:
    """Nsight's own words for it, and its status of 0."""
    assert profiler.tool is not None
    target = NcuTarget(("-m", "pytest_fa.profile.trial"), "another-range", tmp_path / "missed")
    assert profile(profiler.tool, target, "verdict", Preset((DURATION,))).status == "no-kernels"


def test_a_counter_that_is_none_is_dropped(profiler: Nsight, tmp_path: Path) -> None:
    """Nsight names it; the rest is counted."""
    assert profiler.tool is not None
    target = NcuTarget(("-m", "pytest_fa.profile.trial"), "probe", tmp_path / "unknown")
    found: NsightReport = profile(profiler.tool, target, "verdict", Preset((DURATION, "sm__no_such_thing.sum")))
    assert (found.status, found.dropped) == ("ok", ("sm__no_such_thing.sum",)), found


# -- sanitizers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch(tmp_path: Path) -> Callable[[Built, str], Sanitized]:
    """`watch(built, tool)`: one call of the build without torch, under one tool; skips where the runtime refuses."""

    def run(built: Built, tool: str) -> Sanitized:
        variant, library = built
        job = CaseJob(variant, sanitizer_case(variant), library, "cuda", "same_precision", judge=False, time=False)
        path = tmp_path / "job.json"
        path.write_bytes(msgspec.json.format(encode(job)))
        child = SanitizedChild(
            ("-m", "pytest_fa.sanitize.plain_call", str(path)), child_environment(), tmp_path / f"{tool}.log"
        )
        found = sanitize(tool, child)
        if found.status == "not measured":
            pytest.skip(found.message)
        return found

    return run


# One block copies the first row of q, and reads one element past the end of k.
PAST_THE_END = """
__global__ void past_the_end(const unsigned short* k, unsigned short* out, long long count) { out[0] = k[count]; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  const long long count = args->batch * args->kv_heads * args->seq_k * args->head_dim;
  past_the_end<<<1, 1, 0, stream>>>((const unsigned short*)args->k, (unsigned short*)args->out, count);
  return cudaPeekAtLastError();
}
"""


def test_memcheck_finds_one_element_past_the_end(
    build_source: BuildSource, watch: Callable[[Built, str], Sanitized]
) -> None:
    """Two bytes past an allocation of exactly the tensor's size."""
    found = watch(build_source("past_the_end", PAST_THE_END), "memcheck")
    assert found.status == "found", found
    assert any("Invalid __global__ read of size 2 bytes" in each for each in found.findings), found.findings


@pytest.mark.parametrize("name", ["race_s_read_early", "race_s_by_one_warp"])
def test_racecheck_finds_the_historys_races(
    build_rung: Callable[[str], Built], watch: Callable[[Built, str], Sanitized], name: str
) -> None:
    """The two races that lived for months are found in a second."""
    found = watch(build_rung(name), "racecheck")
    assert found.status == "found", found
    assert any("Race reported" in each for each in found.findings), found.findings


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
@pytest.mark.parametrize("name", ["minimal", "stage2", "ws_p1", "ws_p2"])
def test_right_kernels_are_clean(
    build_rung: Callable[[str], Built], watch: Callable[[Built, str], Sanitized], name: str, tool: str
) -> None:
    """Nothing is found where nothing is wrong."""
    found = watch(build_rung(name), tool)
    assert (found.status, found.count) == ("clean", 0), found
