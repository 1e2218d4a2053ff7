"""The interface of a CUDA source: each mistake in it is named at build time, with the line to write."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build.compile_errors import compile_error
from pytest_fa.build.exports import _functions, entry_problem
from pytest_fa.build.interface import BACKWARD, FORWARD
from tests.tiers import nightly_after

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace

pytestmark = pytest.mark.needs_nvcc

INCLUDE = '#include "fa_forward.h"\n'
CALL = "(const FaForwardArgs* args, cudaStream_t stream)"
ENTRY = f"FA_EXPORT int fa_forward{CALL}"
BODY = " { return 0; }\n"
WRITE = f"write `{ENTRY} {{ ... }}`"
WORKSPACE = "FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args)"
AS_CPP = (
    'kernel.cu defines fa_forward as a C++ function (NAME), not as the C function; extern "C" is missing, it is in '
    f"a namespace, or its arguments differ from those in fa_forward.h; {WRITE}"
)


@pytest.mark.parametrize(
    ("source", "problem"),
    nightly_after(
        2,
        [
            (
                "int forward(int x) { return x; }\n",
                f"kernel.cu defines no function fa_forward (it defines: forward); {WRITE}",
            ),
            ("", f"kernel.cu defines no function fa_forward; {WRITE}"),
            (
                "int fa_forward(const float* q, float* out) { return 0; }\n",
                AS_CPP.replace("NAME", "fa_forward(float const*, float*)"),
            ),
            (
                f"namespace mine {{ int fa_forward{CALL}{BODY} }}\n",
                AS_CPP.replace("NAME", "mine::fa_forward(FaForwardArgs const*, CUstream_st*)"),
            ),
            (
                f"{ENTRY}{BODY}size_t fa_workspace_bytes(int bytes) {{ return bytes; }}\n",
                (
                    "kernel.cu defines fa_workspace_bytes as a C++ function (fa_workspace_bytes(int)), which is never "
                    f"called; the kernel would get no workspace; write `{WORKSPACE} {{ ... }}`"
                ),
            ),
        ],
    ),
    ids=["another name", "nothing", "other arguments", "a namespace", "a workspace"],
)
def test_what_the_source_does_not_export_is_named(workplace: Workplace, source: str, problem: str) -> None:
    """The message has the C++ name with its parameters, or the functions that it has, and the line to write."""
    (workplace.folder / "kernel.cu").write_text(INCLUDE + source, encoding="utf-8")
    assert f"{problem} (tile for sm_80)" == workplace.failure().splitlines()[0]
    assert workplace.stages() == []


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """The object file of a C++ function `fa_forward(int)` whose rarely used part has a name of its own."""
    source, compiled = tmp_path / "kernel.cpp", tmp_path / "kernel.o"
    source.write_text("int fa_forward(int x) { if (__builtin_expect(x < 0, 0)) throw x; return x; }\n")
    compiler = shutil.which("g++")
    assert compiler is not None  # nvcc needs it
    subprocess.run([compiler, "-O2", "-c", str(source), "-o", str(compiled)], check=True)
    with compiled.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".symtab")
        assert isinstance(table, SymbolTableSection)
        names = {symbol.name for symbol in table.iter_symbols()}
    assert {"_Z10fa_forwardi", "_Z10fa_forwardi.cold"} <= names
    return compiled


def test_the_cold_part_of_a_function_is_no_function(compiled: Path) -> None:
    """A compiler puts rarely used code of a function under the name `<function>.cold`; no message has that name."""
    assert list(_functions(compiled)) == ["_Z10fa_forwardi"]
    assert entry_problem("kernel.cu", compiled, FORWARD) == AS_CPP.replace("NAME", "fa_forward(int)")


def test_names_stay_mangled_without_a_demangler(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without c++filt, the message has the name of the symbol table."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert entry_problem("kernel.cu", compiled, FORWARD) == AS_CPP.replace("NAME", "_Z10fa_forwardi")


@pytest.mark.parametrize(
    ("source", "sentence"),
    nightly_after(
        2,
        [
            (
                INCLUDE + f'extern "C" int fa_forward(const float* q, float* out){BODY}',
                f"fa_forward has another signature than fa_forward.h declares; {WRITE}",
            ),
            (
                INCLUDE + f"FA_EXPORT void fa_forward{CALL} {{}}\n",
                f"fa_forward has another signature than fa_forward.h declares; {WRITE}",
            ),
            (
                INCLUDE + f'{ENTRY}{BODY}extern "C" size_t fa_workspace_bytes(int bytes) {{ return bytes; }}\n',
                f"fa_workspace_bytes has another signature than fa_forward.h declares; write `{WORKSPACE} {{ ... }}`",
            ),
            (
                f'extern "C" int fa_forward{CALL}{BODY}',
                'the source does not include the interface; write `#include "fa_forward.h"`',
            ),
            (
                f"{ENTRY}{BODY}",
                'the source does not include the interface; write `#include "fa_forward.h"`',
            ),
            (
                INCLUDE
                + "__global__ void k(float* o) { __shared__ float s[13568]; s[threadIdx.x] = o[0]; __syncthreads(); "
                + f"o[threadIdx.x] = s[threadIdx.x + 13000]; }}\n{ENTRY}{BODY}",
                (
                    "kernel k: 54,272 B of static shared memory, 5,120 B too many for sm_80 (49,152 B); as dynamic "
                    "shared memory (`extern __shared__`, with fa_allow_dynamic_smem), a block can have 166,912 B"
                ),
            ),
        ],
    ),
    ids=["arguments", "result", "workspace", "no include", "no include, no macro", "shared memory"],
)
def test_what_a_compiler_error_means_is_said_first(workplace: Workplace, source: str, sentence: str) -> None:
    """Before the compiler's lines stands what the source must contain instead."""
    (workplace.folder / "kernel.cu").write_text(source, encoding="utf-8")
    assert f"{sentence} (tile for sm_80)" == workplace.failure().splitlines()[0]


