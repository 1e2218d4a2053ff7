"""Which variant meets which case: the pairs that become tests, and which of them the user asked for."""

from __future__ import annotations

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.faults import FAULTS, TWINS
from pytest_fa.catalog.fit import Fits, cases_for
from pytest_fa.catalog.properties import properties_of, sanitizer_case
from pytest_fa.catalog.variant import COMPANION_ROLES, BrokenVariant, Variant

AnyVariant = Variant | BrokenVariant


class Plan(msgspec.Struct, frozen=True):
    """The pairs of one run.

    `chosen` are the variants that were asked for, `offered` those that would run by default beside them (shown as
    deselected), `companions` the baselines and floors that stand beside every timed shape.  Where `cases_are_named` one
    by one, nothing is tried on another case.  `fits` names what of a case may be changed to what a variant takes.
    """

    chosen: tuple[AnyVariant, ...]
    offered: tuple[AnyVariant, ...]
    companions: tuple[Variant, ...]
    cases: tuple[Case, ...]
    cases_are_named: bool = False
    sanitizers: tuple[str, ...] = ()
    fits: Fits = ()

    def cases_of(self, variant: Variant) -> tuple[Case, ...]:
        """The run's cases as `variant` takes them."""
        return cases_for(variant, self.cases, self.fits)

    @property
    def asked(self) -> tuple[Case, ...]:
        """The run's cases, where a chosen variant meets those, and the ones that probes bring along."""
        chosen = [each for each in self.chosen if isinstance(each, Variant)]
        bringing = [each for each in chosen if each.cases and "shape" in self.fits]
        given = () if chosen and len(bringing) == len(self.chosen) else self.cases
        return tuple(dict.fromkeys((*given, *(case for each in bringing for case in self.cases_of(each)))))

    def fitted_to(self, dtype: str) -> Variant | None:
        """A chosen variant whose cases were turned to this dtype, which none of the run's has."""
        chosen = (each for each in self.runnable if self.is_chosen(each) and each.is_judged)
        return next((each for each in chosen if any(case.dtype == dtype for case in self.cases_of(each))), None)

    @property
    def builds(self) -> list[AnyVariant]:
        """What `test_build` runs over."""
        return [each for each in self._all() if isinstance(each, BrokenVariant) or each.is_built]

    @property
    def checks(self) -> list[tuple[Variant, Case]]:
        """What `test_correct` runs over: every judged variant with every case."""
        return [(each, case) for each in self.runnable if each.is_judged for case in self.cases_of(each)]

    @property
    def properties(self) -> list[tuple[Variant, str]]:
        """What `test_property` runs over: each judged variant with its properties, unless single cases were named."""
        if self.cases_are_named:
            return []
        return [(each, name) for each in self.runnable if each.is_judged for name in properties_of(each)]

    @property
    def timings(self) -> list[tuple[Variant, Case]]:
        """What `test_speed` runs over: the first seed of every shape, companions of all shapes last.

        Where scores are asked for, no baseline is a companion: it computes attention.
        """
        own = [(each, case) for each in self.runnable for case in _first_seeds(self.cases_of(each))]
        shapes = _first_seeds((*self.cases, *(case for _, case in own)))
        names = {each.name for each in self.runnable}
        beside = [each for each in self.companions if each.name not in names]
        return own + [(each, case) for each in beside for case in shapes if each.answers(case)]

    @property
    def profiles(self) -> list[tuple[Variant, Case]]:
        """What `test_profile` runs over: the first seed of every shape; companions only where they were asked for."""
        return [(each, case) for each in self.runnable for case in _first_seeds(self.cases_of(each))]

    @property
    def sanitized(self) -> list[tuple[Variant, Case, str]]:
        """What `test_sanitize` runs over: every judged variant, on a small case or on those named, with every tool."""
        if not self.sanitizers:
            return []
        judged = [each for each in self.runnable if each.is_judged]
        pairs = [(each, case) for each in judged for case in self._sanitized_cases(each)]
        return [(each, case, tool) for each, case in pairs for tool in self.sanitizers]

    def _sanitized_cases(self, variant: Variant) -> list[Case]:
        return _first_seeds(self.cases_of(variant)) if self.cases_are_named else [sanitizer_case(variant)]

    @property
    def gated(self) -> list[Variant]:
        """What `test_gate` runs over: every judged variant that was asked for, but probes."""
        return [each for each in self.runnable if each.may_be_gated and self.is_chosen(each)]

    @property
    def faults(self) -> list[Variant]:
        """What the self-test runs over: wrong kernels and their right twins."""
        return [each for each in self.runnable if each.name in FAULTS or each.name in TWINS]

    @property
    def runnable(self) -> list[Variant]:
        """Every variant of the run that could be read."""
        return [each for each in self._all() if isinstance(each, Variant)]

    def is_chosen(self, variant: AnyVariant) -> bool:
        """Whether the user asked for `variant`."""
        return any(each.name == variant.name for each in self.chosen)

    def is_companion(self, variant: AnyVariant) -> bool:
        """Whether `variant` only stands beside what was asked for."""
        return not self.is_chosen(variant) and any(each.name == variant.name for each in self.companions)

    def _all(self) -> list[AnyVariant]:
        return list({(type(each), each.name): each for each in (*self.chosen, *self.offered)}.values())


def _first_seeds(cases: tuple[Case, ...]) -> list[Case]:
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(case.shape_id, case)
    return list(first.values())


def make_plan(
    catalog: Catalog,
    chosen: tuple[AnyVariant, ...],
    cases: tuple[Case, ...],
    *,
    cases_are_named: bool = False,
    fits: Fits = (),
    sanitizers: tuple[str, ...] = (),
) -> Plan:
    """The plan for the variants and cases that were asked for."""
    offered = [each for each in catalog.variants.values() if each.role == "candidate"]
    companions = [each for each in catalog.variants.values() if each.role in COMPANION_ROLES]
    return Plan(chosen, tuple(offered), tuple(companions), cases, cases_are_named, sanitizers, fits)
