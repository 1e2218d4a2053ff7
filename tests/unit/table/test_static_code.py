"""What `--fa-static` shows: resources, instructions by group, and the difference of two variants."""

from __future__ import annotations

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.records.built import stable_name
from pytest_fa.records.record import Record
from pytest_fa.records.timing import LaunchedKernel
from pytest_fa.table.static_code import ALL_FIT, GROUPS, difference_lines, fit_lines, mix
from pytest_fa.table.static_tables import static_text
from tests.factories import BUILD, KERNEL, RECORD

INSTRUCTIONS = {"HGMMA": 12, "MUFU": 4, "FFMA": 30, "BAR": 2, "IADD3": 7, "LDL": 1}
OTHER = msgspec.structs.replace(
    BUILD,
    variant="other",
    code_identity="b",
    kernels=(msgspec.structs.replace(KERNEL, registers_per_thread=128, instructions={"HGMMA": 16, "MUFU": 4}),),
)
BOUNDED = msgspec.structs.replace(KERNEL, instructions=INSTRUCTIONS, max_threads_per_block=384)
ONE = msgspec.structs.replace(BUILD, code_identity="a", kernels=(BOUNDED,))


def build(*builds: object) -> Record:
    """A record of `test_build`."""
    return msgspec.structs.replace(RECORD, kind="build", case=None, speed=None, check=None, builds=builds)


def cells(text: str, kernel: str) -> list[list[str]]:
    """The cells after a kernel's name, for each table."""
    return [line.split(kernel)[1].split() for line in text.splitlines() if kernel in line]


def test_instructions_fall_into_groups() -> None:
    """Every instruction is counted in one group; opcodes without a group count as `other`."""
    counts = mix(ONE.kernels[0])
    assert {"tensor": 12, "exp": 4, "fp32": 30, "barrier": 2, "local": 1, "other": 7} == {
        name: count for name, count in counts.items() if count
    }
    assert [*GROUPS, "other"] == list(counts)


def test_no_opcode_is_in_two_groups() -> None:
    """Every opcode is listed in at most one group."""
    opcodes = [opcode for group in GROUPS.values() for opcode in group]
    assert len(opcodes) == len(set(opcodes))


def test_without_a_launch_the_occupancy_is_an_upper_bound() -> None:
    """Without a saved launch the dynamic shared memory is unknown, so blocks and occupancy are marked `<=`."""
    resources, instructions = cells(static_text([build(ONE)], {}, 80), KERNEL.name)
    assert resources == ["168", "12", "16", "49152", "384", "<=", "1", "(registers)", "<=", "19", "%", "4096"]
    assert instructions == ["12", "4", "30", "0", "0", "0", "0", "0", "0", "2", "1", "7"]


def test_brackets_in_a_kernels_name_are_shown() -> None:
    """Square brackets in a demangled name, which rich would take for a style, are printed as they are."""
    kernel = msgspec.structs.replace(KERNEL, name="kernel[abi:cxx11](float [/2])")
    text = static_text([build(msgspec.structs.replace(ONE, kernels=(kernel,)))], {}, 80)
    assert len(cells(text, kernel.name)) == 2


def test_a_saved_launch_completes_it() -> None:
    """With a saved launch, its threads and dynamic shared memory are used."""
    launch = LaunchedKernel(KERNEL.mangled, (8, 1, 1), (128, 1, 1), 65536)
    resources, _ = cells(static_text([build(ONE)], {(ONE.variant, KERNEL.name): launch}, 80), KERNEL.name)
    assert resources == ["168", "12", "16", "114688+", "128", "2", "(shared", "memory)", "12", "%", "4096"]


def test_what_does_not_fit_an_architecture_is_said() -> None:
    """With a saved launch, the excess of its shared memory is shown for each architecture that has too little."""
    launch = LaunchedKernel(KERNEL.mangled, (8, 1, 1), (128, 1, 1), 57344)
    launches = {(ONE.variant, KERNEL.name): launch}
    for_120 = msgspec.structs.replace(ONE, arch="sm_120")
    too_large = f"does not fit: ws_p2@BLOCK_M=64: {KERNEL.name}: shared memory: 106,496 B per block, "
    assert fit_lines([ONE, for_120], launches) == [too_large + "5,120 B too many for sm_120 (101,376 B)"]
    assert fit_lines([ONE], launches) == [ALL_FIT]
    assert too_large in static_text([build(ONE, for_120)], launches, 80)


def test_two_variants_are_compared(snapshot: SnapshotAssertion) -> None:
    """The differences in instruction counts are listed, the largest first."""
    (title, line) = difference_lines([ONE, OTHER])
    assert snapshot == title
    assert snapshot == line


def test_the_same_code_is_reported() -> None:
    """Two variants with the same machine code are reported as such."""
    same_code = msgspec.structs.replace(OTHER, code_identity="a")
    assert difference_lines([ONE, same_code])[1] == "  sm_90a: the same machine code"


def test_three_variants_are_not_compared() -> None:
    """Three variants have no difference lines."""
    assert difference_lines([ONE, OTHER, msgspec.structs.replace(OTHER, variant="third")]) == []


def test_nothing_built_is_nothing_shown() -> None:
    """Without builds there is no table."""
    assert static_text([RECORD], {}, 80) == ""


@pytest.mark.parametrize(
    ("demangled", "stable"),
    [
        ("kernel<__half, Split<(int)1, (int)2>, (int)64, (KeyAssumption)2>", "kernel<__half, Split<1, 2>, 64, 2>"),
        ("kernel<(fa::Mode)-1>(Params)", "kernel<-1>(Params)"),
        ("kernel(int, float*)", "kernel(int, float*)"),
    ],
)
def test_a_kernels_name_does_not_depend_on_the_names_of_enums(demangled: str, stable: str) -> None:
    """A saved launch is found again after a type of a template argument was renamed."""
    assert stable_name(demangled) == stable
