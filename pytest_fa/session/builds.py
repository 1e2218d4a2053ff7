"""The builds of one run: compiled in one batch, or taken from the cache."""

from __future__ import annotations

import functools

from pytest_fa.build.builder import ensure
from pytest_fa.build.cache import delete_builds
from pytest_fa.build.outcomes import BuildFailure, BuildReport
from pytest_fa.build.source_trees import delete_trees
from pytest_fa.build.target import rank, runs_on, target_arches
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.build.units import Say
from pytest_fa.catalog.variant import COMPANION_ROLES, Device, Target, Variant
from pytest_fa.errors import BuildError, ToolchainError, UsageProblem
from pytest_fa.locks import say_waits, tells_wait
from pytest_fa.options.options import Options
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu
from pytest_fa.session.refusals import CannotRun
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import Arm


def device_of(variant: Variant) -> Device:
    """The device on which a variant runs on this machine.  Raises `CannotRun` if it needs a GPU and there is none."""
    device = variant.device_for(gpu=find_gpu() is not None)
    if device is None:
        raise CannotRun(f"{variant.name} needs a GPU, and this machine has none{_how_to_use_a_cpu(variant)}")
    return device


def _how_to_use_a_cpu(variant: Variant) -> str:
    """The line to write for a variant of the user that may run on a CPU although its manifest does not say so."""
    may_run = variant.entry.kind != "cuda" and not variant.entry.has_cuda_sources
    if not may_run or variant.role in COMPANION_ROLES:
        return ""
    return "; write `supports: {device: [cuda, cpu]}` if it also runs on a CPU"


class Builds:
    """The builds of every variant that the selected tests need.

    `needed` holds those variants by name, and `beside` others that are built with them.  Both are set at the end of
    collection, before anything is built.
    """

    def __init__(self, options: Options, run_plan: RunPlan) -> None:
        self.options, self.run_plan = options, run_plan
        self.needed: dict[str, Variant] = {}
        self.beside: tuple[Variant, ...] = ()
        self.say: Say = say_waits

    @functools.cached_property
    def report(self) -> BuildReport:
        """The builds of all needed variants, the failures, and what this machine lacks to build some of them.

        The first access compiles what is not in the cache.
        """
        requests = []
        for variant in {each.name: each for each in (*self.needed.values(), *self.beside)}.values():
            if not variant.is_built or (self.run_plan.plan.is_companion(variant) and not runs_here(variant)):
                continue
            try:
                requests += [(variant, arch) for arch in self._arches_of(variant)]
            except BuildError:
                continue  # `of` raises this error again, for this variant alone
        options = self.options
        return ensure(
            requests,
            options.cache,
            no_build=options.no_build,
            allowed_flags=options.allowed_flags,
            say=self.say,
        )

    @property
    def seconds(self) -> float:
        """The seconds of the batch of builds; 0 if nothing was looked up or compiled."""
        return self.report.seconds if "report" in self.__dict__ else 0.0

    def add(self, variant: Variant) -> None:
        """Build one more variant, which was not needed when the batch was built."""
        if not variant.is_built or any(name == variant.name for name, _ in self.report.outcomes):
            return
        options = self.options
        requests = [(variant, arch) for arch in self._arches_of(variant)]
        more = ensure(
            requests,
            options.cache,
            no_build=options.no_build,
            allowed_flags=options.allowed_flags,
            say=lambda text: self.say(text) if tells_wait(text) else None,
        )
        self.report.outcomes.update(more.outcomes)
        self.report.lacking.update(more.lacking)

    def of(self, variant: Variant) -> list[Build | BuildFailure]:
        """The builds and build failures of a variant, one for each architecture.

        Raises `CannotRun` if there is no compiler, or if no architecture of the variant was selected.
        """
        try:
            arches = self._arches_of(variant)
            if lacking := self.report.lacking.get(variant.name):
                raise CannotRun(lacking)
            outcomes = self.report.outcomes
            return [outcomes[(variant.name, arch)] for arch in arches if (variant.name, arch) in outcomes]
        except (ToolchainError, BuildError) as problem:
            raise CannotRun(str(problem)) from None

    def build_for_this_machine(self, variant: Variant) -> Build | BuildFailure | None:
        """The build, or build failure, for the highest architecture that this machine's GPU runs.

        Without a GPU, it is that for the highest architecture of all.  None if the variant is not compiled.  Raises
        `CannotRun` if the GPU runs none of the variant's architectures.
        """
        if not variant.is_built:
            return None
        gpu = find_gpu()
        outcomes = [build for build in self.of(variant) if not gpu or runs_on(build.arch, gpu.compute_capability)]
        if not outcomes:
            raise CannotRun(f"{variant.name}: this GPU runs none of its architectures ({', '.join(variant.arch)})")
        return max(outcomes, key=lambda build: rank(build.arch))

    def library_of(self, build: Build | None) -> str | None:
        """The path of a built library; None without a build."""
        return str(self.options.cache / build.library) if build else None

    def arm(self, variant: Variant) -> Arm:
        """A variant with its built library.  Raises `CannotRun` if its build failed."""
        build = self.build_for_this_machine(variant)
        if isinstance(build, BuildFailure):
            raise CannotRun(f"build of {variant.name} failed: {build.message}")
        return Arm(variant, self.library_of(build), build.files if build else {})

    def fails_to_compile(self, variant: Variant) -> bool:
        """Whether the compiler rejected the variant.  This is reported even if there is no GPU to run it on."""
        if not variant.is_built:
            return False
        try:
            return any(isinstance(each, BuildFailure) and each.command for each in self.of(variant))
        except CannotRun:
            return False

    def failures_of(self, variant: Variant) -> list[BuildFailure]:
        """The build failures of a variant.  Raises `CannotRun` as `of` does."""
        return [outcome for outcome in self.of(variant) if isinstance(outcome, BuildFailure)]

    def anything_runs(self) -> bool:
        """Whether this machine can run any needed variant, not only build it."""
        return any(runs_here(variant) for variant in self.needed.values())

    def clean(self) -> None:
        """`--fa-clean`: remove the cached builds of the selected variants, the baselines and the overhead variants.

        Of the source trees of revisions, those remain that this run uses.
        """
        plan, cache = self.run_plan.plan, self.options.cache
        try:
            for variant in (*plan.chosen, *plan.companions, *self.beside):
                if isinstance(variant, Variant) and variant.is_built:
                    delete_builds(cache, variant, (*variant.arch, *self.options.arches), self.say)
            delete_trees(cache, {each.root for each in self.beside})
        except OSError as problem:
            raise UsageProblem(f"--fa-clean: {cache} cannot be cleaned: {problem}") from None

    def require_known_arches(self) -> None:
        """Raise `UsageProblem` if `--fa-arch` names an architecture that the compiler of this machine lacks."""
        if not self.options.arches or self.options.no_build:
            return
        try:
            lacking = find_toolchain(self.options.cache).lacks(self.options.arches)
        except ToolchainError:
            return  # `ensure` reports it for each variant
        if lacking:
            raise UsageProblem(f"--fa-arch: {lacking}")

    def _arches_of(self, variant: Variant) -> tuple[Target, ...]:
        """The architectures that a variant is compiled for in this run; with `--fa-static`, all of them by default."""
        return target_arches(variant, self.options.arches, every=self.options.static)


def runs_here(variant: Variant) -> bool:
    """Whether this machine has a device that the variant runs on."""
    return variant.device_for(gpu=find_gpu() is not None) is not None
