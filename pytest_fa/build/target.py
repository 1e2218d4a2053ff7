"""Choose the architectures to compile for: that of the GPU, or without a GPU the last one of the manifest."""

from __future__ import annotations

import re

from pytest_fa.catalog.variant import Arch, Target, Variant
from pytest_fa.errors import BuildError
from pytest_fa.records.environment import find_gpu

# The only plain architecture whose builds hold no PTX: its command line is older than the rule of `holds_ptx`.
WITHOUT_PTX = "sm_89"


def capability(arch: Arch) -> tuple[int, int]:
    """Return the compute capability that an architecture is for: (12, 0) for `sm_120a`."""
    digits = re.sub(r"\D", "", arch)
    return int(digits[:-1]), int(digits[-1])


def holds_ptx(arch: Target) -> bool:
    """Return whether a build also holds PTX, which newer GPUs compile when they load it.

    PTX for an `a` or `f` architecture runs on no newer GPU, so those builds hold none.
    """
    return arch not in ("host", WITHOUT_PTX) and arch[-1].isdigit()


def runs_on(arch: Target, compute_capability: tuple[int, int]) -> bool:
    """Return whether a build for `arch` runs on a GPU of this compute capability.

    Machine code runs on GPUs of the same major and an equal or higher minor version; that of an `a` architecture runs
    only on exactly that version.
    """
    if arch == "host":
        return True
    built_for = capability(arch)
    if arch.endswith("a"):
        return compute_capability == built_for
    return compute_capability >= built_for and (holds_ptx(arch) or compute_capability[0] == built_for[0])


def rank(arch: Target) -> tuple[int, int, int]:
    """Return the order of architectures: by number, and of one number `a` before `f` before the plain one."""
    return (0, 0, 0) if arch == "host" else (*capability(arch), "fa".find(arch[-1]))


def native_arch(variant: Variant) -> Target:
    """Return the best of the variant's architectures for this machine's GPU; without a GPU, the last one.

    Raises `BuildError`, with the GPU and the variant's architectures, if none of them runs on the GPU.
    """
    gpu = find_gpu()
    if gpu is None:
        return variant.arch[-1]
    fitting = [arch for arch in variant.arch if runs_on(arch, gpu.compute_capability)]
    if not fitting:
        needed = "sm_{}{}".format(*gpu.compute_capability)
        raise BuildError(
            f"{variant.name} is only for {', '.join(variant.arch)}; this GPU ({gpu.name}) needs {needed}; if the "
            f"kernel supports it, add {needed} to arch in {variant.folder}/variant.yaml"
        )
    return max(fitting, key=rank)


def target_arches(variant: Variant, requested: tuple[str, ...], *, every: bool = False) -> tuple[Target, ...]:
    """Return the variant's architectures that are requested; without a request, the one of `native_arch`.

    With `every`, a variant without a request is compiled for all its architectures, whatever the GPU.  A variant whose
    manifest names no architectures is compiled for every requested one.  Raises `BuildError` if this selects none.
    """
    if requested and "host" not in variant.arch:
        if variant.any_arch:
            return tuple(sorted(set(requested), key=rank))
        chosen = tuple(arch for arch in variant.arch if arch in requested)
        if not chosen:
            known = ", ".join(variant.arch)
            raise BuildError(f"{variant.name} is only for {known}; --fa-arch selects only {', '.join(requested)}")
        return chosen
    return variant.arch if every else (native_arch(variant),)
