"""The C interface over time: kernels of three ages, called by hosts that know fewer features, the same, and more."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.attention.abi import FEATURES, FIELDS
from pytest_fa.build.command import INCLUDE
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from pytest_fa.features.sanitize.plain_call import ABI_VERSION, PLAIN_SIZE, ForwardArgs, Strides

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

NOOP = INCLUDE.parent / "builtin" / "noop" / "kernel.cu"
HEADER = (INCLUDE / "fa_forward.h").read_text(encoding="utf-8")
# The names of the bits, by the fields that they enable.
BITS = {name: f"FA_{name.removesuffix('_slopes').upper()}" for name in FEATURES} | {"k_new": "FA_APPEND"}
TENSORS = (
    "sink",
    "alibi_slopes",
    "bias",
    "mask",
    "head_dim_v",
    "seqlens_q",
    "seqlens_k",
    "block_table",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cache_dtype",
    "k_new",
)
EARLIER = Path(__file__).parents[2] / "recorded" / "earlier"
# It copies its arguments, and says in `message` which window and which tensors it got.
KERNEL = """\
#include "fa_forward.h"
extern "C" int fa_forward(const FaForwardArgs* args, cudaStream_t) {
  if (int status = CHECK) return status;
#ifdef FA_PLAIN_SIZE
  const FaForwardArgs copy = fa_copy_args(args);
  if (copy.features != 0) {
    snprintf(args->message, args->message_bytes, "left %d, right %d", int(copy.window_left), int(copy.window_right));
  }
  if (TAKES_TENSORS) {
    const auto address = [](const void* pointer) { return int(reinterpret_cast<uintptr_t>(pointer)); };
    snprintf(args->message, args->message_bytes,
             "sink %d, slopes %d, bias %d (%d), mask %d (%d), head_dim %d and %d, lengths %d %d",
             address(copy.sink), address(copy.alibi_slopes), address(copy.bias), int(copy.bias_stride.dim),
             address(copy.mask), int(copy.mask_stride.batch), int(copy.head_dim), int(copy.head_dim_v),
             address(copy.seqlens_q), address(copy.seqlens_k));
  }
#endif
  return FA_OK;
}
"""
OWN_SIZE = ctypes.sizeof(ForwardArgs)
MORE = 8  # bytes of a later host's struct
FULL = b"\xff"
Call = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, Call]:
    """`kernels[age](size, ...)`: the status of a call whose struct has this size, and the message.

    Behind the struct, memory has the bytes `behind`.
    """
    try:
        toolchain = find_toolchain(shared_cache)
    except ToolchainError:
        pytest.skip("this machine has no CUDA compiler")  # the marker's check comes after this fixture
    folder, cuda = tmp_path_factory.mktemp("interface"), Path(toolchain.home) / "include"
    ages = {
        "earlier": (EARLIER, "fa_check_abi(args)"),
        "plain": (INCLUDE, "fa_check_abi(args)"),
        "window": (INCLUDE, "fa_check_features(args, FA_WINDOW_LEFT | FA_WINDOW_RIGHT)"),
        "tensors": (INCLUDE, f"fa_check_features(args, {' | '.join(BITS[name] for name in TENSORS)})"),
        "noop": (INCLUDE, re.findall(r"fa_check_features\(.*?\)", NOOP.read_text(encoding="utf-8"))[0]),
    }
    return {age: _compiled(folder / age, cuda, *header_and_check) for age, header_and_check in ages.items()}


def _compiled(folder: Path, cuda: Path, header: Path, check: str) -> Call:
    folder.mkdir()
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(KERNEL, encoding="utf-8")
    defines = [f"-DCHECK={check}", f"-DTAKES_TENSORS={int('FA_SINK' in check)}"]
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{header}", f"-I{cuda}", *defines]
    command = ["g++", *flags, str(source), "-o", str(library)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert made.returncode == 0, made.stderr
    forward = ctypes.CDLL(str(library)).fa_forward

    def call(size: int, behind: bytes = b"", bits: int = 0, **fields: Any) -> tuple[int, str]:
        message = ctypes.create_string_buffer(200)
        args = ForwardArgs(abi_version=ABI_VERSION, struct_size=size, features=bits, **fields)
        args.message, args.message_bytes = ctypes.addressof(message), len(message)
        for name in fields:
            args.features |= FEATURES.get(name, 0)
        memory = ctypes.create_string_buffer((bytes(args) + bytes(MORE))[: max(size, PLAIN_SIZE)] + behind)
        return forward(memory, None), message.value.decode()

    return call


def test_a_call_without_features_suits_kernels_of_all_ages(kernels: dict[str, Call]) -> None:
    """It has the size that a kernel of the first header asks for, whatever lies behind it in memory."""
    rest = FULL * (OWN_SIZE - PLAIN_SIZE)
    answers = {age: call(PLAIN_SIZE, behind=rest, head_dim=64) for age, call in kernels.items()}
    plain = "sink 0, slopes 0, bias 0 (0), mask 0 (0), head_dim 64 and 64, lengths 0 0"
    assert answers == {**dict.fromkeys(kernels, (0, "")), "tensors": (0, plain)}


def test_no_kernel_ignores_a_window(kernels: dict[str, Call]) -> None:
    """A kernel refuses a window unless it takes one, also one that is compiled with the first header."""
    answers = {age: call(OWN_SIZE, window_left=0, window_right=-3) for age, call in kernels.items()}
    assert answers == {
        "earlier": (-1, f"the caller's ABI is version 1 with {OWN_SIZE} bytes, this kernel's is 1 with {PLAIN_SIZE}"),
        "plain": (
            -1,
            "the call has a window (window_left), but this kernel does not pass FA_WINDOW_LEFT to fa_check_features",
        ),
        "window": (0, "left 0, right -3"),
        "tensors": (
            -1,
            "the call has a window (window_left), but this kernel does not pass FA_WINDOW_LEFT to fa_check_features",
        ),
        "noop": (0, "left 0, right -3"),
    }


def test_each_feature_has_its_bit() -> None:
    """The bits of the header are those of the judge, each for a field of the struct."""
    listed = re.search(r"enum FaFeature \{(.*?)\}", HEADER, re.DOTALL)
    assert listed is not None
    assert dict(re.findall(r"(\w+) = (\d+)", listed[1])) == {BITS[name]: str(bit) for name, bit in FEATURES.items()}
    assert set(FEATURES) <= {name for name, _ in FIELDS}


@pytest.mark.parametrize("name", TENSORS)
def test_no_kernel_ignores_a_tensor(kernels: dict[str, Call], name: str) -> None:
    """Neither a kernel of the first header, nor one of plain attention or with windows alone takes what it lacks."""
    answers = {age: kernels[age](OWN_SIZE, **{name: 4096}) for age in ("earlier", "plain", "window")}
    assert [status for status, _ in answers.values()] == [-1, -1, -1]
    assert answers["plain"] == answers["window"]
    assert f"this kernel does not pass {BITS[name]} to fa_check_features" in answers["plain"][1]


def test_a_kernel_gets_the_tensors(kernels: dict[str, Call]) -> None:
    """Addresses, strides, lengths, and the head_dim of V, which is that of Q and K without its bit."""
    strides = {"bias_stride": Strides(4, 3, 2, 1), "mask_stride": Strides(7, 0, 0, 1)}
    answer = kernels["tensors"](
        OWN_SIZE,
        sink=16,
        alibi_slopes=32,
        bias=48,
        mask=64,
        head_dim=192,
        head_dim_v=128,
        seqlens_q=80,
        seqlens_k=96,
        **strides,
    )
    assert answer == (0, "sink 16, slopes 32, bias 48 (1), mask 64 (7), head_dim 192 and 128, lengths 80 96")
    one = kernels["tensors"](OWN_SIZE, mask=64, mask_stride=Strides(7, 0, 0, 1), head_dim=192)
    assert one == (0, "sink 0, slopes 0, bias 0 (0), mask 64 (7), head_dim 192 and 192, lengths 0 0")


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_refused_by_name(kernels: dict[str, Call], name: str) -> None:
    """A source of plain attention, compiled again, refuses each bit on its own."""
    status, message = kernels["plain"](OWN_SIZE, **{name: 1})
    assert (status, message.endswith(f"does not pass {BITS[name]} to fa_check_features")) == (-1, True)


@pytest.mark.parametrize("name", FEATURES)
def test_the_launch_overhead_takes_each_feature(kernels: dict[str, Call], name: str) -> None:
    """An empty kernel stands beside every kernel, so it must refuse none that is timed."""
    assert kernels["noop"](OWN_SIZE, **{name: 1})[0] == 0


def test_a_kernel_that_takes_a_window_refuses_a_cap(kernels: dict[str, Call]) -> None:
    """One feature that a kernel takes does not let another one through."""
    message = "the call has a soft cap, but this kernel does not pass FA_SOFTCAP to fa_check_features"
    assert kernels["window"](OWN_SIZE, window_left=7, softcap=50.0) == (-1, message)


@pytest.mark.parametrize("size", range(PLAIN_SIZE + 4, OWN_SIZE, 4))
def test_a_feature_needs_the_whole_struct(kernels: dict[str, Call], size: int) -> None:
    """A struct that ends within the features is refused if the call has one, and accepted if not."""
    refusal = f"the call has features and a struct of {size} bytes, this kernel's has {OWN_SIZE}"
    assert kernels["window"](size, window_left=0) == (-1, refusal)
    assert kernels["window"](size) == (0, "")


def test_a_smaller_size_is_refused(kernels: dict[str, Call]) -> None:
    """No caller states a smaller size than that of the first header."""
    refusal = f"the caller's ABI is version 1 with {PLAIN_SIZE - 8} bytes, this kernel's is 1 with {PLAIN_SIZE} or more"
    assert [kernels[age](PLAIN_SIZE - 8) for age in ("plain", "window")] == [(-1, refusal)] * 2


def test_a_later_host_is_served_if_it_asks_for_nothing_new(kernels: dict[str, Call]) -> None:
    """A longer struct is accepted if all that the kernel does not know is zero; a newer bit is named."""
    size, newer = OWN_SIZE + MORE, 1 << 20
    assert (kernels["plain"](size), kernels["window"](size, window_right=3)) == ((0, ""), (0, "left 0, right 3"))
    refusal = f"byte {size} of the caller's struct is not 0; this kernel's struct has {OWN_SIZE} bytes"
    assert [kernels[age](size + 1, behind=b"\1") for age in ("plain", "window")] == [(-1, refusal)] * 2
    refusal = "the call has features 0x100000, which are newer than this kernel's fa_forward.h"
    assert [kernels[age](size, bits=newer) for age in ("plain", "window")] == [(-1, refusal)] * 2
