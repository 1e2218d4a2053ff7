"""The e4m3 trio: e4m3 becomes fp16 by one instruction per pair, and the limits are those of its fp16 twins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.resources import broken_limits
from pytest_fa.build.toolchain import find_tool
from pytest_fa.catalog.discover import discover
from pytest_fa.records.built import Build

KERNELS = Path(__file__).parents[3] / "kernels"
CATALOG = discover((KERNELS,)).variants
TWINS = {"stage2_fp8": "stage2", "ws_p1_fp8": "ws_p1", "ws_p2_fp8": "ws_p2"}
RACES = {"race_fp8_s_read_early": "race_s_read_early", "race_fp8_s_by_one_warp": "race_s_by_one_warp"}
CONVERTED_VECTORS = 1 + 4 + 4  # of Q by each consumer, of K and of V by each of the 64 producers: 16 numbers in 8 pairs
PAIRS = 8


@pytest.mark.parametrize(("name", "twin"), [*TWINS.items(), *RACES.items()])
def test_a_twin_has_the_same_parameters_and_limits(name: str, twin: str) -> None:
    """Tile sizes, warps, omitted barriers, limits and architectures are those of the fp16 twin.

    A wrong kernel may spill registers where its twin does not: its time does not count.
    """
    fp8, fp16 = CATALOG[name], CATALOG[twin]
    assert (fp8.defines, fp8.arch, fp8.role) == (fp16.defines, fp16.arch, fp16.role)
    if name in TWINS:
        assert fp8.limits == fp16.limits
    assert fp8.limits.registers_per_thread == fp16.limits.registers_per_thread
    supports = msgspec.structs.replace(fp8.supports, dtype=fp16.supports.dtype, fp8_out=fp16.supports.fp8_out)
    assert (supports, fp8.tolerance) == (fp16.supports, fp16.tolerance)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_the_conversion_is_one_instruction_per_pair(shared_cache: Path) -> None:
    """For sm_90a, every number of Q, K and V is converted by the instruction for pairs, within the limits."""
    tools = {name: find_tool(name) for name in ("cuobjdump", "nvdisasm")}
    if None in tools.values():
        pytest.skip("cuobjdump or nvdisasm is not installed")
    variant = CATALOG["ws_p2_fp8"]
    build = ensure([(variant, "sm_90a")], shared_cache).outcomes[(variant.name, "sm_90a")]
    assert isinstance(build, Build), build
    assert broken_limits(build, variant.limits) == []
    environment = {**os.environ, "PATH": f"{tools['nvdisasm'].parent}:{os.environ['PATH']}"}  # type: ignore[union-attr]
    command = [str(tools["cuobjdump"]), "-sass", str((shared_cache / build.library).resolve())]
    listing = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    kernels = [part for part in listing.split("Function : ")[1:] if "attention_kernel" in part]
    counts = [part.count("F2FP.F16.E4M3.UNPACK_B") for part in kernels]
    assert counts == [CONVERTED_VECTORS * PAIRS] * len(build.kernels)