BACKWARD_ENTRY = "FA_EXPORT int fa_backward(const FaBackwardArgs* args, cudaStream_t stream)"
BACKWARD_SOURCE = f"{BACKWARD.include_line}\n{BACKWARD_ENTRY}{BODY}"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            f"{INCLUDE}{ENTRY}{BODY}",
            f"kernel.cu defines no function fa_backward (it defines: fa_forward); write `{BACKWARD.entry_line}`",
        ),
        (
            f"{INCLUDE}{BACKWARD_ENTRY}{BODY}",
            'the source does not include the interface; write `#include "fa_backward.h"`',
        ),
        (
            f"{BACKWARD_ENTRY}{BODY}",
            'the source does not include the interface; write `#include "fa_backward.h"`',
        ),
        (
            f"{BACKWARD_SOURCE}size_t {BACKWARD.workspace}(int x) {{ return x; }}\n",
            (
                f"kernel.cu defines {BACKWARD.workspace} as a C++ function ({BACKWARD.workspace}(int)), which is never "
                f"called; the kernel would get no workspace; write `{BACKWARD.workspace_line}`"
            ),
        ),
    ],
    ids=["a forward kernel", "the other header", "no header", "a workspace"],
)
def test_a_source_of_gradients_has_an_interface_of_its_own(workplace: Workplace, source: str, sentence: str) -> None:
    """Its messages name the functions and the header of a backward kernel."""
    workplace.write_manifest("computes: gradients\n")
    (workplace.folder / "kernel.cu").write_text(source, encoding="utf-8")
    assert f"{sentence} (tile for sm_80)" == workplace.failure().splitlines()[0]


def test_gradients_have_a_binding_of_their_own(workplace: Workplace) -> None:
    """The same cache has both bindings, and the library exports what Python calls."""
    workplace.write_manifest("computes: gradients\n")
    (workplace.folder / "kernel.cu").write_text(BACKWARD_SOURCE, encoding="utf-8")
    exported = _functions(workplace.cache / workplace.build().library)
    assert {"fa_backward", "__tvm_ffi_backward", "__tvm_ffi_backward_workspace_bytes"} <= set(exported)
    assert "__tvm_ffi_forward" not in exported
    assert len(list((workplace.cache / "binding").glob("*/binding.o"))) == 2


def test_a_definition_without_extern_c_is_the_c_function(workplace: Workplace) -> None:
    """With the header's declaration, `int fa_forward(...)` alone is exported as the C function."""
    (workplace.folder / "kernel.cu").write_text(INCLUDE + f"int fa_forward{CALL}{BODY}", encoding="utf-8")
    assert workplace.build().arch == "sm_80"


def test_an_architecture_with_more_static_memory_needs_no_advice(snapshot: SnapshotAssertion) -> None:
    """On an `a` architecture static shared memory can be as large as dynamic, so only the excess is named."""
    log = "ptxas error   : Entry function '_Z1kPf' uses too much shared data (0x3a980 bytes, 0x38c00 max)\n"
    assert snapshot == compile_error(log, "sm_90a").splitlines()[0]
