"""The selected variants and cases of a run.  An unknown name is a usage error."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.build.cache import require_safe
from pytest_fa.catalog.discover import BUILTIN_ROOT, Catalog, discover
from pytest_fa.catalog.fit import EVERYTHING, Fits
from pytest_fa.catalog.kernels_folder import absence, missing_manifest
from pytest_fa.catalog.plan import AnyVariant, Plan, make_plan
from pytest_fa.catalog.select import expand_defines, select_cases, select_variants
from pytest_fa.catalog.suites import DEFAULT_SUITE
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import UnknownVariant, UnusableRun, UsageProblem
from pytest_fa.options.options import Options
from pytest_fa.options.values import default_folders
from pytest_fa.records.environment import find_gpu


class RunPlan:
    """The variants and cases of one run, determined from the options when they are first needed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._plans_of_suites: dict[tuple[str, ...], Plan] = {}
        self.of_features: dict[type, Any] = {}  # what a feature has found out from this plan, by its type

    @functools.cached_property
    def catalog(self) -> Catalog:
        """Every variant that can be selected."""
        instead = tuple(part.kernels for part in self.options.parts if part.kernels)
        catalog = discover(instead or self.options.kernels)
        with_truths = {name: self._with_own_truth(variant) for name, variant in catalog.variants.items()}
        return msgspec.structs.replace(catalog, variants=with_truths)

    @functools.cached_property
    def plan(self) -> Plan:
        """The pairs of variant and case.

        Raises `UsageProblem` for unknown names, contradictory options and a cache that every user may write to.
        """
        options, chosen = self.options, self._chosen()
        require_safe(options.cache)
        patterns = options.chosen_cases
        cases = select_cases(options.suites, patterns, options.dtypes, options.seeds)
        if options.named_cases and not patterns and all(part.judges_named_cases for part in options.parts):
            named = select_cases(options.suites, options.named_cases, options.dtypes, options.seeds)
            cases = tuple(dict.fromkeys((*cases, *named)))
        plan = make_plan(
            self.catalog,
            chosen,
            cases,
            cases_are_named=bool(patterns),
            fits=() if patterns else self._fits,
            gpu=find_gpu() is not None,
        )
        judges_claims = DEFAULT_SUITE in options.suites and not patterns
        plan = msgspec.structs.replace(plan, judges_claims=judges_claims, dtypes=options.dtypes)
        _require_consistent(options, plan)
        return plan

    def require_usable(self, *, needs_variant: bool) -> None:
        """Raise `UnusableRun` if names are not unique, or if there is no variant for tests that need one."""
        self.catalog.require_unique_names()
        if needs_variant and not self.plan.chosen and (text := self.absence("")):
            raise UnusableRun(f"no variant to test: {text}")

    def absence(self, name: str) -> str:
        """Where the variant `name` was looked for and how to make it; empty if there is any but the built-in ones."""
        catalog, builtin = self.catalog, str(BUILTIN_ROOT.resolve())
        if catalog.broken or catalog.clashes or any(each.root != builtin for each in catalog.variants.values()):
            return ""
        folders = self.options.kernels or default_folders(Path.cwd(), self.options.rootdir)
        command = tuple(word for word in self.options.rerun if not word.startswith("--fa-kernels="))
        return absence(folders, name, command)

    def plan_of(self, suites: tuple[str, ...]) -> Plan:
        """The plan with the cases of `suites`; the run's own plan if `suites` is empty.  Raises `UsageProblem`."""
        if not suites:
            return self.plan
        if suites not in self._plans_of_suites:
            cases = select_cases(suites, (), self.options.dtypes, self.options.seeds)
            self._plans_of_suites[suites] = msgspec.structs.replace(
                self.plan, cases=cases, fits=self._fits, judges_claims=DEFAULT_SUITE in suites
            )
        return self._plans_of_suites[suites]

    @property
    def sdpa_baselines(self) -> tuple[Variant, ...]:
        """The variants of role `baseline` that are not optional, in the catalog's order."""
        baselines = (variant for variant in self.catalog.variants.values() if variant.role == "baseline")
        return tuple(variant for variant in baselines if not variant.optional)

    @property
    def header(self) -> list[str]:
        """The lines of pytest's header: GPU, and numbers of variants.  pytest itself counts the tests."""
        gpu = find_gpu()
        machine = "{} (sm_{}{}, driver {})".format(gpu.name, *gpu.compute_capability, gpu.driver) if gpu else "no GPU"
        known = len(self.catalog.variants) + len(self.catalog.broken)
        parts = "".join(part.header for part in self.options.parts)
        return [f"fa: {machine}; {len(self.plan.chosen)} of {known} variants{parts}"]

    def _chosen(self) -> tuple[AnyVariant, ...]:
        options = self.options
        naming = next((part for part in options.parts if part.variants), None)
        flag = naming.variants_flag if naming and not options.variants else "--fa-variant"
        names = options.variants or tuple(name for part in options.parts for name in part.variants)
        chosen = expand_defines(self._select(names, flag), options.defines)
        if options.named_variants and not names:  # a companion is not tested only because its id is given
            named = [each for each in self._select(options.named_variants) if each.name not in self._companion_names]
            chosen = tuple({each.name: each for each in (*chosen, *named)}.values())
        for variant in chosen:
            if isinstance(variant, BrokenVariant) and variant.name in names:
                raise UsageProblem(f"{flag}: {variant.name} cannot be used: {variant.problem}")
        return chosen

    @property
    def _companion_names(self) -> set[str]:
        return {variant.name for variant in self.catalog.variants.values() if variant.runs_beside_others}

    def _select(self, names: tuple[str, ...], flag: str = "--fa-variant") -> tuple[AnyVariant, ...]:
        """The variants of these names.  The `UsageProblem` for an unknown name also says where it was looked for."""
        try:
            return select_variants(self.catalog, names, flag)
        except UnknownVariant as problem:
            # A folder of that name is what the user means: no other name is suggested.
            if reason := missing_manifest(self.options.kernels, problem.name):
                raise UsageProblem(f"{flag}: no variant {problem.name!r} (see --fa-list); {reason}") from None
            reason = self.absence(problem.name)
            raise UsageProblem(f"{problem}; {reason}" if reason else str(problem)) from None

    def _with_own_truth(self, variant: Variant) -> Variant:
        """The variant with the user's functions with which this run compares it, if there are some."""
        if not variant.is_judged:
            return variant
        own = next((own for part in self.options.parts if (own := part.own_truth(variant))), None)
        if own is None:
            return variant
        seconds = self.options.watchdog_seconds or own.seconds
        return msgspec.structs.replace(variant, own_truth=msgspec.structs.replace(own, seconds=seconds))

    @property
    def _fits(self) -> Fits:
        """The parts of a suite's cases that may be adapted to a variant.  With `--fa-dtype` the dtype stays."""
        return ("head_dim", "layout", "shape") if self.options.dtypes else EVERYTHING


