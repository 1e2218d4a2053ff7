"""One kernel per class of bottleneck, counted on a GPU; `tests/recorded/ncu/verdict/` has reports of an NVIDIA H200."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pytest_fa.features.ncu.nsight import Nsight
from pytest_fa.features.ncu.nsight_report import BoundBy
from tests.device.conftest import BuildSource, job_of

MANIFEST = """\
step: a kernel that does one thing
because: its bottleneck is known
expect: its class
arch: [sm_90a]
supports: {dtype: [fp16]}
defines: {ONLY: %s}
"""


@pytest.mark.parametrize("limit", get_args(BoundBy))
def test_a_kernel_that_does_one_thing(profiler: Nsight, build_source: BuildSource, tmp_path: Path, limit: str) -> None:
    """A kernel that does one thing is assigned the bottleneck of that thing."""
    folder = Path(__file__).parent
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "include").symlink_to(folder.parents[1] / "kernels" / "include")
    source = (folder / "one_thing.cu").read_text(encoding="utf-8")
    report = profiler.run(job_of(build_source(f"only_{limit}", source, MANIFEST % limit.upper())), "verdict", None)
    assert report.status == "ok", report
    (kernel,) = report.kernels
    assert kernel.bottleneck is not None
    assert kernel.bottleneck.bound_by == limit, kernel.bottleneck
