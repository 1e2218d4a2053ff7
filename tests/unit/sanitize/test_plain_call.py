"""The call without torch: its struct is the header's, its memory has exactly the right size."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.catalog.case import parse_case
from pytest_fa.sanitize import plain_call

INCLUDE = Path(plain_call.__file__).parents[1] / "include"


@pytest.mark.needs_nvcc
def test_the_struct_is_the_headers(tmp_path: Path, shared_cache: Path) -> None:
    """Size and offset of every field, as the compiler that builds kernels lays them out."""
    fields = [name for name, _ in plain_call.ForwardArgs._fields_]  # type: ignore[misc]
    lines = "".join(f'  printf("%zu\\n", offsetof(FaForwardArgs, {name}));\n' for name in fields)
    source = tmp_path / "offsets.cpp"
    source.write_text(
        f'#include "fa_forward.h"\nint main() {{\n  printf("%zu\\n", sizeof(FaForwardArgs));\n{lines}}}\n',
        encoding="utf-8",
    )
    home = find_toolchain(shared_cache).home
    program = tmp_path / "offsets"
    subprocess.run(["g++", f"-I{INCLUDE}", f"-I{home}/include", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    found = [ctypes.sizeof(plain_call.ForwardArgs), *(getattr(plain_call.ForwardArgs, name).offset for name in fields)]
    assert [str(each) for each in found] == printed


@pytest.mark.parametrize(
    ("case_id", "query", "key"),
    [
        ("b2h4s77d64-fp16-kv2-sk33-seed0", (4 * 77 * 64, 77 * 64, 64, 1), (2 * 33 * 64, 33 * 64, 64, 1)),
        ("b2h3s77d64-fp16-bshd-seed0", (3 * 77 * 64, 64, 3 * 64, 1), (3 * 77 * 64, 64, 3 * 64, 1)),
    ],
)
def test_strides_follow_the_layout(case_id: str, query: tuple[int, ...], key: tuple[int, ...]) -> None:
    """Dense tensors, heads before or after the sequence."""
    args = plain_call.describe(parse_case(case_id), 1, 2, 3, 4)
    found = [
        [getattr(stride, name) for name in ("batch", "head", "seq", "dim")] for stride in (args.q_stride, args.k_stride)
    ]
    assert [list(query), list(key)] == found
    assert (args.abi_version, args.struct_size) == (1, ctypes.sizeof(plain_call.ForwardArgs))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_data_are_normal_numbers_of_two_bytes(dtype: str) -> None:
    """N(0, 1), finite, in as many bytes as the tensor has."""
    content = plain_call._draw(np.random.default_rng(0), 10_000, dtype)
    bits = np.frombuffer(content, dtype=np.uint16)
    values = bits.view(np.float16) if dtype == "fp16" else (bits.astype(np.uint32) << 16).view(np.float32)
    assert (len(content), plain_call._not_finite(content, dtype)) == (20_000, 0)
    assert abs(float(values.astype(np.float64).std()) - 1.0) < 0.05


def test_what_is_not_finite_is_counted() -> None:
    """NaN and Inf by their exponents, in both dtypes."""
    halves = np.array([0x7C00, 0x7E01, 0xFC00, 0x7BFF, 0], dtype=np.uint16).tobytes()
    brains = np.array([0x7F80, 0xFF81, 0x7F7F], dtype=np.uint16).tobytes()
    assert (3, 2) == (plain_call._not_finite(halves, "fp16"), plain_call._not_finite(brains, "bf16"))


def test_it_imports_no_torch() -> None:
    """What a sanitizer watches holds nobody else's allocator."""
    code = "import sys, pytest_fa.sanitize.plain_call, pytest_fa.profile.trial; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


def test_scores_are_dense_rows_of_keys() -> None:
    """Whatever the inputs' layout, an output of scores has a row of keys for each query."""
    args = plain_call.describe(parse_case("b2h3s32d64-fp16-sk96-bshd-scores-seed0"), 1, 2, 3, 4)
    found = tuple(getattr(args.out_stride, name) for name in ("batch", "head", "seq", "dim"))
    assert found == (3 * 32 * 96, 32 * 96, 96, 1)
