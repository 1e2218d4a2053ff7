"""How many blocks of a kernel fit on a multiprocessor, and what limits them: arithmetic, no GPU.

Figures of the CUDA C++ Programming Guide's table of compute capabilities; registers are allotted to warps in units of
256, on each of four partitions alone.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.catalog.variant import Arch

WARP = 32
PARTITIONS = 4
REGISTERS_PER_PARTITION = 16_384
REGISTER_UNIT = 256
SMEM_UNIT = 128
DRIVER_SMEM_BYTES = 1024  # of each block


class Multiprocessor(NamedTuple):
    """What one multiprocessor holds."""

    warps: int
    blocks: int
    smem_bytes: int


MULTIPROCESSORS: dict[Arch, Multiprocessor] = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_89": Multiprocessor(48, 24, 100 * 1024),
    "sm_90a": Multiprocessor(64, 32, 228 * 1024),
}


class Occupancy(NamedTuple):
    """The most blocks at once, the share of the multiprocessor's warps that they are, and what limits them."""

    blocks: int
    percent: float
    limited_by: str


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """The limit for blocks of so many threads with so many registers each and so much shared memory."""
    chip = MULTIPROCESSORS[arch]
    warps = -(-threads // WARP)
    limits = {
        "registers": registers_limit(warps, registers),
        "shared memory": chip.smem_bytes // (_round_up(smem_bytes, SMEM_UNIT) + DRIVER_SMEM_BYTES),
        "warps": chip.warps // warps,
        "blocks": chip.blocks,
    }
    limited_by = min(limits, key=lambda name: limits[name])
    blocks = limits[limited_by]
    return Occupancy(blocks, 100 * blocks * warps / chip.warps, limited_by)


def registers_limit(warps: int, registers: int) -> int:
    """Blocks of so many warps that the register file holds."""
    per_warp = _round_up(registers * WARP, REGISTER_UNIT)
    return REGISTERS_PER_PARTITION // per_warp * PARTITIONS // warps if per_warp else 10**6


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
