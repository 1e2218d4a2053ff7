"""Figures are read from ptxas's log and compared with a manifest's limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build.machine_code import MachineCode
from pytest_fa.build.resources import broken_limits, demangle, read_ptxas_log, with_machine_code
from pytest_fa.catalog.variant import InstructionLimit, Limits
from pytest_fa.records.built import Advisory, Build, Kernel

# Output of nvcc 13.0 with -Xptxas=-v,--warn-on-spills: a kernel with spills, and one with shared memory whose wgmma
# instructions are serialised.
TWO_KERNELS = """\
ptxas warning : Registers are spilled to local memory in function '_Z5spillPfPKf', 640 bytes spill stores, 1128 bytes spill loads
ptxas info    : (C7517) warpgroup.wait is injected in around line 82 by compiler to allow use of registers defined by GMMA in function '_Z6serialPfmmi'
ptxas info    : (C7517) warpgroup.wait is injected in around line 101 by compiler to allow use of registers defined by GMMA in function '_Z6serialPfmmi'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function '_Z6serialPfmmi'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5spillPfPKf' for 'sm_90a'
ptxas info    : Function properties for _Z5spillPfPKf
    640 bytes stack frame, 640 bytes spill stores, 1128 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 640 bytes cumulative stack size
ptxas info    : Compile time = 29.600 ms
ptxas info    : Compiling entry function '_Z6serialPfmmi' for 'sm_90a'
ptxas info    : Function properties for _Z6serialPfmmi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 1024 bytes smem
ptxas info    : Compile time = 7.049 ms
"""  # noqa: E501

# A device function that is not inlined has property lines after those of its kernel.
DEVICE_FUNCTION = """\
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas warning : Registers are spilled to local memory in function '_Z1kPfPKf', 12 bytes spill stores, 4 bytes spill loads
ptxas warning : Registers are spilled to local memory in function '_Z5heavyPKf', 628 bytes spill stores, 1020 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kPfPKf' for 'sm_80'
ptxas info    : Function properties for _Z1kPfPKf
    640 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 640 bytes cumulative stack size, 256 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 24.936 ms
ptxas info    : Function properties for _Z5heavyPKf
    0 bytes stack frame, 628 bytes spill stores, 1020 bytes spill loads
"""  # noqa: E501

KERNEL = Kernel(
    name="k",
    mangled="_Z1kPfPKf",
    registers_per_thread=32,
    spill_store_bytes=12,
    spill_load_bytes=4,
    stack_bytes=640,
    smem_bytes_per_block=256,
    instructions={"HMMA": 64, "STL": 3},
    sass_bytes=1920,
)

BUILD = Build(
    variant="ws",
    arch="sm_90a",
    key="0",
    library="builds/ws/kernel.so",
    code_identity="4665c32aaa254325",
    code_identity_missing=None,
    kernels=(KERNEL,),
    advisories=(Advisory("C7511", "wgmma serialized"),),
    command=("nvcc",),
    compiler="nvcc 13.0.88, g++ 12.2.0",
    built_on="Linux x86_64, no GPU",
    built_at="2026-01-01T00:00:00+00:00",
    build_seconds=1.0,
)


def build(**changes: Any) -> Build:
    """Return the build above, with changes."""
    return msgspec.structs.replace(BUILD, **changes)


# -- the log ----------------------------------------------------------------------------------------------------------


def figures(kernel: Kernel) -> tuple[str, int, int, int, int, int]:
    """Return the name, registers, spill stores, spill loads, stack and shared memory of a kernel."""
    return (
        kernel.mangled,
        kernel.registers_per_thread,
        kernel.spill_store_bytes,
        kernel.spill_load_bytes,
        kernel.stack_bytes,
        kernel.smem_bytes_per_block,
    )


def test_figures_of_each_kernel() -> None:
    """Registers, spills, stack and shared memory are assigned to the right kernel, in the log's order."""
    kernels, _ = read_ptxas_log(TWO_KERNELS)

    assert [figures(kernel) for kernel in kernels] == [
        ("_Z5spillPfPKf", 64, 640, 1128, 640, 0),
        ("_Z6serialPfmmi", 30, 0, 0, 0, 1024),
    ]


def test_device_function_is_not_a_kernel() -> None:
    """A device function is not listed as a kernel, and its smaller stack does not replace its kernel's figures."""
    kernels, _ = read_ptxas_log(DEVICE_FUNCTION)

    assert [
        (kernel.mangled, kernel.registers_per_thread, kernel.stack_bytes, kernel.smem_bytes_per_block)
        for kernel in kernels
    ] == [("_Z1kPfPKf", 32, 640, 256)]
    assert (kernels[0].spill_store_bytes >= 12, kernels[0].spill_load_bytes >= 4) == (True, True)


@pytest.mark.parametrize(
    ("log", "codes"),
    [
        (DEVICE_FUNCTION, ["C7508"]),
        (TWO_KERNELS, ["C7517", "C7517", "C7511"]),
    ],
    ids=["C7508", "C7511"],
)
def test_advisories(log: str, codes: list[str], snapshot: SnapshotAssertion) -> None:
    """Each advisory of ptxas is kept with its code and text."""
    _, advisories = read_ptxas_log(log)

    assert [advisory.code for advisory in advisories] == codes
    assert snapshot == advisories[-1].text


