"""What the PTX ISA says about TMA boxes, wgmma descriptors and the fragments of a warp, for operands of one byte."""

from __future__ import annotations

from collections.abc import Sequence

WARP = 32
_SPANS = {1: 128, 2: 64, 3: 32}  # the bytes of a swizzle, by bits 62 and 63 of a descriptor

Memory = list[int | tuple[int, ...] | None]  # shared memory, one entry per byte; its first byte has the address 0


def swizzled(address: int, span: int) -> int:
    """The address at which a byte lies: its 16-byte chunk moves within the span, by bits 7 and up of the address."""
    return address ^ (address >> 7) % (span // 16) * 16


def write_box(memory: Memory, start: int, rows: Sequence[Sequence[tuple[int, ...]]]) -> None:
    """Write the rows of a TMA box, each as long as the span of the swizzle, one after another."""
    span = len(rows[0])
    for row, values in enumerate(rows):
        for column, value in enumerate(values):
            memory[swizzled(start + row * span + column, span)] = value


def read_operand(memory: Memory, start: int, descriptor: int, rows: int, columns: int = 32) -> Memory:
    """Read `rows` x `columns` bytes of a matrix that is contiguous along its columns, row by row, as wgmma does."""
    span, stride = _SPANS[descriptor >> 62], (descriptor >> 32 & 0x3FFF) << 4
    addresses = [
        start + row // 8 * stride + row % 8 * span + column for row in range(rows) for column in range(columns)
    ]
    return [memory[swizzled(address, span)] for address in addresses]


def a_elements(lane: int, register: int) -> list[tuple[int, int]]:
    """The (row, column) of the four bytes of a register of an A fragment, 16 x 32."""
    row, column = lane // 4 + register % 2 * 8, register // 2 * 16 + lane % 4 * 4
    return [(row, column + byte) for byte in range(4)]
