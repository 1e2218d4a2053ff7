"""Malformed calls that reach a kernel through its binding, emulated on the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from pytest_fa.candidate.cuda_forward import CudaForward
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.properties import MALFORMED, case_of_property
from pytest_fa.errors import WrongResult
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.properties import PROPERTIES
from pytest_fa.judge.subject import PropertySubject
from tests.emulator.conftest import KERNELS
from tests.emulator.emulated import Emulator

pytestmark = [pytest.mark.needs_nvcc, pytest.mark.nightly]  # for the headers of CUDA; compiled here


def subject_of(name: str, folder: Path, cache: Path) -> PropertySubject:
    """A kernel of the ladder behind its binding, which takes tensors on the CPU."""
    variant = discover((KERNELS,)).variants[name]
    library = str(Emulator(folder, cache).bound(variant, folder))
    emulator_set = ctypes.CDLL(library).emulator_set
    emulator_set.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_double)
    emulator_set(0, 2, 8, 0.5)
    call = CudaForward(library, lambda size, _: torch.empty(size, dtype=torch.uint8), "attention")
    case = case_of_property(variant, MALFORMED)
    return PropertySubject(variant, case, "same_precision", Candidate.of_function(call, "cpu"))


def test_the_binding_is_no_check_of_the_kernel(tmp_path: Path, shared_cache: Path) -> None:
    """Only calls whose sizes fit together reach the kernel: unaligned, with other strides, of another head_dim."""
    subject = subject_of("mma_regs", tmp_path, shared_cache)
    assert PROPERTIES[MALFORMED](subject) == "3 of 17 kinds of malformed calls apply"


def test_a_kernel_that_trusts_numbers_on_the_device_is_caught(tmp_path: Path, shared_cache: Path) -> None:
    """`minimal` reads as many keys as a length says, and any page, so that it promises nothing."""
    with pytest.raises(WrongResult) as raised:
        PROPERTIES[MALFORMED](subject_of("minimal", tmp_path, shared_cache))
    found = [line.partition(" was accepted: ")[0] for line in str(raised.value).splitlines()]
    calls = ("seqlens_k of 39 where k has 32 rows", "page 138 of 131 in block_table", "page -1 of 131 in block_table")
    assert found == [f"{MALFORMED}: {call}" for call in calls]
    assert "(6 of 17 kinds of malformed calls apply)" in str(raised.value)
