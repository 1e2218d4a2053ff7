"""The C interface of gradients: the order of its fields, and calls by hosts with another struct."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.attention.abi import BACKWARD_FIELDS
from pytest_fa.build.command import INCLUDE
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from pytest_fa.features.sanitize.plain_call import ABI_VERSION, BackwardArgs, ForwardArgs

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

OWN_SIZE = ctypes.sizeof(BackwardArgs)
MORE = 8  # bytes of a later host's struct
SINK, MASK = 8, 64  # bits
KERNEL = """\
#include "fa_backward.h"
extern "C" int fa_backward(const FaBackwardArgs* args, cudaStream_t) {
  if (int status = fa_check_backward(args, FA_SINK)) return status;
  const FaForwardArgs forward = fa_copy_args(args->forward);
  snprintf(forward.message, forward.message_bytes, "head_dim_v %d", int(forward.head_dim_v));
  return FA_OK;
}
extern "C" const size_t offsets[] = {OFFSETS};
"""
Call = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> ctypes.CDLL:
    """A kernel that takes a sink, and the offsets of the struct's fields."""
    try:
        toolchain = find_toolchain(shared_cache)
    except ToolchainError:
        pytest.skip("this machine has no CUDA compiler")  # the marker's check comes after this fixture
    folder = tmp_path_factory.mktemp("interface")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    offsets = ", ".join(f"offsetof(FaBackwardArgs, {name})" for name, _ in BACKWARD_FIELDS)
    source.write_text(KERNEL.replace("OFFSETS", f"{offsets}, sizeof(FaBackwardArgs)"), encoding="utf-8")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", f"-I{toolchain.home}/include"]
    made = subprocess.run(
        ["g++", *flags, str(source), "-o", str(library)], capture_output=True, text=True, check=False, timeout=120
    )
    assert made.returncode == 0, made.stderr
    return ctypes.CDLL(str(library))


@pytest.fixture
def call(kernel: ctypes.CDLL) -> Call:
    """`call(size, behind, features=bits)`: the status of a call whose struct has this size, and the message.

    Behind the struct, memory has the bytes `behind`.
    """

    def call_once(size: int = OWN_SIZE, behind: bytes = b"", **fields: int) -> tuple[int, str]:
        message = ctypes.create_string_buffer(200)
        forward = ForwardArgs(abi_version=ABI_VERSION, struct_size=ctypes.sizeof(ForwardArgs), **fields)
        forward.message, forward.message_bytes = ctypes.addressof(message), len(message)
        args = BackwardArgs(struct_size=size, forward=ctypes.addressof(forward))
        memory = ctypes.create_string_buffer((bytes(args) + bytes(MORE))[: max(size, OWN_SIZE)] + behind)
        return kernel.fa_backward(memory, None), message.value.decode()

    return call_once


def test_the_fields_are_those_of_the_header(kernel: ctypes.CDLL) -> None:
    """Each has the offset that the header gives it."""
    offsets = list((ctypes.c_size_t * (len(BACKWARD_FIELDS) + 1)).in_dll(kernel, "offsets"))
    assert offsets == [*(getattr(BackwardArgs, name).offset for name, _ in BACKWARD_FIELDS), OWN_SIZE]


def test_a_kernel_gets_the_forward_call(call: Call) -> None:
    """It takes what it passes to the check, and refuses other features as a forward kernel does."""
    assert call(features=SINK, head_dim=64) == (0, "head_dim_v 64")
    refusal = "the call has a mask, but this kernel does not pass FA_MASK to fa_check_features"
    assert call(features=MASK) == (-1, refusal)


def test_a_struct_of_another_size(call: Call) -> None:
    """A shorter one is refused, and a longer one accepted if what the kernel does not know is zero."""
    refusal = f"the caller's FaBackwardArgs has {OWN_SIZE - 8} bytes, this kernel's has {OWN_SIZE}"
    assert call(OWN_SIZE - 8) == (-1, refusal)
    assert call(OWN_SIZE, behind=b"\xff" * MORE) == (0, "head_dim_v 0")
    assert call(OWN_SIZE + MORE) == (0, "head_dim_v 0")
    refusal = f"byte {OWN_SIZE + MORE} of the caller's FaBackwardArgs is not 0; this kernel's has {OWN_SIZE} bytes"
    assert call(OWN_SIZE + MORE + 1, behind=b"\1") == (-1, refusal)
