"""The call without torch: its argument struct matches the header, and its memory has exactly the right size."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.catalog.case import parse_case
from pytest_fa.features.sanitize import plain_call

INCLUDE = Path(plain_call.__file__).parents[2] / "include"


@pytest.mark.needs_nvcc
def test_the_struct_is_the_headers(tmp_path: Path, shared_cache: Path) -> None:
    """The struct has the size and the field offsets that the compiler gives the struct of the header."""
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
    size = ctypes.sizeof(plain_call.ForwardArgs)
    offsets = [getattr(plain_call.ForwardArgs, name).offset for name in fields]
    assert [str(number) for number in (size, *offsets)] == printed


@pytest.mark.parametrize(
    ("case_id", "query", "key"),
    [
        ("b2h4s77d64-fp16-kv2-sk33-seed0", (4 * 77 * 64, 77 * 64, 64, 1), (2 * 33 * 64, 33 * 64, 64, 1)),
        ("b2h3s77d64-fp16-bshd-seed0", (3 * 77 * 64, 64, 3 * 64, 1), (3 * 77 * 64, 64, 3 * 64, 1)),
    ],
)
def test_strides_follow_the_layout(case_id: str, query: tuple[int, ...], key: tuple[int, ...]) -> None:
    """The strides are those of dense tensors in the case's layout, bhsd or bshd."""
    args = plain_call.forward_args(parse_case(case_id), 1, 2, 3, 4)
    strides = [
        [getattr(stride, name) for name in ("batch", "head", "seq", "dim")] for stride in (args.q_stride, args.k_stride)
    ]
    assert [list(query), list(key)] == strides
    assert (args.abi_version, args.struct_size, args.features) == (1, plain_call.PLAIN_SIZE, 0)


def test_features_have_their_bits() -> None:
    """A window and a cap of a case are in the struct, each with its bit; an open side has none."""
    args = plain_call.forward_args(parse_case("b1h1s64d64-fp16-win7_0-sk80-cap2p5-seed0"), 1, 2, 3, 4)
    assert (args.struct_size, args.features) == (ctypes.sizeof(plain_call.ForwardArgs), 1 | 2 | 4)
    assert (args.softcap, args.window_left, args.window_right) == (2.5, 7, 0)
    one_side = plain_call.forward_args(parse_case("b1h1s64d64-fp16-wino_5-seed0"), 1, 2, 3, 4)
    assert (one_side.features, one_side.window_right) == (4, 5)


def test_tensors_of_parts_have_their_bits() -> None:
    """A tensor has strides of 0 along the axes on which it does not depend, and a V of another size its own strides."""
    case = parse_case("b2h3s64d64-fp16-sk80-dv128-biasbq-maskh-sink-seed0")
    args = plain_call.forward_args(case, 1, 2, 3, 4)
    assert (args.struct_size, args.features) == (ctypes.sizeof(plain_call.ForwardArgs), 8 | 32 | 64 | 128)
    assert (args.head_dim_v, args.v_stride.seq, args.out_stride.seq, args.k_stride.seq) == (128, 128, 128, 64)
    strides = [(each.batch, each.head, each.seq, each.dim) for each in (args.bias_stride, args.mask_stride)]
    assert strides == [(64 * 80, 0, 80, 1), (0, 80, 0, 1)]
    drawn = {word: math.prod(sizes) for word, sizes in plain_call._tensor_sizes(case).items()}
    assert drawn == {"attn_bias": 2 * 64 * 80, "attn_mask": 3 * 80, "sink": 3}
    slopes = parse_case("b1h2s64d64-e4m3-alibi-seed0")
    assert plain_call.forward_args(slopes, 1, 2, 3, 4).features == 16


def test_new_keys_have_strides_of_the_layout() -> None:
    """They have a bit, beside that of the lengths, and are as large as what a call appends."""
    case = parse_case("b2h4s3d64-fp16-kv2-sk80-var4-append-dv128-bshd-seed0")
    args = plain_call.forward_args(case, 1, 2, 3, 4)
    assert args.features == 128 | 512 | 16384
    strides = [(each.batch, each.head, each.seq, each.dim) for each in (args.k_new_stride, args.v_new_stride)]
    assert strides == [(2 * 3 * 64, 64, 2 * 64, 1), (2 * 3 * 128, 128, 2 * 128, 1)]
    assert plain_call._tensor_sizes(case) == {
        "seqlens_k": (2, 1, 1, 1),
        "k_new": (2, 2, 3, 64),
        "v_new": (2, 2, 3, 128),
    }