def _require_consistent(options: Options, plan: Plan) -> None:
    """Raise `UsageProblem` for options that contradict each other or the variants."""
    if any(word.startswith("--fa-dtype=") for word in options.selection):  # one of the ini file only sets a default
        _require_dtypes(options, plan)
    if options.tolerance == "absolute":
        _require_fp16(plan)
    _require_fit_for_probes(options, plan)
    _require_judgeable(options, plan)


def _require_dtypes(options: Options, plan: Plan) -> None:
    """Raise `UsageProblem` for a case that the user names, whose dtype is not one of `--fa-dtype`."""
    case = next((case for case in plan.cases if case.dtype not in options.dtypes), None)
    if case:
        listed, remedy = ",".join(options.dtypes), case.with_dtype(options.dtypes[0]).id  # type: ignore[arg-type]  # known
        raise UsageProblem(f"--fa-dtype={listed}: case {case.id} is {case.dtype}; drop --fa-dtype, or name {remedy}")


def _require_fp16(plan: Plan) -> None:
    if case := next((case for case in plan.cases if case.dtype != "fp16"), None):
        raise UsageProblem(
            f"--fa-tolerance=absolute judges fp16 only; case {case.id} is {case.dtype} (use same_precision)"
        )
    for dtype in (name for name in DTYPES if name != "fp16"):
        if variant := plan.fitted_to(dtype):
            raise UsageProblem(
                f"--fa-tolerance=absolute judges fp16 only; {variant.name} supports only {dtype} (use same_precision)"
            )


def _require_judgeable(options: Options, plan: Plan) -> None:
    """Raise `UsageProblem` if a feature cannot judge the variants as its options ask."""
    judged = [variant for variant in plan.runnable if variant.is_judged and not variant.runs_beside_others]
    if reason := next((reason for part in options.parts if (reason := part.refusal(judged, options.tolerance))), None):
        raise UsageProblem(reason)


def _require_fit_for_probes(options: Options, plan: Plan) -> None:
    """Raise `UsageProblem` if scores or gradients are selected together with a policy for attention only."""
    other = next((variant for variant in plan.runnable if variant.computes != "attention"), None)
    if other and options.tolerance not in (None, "same_precision"):
        computes = f"{other.name} computes {other.computes}"
        raise UsageProblem(f"--fa-tolerance={options.tolerance} judges attention; {computes} (use same_precision)")
