"""Device code and host code that are compiled side by side: the same library and messages, and when it is done."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from pytest_fa.build import command, side_by_side
from pytest_fa.build.side_by_side import joined_log
from pytest_fa.build.toolchain import Toolchain, find_toolchain
from pytest_fa.catalog.variant import Variant
from tests.factories import wait_until
from tests.tiers import nightly_after
from tests.unit.build.conftest import Workplace
from tests.unit.build.test_command import TOOLCHAIN

SYNTAX_ONLY = "-fdevice-syntax-only"
NEW_NVCC = msgspec.structs.replace(TOOLCHAIN, checks_syntax=True)

# Kernels whose names nvcc makes from the file, variables of the device, and a warning of each front end.
SOURCE = """\
#include "fa_forward.h"
namespace {
__constant__ float table[4];
__device__ int calls;
struct Tag {};
template <typename T>
__global__ void hidden(float* out) { int unused_in_kernel; *out = table[1] + atomicAdd(&calls, 1); }
}
static __device__ float own;
static __global__ void fill(float* out) { *out = own; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  int unused_in_host_code;
  float one = 1;
  cudaMemcpyToSymbol(own, &one, 4);
  hidden<Tag><<<1, 1, 0, stream>>>(static_cast<float*>(args->out));
  fill<<<1, 1, 0, stream>>>(static_cast<float*>(args->out));
  return 0;
}
"""
# By what finds the error.
WRONG = {
    "front end": SOURCE.replace("= own", "= nothing"),
    "preprocessor": '#include "missing.h"\n' + SOURCE,
    "device code only": SOURCE + "#ifdef __CUDA_ARCH__\n#error not for a GPU\n#endif\n",
    "host code only": SOURCE + "#ifndef __CUDA_ARCH__\n#error only for a GPU\n#endif\n",
    "ptxas": SOURCE + "__global__ void large(float* x) { __shared__ float s[99999]; s[0] = *x; *x = s[*x > 1]; }\n",
    "g++": SOURCE + '#ifndef __CUDA_ARCH__\nint wrong() { asm("no_instruction"); return 0; }\n#endif\n',
    "linker": SOURCE.replace("fa_forward(", "other("),
}


class Outcome(NamedTuple):
    """The files and the output of a command in a staging folder."""

    library: bytes
    dependencies: str
    output: str


class Laboratory:
    """A staging folder in which one source is compiled one way after the other."""

    def __init__(self, workplace: Workplace, toolchain: Toolchain, binding: Path) -> None:
        self.workplace, self.toolchain, self.binding = workplace, toolchain, binding
        self.folder = workplace.root.parent / "staged"

    def command(self, *, side_by_side: bool, variant: Variant | None = None) -> list[str]:
        """Make the staging folder anew, and return the command to run in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        chosen = variant or self.workplace.variant()
        return command.stage(chosen, "sm_80", self.folder, self.toolchain, self.binding, side_by_side=side_by_side)

    def run(self, words: list[str]) -> Outcome:
        """Run a command in the staging folder."""
        run = subprocess.run(
            words, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        library, depfile = self.folder / command.LIBRARY, self.folder / command.DEPFILE
        assert (run.returncode == 0) == library.is_file()
        return Outcome(
            library.read_bytes() if library.is_file() else b"",
            depfile.read_text(encoding="utf-8") if library.is_file() else "",
            re.sub(r"Compile time = .*|\S*tmpxft\S*|/tmp/cc\w+", "", run.stdout),
        )

    def write(self, source: str, manifest: str = "") -> None:
        """Write the source, and keys of the manifest."""
        (self.workplace.folder / "kernel.cu").write_text(source, encoding="utf-8")
        self.workplace.write_manifest(manifest)


@pytest.fixture
def laboratory(with_binding: Workplace) -> Laboratory:
    """The compilers of this machine, and the shared binding."""
    (binding,) = (with_binding.cache / "binding").iterdir()
    return Laboratory(with_binding, find_toolchain(with_binding.cache), binding)


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    "flags",
    nightly_after(
        1,
        [
            [],
            ["-w", "-G"],
            ["--maxrregcount=64"],
            ["-use_fast_math", "-Xcompiler=-O1", "-lm", "--split-compile=2"],
        ],
    ),
)
def test_the_library_is_that_of_the_ordinary_command(laboratory: Laboratory, flags: list[str]) -> None:
    """Library, dependencies and output are the same, byte for byte; only the seconds in ptxas's lines differ."""
    laboratory.write(SOURCE, f"flags: [{', '.join(flags)}]\n")
    ordinary = laboratory.run(laboratory.command(side_by_side=False))
    words = laboratory.command(side_by_side=True)
    assert SYNTAX_ONLY in words
    assert laboratory.run(words) == ordinary
    assert (laboratory.folder / "device" / "placeholder.fatbin").is_file()  # the ordinary command was not needed
    assert ordinary.library
    assert ordinary.output.count("unused_in_kernel") == ordinary.output.count("unused_in_host_code")


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_warnings_of_the_preprocessor_are_shown_as_often(laboratory: Laboratory) -> None:
    """Each part runs the preprocessor for its own code, and the host part for both."""
    conditional = "#ifdef __CUDA_ARCH__\n#warning for a GPU\n#else\n#warning for a CPU\n#endif\n#warning for both\n"
    laboratory.write(conditional + SOURCE)
    ordinary = laboratory.run(laboratory.command(side_by_side=False))
    words = laboratory.command(side_by_side=True)
    assert SYNTAX_ONLY in words
    assert laboratory.run(words) == ordinary
    assert ordinary.output.count("#warning for a GPU") == 2  # the message, and the line of the source


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_source_with_two_identities_is_compiled_again(laboratory: Laboratory) -> None:
    """The first function that can be called from elsewhere gives a source its identity."""
    laboratory.write(f"#ifndef __CUDA_ARCH__\nint first() {{ return 0; }}\n#endif\n{SOURCE}")
    ordinary = laboratory.run(laboratory.command(side_by_side=False))
    words = laboratory.command(side_by_side=True)
    assert SYNTAX_ONLY in words
    assert laboratory.run(words) == ordinary
    assert not (laboratory.folder / "device" / "placeholder.fatbin").exists()


