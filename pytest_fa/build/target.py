"""Choose the architectures to compile for: that of the GPU, or without a GPU all of the manifest."""

from __future__ import annotations

from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import BuildError
from pytest_fa.records.environment import find_gpu


def runs_on(arch: Target, compute_capability: tuple[int, int]) -> bool:
    """Return whether a build for `arch` runs on a GPU of this compute capability.

    Machine code runs on GPUs of the same major and an equal or higher minor version; an `a` architecture runs only on
    exactly that version.  An sm_80 build also holds PTX, which newer GPUs compile when they load it.
    """
    if arch == "host":
        return True
    if arch == "sm_80":
        return compute_capability >= (8, 0)
    if arch == "sm_89":
        return compute_capability == (8, 9)
    return compute_capability == (9, 0)


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
        raise BuildError(f"{variant.name} is only for {', '.join(variant.arch)}; this GPU ({gpu.name}) needs {needed}")
    return max(fitting)


def target_arches(variant: Variant, requested: tuple[str, ...]) -> tuple[Target, ...]:
    """Return the variant's architectures that are requested; without a request, that of the GPU, or all without a GPU.

    Raises `BuildError` if this selects none.
    """
    if requested and "host" not in variant.arch:
        chosen = tuple(arch for arch in variant.arch if arch in requested)
        if not chosen:
            known = ", ".join(variant.arch)
            raise BuildError(f"{variant.name} is only for {known}; --fa-arch selects only {', '.join(requested)}")
        return chosen
    return variant.arch if find_gpu() is None else (native_arch(variant),)
