"""The key `sweep` of a manifest: which values of its defines a sweep tries, and which combinations are allowed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.feature_keys import FeatureKey
from pytest_fa.catalog.grammar import define_problem
from pytest_fa.errors import UsageProblem, suggestion
from pytest_fa.features.sweep.condition import Condition, Value

if TYPE_CHECKING:
    from pytest_fa.catalog.variant import Variant

MAX_COMBINATIONS = 1_000_000

Fitness = Literal["device_us", "registers_per_thread", "smem_bytes_per_block", "instructions"]
Point = dict[str, int | str]  # one value for each swept define


class Sweep(FeatureKey, frozen=True, forbid_unknown_fields=True):
    """What a sweep of a variant varies.

    `values` has the values of each define.  `where` has the conditions that all must hold.  `fitness` begins with
    `device_us`; the counters after it decide between configurations whose times differ by less than the noise.
    `cases` are the shapes that are timed, without seeds; those of the run if it is empty.
    """

    feature: ClassVar = "sweep"

    values: Annotated[
        dict[str, Annotated[tuple[int | str, ...], msgspec.Meta(min_length=1, max_length=256)]],
        msgspec.Meta(min_length=1, max_length=32),
    ]
    where: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    fitness: Annotated[tuple[Fitness, ...], msgspec.Meta(min_length=1)] = ("device_us",)
    cases: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()

    @property
    def counters(self) -> tuple[Fitness, ...]:
        """The counters that break ties."""
        return self.fitness[1:]

    @property
    def combinations(self) -> int:
        """The number of combinations of values, feasible or not."""
        return math.prod(map(len, self.values.values()))

    @property
    def searched_cases(self) -> tuple[Case, ...]:
        """The cases of `cases`, with seed 0.  Raises `UsageProblem` for a malformed shape."""
        return tuple(parse_case(f"{text}-seed0") for text in self.cases)

    def problem(self, variant: Variant) -> str | None:
        """The first problem of the values, conditions, counters and cases."""
        return sweep_problem(self, variant.defines)

    def line(self, variant: Variant) -> str:
        """The size of the space that --fa-sweep searches."""
        try:
            feasible = len(feasible_points(self, variant.defines))
        except UsageProblem as problem:
            return f"sweep of {variant.name}: {problem}"
        listed = ", ".join(f"{name} ({len(values)})" for name, values in self.values.items())
        return f"sweep of {variant.name}: {feasible} of {self.combinations} combinations of {listed} are feasible"


def sweep_problem(sweep: Sweep | None, defines: Mapping[str, Value]) -> str | None:
    """Return the first problem of a manifest's `sweep` (the key, the value found, what is allowed), or None."""
    return None if sweep is None else next(_problems(sweep, defines), None)


def feasible_points(sweep: Sweep, defines: Mapping[str, Value]) -> tuple[Point, ...]:
    """Return every combination of values for which all conditions hold, in the manifest's order.

    A condition may also read a define that is not swept.
    """
    conditions = [Condition(text) for text in sweep.where]
    names = list(sweep.values)
    points = (dict(zip(names, values, strict=True)) for values in itertools.product(*sweep.values.values()))
    return tuple(point for point in points if all(each.holds({**defines, **point}) for each in conditions))


def point_text(point: Mapping[str, Value]) -> str:
    """Return a point as in the name of its variant: `BLOCK_M=64@STAGES=3`."""
    return "@".join(f"{name}={value}" for name, value in point.items())


def _problems(sweep: Sweep, defines: Mapping[str, Value]) -> Iterator[str]:
    for name, values in sweep.values.items():
        if name not in defines:
            listed = ", ".join(defines) or "none"
            yield f"sweep.values has {name!r}, which is not in defines{suggestion(name, defines)} (they are: {listed})"
        if doubled := [value for value in values if values.count(value) > 1]:
            yield f"sweep.values.{name} has {doubled[0]!r} twice"
        yield from (f"sweep.values: {problem}" for each in values if (problem := define_problem(name, each)))
    if sweep.fitness[0] != "device_us" or len(set(sweep.fitness)) < len(sweep.fitness):
        listed = ", ".join(sweep.fitness)
        yield f"sweep.fitness is [{listed}]; device_us comes first, and then each counter once"
    if sweep.combinations > MAX_COMBINATIONS:
        yield f"sweep.values has {sweep.combinations:,} combinations; at most {MAX_COMBINATIONS:,} are allowed"
    try:
        for text in sweep.where:
            Condition(text).require_names(defines)
    except UsageProblem as problem:
        yield str(problem)
    try:
        _ = sweep.searched_cases
    except UsageProblem as problem:
        yield f"sweep.cases: {str(problem).replace('-seed0', '').replace('-seed<N>', '')}"
