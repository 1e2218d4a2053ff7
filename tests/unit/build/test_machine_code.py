"""Machine code: an identity that depends only on code, sizes, opcode counts, and errors without the tools."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build import machine_code
from pytest_fa.build.machine_code import MachineCode, host_code, read_machine_code
from pytest_fa.build.toolchain import find_tool, find_toolchain

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace

# mma.sync by its PTX name: one HMMA instruction for each line of the loop's body.
SOURCE = """\
#include <cstdint>

__global__ void mma_kernel(float* out, const uint32_t* in) {
  float d[4] = {};
#pragma unroll
  for (int i = 0; i < MMAS; ++i) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3]), "r"(in[4]), "r"(in[5]));
  }
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

__global__ void copy_kernel(float* out, const float* in) { out[threadIdx.x] = in[threadIdx.x]; }
"""


def compile_library(nvcc: str, folder: Path, mmas: int) -> Path:
    """Compile the source in `folder` by its absolute path, with line information; return the library."""
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text(SOURCE, encoding="utf-8")
    flags = ["-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_80,code=sm_80", "-Xcompiler=-fPIC", "-shared"]
    library = folder / "kernel.so"
    subprocess.run([nvcc, *flags, f"-DMMAS={mmas}", "-o", str(library), str(folder / "kernel.cu")], check=True)
    return library


@pytest.fixture(scope="session")
def _codes(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, MachineCode]:
    """Return the machine code of three compilations."""
    nvcc, folder = find_toolchain(shared_cache).nvcc, tmp_path_factory.mktemp("codes")
    compilations = {
        "original": (folder / "original", 3),
        "moved": (folder / "a" / "longer path" / "moved", 3),
        "larger": (folder / "m", 5),
    }
    with ThreadPoolExecutor(2) as pool:
        libraries = pool.map(lambda arguments: compile_library(nvcc, *arguments), compilations.values())
        return dict(zip(compilations, map(read_machine_code, libraries), strict=True))


@pytest.fixture
def codes(request: pytest.FixtureRequest) -> dict[str, MachineCode]:
    """Return the machine code of one source: `original`, `moved` to another folder, and two instructions `larger`."""
    machine_codes: dict[str, MachineCode] = request.getfixturevalue("_codes")  # after the check for a compiler
    return machine_codes


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_identity_does_not_depend_on_folders(codes: dict[str, MachineCode]) -> None:
    """The same source in another folder has the same identity, although its line information differs."""
    assert codes["moved"] == codes["original"]


@pytest.mark.needs_nvcc
def test_identity_changes_with_the_code(codes: dict[str, MachineCode]) -> None:
    """Two more instructions change the identity."""
    assert codes["larger"].identity != codes["original"].identity


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(("name", "mmas"), [("original", 3), ("larger", 5)])
def test_opcode_counts(codes: dict[str, MachineCode], name: str, mmas: int) -> None:
    """Instructions are counted by the first part of the opcode, and the code has 16 bytes per instruction."""
    mma_bytes, mma_counts = codes[name].kernels["_Z10mma_kernelPfPKj"]
    copy_bytes, copy_counts = codes[name].kernels["_Z11copy_kernelPfPKf"]

    assert (mma_counts["HMMA"], "HMMA" in copy_counts) == (mmas, False)
    assert (copy_counts["LDG"], copy_counts["STG"]) == (1, 1)
    assert (mma_bytes, copy_bytes) == (16 * sum(mma_counts.values()), 16 * sum(copy_counts.values()))


@pytest.mark.parametrize("missing", ["cuobjdump", "nvdisasm"])
def test_missing_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, snapshot: SnapshotAssertion
) -> None:
    """Without a disassembler, the error says what to install."""
    monkeypatch.setattr(machine_code, "find_tool", lambda name: None if name == missing else Path("/bin/true"))

    with pytest.raises(FileNotFoundError) as caught:
        read_machine_code(tmp_path / "kernel.so")

    assert snapshot == str(caught.value)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_build_without_a_disassembler(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a disassembler, the build succeeds; its identity is None, and `code_identity_missing` says why."""
    monkeypatch.setattr(machine_code, "find_tool", lambda _: None)
    (workplace.folder / "tile.h").write_text("#define BLOCK 32\n", encoding="utf-8")

    build = workplace.build()

    assert build.code_identity is None
    assert build.code_identity_missing is not None
    assert build.code_identity_missing.startswith("machine code not read: cuobjdump and nvdisasm are not installed")
    assert [(kernel.instructions, kernel.sass_bytes) for kernel in build.kernels] == [({}, None)]


@pytest.mark.needs_nvcc
def test_unreadable_disassembly_gives_a_build_without_identity(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disassembler's output cannot be read, as with an old one without -json, the build succeeds."""
    nvdisasm = tmp_path / "nvdisasm"
    nvdisasm.write_text("#!/bin/sh\necho 'nvdisasm: no such option'\n", encoding="utf-8")
    nvdisasm.chmod(0o755)
    monkeypatch.setattr(machine_code, "find_tool", lambda name: nvdisasm if name == "nvdisasm" else find_tool(name))
    (workplace.folder / "tile.h").write_text("#define BLOCK 32\n", encoding="utf-8")

    build = workplace.build()

    assert build.code_identity is None
    assert (build.code_identity_missing or "").startswith("machine code not read: ")


@pytest.mark.needs_nvcc
def test_only_cubins_with_kernels_are_disassembled(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cubin that the linker adds has no kernel, so nvdisasm is started for the other one only."""
    commands: list[list[str]] = []
    run = machine_code._run

    def recorded(command: list[str], *arguments: Any) -> str:
        commands.append(command)
        return run(command, *arguments)

    monkeypatch.setattr(machine_code, "_run", recorded)
    code = read_machine_code(workplace.library())

    assert (["cuobjdump", "nvdisasm"], 1) == ([Path(command[0]).name for command in commands], len(code.kernels))


def test_host_code_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    """The size of the device code does not count, which moves what lies behind it; code, data and tables do."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    text = """
        __attribute__((section(".nv_fatbin"), used)) static const char device[SIZE] = {1};
        static int one() { return 1; }
        static int two() { return 2; }
        static const struct { int most; int (*f)(); } table[] = {{10, &one}, {20, &two}};
        int threads = 128;
        extern "C" int pick(int x) { for (auto& row : table) if (x < row.most) return row.f() + threads; return 0; }
        extern "C" double scale(double x) { ++threads; return x * 1.5; }
    """
    changes = [("SIZE", "9"), ("SIZE", "70000"), ("1.5", "2.5"), ("x * ", "x + "), ("128", "256"), ("{20", "{30")]
    changes += [("&one}, {20, &two", "&two}, {20, &one")]
    codes: list[str | None] = []
    for old, new in changes:
        source, library = tmp_path / f"{len(codes)}.cpp", tmp_path / f"{len(codes)}.so"
        source.write_text(text.replace(old, new).replace("SIZE", "9"), encoding="utf-8")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        codes.append(host_code(library))
    assert None not in codes
    assert [code == codes[0] for code in codes] == [True, True, *[False] * 5]
