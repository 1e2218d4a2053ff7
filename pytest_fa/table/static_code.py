"""Resources and instructions in the machine code of each variant, and the difference of two variants."""

from __future__ import annotations

import collections

from pytest_fa.build.occupancy import excesses, occupancy
from pytest_fa.records.built import Build, Kernel, stable_name
from pytest_fa.records.timing import LaunchedKernel

# Opcodes by what they do.  An opcode that is not listed counts as `other`.
GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "BMMA", "DMMA"),
    "exp": ("MUFU",),
    "fp32": ("FFMA", "FADD", "FMUL", "FMNMX", "FSETP", "FSEL", "FCHK"),
    "fp16": ("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSETP2"),
    "convert": ("F2F", "F2FP", "F2I", "I2F", "I2FP"),
    "shuffle": ("SHFL", "REDUX", "VOTE", "VOTEU"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "global": ("LDG", "STG", "LD", "ST", "RED", "ATOM", "ATOMG"),
    "async": ("STAS", "LDGSTS", "LDGDEPBAR", "DEPBAR", "UTMALDG", "UTMASTG", "UBLKCP", "UTMACMDFLUSH"),
    "barrier": ("BAR", "SYNCS", "WARPSYNC", "MEMBAR", "FENCE", "WARPGROUP", "UCGABAR_ARV", "UCGABAR_WAIT"),
    "local": ("LDL", "STL"),
}
MAX_CHANGES = 8
ALL_FIT = "fits: every block fits its architecture, as far as its threads and its dynamic shared memory are known"

Launches = dict[tuple[str, str], LaunchedKernel]  # by variant and kernel name


def fit_lines(builds: list[Build], launches: Launches) -> list[str]:
    """A line for each kernel and resource that does not fit an architecture, or one line that all fit."""
    lines = []
    for build in builds:
        for kernel in build.kernels:
            needs = _needs(kernel, launches.get((build.variant, stable_name(kernel.name))))
            lines += [
                f"does not fit: {build.variant}: {kernel.name}: {text}"
                for text in excesses(build.arch, needs[0], kernel.registers_per_thread, needs[1])
            ]
    return lines or [ALL_FIT]


def _needs(kernel: Kernel, launch: LaunchedKernel | None) -> tuple[int | None, int]:
    """The threads of a block, None if unknown, and its shared memory in bytes, as far as both are known."""
    launched_threads = launch.block[0] * launch.block[1] * launch.block[2] if launch else None
    dynamic_bytes = launch.dynamic_smem_bytes if launch else 0
    return launched_threads or kernel.max_threads_per_block, kernel.smem_bytes_per_block + dynamic_bytes


def mix(kernel: Kernel) -> dict[str, int]:
    """The number of instructions in each group, in the groups' order, `other` last."""
    group_of = {opcode: group for group, opcodes in GROUPS.items() for opcode in opcodes}
    counts = dict.fromkeys((*GROUPS, "other"), 0)
    for opcode, count in kernel.instructions.items():
        counts[group_of.get(opcode, "other")] += count
    return counts


def resource_cells(build: Build, kernel: Kernel, launch: LaunchedKernel | None) -> list[str]:
    """The cells of one kernel from column `regs` on."""
    threads, smem_bytes = _needs(kernel, launch)
    at_most = "" if launch else "<= "  # the dynamic shared memory is known only from a launch
    limit = occupancy(build.arch, threads, kernel.registers_per_thread, smem_bytes) if threads else None
    return [
        str(kernel.registers_per_thread),
        str(kernel.spill_bytes),
        str(kernel.stack_bytes),
        f"{smem_bytes}{'+' if launch and launch.dynamic_smem_bytes else ''}",
        str(threads or "-"),
        f"{at_most}{limit.blocks} ({limit.limited_by})" if limit else "-",
        f"{at_most}{limit.percent:.0f} %" if limit else "-",
        "-" if kernel.sass_bytes is None else str(kernel.sass_bytes),
    ]


def difference_lines(builds: list[Build]) -> list[str]:
    """The difference in instructions and registers for each architecture, if exactly two variants were built."""
    names = list(dict.fromkeys(build.variant for build in builds))
    if len(names) != 2:  # noqa: PLR2004
        return []
    lines = [f"{names[0]} -> {names[1]}, instructions over all kernels:"]
    for arch in dict.fromkeys(build.arch for build in builds):
        pair = [
            next((build for build in builds if (build.variant, build.arch) == (name, arch)), None) for name in names
        ]
        if pair[0] and pair[1]:
            lines.append(f"  {arch}: {_difference(pair[0], pair[1])}")
    return lines


def _difference(before: Build, after: Build) -> str:
    if before.code_identity and before.code_identity == after.code_identity:
        return "the same machine code"
    counts = [collections.Counter[str](), collections.Counter[str]()]
    for build, count in zip((before, after), counts, strict=True):
        for kernel in build.kernels:
            count.update(kernel.instructions)
    changes = {opcode: counts[1][opcode] - counts[0][opcode] for opcode in counts[0] | counts[1]}
    largest = sorted((opcode for opcode in changes if changes[opcode]), key=lambda opcode: -abs(changes[opcode]))
    registers = [max((each.registers_per_thread for each in build.kernels), default=0) for build in (before, after)]
    listed = [f"{opcode} {changes[opcode]:+d}" for opcode in largest[:MAX_CHANGES]]
    rest = f", {len(largest) - MAX_CHANGES} more opcodes" if len(largest) > MAX_CHANGES else ""
    return f"registers {registers[0]} -> {registers[1]}; {', '.join(listed) or 'the same instruction counts'}{rest}"
