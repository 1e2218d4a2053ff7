"""Compute the theoretical occupancy of a kernel and what limits it, without a GPU.

The limits are those of the compute capability table in the CUDA C++ Programming Guide.  Registers are allocated per
warp in units of 256, separately in each of the four partitions of a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.catalog.variant import Arch

WARP = 32
PARTITIONS = 4
REGISTERS_PER_PARTITION = 16_384
REGISTER_UNIT = 256
SMEM_UNIT = 128
DRIVER_SMEM_BYTES = 1024  # reserved per block


class Multiprocessor(NamedTuple):
    """The limits of one multiprocessor."""

    warps: int
    blocks: int
    smem_bytes: int


MULTIPROCESSORS: dict[Arch, Multiprocessor] = {
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_89": Multiprocessor(48, 24, 100 * 1024),
    "sm_90a": Multiprocessor(64, 32, 228 * 1024),
}


class Occupancy(NamedTuple):
    """The maximum resident blocks, the occupancy in percent, and the resource that limits it."""

    blocks: int
    percent: float
    limited_by: str


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Return the occupancy for `threads` per block, `registers` per thread and `smem_bytes` per block."""
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
    """Return how many blocks of `warps` warps fit in the register file, with `registers` per thread."""
    per_warp = _round_up(registers * WARP, REGISTER_UNIT)
    return REGISTERS_PER_PARTITION // per_warp * PARTITIONS // warps if per_warp else 10**6


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
