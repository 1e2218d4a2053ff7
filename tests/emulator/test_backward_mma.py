"""The backward kernels on tensor cores behind their binding, emulated on the CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.candidate.cuda_backward import CudaBackward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.gpu.inputs import make_inputs
from tests.emulator.conftest import KERNELS
from tests.emulator.emulated import NAN_BYTE, Emulator
from tests.emulator.test_backward_minimal import broken_bounds, gradients_of, upstream_of
from tests.tiers import nightly_after

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

# Shapes of the ladder: each rung is judged on all of them.
SHAPES = (
    "b2h4s70d64-fp16-causal-kv2-sk100",
    "b1h2s130d64-fp16-causal_br-sk30",  # the first queries see no key
    "b1h2s70d128-bf16-causal_br-sk150-bshd",
    "b1h2s1d64-fp16",
    "b1h2s5d64-fp16-sk0",
    "b1h2s1d64-bf16-causal_br-sk200",
    "b1h6s33d128-fp16-kv2-sk65",
    "b1h2s150d64-fp16-causal-sk50-scalem0p7",
    "b1h2s150d128-fp16-scale0",
    "b1h4s300d64-bf16-causal_br-kv2-sk330",
    "b1h2s200d128-fp16-causal-sk260-bshd",
    "b1h1s10d128-fp16-causal-sk300",  # the last keys are seen by no query
)
RUNGS = ("backward_mma", "backward_deterministic", "backward_overlap", "backward_wgmma", "backward_bulk")
ALL = ["dq", "dk", "dv"]
MISTAKES = {
    "wrong_backward_delta": ["dk"],
    "race_backward_visible": ALL,
    "race_backward_stage": ALL,
    "race_backward_kv_full": ALL,
    "race_backward_q_full": ALL,
    "race_backward_q_empty": ALL,
    "race_backward_ds_written": ["dq"],
    "race_overlap_kv_full": ALL,
    "race_overlap_q_full": ALL,
    "race_overlap_q_empty": ALL,
    "race_overlap_ds_written": ["dq"],
    "race_overlap_dq_full": ["dq"],
    "race_overlap_dq_empty": ["dq"],
    "race_registers_kv_full": ALL,
    "race_bulk_kv_full": ALL,
    "race_bulk_q_full": ALL,
    "race_bulk_q_empty": ALL,
    "race_bulk_ds_written": ["dq"],
    "race_bulk_dq_full": ["dq"],
    "race_bulk_dq_empty": ["dq"],
}

Kernel = Callable[..., CudaBackward]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Kernel:
    """`kernel("backward_bulk", "fp16", 64)`: a variant as Python calls it, compiled once; its workspace is full of NaN.

    The keyword `seed` is that of the order in which blocks start and threads run, `resident_blocks` of them at once.
    """
    emulator, variants = Emulator(tmp_path_factory.mktemp("emulator"), shared_cache), discover((KERNELS,)).variants

    @functools.cache
    def build(name: str, dtype: str, head_dim: int) -> str:
        variant = msgspec.structs.replace(variants[name], instantiations=((dtype, head_dim),))
        return str(emulator.bound(variant, tmp_path_factory.mktemp(name)))

    def load(name: str, dtype: str, head_dim: int, seed: int = 0, resident_blocks: int = 8) -> CudaBackward:
        library = build(name, dtype, head_dim)
        ctypes.CDLL(library).emulator_set(ctypes.c_uint64(seed), 2, resident_blocks, ctypes.c_double(0.5))
        return CudaBackward(library, lambda size, _: torch.full((size,), NAN_BYTE, dtype=torch.uint8))

    return load


def complaints(kernel: Kernel, name: str, shape: str, *, has_dlse: bool) -> list[str]:
    """The bounds that the gradients of a call of a variant do not hold."""
    case = parse_case(f"{shape}-seed0")
    inputs = make_inputs(case, torch.device("cpu"))
    upstream = upstream_of(inputs, has_dlse=has_dlse)
    return broken_bounds(inputs, upstream, gradients_of(kernel(name, case.dtype, case.head_dim), inputs, upstream))


@pytest.mark.parametrize("number", nightly_after(1, range(len(SHAPES))))
@pytest.mark.parametrize("rung", nightly_after(2, RUNGS))
def test_it_is_right(kernel: Kernel, rung: str, number: int) -> None:
    """Each gradient is, with a gradient of the log-sum-exp and without."""
    assert complaints(kernel, rung, SHAPES[number], has_dlse=number % 2 == 0) == []


@pytest.mark.parametrize("shape", nightly_after(1, [shape for shape in SHAPES if "d64" in shape]))
def test_operands_in_registers_are_right(kernel: Kernel, shape: str) -> None:
    """K and V may be there at D = 64."""
    assert complaints(kernel, "backward_registers", shape, has_dlse=True) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(kernel: Kernel, name: str) -> None:
    """A kernel with one mistake has wrong gradients, and no others than it may have."""
    wrong_gradients = {
        complaint.split(":")[0] for complaint in complaints(kernel, name, "b2h4s150d64-fp16-kv2-sk200", has_dlse=True)
    }
    assert wrong_gradients
    assert wrong_gradients <= set(MISTAKES[name])


def gradients_that_differ(kernel: Kernel, name: str) -> set[str]:
    """The gradients whose bits differ between calls of a variant, in which blocks and threads run in other orders."""
    inputs = make_inputs(parse_case("b2h2s150d64-fp16-causal_br-kv1-sk400-seed0"), torch.device("cpu"))
    upstream = upstream_of(inputs, has_dlse=False)
    calls = (kernel(name, "fp16", 64, seed=seed, resident_blocks=3) for seed in range(1, 5))
    first, *later = (gradients_of(call, inputs, upstream) for call in calls)
    return {gradient for call in later for gradient in call if not torch.equal(call[gradient], first[gradient])}


def test_blocks_that_add_in_turn_give_the_same_bits(kernel: Kernel) -> None:
    """The order in which blocks start and threads run does not change them."""
    assert gradients_that_differ(kernel, "backward_deterministic") == set()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["backward_overlap", "race_deterministic_turn"])
def test_blocks_that_add_in_any_order_change_the_bits_of_dq(kernel: Kernel, name: str) -> None:
    """Those of dK and dV stay the same, because no other block adds to them."""
    assert gradients_that_differ(kernel, name) == {"dq"}
