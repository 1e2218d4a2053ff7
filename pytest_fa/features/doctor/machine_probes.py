"""Probes of the machine: compilers, GPUs, Nsight Compute and its permission, compute-sanitizer.

This module imports `msgspec`, which may be missing, so it is imported by its probes only.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_fa.build.toolchain import find_tool, find_toolchain, host_toolchain
from pytest_fa.catalog.variant import ARCHES
from pytest_fa.errors import ToolchainError
from pytest_fa.features.doctor.finding import Finding, Places
from pytest_fa.features.ncu.ncu_status import SENTENCES
from pytest_fa.features.sanitize.sanitizer import find_sanitizer
from pytest_fa.host.programs import find_program, version_of
from pytest_fa.records import environment

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
PROCESS_STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21  # its bit in CapEff
NO_BUILDS = "no CUDA variant is built"
MIN_CAPABILITY = (8, 0)


def probe_host_compiler(_: Places) -> Iterator[Finding]:
    """The C++ compiler, which nvcc needs as well."""
    try:
        toolchain = host_toolchain()
    except ToolchainError as problem:
        yield Finding("warning", "host compiler", str(problem), NO_BUILDS)
        return
    text = f"{toolchain.title} ({toolchain.host_compiler})"
    if re.search(r"\d+\.\d+", toolchain.versions[-1]):
        yield Finding("ok", "host compiler", text)
    else:
        yield Finding("warning", "host compiler", f"{text} prints no version", "set CXX to g++ or clang++")


def probe_nvcc(_: Places) -> Iterator[Finding]:
    """The CUDA compiler, the architectures that it compiles for, and whether the driver runs what it compiles."""
    try:
        with tempfile.TemporaryDirectory() as scratch:  # the doctor writes nothing to the cache
            toolchain = find_toolchain(Path(scratch))
    except ToolchainError as problem:
        yield Finding("warning", "nvcc", str(problem), NO_BUILDS)
        return
    text = f"{toolchain.title.split(',')[0].removeprefix('nvcc ')} ({toolchain.nvcc})"
    known = _architectures(toolchain.nvcc)
    unknown = [arch for arch in ARCHES if arch.removesuffix("a") not in known]  # nvcc lists sm_90 for sm_90a as well
    if unknown:
        yield Finding("warning", "nvcc", f"{text} does not compile for {', '.join(unknown)}", "install CUDA 13")
    else:
        yield Finding("ok", "nvcc", f"{text} compiles for {', '.join(ARCHES)}")
    yield from _older_driver(text)


def _architectures(nvcc: str) -> set[str]:
    listing = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    return set(re.findall(r"sm_\w+", listing.stdout))


def _older_driver(nvcc: str) -> Iterator[Finding]:
    """A finding if the driver is of an earlier CUDA major version than nvcc."""
    gpu, version = environment.find_gpu(), re.match(r"(\d+)\.", nvcc)
    if gpu and version and int(version[1]) > int(gpu.cuda.split(".")[0]):
        text = f"driver {gpu.driver} supports CUDA up to {gpu.cuda}, nvcc is {nvcc}"
        yield Finding("warning", "nvcc", text, "update the driver, or use a CUDA toolkit of the driver's major version")


def probe_disassemblers(_: Places) -> Iterator[Finding]:
    """The programs that read machine code."""
    lacking = [name for name in ("cuobjdump", "nvdisasm") if find_tool(name) is None]
    if lacking:
        advice = f"pip install {' '.join(f'nvidia-cuda-{name}' for name in lacking)}"
        text = f"{', '.join(lacking)} not found: the records have no instruction counts"
        yield Finding("warning", "disassemblers", text, advice)
    else:
        yield Finding("ok", "disassemblers", "cuobjdump and nvdisasm")


def probe_gpu(_: Places) -> Iterator[Finding]:
    """Every visible GPU with its driver; other processes on the first one."""
    gpus, visible = environment.find_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        why = "no NVIDIA driver, or no device" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
        text = f"none ({why}): CUDA variants are compiled, but not run"
        yield Finding("warning", "gpu", text, "run `nvidia-smi`; in a container, start it with --gpus all")
        return
    for gpu in gpus:
        text = "{} (sm_{}{}), driver {}, CUDA up to {}".format(gpu.name, *gpu.compute_capability, gpu.driver, gpu.cuda)
        is_supported = gpu.compute_capability >= MIN_CAPABILITY
        advice = "" if is_supported else "no variant runs on it; sm_80 or newer is needed"
        yield Finding("ok" if is_supported else "warning", "gpu", text, advice)
    if others := environment.find_other_gpu_processes():
        text = f"other processes use the first one ({len(others)}): {', '.join(others[:3])}"
        yield Finding("warning", "gpu", text, "times are not reliable until they end")


def probe_nsight(_: Places) -> Iterator[Finding]:
    """Nsight Compute, and whether this user may read the GPU's counters."""
    ncu = find_program("ncu")
    if ncu is None:
        yield Finding("warning", "nsight compute", SENTENCES["not-installed"], "--ncu skips its tests until then")
        return
    yield Finding("ok", "nsight compute", f"{version_of(ncu) or 'of unknown version'} ({ncu})")
    if not DRIVER_PARAMETERS.is_file():
        return
    restricted = "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text(encoding="utf-8")
    if restricted and not _is_administrator():
        yield Finding("warning", "gpu counters", f"the driver would answer ERR_NVGPUCTRPERM: {SENTENCES['permission']}")
    else:
        reason = "as root" if restricted else "as every user"
        yield Finding("ok", "gpu counters", f"this user may read them, {reason}")


def _is_administrator() -> bool:
    """Whether this process has CAP_SYS_ADMIN; root in a container often lacks it."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", PROCESS_STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    return capabilities is not None and bool(int(capabilities[1], 16) >> CAP_SYS_ADMIN & 1)


def probe_sanitizer(_: Places) -> Iterator[Finding]:
    """compute-sanitizer."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        text = "not found on PATH or in a CUDA toolkit: --fa-sanitize skips its tests"
        yield Finding("warning", "compute-sanitizer", text, "pip install nvidia-cuda-sanitizer-api")
    else:
        yield Finding("ok", "compute-sanitizer", f"{sanitizer[1] or 'of unknown version'} ({sanitizer[0]})")
