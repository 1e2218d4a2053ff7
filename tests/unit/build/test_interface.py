"""The C interface over time: kernels of three ages, called by hosts that know fewer features, the same, and more."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.attention.abi import FEATURES
from pytest_fa.build.command import INCLUDE
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from pytest_fa.features.sanitize.plain_call import ABI_VERSION, PLAIN_SIZE, ForwardArgs

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

NOOP = INCLUDE.parent / "builtin" / "noop" / "kernel.cu"
EARLIER = Path(__file__).parents[2] / "recorded" / "earlier"
# It copies its arguments, and says in `message` which window it got.
KERNEL = """\
#include "fa_forward.h"
extern "C" int fa_forward(const FaForwardArgs* args, cudaStream_t) {
  if (int status = CHECK) return status;
#ifdef FA_PLAIN_SIZE
  const FaForwardArgs copy = fa_copy_args(args);
  if (copy.features != 0) {
    snprintf(args->message, args->message_bytes, "left %d, right %d", int(copy.window_left), int(copy.window_right));
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
        "noop": (INCLUDE, re.findall(r"fa_check_features\(.*?\)", NOOP.read_text(encoding="utf-8"))[0]),
    }
    return {age: _compiled(folder / age, cuda, *header_and_check) for age, header_and_check in ages.items()}


def _compiled(folder: Path, cuda: Path, header: Path, check: str) -> Call:
    folder.mkdir()
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(KERNEL, encoding="utf-8")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{header}", f"-I{cuda}", f"-DCHECK={check}"]
    command = ["g++", *flags, str(source), "-o", str(library)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert made.returncode == 0, made.stderr
    forward = ctypes.CDLL(str(library)).fa_forward

    def call(size: int, behind: bytes = b"", bits: int = 0, **features: float) -> tuple[int, str]:
        message = ctypes.create_string_buffer(200)
        args = ForwardArgs(abi_version=ABI_VERSION, struct_size=size, features=bits, **features)
        args.message, args.message_bytes = ctypes.addressof(message), len(message)
        for name in features:
            args.features |= FEATURES[name]
        memory = ctypes.create_string_buffer((bytes(args) + bytes(MORE))[: max(size, PLAIN_SIZE)] + behind)
        return forward(memory, None), message.value.decode()

    return call


def test_a_call_without_features_suits_kernels_of_all_ages(kernels: dict[str, Call]) -> None:
    """It has the size that a kernel of the first header asks for, whatever lies behind it in memory."""
    answers = {age: call(PLAIN_SIZE, behind=FULL * (OWN_SIZE - PLAIN_SIZE)) for age, call in kernels.items()}
    assert answers == dict.fromkeys(kernels, (0, ""))


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
        "noop": (0, "left 0, right -3"),
    }


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_refused_by_name(kernels: dict[str, Call], name: str) -> None:
    """A source of plain attention, compiled again, refuses each bit on its own."""
    status, message = kernels["plain"](OWN_SIZE, **{name: 1})
    assert (status, message.endswith(f"does not pass FA_{name.upper()} to fa_check_features")) == (-1, True)


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
