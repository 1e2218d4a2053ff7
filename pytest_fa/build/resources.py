"""Read kernels and advisories from ptxas's log, and compare a build's figures with the manifest's limits."""

from __future__ import annotations

import re
import shutil
import subprocess

import msgspec

from pytest_fa.build.machine_code import MachineCode
from pytest_fa.catalog.variant import Limits
from pytest_fa.records.built import Advisory, Build, Kernel

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\((C\d{4})\)\s*(.*)")


def read_ptxas_log(log: str) -> tuple[tuple[Kernel, ...], tuple[Advisory, ...]]:
    """Return the kernels of one compilation, in the log's order, and ptxas's advisories.

    Only entry functions are kernels.  The spills of a device function that is not inlined are added to its kernel.
    """
    figures: dict[str, dict[str, int]] = {}
    advisories: list[Advisory] = []
    current = function = ""
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            current = function = entry[1]
            figures[current] = {"stack": 0, "stores": 0, "loads": 0, "registers": 0, "smem": 0}
        elif properties := _PROPERTIES.search(line):
            function = properties[1]
            if function not in figures:
                function = current  # a function that is not inlined: its spills are added to its kernel
        elif (frame := _FRAME.search(line)) and function in figures:
            row = figures[function]
            row["stack"] = max(row["stack"], int(frame[1]))
            row["stores"] += int(frame[2])
            row["loads"] += int(frame[3])
        elif (used := _USED.search(line)) and current:
            smem = _SMEM.search(line)
            figures[current].update(registers=int(used[1]), smem=int(smem[1]) if smem else 0)
        if advisory := _ADVISORY.search(line):
            advisories.append(Advisory(advisory[1], advisory[2].strip()))
    names = demangle(list(figures))
    kernels = tuple(
        Kernel(
            name=name,
            mangled=mangled,
            registers_per_thread=row["registers"],
            spill_store_bytes=row["stores"],
            spill_load_bytes=row["loads"],
            stack_bytes=row["stack"],
            smem_bytes_per_block=row["smem"],
        )
        for name, (mangled, row) in zip(names, figures.items(), strict=True)
    )
    return kernels, tuple(dict.fromkeys(advisories))


def demangle(names: list[str], *, parameters: bool = False) -> list[str]:
    """Return C++ names, without parameter lists unless `parameters`, by c++filt of binutils, which g++ needs.

    Without c++filt, the names do not change.
    """
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    text, command = "\n".join(names), [tool, *([] if parameters else ["-p"])]
    try:
        run = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return names
    lines = [line.removeprefix("void ") for line in run.stdout.splitlines()]
    return lines if len(lines) == len(names) else names


def broken_limits(build: Build, limits: Limits) -> list[str]:
    """Return a sentence for each limit that a build breaks: the kernel, the value found, the value allowed."""
    if not build.kernels and limits.of_build != Limits():
        return [f"{build.arch}: the ptxas log names no kernel, so limits cannot be checked"]
    return [*_broken_counts(build, limits), *_broken_instructions(build, limits)]


def _broken_counts(build: Build, limits: Limits) -> list[str]:
    broken = []
    for field in ("registers_per_thread", "spill_bytes", "stack_bytes", "smem_bytes_per_block"):
        allowed = getattr(limits, field)
        for kernel in build.kernels:
            value = getattr(kernel, field)
            if allowed is not None and not value <= allowed:
                broken.append(f"{build.arch}: {kernel.name}: {field} is {value}, the limit is {allowed}")
    if limits.advisories is not None and not len(build.advisories) <= limits.advisories:
        listed = "; ".join(f"{advisory.code} {advisory.text}" for advisory in build.advisories)
        broken.append(
            f"{build.arch}: {len(build.advisories)} ptxas advisories, the limit is {limits.advisories}: {listed}"
        )
    return broken


def _broken_instructions(build: Build, limits: Limits) -> list[str]:
    broken = []
    if limits.instructions and build.code_identity is None:
        broken.append(f"{build.arch}: limits.instructions cannot be checked: {build.code_identity_missing}")
        return broken
    for opcode, limit in limits.instructions.items():
        for kernel in build.kernels:
            count = kernel.instructions.get(opcode, 0)
            most = float("inf") if limit.max is None else limit.max
            if not limit.min <= count <= most:
                broken.append(f"{build.arch}: {kernel.name}: {count} {opcode}, the limits are {limit.min} to {most}")
    return broken


def with_machine_code(kernels: tuple[Kernel, ...], code: MachineCode) -> tuple[Kernel, ...]:
    """Return the kernels with their SASS bytes, instruction counts and maximum threads per block filled in."""
    return tuple(
        msgspec.structs.replace(
            kernel,
            sass_bytes=code.kernels[kernel.mangled][0],
            instructions=code.kernels[kernel.mangled][1],
            max_threads_per_block=code.threads.get(kernel.mangled),
        )
        if kernel.mangled in code.kernels
        else kernel
        for kernel in kernels
    )
