"""The memory of a call on a GPU: the workspace, torch's allocations in the candidate's process, and their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.gpu.device import peak_bytes_of
from pytest_fa.host.client import Workers
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.device.conftest import MANIFEST, BuildSource
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

CASE = parse_case("b1h2s64d64-fp16-seed0")
MINIMAL = (Path(__file__).parents[2] / "kernels" / "minimal" / "kernel.cu").read_text(encoding="utf-8")
WORKSPACE = "\nFA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs*) { return 4096; }\n"
SCRATCH_BYTES = 2**26
SCRATCH = f"    scratch = torch.empty({SCRATCH_BYTES}, dtype=torch.uint8, device=q.device)\n    scores ="


def judged(workers: Workers, variant: Variant, library: str | None = None) -> CaseResult:
    """The result of one judged case, in a process of its own."""
    job = CaseJob(variant, CASE, library, "cuda", "same_precision", checks_output=True, time=False, repeats=3)
    return workers.run(job)


@pytest.mark.parametrize(("end", "size_bytes"), [("", 0), (WORKSPACE, 4096)], ids=["none", "workspace"])
def test_the_peak_of_a_cuda_source_is_its_workspace(
    workers: Workers, build_source: BuildSource, end: str, size_bytes: int
) -> None:
    """Such a source allocates nothing itself."""
    result = judged(workers, *build_source(f"asks_for_{size_bytes}", MINIMAL + end))
    assert (result.outcome, result.workspace_bytes, result.peak_bytes) == ("ok", size_bytes, size_bytes), result.message


def test_a_workspace_above_its_limit_fails(workers: Workers, build_source: BuildSource) -> None:
    """The message has the value found and the value allowed."""
    manifest = f"{MANIFEST}limits: {{workspace_bytes: 4095}}\n"
    result = judged(workers, *build_source("asks_for_too_much", MINIMAL + WORKSPACE, manifest))
    assert (result.outcome, result.message.partition(":")[0]) == (
        "over_limit",
        "workspace_bytes is 4096, the limit is 4095",
    )


def test_what_a_function_allocates_is_its_peak(workers: Workers, write_variant: WriteVariant, tmp_path: Path) -> None:
    """64 MiB that a function holds during its call add 64 MiB, and what its process keeps for later calls adds none."""
    peaks = []
    for name, source in (("plain", PYTHON_SOURCE), ("holds_more", PYTHON_SOURCE.replace("    scores =", SCRATCH, 1))):
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        result = judged(workers, variant)
        assert (result.outcome, result.workspace_bytes) == ("ok", 0), result.message
        peaks.append(result.peak_bytes or 0)
    assert (peaks[0] > 0, peaks[1] - peaks[0]) == (True, SCRATCH_BYTES)


def test_the_peak_counts_what_a_call_adds() -> None:
    """Memory from before a call does not count, and memory that is freed and used again counts once."""
    device = torch.device("cuda", 0)
    kept = torch.empty(2**22, dtype=torch.uint8, device=device)

    def call() -> None:
        for _ in range(3):
            torch.empty(2**20, dtype=torch.uint8, device=device)

    assert (peak_bytes_of(call, device), len(kept)) == (2**20, 2**22)