@pytest.mark.needs_nvcc
@pytest.mark.parametrize("source", nightly_after(2, WRONG.values()), ids=WRONG)
def test_errors_are_those_of_the_ordinary_command(laboratory: Laboratory, source: str) -> None:
    """Whatever finds an error, it is shown once, with the file and line of the source, as by the ordinary command."""
    laboratory.write(source)
    ordinary = laboratory.run(laboratory.command(side_by_side=False))
    words = laboratory.command(side_by_side=True)
    assert SYNTAX_ONLY in words
    assert laboratory.run(words) == ordinary
    assert not ordinary.library


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_parts_that_do_not_fit_together_are_compiled_again(laboratory: Laboratory) -> None:
    """If the fatbin cannot be replaced, or the kernels have other names, the ordinary command makes the library."""
    laboratory.write(SOURCE)
    ordinary = laboratory.run(laboratory.command(side_by_side=False))
    words = laboratory.command(side_by_side=True)
    objcopy = shutil.which("objcopy") or ""
    assert laboratory.run([word if word != objcopy else "false" for word in words]) == ordinary
    words = laboratory.command(side_by_side=True)
    device = words.index("-fatbin")
    assert laboratory.run([*words[:device], "-DTag=Other", *words[device:]]) == ordinary


def test_only_equal_kernels_and_the_expected_fatbin_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files in which nvcc registers the kernels may differ in the names of files only, and must be there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "device").mkdir()
    host, device = tmp_path / "kernel.cudafe1.stub.c", tmp_path / "device" / "kernel.cudafe1.stub.c"
    assert not side_by_side._are_of_one_source("kernel")
    host.write_text('# 1 "kernel.cudafe1.stub.c"\nregister(one)\n', encoding="utf-8")
    identities = [path.with_name("kernel.module_id") for path in (host, device)]
    for identity in identities:
        identity.write_text("_kernel_cu_1234", encoding="utf-8")
    assert not side_by_side._are_of_one_source("kernel")
    device.write_text('# 1 "device/kernel.cudafe1.stub.c"\nregister(one)\n', encoding="utf-8")
    assert side_by_side._are_of_one_source("kernel")
    for content in ("_kernel_cu_5678", ""):
        identities[1].write_text(content, encoding="utf-8")
        assert not side_by_side._are_of_one_source("kernel")
    identities[1].write_text("_kernel_cu_1234", encoding="utf-8")
    device.write_text('# 1 "device/kernel.cudafe1.stub.c"\nregister(two)\n', encoding="utf-8")
    assert not side_by_side._are_of_one_source("kernel")
    (tmp_path / "kernel.fatbin").write_bytes(b"without kernels")
    (tmp_path / "objcopy").write_text('#!/bin/sh\nprintf %s "$FOUND" > "${2#*=}"\n', encoding="utf-8")
    (tmp_path / "objcopy").chmod(0o755)
    for content, fits in (("without kernels", True), ("something else", False), ("", False)):
        monkeypatch.setenv("FOUND", content)
        assert side_by_side._put_fatbin(str(tmp_path / "objcopy"), "kernel") == fits


FRONT_END = ["warning a\n", "   ^\n", "warning b\n", "   ^\n"]
INFO = "ptxas info    : 0 bytes gmem\n"


