"""Compute the theoretical occupancy of a kernel, what limits it, and what does not fit at all, without a GPU.

The limits are those of the table "Technical Specifications per Compute Capability" in the CUDA C++ Programming Guide.
ptxas states the same limits of shared memory when a kernel exceeds them.  Registers are allocated per warp in units of
256, separately in each of the four partitions of a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.build.target import capability
from pytest_fa.catalog.variant import Arch

WARP = 32
PARTITIONS = 4
REGISTERS_PER_PARTITION = 16_384
REGISTER_UNIT = 256
SMEM_UNIT = 128
DRIVER_SMEM_BYTES = 1024  # reserved per block
MAX_THREADS = 1024  # per block


class Multiprocessor(NamedTuple):
    """The limits of one multiprocessor."""

    warps: int
    blocks: int
    smem_bytes: int

    @property
    def smem_bytes_per_block(self) -> int:
        """The shared memory that one block can have, static and dynamic together."""
        return self.smem_bytes - DRIVER_SMEM_BYTES


MULTIPROCESSORS: dict[tuple[int, int], Multiprocessor] = {  # by compute capability
    (8, 0): Multiprocessor(64, 32, 164 * 1024),
    (8, 6): Multiprocessor(48, 16, 100 * 1024),
    (8, 7): Multiprocessor(48, 16, 164 * 1024),
    (8, 9): Multiprocessor(48, 24, 100 * 1024),
    (9, 0): Multiprocessor(64, 32, 228 * 1024),
    (10, 0): Multiprocessor(64, 32, 228 * 1024),
    (10, 3): Multiprocessor(64, 32, 228 * 1024),
    (11, 0): Multiprocessor(48, 24, 228 * 1024),
    (12, 0): Multiprocessor(48, 24, 100 * 1024),
    (12, 1): Multiprocessor(48, 24, 100 * 1024),
}


class Occupancy(NamedTuple):
    """The maximum resident blocks, the occupancy in percent, and the resource that limits it."""

    blocks: int
    percent: float
    limited_by: str


def multiprocessor(arch: Arch) -> Multiprocessor | None:
    """Return the limits of an architecture; None if they are not in the table."""
    return None if arch == "host" else MULTIPROCESSORS.get(capability(arch))


def excesses(arch: Arch, threads: int | None, registers: int, smem_bytes: int) -> list[str]:
    """Return a phrase for each resource of which a block needs more than `arch` has.

    `threads` is None if the size of a block is not known.  Without the limits of `arch`, nothing is compared.
    """
    chip = multiprocessor(arch)
    if chip is None:
        return []
    too_much = []
    if smem_bytes > (limit := chip.smem_bytes_per_block):
        more = f"{smem_bytes - limit:,} B too many for {arch}"
        too_much.append(f"shared memory: {smem_bytes:,} B per block, {more} ({limit:,} B)")
    if threads and threads > MAX_THREADS:
        too_much.append(f"threads: {threads:,} per block, {threads - MAX_THREADS:,} too many ({MAX_THREADS:,})")
    elif threads and not registers_limit(-(-threads // WARP), registers):
        in_all = PARTITIONS * REGISTERS_PER_PARTITION
        too_much.append(f"registers: {registers} for each of {threads} threads, too many for {arch} ({in_all:,})")
    return too_much


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy | None:
    """Return the occupancy for `threads` per block, `registers` per thread and `smem_bytes` per block.

    None if the limits of `arch` are not known.
    """
    chip = multiprocessor(arch)
    if chip is None:
        return None
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