def test_repeated_advisory_counts_once() -> None:
    """Identical advisories count once; an advisory for another source line counts again."""
    _, advisories = read_ptxas_log(TWO_KERNELS + TWO_KERNELS.replace("line 82", "line 99"))

    assert [advisory.code for advisory in advisories] == ["C7517", "C7517", "C7511", "C7517"]


def test_log_without_kernels() -> None:
    """The log of host code has no kernels and no advisories."""
    assert read_ptxas_log("ptxas info    : 0 bytes gmem\n") == ((), ())


def test_demangled_names() -> None:
    """A demangled name has template arguments, but no parameters and no return type."""
    names = demangle(["_Z11zero_kernelPf", "_Z14minimal_kernelI6__halfLi64EEv13FaForwardArgs", "plain"])

    assert names == ["zero_kernel", "minimal_kernel<__half, 64>", "plain"]


def test_names_without_a_demangler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without c++filt, names are not changed."""
    monkeypatch.setattr("shutil.which", lambda _: None)

    assert demangle(["_Z11zero_kernelPf"]) == ["_Z11zero_kernelPf"]


def test_machine_code_is_joined_by_mangled_name() -> None:
    """Sizes and counts are assigned by mangled name; a kernel that was not disassembled has none."""
    first, second = read_ptxas_log(TWO_KERNELS)[0]

    joined = with_machine_code((first, second), MachineCode("", {"_Z6serialPfmmi": (256, {"HGMMA": 2})}))

    assert joined == (first, msgspec.structs.replace(second, sass_bytes=256, instructions={"HGMMA": 2}))


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        ({"registers_per_thread": 31}, "sm_90a: k: registers_per_thread is 32, the limit is 31"),
        ({"spill_bytes": 15}, "sm_90a: k: spill_bytes is 16, the limit is 15"),
        ({"stack_bytes": 0}, "sm_90a: k: stack_bytes is 640, the limit is 0"),
        ({"smem_bytes_per_block": 255}, "sm_90a: k: smem_bytes_per_block is 256, the limit is 255"),
        ({"advisories": 0}, "sm_90a: 1 ptxas advisories, the limit is 0: C7511 wgmma serialized"),
        (
            {"instructions": {"STL": InstructionLimit(max=2)}},
            "sm_90a: k: 3 STL, the limits are 0 to 2",
        ),
        (
            {"instructions": {"HGMMA": InstructionLimit(min=1)}},
            "sm_90a: k: 0 HGMMA, the limits are 1 to inf",
        ),
    ],
    ids=["registers", "spills", "stack", "smem", "advisories", "most", "least"],
)
def test_broken_limit(limit: dict[str, Any], sentence: str) -> None:
    """A broken limit gives one sentence: the architecture, the kernel, the value found and the value allowed."""
    assert broken_limits(BUILD, Limits(**limit)) == [sentence]


@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"registers_per_thread": 32},
        {"spill_bytes": 16},
        {"stack_bytes": 640},
        {"smem_bytes_per_block": 256},
        {"advisories": 1},
        {"instructions": {"HMMA": InstructionLimit(min=64, max=64), "LDL": InstructionLimit(max=0)}},
    ],
)
def test_kept_limit(limit: dict[str, Any]) -> None:
    """A figure equal to its limit is allowed, and a figure without a limit is not checked."""
    assert broken_limits(BUILD, Limits(**limit)) == []


def test_every_kernel_is_checked(snapshot: SnapshotAssertion) -> None:
    """A kernel that breaks a limit is reported even if another one does not."""
    large = msgspec.structs.replace(KERNEL, name="large", registers_per_thread=255)

    broken = broken_limits(build(kernels=(KERNEL, large)), Limits(registers_per_thread=128))

    assert snapshot == broken


def test_limits_fail_without_machine_code(snapshot: SnapshotAssertion) -> None:
    """Instruction limits fail if the machine code was not read, with the reason."""
    unread = build(code_identity=None, code_identity_missing="machine code not read: no nvdisasm")

    broken = broken_limits(unread, Limits(instructions={"STL": InstructionLimit(max=0)}))

    assert snapshot == broken


@pytest.mark.parametrize(
    "limit", [{"registers_per_thread": 255}, {"spill_bytes": 0}, {"instructions": {"HMMA": InstructionLimit(min=1)}}]
)
def test_limits_fail_without_kernels(limit: dict[str, Any]) -> None:
    """All limits fail if the log names no kernel."""
    assert len(broken_limits(build(kernels=()), Limits(**limit))) == 1


def test_limits_of_memory_are_those_of_calls() -> None:
    """A build without kernels keeps them, because a build says nothing about the memory of a call."""
    assert broken_limits(build(kernels=()), Limits(workspace_bytes=0, peak_bytes=0)) == []


def test_spills_of_a_device_function_break_the_limit() -> None:
    """Spills of a device function that is not inlined break `spill_bytes: 0`."""
    log = DEVICE_FUNCTION.replace(
        "12 bytes spill stores, 4 bytes spill loads", "0 bytes spill stores, 0 bytes spill loads"
    )
    kernels, advisories = read_ptxas_log(log)

    broken = broken_limits(build(kernels=kernels, advisories=advisories), Limits(spill_bytes=0))

    assert len(broken) == 1