@pytest.mark.parametrize(
    ("host", "device", "device_failed", "host_failed", "expected"),
    [
        ([INFO], ["ptxas info    : 8 bytes gmem\n"], False, False, ["ptxas info    : 8 bytes gmem\n"]),
        (
            ["cudafe++\n", *FRONT_END, INFO, "g++\n"],
            [*FRONT_END, "not unrolled\n", "ptxas info\n"],
            False,
            False,
            ["cudafe++\n", *FRONT_END, "not unrolled\n", "ptxas info\n", "g++\n"],
        ),
        (
            [*FRONT_END, INFO, "g++\n"],
            [*FRONT_END, "ptxas error\n"],
            True,
            False,
            [*FRONT_END, "ptxas error\n"],
        ),
        (
            [*FRONT_END, INFO, "g++ error\n"],
            [*FRONT_END, "ptxas info\n"],
            False,
            True,
            [*FRONT_END, "ptxas info\n", "g++ error\n"],
        ),
        (
            ["for both\n", "for a CPU\n", "warning a\n", INFO, "ptxas warning\n", "g++\n"],
            ["for both\n", "warning a\n", "ptxas info\n"],
            False,
            False,
            ["for both\n", "for a CPU\n", "warning a\n", "ptxas info\n", "g++\n"],
        ),
        (["error\n"], ["error\n"], True, True, ["error\n"]),
        (["error\n"], [], True, True, ["error\n"]),
        ([], ["ptxas info\n"], False, False, ["ptxas info\n"]),
    ],
    ids=["quiet", "warnings", "ptxas", "g++", "preprocessor", "front end", "host code only", "no ptxas line"],
)
def test_output_of_both_parts_is_joined(
    host: list[str], device: list[str], expected: list[str], *, device_failed: bool, host_failed: bool
) -> None:
    """Messages that both parts print are shown once, and messages of the parts stand in the ordinary order."""
    lines = [[line.encode() for line in part] for part in (host, device, expected)]
    assert joined_log(lines[0], lines[1], device_failed=device_failed, host_failed=host_failed) == lines[2]


def _rdc(place: Workplace, _: pytest.MonkeyPatch) -> Toolchain:
    place.write_manifest("flags: [-rdc=true]\n")
    return NEW_NVCC


def _unlisted(place: Workplace, _: pytest.MonkeyPatch) -> Toolchain:
    place.write_manifest("flags: [-dlto]\n")
    return NEW_NVCC


def _debug(place: Workplace, _: pytest.MonkeyPatch) -> Toolchain:
    place.write_manifest("flags: ['-Xcompiler=-O1,-g']\n")
    return NEW_NVCC


def _environment(_: Workplace, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-dlto")
    return NEW_NVCC


def _old_nvcc(_: Workplace, __: pytest.MonkeyPatch) -> Toolchain:
    return msgspec.structs.replace(TOOLCHAIN, checks_syntax=False)


def _no_objcopy(_: Workplace, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    monkeypatch.setenv("PATH", "/nothing")
    return NEW_NVCC


def _cpp(place: Workplace, _: pytest.MonkeyPatch) -> Toolchain:
    (place.folder / "kernel.cu").rename(place.folder / "kernel.cpp")
    place.write_manifest("entry: {source: kernel.cpp}\n")
    return NEW_NVCC


@pytest.mark.parametrize("change", [_rdc, _unlisted, _debug, _environment, _old_nvcc, _no_objcopy, _cpp])
def test_what_needs_the_ordinary_command_gets_it(
    unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch, change: Callable[[Workplace, pytest.MonkeyPatch], Toolchain]
) -> None:
    """Relocatable device code, unknown flags, debug information, an older nvcc, no objcopy, sources of another kind."""
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    staged = [unbuilt.root.parent / name for name in ("usual", "chosen", "changed")]
    for folder in staged:
        folder.mkdir()
    binding = Path("binding.o")

    def words(folder: Path, toolchain: Toolchain, *, side_by_side: bool) -> list[str]:
        return command.stage(unbuilt.variant(), "sm_80", folder, toolchain, binding, side_by_side=side_by_side)

    assert SYNTAX_ONLY not in words(staged[0], NEW_NVCC, side_by_side=False)
    assert SYNTAX_ONLY in words(staged[1], NEW_NVCC, side_by_side=True)
    toolchain = change(unbuilt, monkeypatch)
    assert SYNTAX_ONLY not in words(staged[2], toolchain, side_by_side=True)
    assert not (staged[2] / "device").exists()


def test_the_device_linker_runs_only_if_it_may_be_needed(unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs for relocatable device code, and with flags whose meaning is not known."""
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)

    def has_device_link(flags: str) -> bool:
        unbuilt.write_manifest(f"flags: [{flags}]\n")
        return "-nodlink" not in command._ordinary_command(unbuilt.variant(), "sm_80", TOOLCHAIN)

    assert [has_device_link(flags) for flags in ("", "-lineinfo", "-rdc=true", "-dlto")] == [False, False, True, True]
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-rdc=true")
    assert has_device_link("")


def test_the_program_imports_nothing_that_takes_time() -> None:
    """It is started for each build, so it imports only modules that Python has loaded before."""
    tree = ast.parse(Path(side_by_side.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    assert len(names) == len(imports)
    assert names == {"os", "sys"}


def test_a_part_ends_with_what_it_has_started(tmp_path: Path) -> None:
    """A compiler that nvcc has started does not go on after nvcc."""
    script = f"sleep 60 & echo $! > {tmp_path}/child; wait"
    with subprocess.Popen(["sh", "-c", script]) as process:
        while not (tmp_path / "child").exists() or not (child := (tmp_path / "child").read_text().strip()):
            pass
        side_by_side._end(process.pid)
        assert process.wait(10) != 0
    assert wait_until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())
    side_by_side._end(process.pid)  # one that has ended
