"""The plan of a run: which variants are tested on which cases, and which of them the user selected."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.fit import Fits, cases_for
from pytest_fa.catalog.properties import properties_of
from pytest_fa.catalog.variant import BrokenVariant, Device, Variant

AnyVariant = Variant | BrokenVariant


class Plan(msgspec.Struct, frozen=True, dict=True):  # dict: for cached_property
    """The variants and cases of one run.

    `chosen` are the selected variants.  `companions` are the baselines and launch-overhead variants, which are timed on
    every timed shape; an optional baseline is none.  With `cases_are_named`, `--fa-case` or a feature selected the
    cases, and no other case is run.  `fits` lists the parameters of a case that may be changed to what a variant
    supports.  `gpu` tells whether this machine has a GPU.  With `judges_claims`, cases are added for all that a
    manifest claims to support; with `dtypes`, only those of these dtypes.

    Every test function reads the plan during collection, so each list of pairs is computed once.
    """

    chosen: tuple[AnyVariant, ...]
    companions: tuple[Variant, ...]
    cases: tuple[Case, ...]
    cases_are_named: bool = False
    fits: Fits = ()
    gpu: bool = False
    judges_claims: bool = False
    dtypes: tuple[str, ...] = ()

    def cases_of(self, variant: Variant) -> tuple[Case, ...]:
        """Return the run's cases, adapted to `variant`.  Variants that support the same share one tuple."""
        key = (variant.computes, variant.cases, variant.supports, variant.instantiations)
        if key not in self._adapted:
            self._adapted[key] = cases_for(variant, self.cases, self.fits)
        return self._adapted[key]

    @cached_property
    def _adapted(self) -> dict[object, tuple[Case, ...]]:
        """The results of `cases_of`, by the fields of a variant on which they depend."""
        return {}

    @property
    def first_cases(self) -> list[Case]:
        """The first seed of each shape that a chosen variant runs: those cases are timed."""
        return first_seeds(case for variant in self.runnable for case in self.cases_of(variant))

    def fitted_to(self, dtype: str) -> Variant | None:
        """Return a chosen variant that has a case of this dtype, after its cases were adapted to it."""
        fitted = (variant for variant in self.judged if any(case.dtype == dtype for case in self.cases_of(variant)))
        return next(fitted, None)

    @cached_property
    def builds(self) -> list[AnyVariant]:
        """The variants of `test_build`: those that are compiled, and broken manifests."""
        return [variant for variant in self._all if isinstance(variant, BrokenVariant) or variant.is_built]

    @cached_property
    def checks(self) -> list[tuple[Variant, Case]]:
        """The pairs of `test_correct`: each judged variant with each case."""
        return [(variant, case) for variant in self.judged for case in self.cases_of(variant)]

    @cached_property
    def claims(self) -> list[tuple[Variant, Case]]:
        """The pairs that `test_correct` judges besides `checks`, for what manifests claim to support."""
        if not self.judges_claims:
            return []
        pairs: list[tuple[Variant, Case]] = []
        for variant in self.judged:
            cases = self.cases_of(variant)
            seed = cases[0].seed if cases else 0
            pairs += [(variant, case) for case in claim_cases(variant, cases, seed, self.dtypes)]
        return pairs

    def is_claim(self, variant: Variant, case: Case) -> bool:
        """Return whether a case was added for what the variant's manifest claims."""
        return (variant.name, case) in self._claim_keys

    @cached_property
    def _claim_keys(self) -> frozenset[tuple[str, Case]]:
        return frozenset((variant.name, case) for variant, case in self.claims)

    @property
    def ids_with_seeds(self) -> dict[str, list[str]]:
        """The parameters of a test id of `test_correct` without the seed -> those with each seed."""
        ids: dict[str, list[str]] = {}
        for variant, case in (*self.checks, *self.claims):
            ids.setdefault(f"{variant.name}-{case.shape_id}", []).append(f"{variant.name}-{case.id}")
        return ids

    @cached_property
    def properties(self) -> list[tuple[Variant, str]]:
        """The pairs of `test_property`: each judged variant with its properties; none with `--fa-case`."""
        if self.cases_are_named:
            return []
        return [(variant, name) for variant in self.judged for name in properties_of(variant)]

    @cached_property
    def timings(self) -> list[tuple[Variant, Case]]:
        """The pairs of `test_speed`: the pairs of `first_seeds`, then each companion with each of their shapes.

        A case of scores has no baseline as a companion, because baselines compute attention.  On a machine with a GPU,
        a companion is timed only at the shapes of variants that run on the same device, the GPU or the CPU.  A
        companion without e4m3 is timed in the dtype of the output.
        """
        shapes = first_seeds(case for _, case in self.first_seeds)
        companions = [variant for variant in self.companions if self.is_companion(variant)]
        pairs = [
            (variant, case)
            for variant in companions
            for case in dict.fromkeys(_comparison(variant, case) for case in shapes)
            if self._is_comparable(variant, case)
        ]
        return self.first_seeds + pairs

    def _is_comparable(self, companion: Variant, case: Case) -> bool:
        """Whether the companion is compared on the case, on a device on which a chosen variant runs it.

        Without a GPU, every companion stays: those that need one are skipped, with that reason.
        """
        on_device = not self.gpu or companion.device_for(gpu=True) in self._devices[case.shape_id]
        return on_device and companion.can_compute(case) and not companion.leaves_out(case)

    @cached_property
    def _devices(self) -> dict[str, set[Device | None]]:
        """The devices on which the chosen variants run on this machine, by shape id; for e4m3 also by that in fp16."""
        devices: dict[str, set[Device | None]] = {}
        for variant, case in self.first_seeds:
            for each in (case, case.with_dtype(case.out_dtype)):
                devices.setdefault(each.shape_id, set()).add(variant.device_for(gpu=self.gpu))
        return devices

    @cached_property
    def first_seeds(self) -> list[tuple[Variant, Case]]:
        """Each variant with the first seed of each shape; companions only if selected."""
        return [(variant, case) for variant in self.runnable for case in first_seeds(self.cases_of(variant))]

    @cached_property
    def runnable(self) -> list[Variant]:
        """The chosen variants whose manifest can be read."""
        return [variant for variant in self._all if isinstance(variant, Variant)]

    def is_companion(self, variant: AnyVariant) -> bool:
        """Return whether `variant` runs only as a companion."""
        return isinstance(variant, Variant) and variant.name in self._companion_names

    @cached_property
    def _companion_names(self) -> frozenset[str]:
        return frozenset(each.name for each in self.companions) - {each.name for each in self.runnable}

    @cached_property
    def judged(self) -> list[Variant]:
        """The chosen variants whose output is judged."""
        return [variant for variant in self.runnable if variant.is_judged]

    @cached_property
    def _all(self) -> list[AnyVariant]:
        """The chosen variants; of those with the same name, one that can be read and one that is broken."""
        return list({(type(each), each.name): each for each in self.chosen}.values())


def _comparison(companion: Variant, case: Case) -> Case:
    """The case on which a companion is timed: without e4m3, that of the same shape in the dtype of the output."""
    has_dtype = case.dtype != "e4m3" or case.dtype in companion.supports.dtype
    return case if has_dtype else case.with_dtype(case.out_dtype)


def first_seeds(cases: Iterable[Case]) -> list[Case]:
    """Return the first case of each shape."""
    first: dict[str, Case] = {}
    for case in dict.fromkeys(cases):
        first.setdefault(case.shape_id, case)
    return list(first.values())


def make_plan(
    catalog: Catalog,
    chosen: tuple[AnyVariant, ...],
    cases: tuple[Case, ...],
    *,
    cases_are_named: bool = False,
    fits: Fits = (),
    gpu: bool = False,
) -> Plan:
    """Return the plan for the chosen variants and cases."""
    companions = [variant for variant in catalog.variants.values() if variant.runs_beside_others]
    return Plan(chosen, tuple(companions), cases, cases_are_named, fits, gpu)
