"""A kernel of each class, counted on a real GPU; `tests/recorded/ncu/verdict/` is what they gave on an NVIDIA H200."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pytest_fa.profile.nsight import Nsight
from pytest_fa.records.tool_results import BoundBy
from tests.device.conftest import BuildSource, job_of

MANIFEST = """\
step: a kernel that does one thing
because: nobody has to guess what bounds it
expect: its class
arch: [sm_90a]
supports: {dtype: [fp16]}
defines: {ONLY: %s}
"""


@pytest.mark.parametrize("limit", get_args(BoundBy))
def test_a_kernel_that_does_one_thing(profiler: Nsight, build_source: BuildSource, tmp_path: Path, limit: str) -> None:
    """Its class, from counters that were just read."""
    here = Path(__file__).parent
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "include").symlink_to(here.parents[1] / "kernels" / "include")
    source = (here / "one_thing.cu").read_text(encoding="utf-8")
    found = profiler.run(job_of(build_source(f"only_{limit}", source, MANIFEST % limit.upper())), "verdict", None)
    assert found.status == "ok", found
    (kernel,) = found.kernels
    assert kernel.bottleneck is not None
    assert kernel.bottleneck.bound_by == limit, kernel.bottleneck
