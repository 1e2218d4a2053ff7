"""The theoretical occupancy equals the one that Nsight Compute reported for four kernels on an H200."""

from __future__ import annotations

import pytest

from pytest_fa.build.occupancy import MULTIPROCESSORS, Occupancy, occupancy, registers_limit
from pytest_fa.catalog.variant import ARCHES
from pytest_fa.profile.raw_table import read_raw_table
from pytest_fa.records.tool_results import CountedKernel
from tests.factories import RECORDED

KERNELS = read_raw_table((RECORDED / "sdpa_detailed.csv").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name[:30])
def test_limits_equal_those_of_nsight(kernel: CountedKernel) -> None:
    """The blocks that fit by registers, and the occupancy in percent, equal Nsight's."""
    counters = kernel.counters
    threads, registers = int(counters["launch__block_size"]), int(counters["launch__registers_per_thread"])
    smem_bytes = int(counters["launch__shared_mem_per_block"] - counters["launch__shared_mem_per_block_driver"])
    computed = occupancy("sm_90a", threads, registers, smem_bytes)
    assert counters["launch__occupancy_limit_registers"] == registers_limit(threads // 32, registers)
    assert counters["sm__maximum_warps_per_active_cycle_pct"] == computed.percent


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("sm_90a", 128, 32, 0), Occupancy(16, 100.0, "registers")),
        (("sm_90a", 32, 16, 0), Occupancy(32, 50.0, "blocks")),
        (("sm_89", 128, 64, 48 * 1024), Occupancy(2, 100 * 8 / 48, "shared memory")),
        (("sm_80", 1024, 128, 0), Occupancy(0, 0.0, "registers")),
    ],
)
def test_the_limiting_resource(arguments: tuple[str, int, int, int], expected: Occupancy) -> None:
    """`limited_by` names the smallest limit."""
    assert expected == occupancy(*arguments)  # type: ignore[arg-type]  # an architecture


def test_every_architecture_has_its_limits() -> None:
    """The limits of each architecture that can be compiled for are known."""
    assert set(ARCHES) == set(MULTIPROCESSORS)
