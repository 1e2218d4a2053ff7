"""The machine code of the rungs with products in e4m3: their instructions, and the limits of their manifests."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from pytest_fa.build.builder import ensure
from pytest_fa.build.resources import broken_limits
from pytest_fa.catalog.discover import discover
from pytest_fa.records.built import Build
from tests.unit.build.listings import functions_of

CATALOG = discover((Path(__file__).parents[3] / "kernels",)).variants
# For each kernel, head_dim, the warpgroups, the keys of a tile and the columns of P V, eight more with those for the
# row sum.  A step computes 32 columns of Q K^T or 32 keys of P V.
SUMS_BY_LANES = [(64, 2, 128, 64), (128, 2, 128, 128)]
THREE_GROUPS = [(64, 3, 96, 72), (128, 2, 128, 136)]
SHAPES = [(64, 3, 96, 72), (64, 2, 128, 72), (64, 1, 128, 72), (128, 2, 128, 136), (128, 1, 96, 136)]
WHOLE_AND_DIVIDED = SHAPES + [shape for shape in SHAPES if shape[:2] != (128, 2)]
IN_HALVES = (64, 4, 64, 72)  # each step computes P V in two halves of its columns
PRODUCTS = {
    "fp8_wgmma": SUMS_BY_LANES,
    "fp8_overlap": SUMS_BY_LANES,
    "fp8_sum": [(64, 2, 128, 72), (128, 2, 128, 136)],
    "fp8_tiles": THREE_GROUPS,
    "fp8_max": THREE_GROUPS,
    "fp8_transpose": THREE_GROUPS,
    "fp8_keys": [(64, 3, 96, 72), (128, 2, 96, 136)],
    "fp8_shapes": SHAPES,
    "fp8_causal": SHAPES,
    "fp8_split": WHOLE_AND_DIVIDED,
    "fp8_four": [*WHOLE_AND_DIVIDED, IN_HALVES],
    "fp8_stages": [*WHOLE_AND_DIVIDED, IN_HALVES],
}
STEP = 32
COPIES = 3  # of each product: the first key tile, those with a mask, and those without
NAME = re.compile(r"fp8_\w+_kernel\S*ShapeILi(?P<head_dim>\d+)ELi(?P<groups>\d+)ELi(?P<keys>\d+)E")


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("rung", PRODUCTS)
def test_both_products_are_in_e4m3(shared_cache: Path, tmp_path: Path, rung: str) -> None:
    """Each kernel has the wgmma of its tile in e4m3 and no others, and the build is within the limits."""
    variant = CATALOG[rung]
    build = ensure([(variant, "sm_90a")], shared_cache).outcomes[(variant.name, "sm_90a")]
    assert isinstance(build, Build), build
    assert broken_limits(build, variant.limits) == []
    kernels = [
        (tuple(map(int, match.groups())), Counter(re.findall(r"\b([QHI]GMMA\.\S+)", text)))
        for name, text in functions_of(shared_cache / build.library, tmp_path).items()
        if (match := NAME.search(name))
    ]
    columns = {(head_dim, groups, keys): columns for head_dim, groups, keys, columns in PRODUCTS[rung]}
    each_shape = [tuple(shape) for *shape, _ in PRODUCTS[rung]]
    assert sorted(shape for shape, _ in kernels) == sorted(2 * each_shape)  # outputs in fp16 and in bf16
    for (head_dim, groups, keys), instructions in kernels:
        assert instructions == _expected((head_dim, groups, keys, columns[head_dim, groups, keys]))


def _expected(shape: tuple[int, int, int, int]) -> Counter[str]:
    head_dim, _, keys, columns = shape
    last = [columns]  # P V of the last key tile
    each_step = [columns // 16 * 8, columns - columns // 16 * 8] if shape == IN_HALVES else last
    widths = Counter({keys: COPIES * head_dim // STEP})  # of the results
    for width in (*each_step, *each_step, *last):
        widths[width] += keys // STEP
    return Counter({f"QGMMA.64x{width}x32.F32.E4M3.E4M3": count for width, count in widths.items()})


# mma.sync in e4m3: instructions of Ada, and for Hopper conversions to fp16 with products in fp16.
MMA_SYNC = {"sm_89": {"QMMA.16832.F32.E4M3.E4M3"}, "sm_90a": {"F2FP.F16.E4M3.UNPACK_B", "HMMA.16816.F32"}}


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("arch", MMA_SYNC)
def test_mma_sync_is_emulated_on_hopper(shared_cache: Path, tmp_path: Path, arch: str) -> None:
    """fp8_mma has products in e4m3 for sm_89 and in fp16 for sm_90a, and both builds are within the limits."""
    variant = CATALOG["fp8_mma"]
    build = ensure([(variant, arch)], shared_cache).outcomes[(variant.name, arch)]
    assert isinstance(build, Build), build
    assert broken_limits(build, variant.limits) == []
    functions = functions_of(shared_cache / build.library, tmp_path)
    kernels = [text for name, text in functions.items() if "fp8_mma_kernel" in name]
    assert len(kernels) == 4  # two head_dims, outputs in fp16 and in bf16
    for text in kernels:
        assert set(re.findall(r"\b(?:[QHI]MMA\.\S+|F2FP\.F16\.E4M3\.\S+)", text)) == MMA_SYNC[arch]