@pytest.mark.parametrize(
    ("shape", "code", "strides"),
    [
        ("-kv_int8_t", 4, (0, 0, 0, 0)),
        ("-kv_e4m3_h", 3, (0, 1, 0, 0)),
        ("-kv_int8_th", 4, (2 * 80, 80, 1, 0)),
        ("-var1-page16-kv_e4m3_th", 3, (2 * 16, 16, 1, 0)),
    ],
)
def test_a_cache_has_scales(shape: str, code: int, strides: tuple[int, ...]) -> None:
    """They have strides of 0 along the axes on which they do not depend, and numbers have a byte."""
    case = parse_case(f"b2h4s64d64-fp16-kv2-sk80{shape}-seed0")
    args = plain_call.forward_args(case, 1, 2, 3, 4)
    assert (args.features & 2048, args.dtype, args.cache_dtype) == (2048, 0, code)
    for each in (args.k_scale_stride, args.v_scale_stride):
        assert (each.batch, each.head, each.seq, each.dim) == strides
    generator = np.random.default_rng(0)
    scales = np.frombuffer(plain_call._draw_tensor(generator, "k_scale", 6, case), dtype=np.float32)
    assert (len(plain_call._draw(generator, 1000, "int8")), len(scales), min(scales) > 0) == (1000, 6, True)


@pytest.mark.parametrize(
    ("word", "dtype", "size"),
    [("attn_mask", "bf16", 1), ("attn_bias", "fp16", 2), ("attn_bias", "e4m3", 4), ("sink", "fp16", 4)],
)
def test_tensors_have_their_dtype(word: str, dtype: str, size: int) -> None:
    """A mask has bytes of 0 and 1, a bias the dtype of Q or float32."""
    case = parse_case(f"b1h2s64d64-{dtype}-seed0")
    content = plain_call._draw_tensor(np.random.default_rng(0), word, 1000, case)
    assert len(content) == 1000 * size
    assert word != "attn_mask" or set(content) == {0, 1}


def test_lengths_are_those_of_the_case() -> None:
    """They are not random: a length past the end would be read."""
    case = parse_case("b4h2s150d64-fp16-var2-seed0")
    content = plain_call._draw_tensor(np.random.default_rng(0), "seqlens_q", 4, case)
    assert np.frombuffer(content, dtype=np.int32).tolist() == [queries.seq_q for queries in case.sequences]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_data_are_normal_numbers_of_two_bytes(dtype: str) -> None:
    """The inputs are finite numbers from N(0, 1), two bytes each."""
    content = plain_call._draw(np.random.default_rng(0), 10_000, dtype)
    bits = np.frombuffer(content, dtype=np.uint16)
    values = bits.view(np.float16) if dtype == "fp16" else (bits.astype(np.uint32) << 16).view(np.float32)
    assert (len(content), plain_call._count_not_finite(content, dtype)) == (20_000, 0)
    assert abs(float(values.astype(np.float64).std()) - 1.0) < 0.05


def test_what_is_not_finite_is_counted() -> None:
    """NaN and Inf elements are counted in every dtype."""
    fp16 = np.array([0x7C00, 0x7E01, 0xFC00, 0x7BFF, 0], dtype=np.uint16).tobytes()
    bf16 = np.array([0x7F80, 0xFF81, 0x7F7F], dtype=np.uint16).tobytes()
    assert (3, 2) == (plain_call._count_not_finite(fp16, "fp16"), plain_call._count_not_finite(bf16, "bf16"))
    fp32 = np.array([np.nan, -np.inf, 3e38, 0.0], dtype=np.float32).tobytes()
    assert plain_call._count_not_finite(fp32, "fp32") == 2


def test_data_of_fp32_have_four_bytes() -> None:
    """The inputs of an fp32 case are finite float32 numbers from N(0, 1)."""
    content = plain_call._draw(np.random.default_rng(0), 10_000, "fp32")
    values = np.frombuffer(content, dtype=np.float32)
    assert (len(values), plain_call._count_not_finite(content, "fp32")) == (10_000, 0)
    assert abs(float(values.std()) - 1.0) < 0.05


def test_it_imports_no_torch() -> None:
    """The programs that run under a sanitizer or a profiler do not import torch and its allocator."""
    programs = "pytest_fa.features.sanitize.plain_call, pytest_fa.features.ncu.trial"
    code = f"import sys, {programs}; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert process.stdout.strip() == "False"


def test_scores_are_dense_rows_of_keys() -> None:
    """An output of scores is dense with one row of keys for each query, whatever the layout of the inputs."""
    args = plain_call.forward_args(parse_case("b2h3s32d64-fp16-sk96-bshd-scores-seed0"), 1, 2, 3, 4)
    strides = tuple(getattr(args.out_stride, name) for name in ("batch", "head", "seq", "dim"))
    assert strides == (3 * 32 * 96, 32 * 96, 96, 1)
