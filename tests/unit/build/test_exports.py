"""The interface of a CUDA source: each mistake in it is named at build time, with the line to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_fa.build.compile_errors import compile_error

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
    'kernel.cu defines fa_forward as a C++ function (MANGLED), not as the C function; extern "C" is missing, it is in '
    f"a namespace, or its arguments differ from those in fa_forward.h; {WRITE}"
)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "int forward(int x) { return x; }\n",
            f"kernel.cu defines no function fa_forward (it defines: forward); {WRITE}",
        ),
        ("", f"kernel.cu defines no function fa_forward; {WRITE}"),
        (
            "int fa_forward(const float* q, float* out) { return 0; }\n",
            AS_CPP.replace("MANGLED", "_Z10fa_forwardPKfPf"),
        ),
        (
            f"namespace mine {{ int fa_forward{CALL}{BODY} }}\n",
            AS_CPP.replace("MANGLED", "_ZN4mine10fa_forwardEPK13FaForwardArgsP11CUstream_st"),
        ),
        (
            f"{ENTRY}{BODY}size_t fa_workspace_bytes(int bytes) {{ return bytes; }}\n",
            (
                "kernel.cu defines fa_workspace_bytes as a C++ function (_Z18fa_workspace_bytesi), which is never "
                f"called; the kernel would get no workspace; write `{WORKSPACE} {{ ... }}`"
            ),
        ),
    ],
    ids=["another name", "nothing", "other arguments", "a namespace", "a workspace"],
)
def test_what_the_source_does_not_export_is_named(workplace: Workplace, source: str, problem: str) -> None:
    """The message has the mangled name in the symbol table, or the functions that it has, and the line to write."""
    (workplace.folder / "kernel.cu").write_text(INCLUDE + source, encoding="utf-8")
    assert f"{problem} (tile for sm_80)" == workplace.failure().splitlines()[0]
    assert workplace.stages() == []


@pytest.mark.parametrize(
    ("source", "sentence"),
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
                "kernel k: 54,272 B of static shared memory, 5,120 B too many for sm_80 (49,152 B); as dynamic shared "
                "memory (`extern __shared__`, with fa_allow_dynamic_smem), a block can have 166,912 B"
            ),
        ),
    ],
    ids=["arguments", "result", "workspace", "no include", "no include, no macro", "shared memory"],
)
def test_what_a_compiler_error_means_is_said_first(workplace: Workplace, source: str, sentence: str) -> None:
    """Before the compiler's lines stands what the source must contain instead."""
    (workplace.folder / "kernel.cu").write_text(source, encoding="utf-8")
    assert f"{sentence} (tile for sm_80)" == workplace.failure().splitlines()[0]


def test_a_definition_without_extern_c_is_the_c_function(workplace: Workplace) -> None:
    """With the header's declaration, `int fa_forward(...)` alone is exported as the C function."""
    (workplace.folder / "kernel.cu").write_text(INCLUDE + f"int fa_forward{CALL}{BODY}", encoding="utf-8")
    assert workplace.build().arch == "sm_80"


def test_an_architecture_with_more_static_memory_needs_no_advice() -> None:
    """On an `a` architecture static shared memory can be as large as dynamic, so only the excess is named."""
    log = "ptxas error   : Entry function '_Z1kPf' uses too much shared data (0x3a980 bytes, 0x38c00 max)\n"
    assert compile_error(log, "sm_90a").splitlines()[0] == (
        "kernel k: 240,000 B of static shared memory, 7,552 B too many for sm_90a (232,448 B)"
    )
