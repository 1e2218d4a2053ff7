"""The theoretical occupancy equals the one that Nsight Compute reported for four kernels on an H200."""

from __future__ import annotations

import pytest

from pytest_fa.build.occupancy import MULTIPROCESSORS, Occupancy, excesses, multiprocessor, occupancy, registers_limit
from pytest_fa.build.target import capability
from pytest_fa.catalog.variant import ARCHES
from pytest_fa.features.ncu.nsight_report import CountedKernel
from pytest_fa.features.ncu.raw_table import read_raw_table
from tests.factories import RECORDED

KERNELS = read_raw_table((RECORDED / "sdpa_detailed.csv").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name[:30])
def test_limits_equal_those_of_nsight(kernel: CountedKernel) -> None:
    """The blocks that fit by registers, and the occupancy in percent, equal Nsight's."""
    counters = kernel.counters
    threads, registers = int(counters["launch__block_size"]), int(counters["launch__registers_per_thread"])
    smem_bytes = int(counters["launch__shared_mem_per_block"] - counters["launch__shared_mem_per_block_driver"])
    computed = occupancy("sm_90a", threads, registers, smem_bytes)
    assert computed is not None
    assert counters["launch__occupancy_limit_registers"] == registers_limit(threads // 32, registers)
    assert counters["sm__maximum_warps_per_active_cycle_pct"] == computed.percent


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("sm_90a", 128, 32, 0), Occupancy(16, 100.0, "registers")),
        (("sm_90a", 32, 16, 0), Occupancy(32, 50.0, "blocks")),
        (("sm_89", 128, 64, 48 * 1024), Occupancy(2, 100 * 8 / 48, "shared memory")),
        (("sm_80", 1024, 128, 0), Occupancy(0, 0.0, "registers")),
        (("sm_120a", 128, 32, 33 * 1024), Occupancy(2, 100 * 8 / 48, "shared memory")),
        (("sm_99", 128, 32, 0), None),
    ],
)
def test_the_limiting_resource(arguments: tuple[str, int, int, int], expected: Occupancy | None) -> None:
    """`limited_by` names the smallest limit; without the limits of an architecture there is no answer."""
    assert expected == occupancy(*arguments)


# The greatest shared memory of a block, as ptxas 13.0 states it: "uses too much shared data (..., 0x18c00 max)".
PTXAS_LIMITS = {"sm_90a": 0x38C00, "sm_100a": 0x38C00, "sm_103a": 0x38C00, "sm_110a": 0x38C00}
PTXAS_LIMITS |= {"sm_120a": 0x18C00, "sm_121a": 0x18C00}


def test_the_limits_of_shared_memory_are_those_of_ptxas() -> None:
    """For each `a` architecture, the table has the limit that ptxas enforces."""
    chips = {arch: multiprocessor(arch) for arch in PTXAS_LIMITS}
    assert {arch: chip and chip.smem_bytes_per_block for arch, chip in chips.items()} == PTXAS_LIMITS


def test_every_default_architecture_has_its_limits() -> None:
    """The limits of each architecture of a manifest without `arch` are known."""
    assert {capability(arch) for arch in ARCHES} <= set(MULTIPROCESSORS)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("sm_120", 128, 64, 101_376), []),
        (("sm_120", 128, 64, 106_496), ["shared memory: 106,496 B per block, 5,120 B too many for sm_120 (101,376 B)"]),
        (("sm_90a", 128, 64, 106_496), []),
        (("sm_90a", None, 255, 0), []),
        (("sm_80", 512, 160, 0), ["registers: 160 for each of 512 threads, too many for sm_80 (65,536)"]),
        (("sm_80", 512, 128, 0), []),
        (("sm_86", 1056, 32, 0), ["threads: 1,056 per block, 32 too many (1,024)"]),
        (("sm_99", 4096, 255, 10**9), []),
        (("host", 4096, 255, 10**9), []),
    ],
)
def test_what_does_not_fit_is_said_with_the_excess(
    arguments: tuple[str, int | None, int, int], expected: list[str]
) -> None:
    """Each exceeded resource is named with the need, the excess and the limit; unknown limits are not compared."""
    assert expected == excesses(*arguments)
