"""With what and where a gate compares, by `--fa-gate-baseline` and `--fa-gate-gpus`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pytest_fa.build.cache import find_by_key
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.gate_gpus import gpus_of_gate
from pytest_fa.features.gate.plugin import GateOptions
from pytest_fa.features.gate.revision import GIT, VariantAtRevision, variants_at
from pytest_fa.options.options import Options
from pytest_fa.records.built import Build
from pytest_fa.records.environment import Gpu
from pytest_fa.records.text import printable
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.session.session import Session


class Opponents(NamedTuple):
    """What replaces the SDPA backends: a variant, a cached build, or each candidate as it is at a revision.

    `gpus` are those of a gate on several GPUs.
    """

    baseline: Variant | None
    cached_build: Build | None
    gpus: tuple[Gpu, ...]
    revisions: Mapping[str, VariantAtRevision]

    @staticmethod
    def of(run_plan: RunPlan) -> Opponents:
        """Those of a run.  Raises `UsageProblem` for a baseline or GPUs that are not there."""
        if Opponents not in run_plan.of_features:
            asked = options_of(run_plan.options)
            run_plan.of_features[Opponents] = Opponents(
                _baseline(run_plan.catalog, asked.baseline),
                _cached_build(run_plan.options, asked.baseline),
                gpus_of_gate(asked.gpus) if asked.ratio is not None else (),
                _revisions(run_plan, asked.baseline),
            )
        opponents: Opponents = run_plan.of_features[Opponents]
        return opponents


def options_of(options: Options) -> GateOptions:
    """The options of the gate; those of a gate that only a test's marker asks for are the defaults."""
    return options.part(GateOptions) or GateOptions()


def gated_variants(plan: Plan) -> list[Variant]:
    """The variants of `test_gate`: those of attention or its gradients whose output is judged, without probes."""
    return [variant for variant in plan.runnable if may_be_gated(variant)]


def may_be_gated(variant: Variant) -> bool:
    """Whether a variant can be gated: it is judged, and computes more than scores; probes have no baseline."""
    return variant.is_judged and variant.role != "probe" and variant.computes != "scores"


def require_gated(plan: Plan) -> None:
    """Raise `UsageProblem` if variants are selected, and none of them can be gated."""
    chosen = plan.runnable
    if chosen and not gated_variants(plan):
        listed = ", ".join(f"{variant.name} ({variant.role}, computes {variant.computes})" for variant in chosen)
        raise UsageProblem(
            f"--fa-gate: no selected variant can be gated: {listed}; a gated variant must compute all of attention, or "
            f"its gradients"
        )


def prepare_opponents(session: Session) -> None:
    """Let baselines be built with the variants that the tests need."""
    opponents = Opponents.of(session.run_plan)
    at_revision = (each.variant for each in opponents.revisions.values())
    session.builds.beside = (*([opponents.baseline] if opponents.baseline else []), *at_revision)


def _baseline(catalog: Catalog, name: str | None) -> Variant | None:
    """The variant that `--fa-gate-baseline` names; None if it names a build key or a revision, or is not given.

    Raises `UsageProblem` unless exactly one readable variant has that name, or if it computes scores.
    """
    if name is None or name.startswith(("key:", GIT)):
        return None
    matches = select_variants(catalog, (name,), flag="--fa-gate-baseline")
    if len(matches) != 1 or isinstance(matches[0], BrokenVariant):
        raise UsageProblem(f"--fa-gate-baseline: {name!r} must name exactly one variant with a readable manifest")
    if matches[0].computes == "scores":
        raise UsageProblem(f"--fa-gate-baseline: {name} computes scores; it must compute attention or gradients")
    return matches[0]


def _cached_build(options: Options, name: str | None) -> Build | None:
    """The build that `--fa-gate-baseline=key:KEY` names.  Raises `UsageProblem` unless there is exactly one."""
    if name is None or not name.startswith("key:"):
        return None
    try:
        builds = {build.key: build for build in find_by_key(options.cache, name.removeprefix("key:"))}
    except UsageProblem as problem:
        raise UsageProblem(f"--fa-gate-baseline: {problem}") from None
    if len(builds) != 1:
        listed = ", ".join(f"{build.key} ({build.variant}, {build.built_at})" for build in builds.values()) or "none"
        raise UsageProblem(f"--fa-gate-baseline: {name!r} must name one cached build; it matches {listed}")
    return next(iter(builds.values()))


def _revisions(run_plan: RunPlan, name: str | None) -> dict[str, VariantAtRevision]:
    """The variants of a run as they are at the revision of `--fa-gate-baseline=git:REV`.  Raises `UsageProblem`."""
    if name is None or not name.startswith(GIT):
        return {}
    found = variants_at(gated_variants(run_plan.plan), name.removeprefix(GIT), run_plan.options.cache)
    for variant, revision in found.values():
        if not may_be_gated(variant):
            base = variant.name.partition("@")[0]
            raise UsageProblem(
                f"--fa-gate-baseline={printable(name)}: {base} at {revision.shown} cannot be a baseline: "
                f"role {variant.role}, computes {variant.computes}; choose another revision"
            )
    return found
