"""The builds of one run: compiled in one batch, or taken from the cache."""

from __future__ import annotations

import functools

from pytest_fa.build.builder import BuildFailure, BuildReport, Say, ensure
from pytest_fa.build.cache import forget, locked
from pytest_fa.build.target import runs_on, target_arches
from pytest_fa.catalog.variant import ARCHES, Device, Variant
from pytest_fa.errors import BuildError, ToolchainError, UsageProblem
from pytest_fa.options import Options
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.session.refusals import CannotRun
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.worker.jobs import Arm


def device_of(variant: Variant) -> Device:
    """The device on which a variant runs on this machine.  Raises `CannotRun` where there is none."""
    device = variant.device_for(gpu=find_gpu() is not None)
    if device is None:
        raise CannotRun(f"{variant.name} needs a GPU, and this machine has none")
    return device


class Builds:
    """What was built of every variant that the selected items need.

    `needed` holds those variants by name; it is set when collection has ended, before anything is built.
    """

    def __init__(self, options: Options, asked: RunPlan) -> None:
        self.options, self.asked = options, asked
        self.needed: dict[str, Variant] = {}
        self.say: Say = lambda _: None

    @functools.cached_property
    def report(self) -> BuildReport:
        """The builds of all needed variants, why there are none, and what this machine lacks for some."""
        beside = [self.asked.gate_baseline] if self.asked.gate_baseline else []
        requests = []
        for variant in {each.name: each for each in (*self.needed.values(), *beside)}.values():
            if not variant.is_built or (self.asked.plan.is_companion(variant) and not _runs_here(variant)):
                continue
            try:
                requests += [(variant, arch) for arch in target_arches(variant, self._arches)]
            except BuildError:
                continue  # `of` raises it again for this variant alone
        return ensure(requests, self.options.cache, no_build=self.options.no_build, say=self.say)

    def of(self, variant: Variant) -> list[Build | BuildFailure]:
        """What was built of a variant, one entry for each architecture.

        Raises `CannotRun` where there is no compiler or where the variant has no architecture that fits.
        """
        try:
            arches = target_arches(variant, self._arches)
            if lacking := self.report.lacking.get(variant.name):
                raise CannotRun(lacking)
            outcomes = self.report.outcomes
            return [outcomes[(variant.name, arch)] for arch in arches if (variant.name, arch) in outcomes]
        except (ToolchainError, BuildError) as problem:
            raise CannotRun(str(problem)) from None

    def runnable(self, variant: Variant) -> Build | BuildFailure | None:
        """The best build for this machine's GPU, or why it failed; None for a variant that needs no compiler.

        Without a GPU: any failure, else any build.  Raises `CannotRun` where nothing that was compiled runs here.
        """
        if not variant.is_built:
            return None
        gpu = find_gpu()
        outcomes = [each for each in self.of(variant) if not gpu or runs_on(each.arch, gpu.compute_capability)]
        if not outcomes:
            raise CannotRun(f"{variant.name}: nothing that was compiled ({', '.join(variant.arch)}) runs on this GPU")
        return max(outcomes, key=lambda each: each.arch)

    def library_of(self, build: Build | None) -> str | None:
        """The path of a build's library."""
        return str(self.options.cache / build.library) if build else None

    def arm(self, variant: Variant) -> Arm:
        """A variant with its library.  Raises `CannotRun` where it was not built."""
        build = self.runnable(variant)
        if isinstance(build, BuildFailure):
            raise CannotRun(f"build of {variant.name} failed: {build.message}")
        return Arm(variant, self.library_of(build))

    def fails_to_compile(self, variant: Variant) -> bool:
        """Whether the compiler rejected the variant: that is said even where there is no GPU to run it on."""
        if not variant.is_built:
            return False
        try:
            return any(isinstance(each, BuildFailure) and each.command for each in self.of(variant))
        except CannotRun:
            return False

    def anything_runs(self) -> bool:
        """Whether any needed variant can run on this machine, beyond being built."""
        return any(_runs_here(variant) for variant in self.needed.values())

    def clean(self) -> None:
        """`--fa-clean`: remove the cached builds of the chosen variants and their baselines."""
        plan, cache = self.asked.plan, self.options.cache
        try:
            with locked(cache, self.say):
                for variant in (*plan.chosen, *plan.companions):
                    if isinstance(variant, Variant) and variant.is_built:
                        forget(cache, variant, variant.arch)
        except OSError as problem:
            raise UsageProblem(f"--fa-clean: {cache} cannot be cleaned: {problem}") from None

    @property
    def _arches(self) -> tuple[str, ...]:
        """The architectures that were asked for; all of them where only machine code is read."""
        return self.options.arches or (ARCHES if self.options.static else ())


def _runs_here(variant: Variant) -> bool:
    return variant.device_for(gpu=find_gpu() is not None) is not None
