"""The plan of a run: which variants are tested on which cases, and which of them the user selected."""

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
    """The variants and cases of one run.

    `chosen` are the selected variants.  `offered` are all candidates; those not chosen are shown as deselected.
    `companions` are the baselines and launch-overhead variants, which are timed on every timed shape.  With
    `cases_are_named`, the option `--fa-case` selected the cases, and no other case is run.  `fits` lists the parameters
    of a case that may be changed to what a variant supports.
    """

    chosen: tuple[AnyVariant, ...]
    offered: tuple[AnyVariant, ...]
    companions: tuple[Variant, ...]
    cases: tuple[Case, ...]
    cases_are_named: bool = False
    sanitizers: tuple[str, ...] = ()
    fits: Fits = ()

    def cases_of(self, variant: Variant) -> tuple[Case, ...]:
        """Return the run's cases, adapted to `variant`."""
        return cases_for(variant, self.cases, self.fits)

    @property
    def selected_cases(self) -> tuple[Case, ...]:
        """The run's cases, and the own cases of chosen probes.

        The run's cases are omitted if all chosen variants are probes with their own shapes.
        """
        chosen = [variant for variant in self.chosen if isinstance(variant, Variant)]
        probes = [variant for variant in chosen if variant.cases and "shape" in self.fits]
        suite_cases = () if chosen and len(probes) == len(self.chosen) else self.cases
        return tuple(dict.fromkeys((*suite_cases, *(case for probe in probes for case in self.cases_of(probe)))))

    def fitted_to(self, dtype: str) -> Variant | None:
        """Return a chosen variant that has a case of this dtype, after its cases were adapted to it."""
        chosen = (variant for variant in self.runnable if self.is_chosen(variant) and variant.is_judged)
        fitted = (variant for variant in chosen if any(case.dtype == dtype for case in self.cases_of(variant)))
        return next(fitted, None)

    @property
    def builds(self) -> list[AnyVariant]:
        """The variants of `test_build`: those that are compiled, and broken manifests."""
        return [variant for variant in self._all() if isinstance(variant, BrokenVariant) or variant.is_built]

    @property
    def checks(self) -> list[tuple[Variant, Case]]:
        """The pairs of `test_correct`: each judged variant with each case."""
        return [(variant, case) for variant in self.runnable if variant.is_judged for case in self.cases_of(variant)]

    @property
    def properties(self) -> list[tuple[Variant, str]]:
        """The pairs of `test_property`: each judged variant with its properties; none with `--fa-case`."""
        if self.cases_are_named:
            return []
        return [(variant, name) for variant in self.runnable if variant.is_judged for name in properties_of(variant)]

    @property
    def timings(self) -> list[tuple[Variant, Case]]:
        """The pairs of `test_speed`: each variant with the first seed of each shape; companions come last.

        A case of scores has no baseline as a companion, because baselines compute attention.
        """
        pairs = [(variant, case) for variant in self.runnable for case in _first_seeds(self.cases_of(variant))]
        shapes = _first_seeds((*self.cases, *(case for _, case in pairs)))
        names = {variant.name for variant in self.runnable}
        companions = [variant for variant in self.companions if variant.name not in names]
        return pairs + [(variant, case) for variant in companions for case in shapes if variant.can_compute(case)]

    @property
    def profiles(self) -> list[tuple[Variant, Case]]:
        """The pairs of `test_profile`: each variant with the first seed of each shape; companions only if selected."""
        return [(variant, case) for variant in self.runnable for case in _first_seeds(self.cases_of(variant))]

    @property
    def sanitized(self) -> list[tuple[Variant, Case, str]]:
        """The triples of `test_sanitize`: each judged variant, on a small case or the named ones, with each tool."""
        if not self.sanitizers:
            return []
        judged = [variant for variant in self.runnable if variant.is_judged]
        pairs = [(variant, case) for variant in judged for case in self._sanitized_cases(variant)]
        return [(variant, case, tool) for variant, case in pairs for tool in self.sanitizers]

    def _sanitized_cases(self, variant: Variant) -> list[Case]:
        return _first_seeds(self.cases_of(variant)) if self.cases_are_named else [sanitizer_case(variant)]

    @property
    def gated(self) -> list[Variant]:
        """The variants of `test_gate`: the chosen variants of attention whose output is judged, without probes."""
        return [variant for variant in self.runnable if variant.may_be_gated and self.is_chosen(variant)]

    @property
    def faults(self) -> list[Variant]:
        """The variants of the self-test: wrong kernels and their correct twins."""
        return [variant for variant in self.runnable if variant.name in FAULTS or variant.name in TWINS]

    @property
    def runnable(self) -> list[Variant]:
        """All variants of the run whose manifest can be read."""
        return [variant for variant in self._all() if isinstance(variant, Variant)]

    def is_chosen(self, variant: AnyVariant) -> bool:
        """Return whether the user selected `variant`."""
        return any(each.name == variant.name for each in self.chosen)

    def is_companion(self, variant: AnyVariant) -> bool:
        """Return whether `variant` runs only as a companion."""
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
    """Return the plan for the chosen variants and cases."""
    offered = [variant for variant in catalog.variants.values() if variant.role == "candidate"]
    companions = [variant for variant in catalog.variants.values() if variant.role in COMPANION_ROLES]
    return Plan(chosen, tuple(offered), tuple(companions), cases, cases_are_named, sanitizers, fits)
