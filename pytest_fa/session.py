"""One run, as pytest sees it: what was asked for, what was built, the workers, the records.

Everything here is torch-free; the tensors live in the workers.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pytest_fa.build.builder import BuildFailure, BuildReport, ensure, explain
from pytest_fa.build.cache import find_by_key, forget, locked
from pytest_fa.build.resources import broken_limits
from pytest_fa.build.target import runs_on, target_arches
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import Catalog, discover
from pytest_fa.catalog.faults import REPEATS as SELFTEST_REPEATS
from pytest_fa.catalog.fit import EVERYTHING, Fits
from pytest_fa.catalog.plan import Plan, make_plan
from pytest_fa.catalog.properties import MAY_REFUSE, applies, property_case
from pytest_fa.catalog.select import expand_defines, select_cases, select_variants
from pytest_fa.catalog.variant import ARCHES, BrokenVariant, Device, Tolerance, Variant
from pytest_fa.errors import BuildError, FaError, ToolchainError, UsageProblem
from pytest_fa.jobs import WATCHDOG_SECONDS, Arm, BusyJob, CaseJob, CaseResult
from pytest_fa.measure.timing_lock import timing_lock
from pytest_fa.options import Options
from pytest_fa.profile.profiler import Profiler
from pytest_fa.report.agreement import agree
from pytest_fa.report.ceilings import Ceilings, read_ceilings
from pytest_fa.report.environment import find_gpu, foreign_processes, read_environment
from pytest_fa.report.profiled import Profile
from pytest_fa.report.record import (
    ON_CPU,
    SCHEMA,
    STAGES,
    Ablation,
    Environment,
    Kind,
    Leaf,
    Outcome,
    Record,
    Speed,
    Stage,
)
from pytest_fa.report.source import read_source
from pytest_fa.workers import Workers

Say = Callable[[str], None]

PATIENT_WATCHDOG_SECONDS = 300.0
SELFTEST_WATCHDOG_SECONDS = 30.0  # its Python kernels compile nothing
SELFTEST_KERNELS = Path(__file__).parent / "selftest"


class CannotRun(FaError):
    """Something that this machine lacks: a reason to skip."""


class Refused(CannotRun):
    """A case that a variant does not take, on any machine."""


class Session:
    """The state of one run."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.needed: dict[str, Variant] = {}
        self.workers = Workers(options.cache)
        self.profilers = Workers(options.cache)
        self.right: set[tuple[str, str]] = set()
        self.device_us: dict[tuple[str, str], float] = {}
        self.profiles: dict[tuple[str, str], Profile] = {}
        self._neighbours: tuple[str, ...] = ()
        self._say: Say = lambda _: None

    # -- what was asked for ------------------------------------------------------------------------------------------

    @functools.cached_property
    def catalog(self) -> Catalog:
        """Every variant there is; the self-test has its own."""
        return discover((SELFTEST_KERNELS,) if self.options.selftest else self.options.kernels)

    @functools.cached_property
    def plan(self) -> Plan:
        """The pairs of this run.  Raises `UsageProblem` for names that do not exist or do not go together."""
        options = self.options
        if options.selftest and options.tolerance:
            raise UsageProblem("--fa-selftest: the self-test judges by its own policies; drop --fa-tolerance")
        wanted = options.variants or (("*",) if options.selftest else ())
        chosen = expand_defines(select_variants(self.catalog, wanted), options.defines)
        for each in chosen:
            if isinstance(each, BrokenVariant) and each.name in options.variants:
                raise UsageProblem(f"--fa-variant: {each.name} cannot be used: {each.problem}")
        cases = select_cases(options.suites, options.cases, options.dtypes, options.seeds)
        if options.tolerance == "absolute" and (odd := next((c for c in cases if c.dtype != "fp16"), None)):
            raise UsageProblem(f"--fa-tolerance=absolute judges fp16 only; case {odd.id} is {odd.dtype} (use measured)")
        if options.gate_baseline and options.gate is None:
            raise UsageProblem("--fa-gate-baseline: there is no gate; give --fa-gate=RATIO too")
        _ = self.gate_baseline, self.old_build  # a name or a key that does not exist ends the run here
        fits: Fits = () if options.cases else self._fits
        plan = make_plan(
            self.catalog,
            chosen,
            cases,
            cases_are_named=bool(options.cases),
            fits=fits,
            sanitizers=options.sanitizers,
        )
        _require_fit_for_probes(options, plan)
        if options.tolerance == "absolute" and (other := plan.fitted_to("bf16")):
            raise UsageProblem(
                f"--fa-tolerance=absolute judges fp16 only; {other.name} takes bf16 alone (use measured)"
            )
        return plan

    def plan_of(self, suites: tuple[str, ...]) -> Plan:
        """The plan with other suites' cases; the run's own plan for none.  Raises `UsageProblem`."""
        if not suites:
            return self.plan
        options = self.options
        cases = select_cases(suites, (), options.dtypes, options.seeds)
        return msgspec.structs.replace(self.plan, cases=cases, fits=self._fits)

    @property
    def _fits(self) -> Fits:
        """What of a suite's case may be changed to what a variant takes: not what was asked for."""
        return ("head_dim", "layout", "shape") if self.options.dtypes else EVERYTHING

    @functools.cached_property
    def gate_baseline(self) -> Variant | None:
        """The variant that `--fa-gate-baseline` names; None for a build key or none.  Raises `UsageProblem`."""
        named = self.options.gate_baseline
        if named is None or named.startswith("key:"):
            return None
        found = select_variants(self.catalog, (named,))
        if len(found) != 1 or isinstance(found[0], BrokenVariant):
            raise UsageProblem(f"--fa-gate-baseline: {named!r} must name one variant that can be read")
        if found[0].computes != "attention":
            raise UsageProblem(f"--fa-gate-baseline: {named} computes {found[0].computes}; it must compute attention")
        return found[0]

    @functools.cached_property
    def old_build(self) -> Leaf | None:
        """The build that `--fa-gate-baseline=key:` names.  Raises `UsageProblem` where that is not one in the cache."""
        named = self.options.gate_baseline
        if named is None or not named.startswith("key:"):
            return None
        found = {leaf.key: leaf for leaf in find_by_key(self.options.cache, named.removeprefix("key:"))}
        if len(found) != 1:
            names = ", ".join(f"{leaf.key} ({leaf.variant}, {leaf.built_at})" for leaf in found.values()) or "none"
            raise UsageProblem(f"--fa-gate-baseline: {named!r} must name one build in the cache; it names {names}")
        return next(iter(found.values()))

    @property
    def title(self) -> str:
        """The header line: GPU, how many variants, which cases."""
        gpu = find_gpu()
        machine = "{} (sm_{}{}, driver {})".format(gpu.name, *gpu.compute_capability, gpu.driver) if gpu else "no GPU"
        of = len(self.catalog.variants) + len(self.catalog.broken)
        chosen, cases = len(self.plan.chosen), len(self.plan.asked)
        return f"fa: {machine}; {chosen} of {of} variants; {cases} case{'s' * (cases != 1)}"

    @property
    def machine_info(self) -> dict[str, str | None]:
        """What a time depends on, for pytest-benchmark's files."""
        here = self.environment
        return {"gpu": here.gpu, "driver": here.driver, "cuda": here.cuda, "torch": here.torch}

    def clean(self) -> None:
        """`--fa-clean`: forget the builds of what was chosen, before anybody looks for them."""
        try:
            self._forget_chosen()
        except OSError as problem:
            raise UsageProblem(f"--fa-clean: {self.options.cache} cannot be cleaned: {problem}") from None

    def _forget_chosen(self) -> None:
        with locked(self.options.cache, self._say):
            for variant in (*self.plan.chosen, *self.plan.companions):
                if isinstance(variant, Variant) and variant.is_built:
                    forget(self.options.cache, variant, variant.arch)

    # -- building ----------------------------------------------------------------------------------------------------

    def build_all(self, say: Say) -> None:
        """Build everything the selected items need in one batch, and let the workers start meanwhile."""
        self._say = say
        if self.will_run() and not self.options.static:
            self._neighbours = foreign_processes()  # before there are processes of ours
            self.workers.start()
            if find_gpu() and self.options.timing and not self.options.selftest:
                self.profilers.start()
        if report := self.builds.title:
            say(report)

    @functools.cached_property
    def builds(self) -> BuildReport:
        """The leaves of all needed variants, why there are none, and what this machine lacks for some."""
        options = self.options
        requests = []
        beside = [self.gate_baseline] if self.gate_baseline else []
        for variant in {each.name: each for each in (*self.needed.values(), *beside)}.values():
            if not variant.is_built or (self.plan.is_companion(variant) and not self._runs_here(variant)):
                continue
            try:
                requests += [(variant, arch) for arch in target_arches(variant, self._arches)]
            except BuildError:
                continue  # said again by whoever asks for this variant's leaf
        return ensure(requests, options.cache, no_build=options.no_build, say=self._say)

    @property
    def _arches(self) -> tuple[str, ...]:
        """What was asked for; all of them where only machine code is to be read."""
        return self.options.arches or (ARCHES if self.options.static else ())

    def leaves(self, variant: Variant) -> list[Leaf | BuildFailure]:
        """What was built of a variant, for each architecture.

        Raises `CannotRun` where there is no compiler or no architecture of the variant's fits.
        """
        try:
            arches = target_arches(variant, self._arches)
            if lacking := self.builds.lacking.get(variant.name):
                raise CannotRun(lacking)
            return [
                self.builds.outcomes[(variant.name, arch)]
                for arch in arches
                if (variant.name, arch) in self.builds.outcomes
            ]
        except (ToolchainError, BuildError) as problem:
            raise CannotRun(str(problem)) from None

    def will_run(self) -> bool:
        """Whether anything selected can run on this machine, beyond being built."""
        return any(self._runs_here(each) for each in self.needed.values())

    def _runs_here(self, variant: Variant) -> bool:
        return variant.device_for(gpu=find_gpu() is not None) is not None

    # -- running -----------------------------------------------------------------------------------------------------

    def judge_build(self, variant: Variant | BrokenVariant) -> Record:
        """The record of `test_build`: compiled for every architecture, within the manifest's limits."""
        if isinstance(variant, BrokenVariant):
            return self.record("build", variant.name, "candidate", None, _failed_build(variant.problem), ())
        outcomes = self.leaves(variant)
        leaves = tuple(each for each in outcomes if isinstance(each, Leaf))
        problems = explain([each for each in outcomes if isinstance(each, BuildFailure)])
        problems += [] if outcomes else [f"{variant.name}: nothing was built"]
        over = [text for leaf in leaves for text in broken_limits(leaf, variant.limits)]
        stage = Stage("build", "failed" if problems or over else "ok", sum(leaf.build_seconds for leaf in leaves))
        outcome: Outcome = "not_built" if problems else "over_limit" if over else "ok"
        result = CaseResult(outcome, "\n".join([*problems, *over]), (stage,))
        return self.record("build", variant.name, variant.role, None, result, leaves)

    def hold_to_property(self, variant: Variant, name: str) -> Record:
        """The record of `test_property`: one job, through a worker.

        Raises `Refused` where the property means nothing for the variant or the kernel refuses it with a reason.
        """
        device = variant.device_for(gpu=find_gpu() is not None)
        if device and not applies(name, variant, device):
            raise Refused(f"{name} means nothing for {variant.name} on {device}")
        case = property_case(variant)
        if (self.options.tolerance or variant.tolerance) == "absolute" and case.dtype != "fp16":
            raise Refused(f"{variant.name}: policy 'absolute' judges fp16 only, {name} would be {case.dtype}")
        return self.run_case(variant, case, "property", name)

    def run_case(self, variant: Variant, case: Case, kind: Kind, property_name: str | None = None) -> Record:
        """The record of `test_correct`, `test_property` or `test_speed`: one job, through a worker.

        Raises `Refused` where the variant does not take the case, `CannotRun` where this machine cannot run it.
        """
        if reason := variant.refuses(case):
            raise Refused(reason)
        device = variant.device_for(gpu=find_gpu() is not None)
        if device is None and not self._does_not_compile(variant):
            raise CannotRun(f"{variant.name} needs a GPU, and this machine has none")
        leaf = self.runnable_leaf(variant) if variant.is_built else None
        if device is None or isinstance(leaf, BuildFailure):
            result = _failed_build(f"build of {variant.name} failed (see test_build[{variant.name}])")
            return self.record(kind, variant.name, variant.role, case, result, ())
        job = CaseJob(
            variant=variant,
            case=case,
            library=str(self.options.cache / leaf.library) if leaf else None,
            device=device,
            policy=self.policy_of(variant),
            judge=variant.is_judged,
            time=kind == "speed" and self.options.timing,
            repeats=self._repeats(kind),
            property_name=property_name,
            witnesses=self._witnesses(variant, case, device),
            watchdog_seconds=self.watchdog_seconds(variant, device),
        )
        with timing_lock() if job.time and not self.options.selftest else nullcontext():
            result = self.workers.run(job)
            if result.speed and not self.options.selftest:
                result = msgspec.structs.replace(result, speed=self._confirmed(job, result.speed))
        if result.outcome == "ok" and not property_name:
            self._note(variant, case, result)
        # What brings its own cases has promised these alone, and a property is tried on another.
        may_refuse = property_name in MAY_REFUSE or (property_name is not None and variant.cases)
        if result.outcome == "unsupported" and may_refuse:
            raise Refused(f"{variant.name}: {property_name}: {result.message}")
        if result.outcome == "unsupported" and variant.role == "baseline":
            raise Refused(f"{variant.name} does not support {case.shape_id}: {result.message}")
        record = self.record(kind, variant.name, variant.role, case, result, (leaf,) if leaf else (), property_name)
        if variant.leaves_out and variant.parent:
            record = msgspec.structs.replace(record, ablation=Ablation(variant.leaves_out, variant.parent))
        return record

    def _note(self, variant: Variant, case: Case, result: CaseResult) -> None:
        """Remember what later items of this run build upon: who was right where, and how fast."""
        self.right.add((variant.name, case.id))
        if result.speed:
            self.device_us[(case.shape_id, variant.name)] = result.speed.device.median_us

    def _confirmed(self, job: CaseJob, speed: Speed) -> Speed:
        """The figures beside what the profiler says in a process of its own, and whether the two agree."""
        changes: dict[str, Any] = {"busy_missing": ON_CPU}
        if job.device == "cuda":
            changes = self._profiled(job)
        speed = msgspec.structs.replace(speed, **changes)
        least_us = self._ceilings.least_us(job.case) if self._ceilings and job.device == "cuda" else 0.0
        least_us = 0.0 if job.variant.role == "floor" else least_us
        agreement = agree(job.variant.name, job.variant.role, speed, least_us)
        if agreement.valid is False and job.device == "cuda":  # a doubt is looked into once more
            speed = msgspec.structs.replace(speed, **self._profiled(job))
            agreement = agree(job.variant.name, job.variant.role, speed, least_us)
        return msgspec.structs.replace(speed, agreement=agreement)

    def _profiled(self, job: CaseJob) -> dict[str, Any]:
        found = self.profilers.profile(BusyJob(job.variant, job.case, job.library, job.watchdog_seconds))
        return {"busy": found.busy, "busy_missing": found.missing, "neighbours": self._neighbours}

    @functools.cached_property
    def profiler(self) -> Profiler:
        """Nsight Compute for this run; raises `CannotRun` without a GPU."""
        gpu, options = find_gpu(), self.options
        if gpu is None:
            raise CannotRun("profiling needs a GPU, and this machine has none")
        return Profiler(
            options.artifacts / "ncu",
            options.rootdir,
            gpu.compute_capability,
            sudo=options.ncu_sudo,
            cache=options.cache,
        )

    @functools.cached_property
    def _ceilings(self) -> Ceilings | None:
        return read_ceilings(self.options.profiles, self.environment.gpu)

    def arm(self, variant: Variant) -> Arm:
        """A variant with its library, for a contest.  Raises `CannotRun` where it was not built."""
        if not variant.is_built:
            return Arm(variant, None)
        leaf = self.runnable_leaf(variant)
        if isinstance(leaf, BuildFailure):
            raise CannotRun(f"build of {variant.name} failed: {leaf.message}")
        return Arm(variant, str(self.options.cache / leaf.library))

    def device_of(self, variant: Variant) -> Device:
        """Where a variant runs on this machine.  Raises `CannotRun` where it does not."""
        device = variant.device_for(gpu=find_gpu() is not None)
        if device is None:
            raise CannotRun(f"{variant.name} needs a GPU, and this machine has none")
        return device

    def policy_of(self, variant: Variant) -> Tolerance:
        """The tolerance policy: the option's, else the manifest's."""
        return self.options.tolerance or variant.tolerance  # type: ignore[return-value]  # options.py checked it

    def _repeats(self, kind: Kind) -> int | None:
        """How often a judged call is repeated; None leaves it to the time that takes."""
        if kind != "correct":
            return 0
        return self.options.soak or (SELFTEST_REPEATS if self.options.selftest else None)

    def _witnesses(self, variant: Variant, case: Case, device: Device) -> tuple[Variant, ...]:
        """The baselines that take the case on this device; a baseline needs none."""
        if variant.role == "baseline":
            return ()
        baselines = (each for each in self.catalog.variants.values() if each.role == "baseline")
        return tuple(
            each
            for each in baselines
            if device in each.supports.device and not each.is_built and not each.refuses(case)
        )

    def watchdog_seconds(self, variant: Variant, device: Device) -> float:
        """How long one launch may take: a Python entry may compile itself first, a CPU is slow."""
        if self.options.watchdog_seconds:
            return self.options.watchdog_seconds
        if self.options.selftest and not variant.is_built:
            return SELFTEST_WATCHDOG_SECONDS
        return WATCHDOG_SECONDS if variant.is_built and device == "cuda" else PATIENT_WATCHDOG_SECONDS

    def _does_not_compile(self, variant: Variant) -> bool:
        """Whether the compiler rejected it: to be said even where there is no GPU to run it on."""
        if not variant.is_built:
            return False
        try:
            return any(isinstance(each, BuildFailure) and each.command for each in self.leaves(variant))
        except CannotRun:
            return False

    def runnable_leaf(self, variant: Variant) -> Leaf | BuildFailure:
        """The best leaf for this machine's GPU, or why it was not built; without a GPU, whatever failed."""
        gpu = find_gpu()
        outcomes = [each for each in self.leaves(variant) if not gpu or runs_on(each.arch, gpu.compute_capability)]
        if not outcomes:
            raise CannotRun(f"{variant.name}: nothing that was compiled ({', '.join(variant.arch)}) runs on this GPU")
        return max(outcomes, key=lambda each: each.arch)

    def record(
        self,
        kind: Kind,
        variant: str,
        role: str,
        case: Case | None,
        result: CaseResult,
        leaves: tuple[Leaf, ...],
        property_name: str | None = None,
    ) -> Record:
        """One result as a record, with where, when and from what source it was made."""
        stages = {name: Stage(name, "not reached") for name in STAGES}
        stages["build"] = Stage("build", "ok", leaves[0].build_seconds if leaves else 0.0)
        stages.update({stage.name: stage for stage in result.stages})
        return Record(
            schema=SCHEMA,
            id=variant if case is None else f"{variant}-{property_name or case.id}",
            kind=kind,
            variant=variant,
            role=role,
            case=case,
            outcome=result.outcome,
            message=result.message,
            caught_by=result.caught_by,
            stages=tuple(stages.values()),
            leaves=leaves,
            check=result.check,
            speed=result.speed,
            gate=None,
            repeats=result.repeats,
            diagnosis=result.diagnosis,
            environment=self.environment,
            source=read_source(self.options.rootdir),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            repeat=self._repeat(kind, variant, case, property_name),
        )

    @functools.cached_property
    def environment(self) -> Environment:
        """The machine, read once."""
        return read_environment()

    def _repeat(self, kind: Kind, variant: str, case: Case | None, property_name: str | None) -> str:
        """One command line that runs this item again."""
        words = [*self.options.repeat, f"--fa-variant={variant}", *self._asked_for(kind)]
        if property_name:
            return shlex.join([*words, "-k", f"test_property and {property_name}"])
        return shlex.join([*words, *([f"--fa-case={case.id}"] if case else []), "-k", f"test_{kind}"])

    def _asked_for(self, kind: Kind) -> list[str]:
        """The option that makes a test of this kind appear at all."""
        if kind == "profile":
            return ["--ncu", f"--ncu-set={self.options.ncu_set}"]
        return [f"--fa-sanitize={','.join(self.options.sanitizers)}"] if kind == "sanitize" else []


def _require_fit_for_probes(options: Options, plan: Plan) -> None:
    """Raise `UsageProblem` where probes are held to what is attention's: another policy, a gate with nothing else."""
    chosen = [each for each in plan.runnable if plan.is_chosen(each)]
    scorer = next((each.name for each in chosen if each.computes == "scores"), None)
    if scorer and options.tolerance not in (None, "measured"):
        text = f"--fa-tolerance={options.tolerance} judges attention; {scorer} computes scores (use measured)"
        raise UsageProblem(text)
    if options.gate is not None and chosen and not plan.gated:
        found = ", ".join(f"{each.name} ({each.role}, computes {each.computes})" for each in chosen)
        raise UsageProblem(
            f"--fa-gate: nothing here can be gated: {found}; a gate takes what computes all of attention"
        )


def _failed_build(message: str) -> CaseResult:
    outcome: Outcome = "not_built"
    return CaseResult(outcome, message, (Stage("build", "failed"),))
