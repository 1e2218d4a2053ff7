"""Which architectures to compile for: the GPU's own, or all of the manifest's without one."""

from __future__ import annotations

from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import BuildError
from pytest_fa.records.environment import find_gpu


def runs_on(arch: Target, compute_capability: tuple[int, int]) -> bool:
    """Whether a build for `arch` runs on a GPU.

    Machine code runs on its own major version from its minor version on; an `a` architecture on that one chip family
    alone; sm_80 builds carry PTX as well, which newer GPUs compile when they load it.
    """
    if arch == "host":
        return True
    if arch == "sm_80":
        return compute_capability >= (8, 0)
    if arch == "sm_89":
        return compute_capability == (8, 9)
    return compute_capability == (9, 0)


def native_arch(variant: Variant) -> Target:
    """The best of the variant's architectures for this machine's GPU; without a GPU, its last.

    Raises `BuildError` that names the GPU and what the variant is for.
    """
    gpu = find_gpu()
    if gpu is None:
        return variant.arch[-1]
    fitting = [arch for arch in variant.arch if runs_on(arch, gpu.compute_capability)]
    if not fitting:
        found = "sm_{}{}".format(*gpu.compute_capability)
        raise BuildError(f"{variant.name} is for {', '.join(variant.arch)}; this GPU, {gpu.name}, is {found}")
    return max(fitting)


def target_arches(variant: Variant, asked: tuple[str, ...]) -> tuple[Target, ...]:
    """What to compile: the asked ones that the variant has, else the GPU's own, else all.

    Raises `BuildError` where nothing fits.
    """
    if asked and "host" not in variant.arch:
        chosen = tuple(arch for arch in variant.arch if arch in asked)
        if not chosen:
            raise BuildError(f"{variant.name} is for {', '.join(variant.arch)}; --fa-arch asks for {', '.join(asked)}")
        return chosen
    return variant.arch if find_gpu() is None else (native_arch(variant),)
