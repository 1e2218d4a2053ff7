"""The layouts of the kernels in e4m3: P's columns, V^T's keys, and where TMA writes and wgmma reads them.

A program that includes the kernel's source runs its host functions, and prints the numbers of its layout.  Whether a
wgmma then reads the right bytes is computed by a model of the PTX ISA.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_fa.build.command import defines_header
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.catalog.discover import discover
from tests.unit.build.wgmma_model import WARP, Memory, a_elements, read_operand, write_box

KERNELS = Path(__file__).parents[3] / "kernels"
INCLUDE = Path(__file__).parents[3] / "pytest_fa" / "include"
PROGRAM = Path(__file__).with_name("fp8_layout.cu")
RUNGS = ("fp8_wgmma", "fp8_tiles", "fp8_keys")
STEP = 32  # keys or columns of one wgmma
TILE_KEYS = 128  # that a block transposes
BANKS = 32  # of shared memory, of four bytes each
ONE = (-1,)  # stands for an element of the rows of ones
Lines = list[tuple[str, list[int]]]

pytestmark = pytest.mark.needs_nvcc


class Layout(NamedTuple):
    """The numbers that the program prints for one head_dim."""

    shape: list[int]  # head_dim, warpgroups, keys of a tile, bytes of shared memory
    panel: list[int]  # keys of a panel of V^T, its rows, and the bytes that TMA loads of V and of K
    stages: list[int]  # where K and V of each stage begin
    descriptors: list[int]  # of rows and of panels
    qk_steps: list[int]
    pv_steps: list[int]
    panels: list[int]


@pytest.fixture(scope="module", params=RUNGS)
def lines(request: pytest.FixtureRequest, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """What the program prints, with the defines of a rung: the name of each line and its numbers."""
    toolchain, folder = find_toolchain(shared_cache), tmp_path_factory.mktemp("layout")
    variant = discover((KERNELS,)).variants[request.param]
    (folder / "defines.h").write_text(defines_header(variant), encoding="utf-8")
    (folder / "fa_instantiations.h").write_text("#define FA_FOR_EACH_INSTANTIATION(X)\n", encoding="utf-8")
    includes = [f"-I{path}" for path in (variant.folder, KERNELS / "include", INCLUDE, folder)]
    flags = ["-std=c++17", "-arch=sm_90a", "-cudart=static", f"-L{toolchain.library_folder}", "-include=defines.h"]
    command = [toolchain.nvcc, "-ccbin", toolchain.host_compiler, *flags, *includes, "-o", "layout", str(PROGRAM)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    printed = subprocess.run([str(folder / "layout")], check=True, capture_output=True, text=True).stdout
    return [(name, [int(word) for word in words]) for name, *words in map(str.split, printed.splitlines())]


@pytest.fixture
def layouts(lines: Lines) -> list[Layout]:
    """The layout of each head_dim."""
    columns = [[numbers for name, numbers in lines if name == field] for field in Layout._fields]
    return [Layout(*numbers) for numbers in zip(*columns, strict=True)]


def _bytes_of(words: list[int]) -> list[int]:
    return [word >> 8 * byte & 0xFF for word in words for byte in range(4)]


def _keys(lines: Lines) -> list[int]:
    return next(numbers for name, numbers in lines if name == "keys")


@pytest.mark.nightly
def test_p_has_the_keys_of_its_columns(lines: Lines) -> None:
    """Each column of the A fragments holds the weights of one key for all rows, in the order of `key_of_column`."""
    fragments = [numbers for name, numbers in lines if name == "p"]
    held = {
        element: value
        for lane in range(WARP)
        for register in range(4)
        for element, value in zip(a_elements(lane, register), _bytes_of([fragments[lane][register]]), strict=True)
    }
    keys = _keys(lines)
    assert sorted(keys) == list(range(STEP)) != keys
    assert held == {(row, c): 1 + keys[c] + 0x80 * (row // 8) for row in range(16) for c in range(STEP)}


def test_v_is_transposed_with_the_keys_of_p(lines: Lines) -> None:
    """A column of a patch has its keys in the order of P; the deliberately wrong one has them in their own order."""
    right, wrong = ([numbers for name, numbers in lines if name == kind] for kind in ("column", "in_order"))
    assert [_bytes_of(column) for column in right] == [[4 * key + i for key in _keys(lines)] for i in range(4)]
    assert [_bytes_of(column) for column in wrong] == [[4 * key + i for key in range(STEP)] for i in range(4)]


def test_a_tile_of_v_is_transposed_with_the_keys_of_p(lines: Lines) -> None:
    """Each row of V^T has the bytes of one column, with the keys of each 32 in the order of P."""
    tiles, rows = ([numbers for name, numbers in lines if name == kind] for kind in ("tile", "v_t"))
    order = [first + key for first in range(0, TILE_KEYS, STEP) for key in _keys(lines)]
    assert [head_dim for head_dim, *_ in tiles] == [64, 128]
    for (head_dim, *_), words in zip(tiles, rows, strict=True):
        assert _bytes_of(words) == [(7 * key + column) & 0xFF for column in range(head_dim) for key in order]


def test_a_tile_of_v_has_no_bank_conflicts(lines: Lines) -> None:
    """Eight threads write 16 bytes each to all 32 banks, and the threads of a warp read a word from each bank."""
    written, read, tiles = (
        [numbers for name, numbers in lines if name == kind] for kind in ("written", "read", "tile")
    )
    for first_words, words, (head_dim, threads, vectors, size) in zip(written, read, tiles, strict=True):
        assert len(first_words) == threads * vectors == TILE_KEYS * head_dim // 16
        all_words = [word + i for word in first_words for i in range(4)]
        assert (len(set(all_words)), max(all_words) < size // 4) == (TILE_KEYS * head_dim // 4, True)
        assert sorted(words) == sorted(all_words)
        for banks in (_in_banks(all_words), _in_banks(words)):  # eight threads' vectors, or 32 threads' words
            assert all(sorted(phase) == list(range(BANKS)) for phase in banks)


def _in_banks(words: list[int]) -> list[list[int]]:
    """The banks of successive words, of as many as one phase accesses."""
    return [[word % BANKS for word in words[first : first + BANKS]] for first in range(0, len(words), BANKS)]


def test_rounding_saturates_and_keeps_nan(lines: Lines) -> None:
    """Numbers beyond 448 become 448, and NaN stays NaN."""
    (words,) = (numbers for name, numbers in lines if name == "rounded")
    assert _bytes_of(words) == [0x7E, 0xFE, 0x38, 0x7F]


def test_wgmma_reads_k_as_tma_wrote_it(layouts: list[Layout]) -> None:
    """Every step of Q K^T reads 32 columns of all keys of the tile, in both stages; Q has the same layout."""
    for layout in layouts:
        head_dim, _, keys, size = layout.shape
        assert layout.panel[3] == keys * head_dim  # the bytes for which the barrier waits
        for start in layout.stages[:2]:
            memory: Memory = [None] * size
            write_box(memory, start, [[(key, d) for d in range(head_dim)] for key in range(keys)])
            for step, offset in enumerate(layout.qk_steps):
                expected = [(key, step * STEP + d) for key in range(keys) for d in range(STEP)]
                assert read_operand(memory, start + offset, layout.descriptors[0], keys) == expected
        assert len(layout.qk_steps) * STEP == head_dim


def test_wgmma_reads_v_transposed_as_tma_wrote_it(layouts: list[Layout]) -> None:
    """Every step of P V reads 32 keys of all columns of V, and then the rows of ones, in both stages."""
    for layout in layouts:
        (head_dim, _, keys, size), (panel_keys, rows, loaded_bytes, _) = layout.shape, layout.panel
        assert loaded_bytes == keys * head_dim
        assert len(layout.pv_steps) * STEP == keys == len(layout.panels) * panel_keys
        for start in layout.stages[2:]:
            memory: Memory = [None] * size
            for panel, offset in enumerate(layout.panels):
                first = panel * panel_keys
                write_box(
                    memory, start + offset, [[(d, first + key) for key in range(panel_keys)] for d in range(head_dim)]
                )
                ones = start + offset + head_dim * panel_keys
                memory[ones : ones + (rows - head_dim) * panel_keys] = [ONE] * ((rows - head_dim) * panel_keys)
            for step, offset in enumerate(layout.pv_steps):
                values = [[(d, step * STEP + key) if d < head_dim else ONE for key in range(STEP)] for d in range(rows)]
                expected = [value for row in values for value in row]
                assert read_operand(memory, start + offset, layout.descriptors[1], rows) == expected
        assert rows in (head_dim, head_dim + 8)


def test_stages_do_not_overlap(layouts: list[Layout]) -> None:
    """The stages of K and V follow each other in shared memory, at multiples of the pattern of their swizzle."""
    for layout in layouts:
        (_, _, keys, size), (panel_keys, rows, _, k_bytes) = layout.shape, layout.panel
        k0, k1, v0, v1 = layout.stages
        assert (k1 - k0, v0 - k1, v1 - v0) == (k_bytes, k_bytes, keys * rows)
        assert v1 + keys * rows <= size <= 227 * 1024
        assert [k0 % 1024, k1 % 1024, v0 % 1024, v1 % (8 * panel_keys)] == [0, 0, 0, 0]
