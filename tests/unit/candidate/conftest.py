"""The bindings, compiled once for tensors on the CPU with kernels that keep their arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_fa.build.command import BINDINGS, binding_command, ffi_folder
from pytest_fa.build.interface import FORWARD
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError

SOURCE = Path(__file__).with_name("binding_on_cpu.cpp")


@pytest.fixture(scope="session")
def bound_library(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> str:
    """The library of both bindings."""
    folder = tmp_path_factory.mktemp("binding")
    try:
        toolchain = find_toolchain(shared_cache)
    except ToolchainError:
        pytest.skip("this machine has no CUDA compiler")  # the marker's check comes after this fixture
    words = [word for word in binding_command(toolchain, FORWARD) if word != "-c"]
    words[words.index(str(BINDINGS / FORWARD.binding))] = str(SOURCE)
    words[words.index("binding.o")] = str(folder / "kernel.so")
    libraries = [f"-L{ffi_folder()}/lib", "-ltvm_ffi", f"-Wl,-rpath,{ffi_folder()}/lib"]
    command = [*words, "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-address", f"-I{BINDINGS}", *libraries]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, made.stderr
    return str(folder / "kernel.so")
