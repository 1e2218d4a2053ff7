"""The decode kernels with pages, lengths on the device, and caches in e4m3, emulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import make_inputs
from tests.emulator.conftest import Build, complaints
from tests.emulator.emulated import Schedule
from tests.tiers import nightly_after

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

RUNG, E4M3_RUNG, WINDOW_RUNG, INVARIANT_RUNG = "decode_paged", "decode_e4m3", "decode_window", "decode_invariant"
# Shapes, the number of SMs, and how many blocks are resident at once.
CASES = (
    ("b4h8s1d64-fp16-kv2-sk1008-var1-page16", 24, 24),
    ("b5h4s4d64-fp16-causal_br-kv2-sk144-var1-page16", 24, 24),  # a sequence has fewer keys than queries
    ("b9h8s3d64-fp16-causal_br-kv2-sk1024-var1-page64hnd", 132, 132),
    ("b4h16s8d128-fp16-causal_br-kv2-sk304-var4-page16hnd-bshd", 8, 16),  # two row tiles
    ("b9h4s2d128-fp16-causal_br-sk256-var1-page256", 5, 16),  # more tiles than SMs
    ("b2h4s1d128-fp16-kv1-sk2048-var4-page128", 60, 60),  # several clusters per tile
    ("b3h4s20d64-fp16-causal_br-kv1-sk512-var4-page16", 2, 8),
    ("b9h2s1d64-fp16-sk200-var1", 4, 8),
    ("b1h8s1d64-fp16-kv2-sk1000", 24, 24),
    ("b1h4s1d64-fp16-sk0", 4, 8),
)
INVARIANT_CASES = (
    *CASES[:7],
    ("b2h4s1d64-fp16-kv1-sk2064-var1-page16", 20, 40),  # narrow blocks in clusters
    ("b1h16s8d128-fp16-causal_br-kv2-sk2500", 9, 18),
    ("b1h2s1d64-fp16-kv1-sk16400", 20, 40),  # a block has 1024 keys
)
E4M3_CASES = (
    ("b4h8s1d64-fp16-kv2-sk1008-var1-page16-kv_e4m3_th", 24, 24),
    ("b1h8s1d128-bf16-kv2-sk1000-kv_e4m3_h", 24, 24),
    ("b1h8s1d64-fp16-kv2-sk1000-kv_e4m3_t", 24, 24),
    ("b9h8s3d64-bf16-causal_br-kv2-sk1024-var1-page64hnd-kv_e4m3_th", 132, 132),
    ("b4h16s8d128-fp16-causal_br-kv2-sk304-var4-page16hnd-kv_e4m3_h-bshd", 8, 16),
    ("b9h4s2d128-fp16-causal_br-sk256-var1-page256-kv_e4m3_th", 5, 16),
    ("b2h4s1d128-fp16-kv1-sk2048-var4-page128-kv_e4m3_t", 60, 60),
    ("b3h4s20d64-fp16-causal_br-kv1-sk512-var4-page16-kv_e4m3_h", 2, 8),
    ("b9h2s1d64-bf16-sk200-var1-kv_e4m3_th", 4, 8),
    ("b1h4s1d64-fp16-sk0-kv_e4m3_h", 4, 8),
)
WINDOW_CASES = (
    ("b1h8s1d64-fp16-win127_0-kv1-sk1000-sink", 24, 24),
    ("b4h8s1d64-fp16-win127_0-kv2-sk1008-var1-page16-sink", 24, 24),  # windows that are longer than their sequences
    ("b5h4s4d64-fp16-win20_0-kv2-sk144-var1-page16-sink", 24, 24),
    ("b9h8s3d64-fp16-win100_0-kv2-sk1024-var1-page64hnd", 132, 132),
    ("b4h16s8d128-fp16-win50_0-kv2-sk304-var4-page16hnd-sink-bshd", 8, 16),  # two row tiles
    ("b2h4s1d128-fp16-win1500_0-kv1-sk2048-var4-page128-sink", 60, 60),  # several clusters per tile
    ("b3h4s20d64-fp16-win30_4-kv1-sk512-var4-page16-sink", 2, 8),  # a window to both sides
    ("b2h4s5d64-fp16-winm3_9-kv1-sk200-sink", 8, 8),  # without the newest keys
    ("b2h4s77d64-fp16-win63_64-sk150", 24, 24),  # the windows of a whole tile end after the last key
    ("b4h4s150d64-fp16-winm8_57-kv2-sk77-var1-page16hnd-bshd", 24, 24),
    ("b2h4s300d64-fp16-win130_190-sk700", 24, 24),
    ("b1h8s1d64-fp16-kv2-sk1000-sink", 24, 24),
    ("b1h4s1d64-fp16-win7_0-sk0-sink", 4, 8),
)
MISTAKES = {
    "wrong_paged_page": CASES[0],
    "wrong_paged_tail": CASES[0],
    "wrong_decode_window_begin": ("b1h8s1d64-fp16-win100_0-kv1-sk1000", 24, 24),
    "wrong_decode_window_sink": ("b1h8s1d64-fp16-kv1-sk300-sink", 24, 24),
}


@pytest.mark.parametrize("number", nightly_after(1, range(len(CASES))))
def test_it_is_right(build: Build, number: int) -> None:
    """Output and log-sum-exp are right, whatever slots that no sequence has and the tail of the table hold."""
    shape, sms, resident_blocks = CASES[number]
    kernel = build(RUNG, parse_case(f"{shape}-seed0").head_dim)
    assert complaints(kernel, shape, Schedule(number, sms, number % 3 / 2, resident_blocks), calls=1 + number % 2) == []


@pytest.mark.parametrize("number", nightly_after(1, range(len(E4M3_CASES))))
def test_caches_in_e4m3_are_right(build: Build, number: int) -> None:
    """So are they with scales for the tensor, for each head and for each key."""
    shape, sms, resident_blocks = E4M3_CASES[number]
    case = parse_case(f"{shape}-seed0")
    kernel = build(E4M3_RUNG, case.head_dim, dtypes=(case.dtype,))
    assert complaints(kernel, shape, Schedule(number, sms, number % 3 / 2, resident_blocks), calls=1 + number % 2) == []


@pytest.mark.nightly
def test_a_missing_scale_is_found(build: Build) -> None:
    """Without the scales of V, the output is wrong."""
    shape, sms, resident_blocks = E4M3_CASES[0]
    assert complaints(build("wrong_e4m3_v_scale"), shape, Schedule(0, sms, 0.5, resident_blocks)) != []


@pytest.mark.parametrize("number", nightly_after(1, range(len(WINDOW_CASES))))
def test_windows_and_sinks_are_right(build: Build, number: int) -> None:
    """So are they if a row sees only some keys before it, or has a sink, with and without pages and lengths."""
    shape, sms, resident_blocks = WINDOW_CASES[number]
    kernel = build(WINDOW_RUNG, parse_case(f"{shape}-seed0").head_dim)
    assert complaints(kernel, shape, Schedule(number, sms, number % 3 / 2, resident_blocks), calls=1 + number % 2) == []


@pytest.mark.parametrize("number", nightly_after(0, range(len(INVARIANT_CASES))))
def test_fixed_keys_are_right(build: Build, number: int) -> None:
    """So are they if the keys of a block do not depend on the sequence."""
    shape, sms, resident_blocks = INVARIANT_CASES[number]
    kernel = build(INVARIANT_RUNG, parse_case(f"{shape}-seed0").head_dim)
    assert complaints(kernel, shape, Schedule(number, sms, number % 3 / 2, resident_blocks), calls=1 + number % 2) == []


@pytest.mark.nightly
@pytest.mark.parametrize("keys", [1500, 2500])
def test_the_bits_of_a_sequence_depend_on_no_other_one(build: Build, keys: int) -> None:
    """A sequence alone has the same bits as among others; with decode_paged, it does not."""
    batch, alone = (parse_case(f"b{size}h16s8d64-fp16-causal_br-kv2-sk{keys}-seed0") for size in (3, 1))
    inputs = make_inputs(batch, torch.device("cpu"))
    own = inputs._replace(q=inputs.q[1:2], k=inputs.k[1:2], v=inputs.v[1:2])
    same = {}
    for name in (INVARIANT_RUNG, RUNG):
        kernel = build(name, 64)
        among_others = kernel(batch, inputs, Schedule(0, 48, 0.5, 48))
        by_itself = kernel(alone, own, Schedule(1, 48, 0.5, 48))
        same[name] = all(torch.equal(both[1:2], single) for both, single in zip(among_others, by_itself, strict=True))
    assert same == {INVARIANT_RUNG: True, RUNG: False}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(build: Build, name: str) -> None:
    """A kernel with one mistake is wrong where the rung is right."""
    shape, sms, resident_blocks = MISTAKES[name]
    assert complaints(build(name), shape, Schedule(0, sms, 0.5, resident_blocks)) != []
