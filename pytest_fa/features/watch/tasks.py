"""The tests of the shipped suite that are repeated after a save."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant

RepeatedTest = Literal["build", "correct", "property", "speed"]
TaskKey = tuple[str, str, str]  # the test function, the variant, and the case or property


class Task(NamedTuple):
    """One test of the shipped suite: `part` is its case or property, None for `test_build`."""

    test: RepeatedTest
    variant: Variant
    part: Case | str | None = None

    @property
    def key(self) -> TaskKey:
        """What identifies the test also after the manifest was read again."""
        return key_of(f"test_{self.test}", self.variant.name, self.part)

    @property
    def name(self) -> str:
        """The name of the test, as pytest shows it."""
        function, variant, part = self.key
        return f"{function}[{variant}-{part}]" if part else f"{function}[{variant}]"


def key_of(function: str, variant: str, part: Case | str | None) -> TaskKey:
    """The key of a test; for a timing, the shape stands for the case."""
    if isinstance(part, Case):
        part = part.shape_id if function == "test_speed" else part.id
    return function, variant, part or ""


class SelectedTests:
    """The tests that the user selected.  If that were all, tests that a changed manifest adds are selected, too."""

    def __init__(self, plan: Plan, selected: Collection[TaskKey], *, timing: bool) -> None:
        self._timing = timing
        self.keys = frozenset(task.key for task in self._kept(_tasks(plan)))  # of all tests that could be repeated
        self._selected, self._is_all = frozenset(selected), self.keys <= set(selected)
        self.is_empty = not self.keys & self._selected

    def tasks(self, plan: Plan, variant: str) -> list[Task]:
        """The tests of one variant, in the order in which they run."""
        own = [task for task in _tasks(plan) if task.variant.name == variant]
        return self._kept(task for task in own if self._is_all or task.key in self._selected)

    def variants(self, plan: Plan, apart_from: Collection[TaskKey] = ()) -> set[str]:
        """The variants that have a selected test, apart from these; with a broken manifest, those that had one."""
        keys = {task.key for task in self._kept(_tasks(plan))}
        wanted = keys if self._is_all else keys & self._selected
        broken = {variant.name for variant in plan.chosen if not isinstance(variant, Variant)}
        kept = broken if self._is_all else broken & {name for _, name, _ in self._selected}
        return {name for _, name, _ in wanted.difference(apart_from)} | kept

    def _kept(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if self._timing or task.test != "speed"]


def _tasks(plan: Plan) -> list[Task]:
    """Builds, checks, properties and timings of the selected variants.  Companions are not timed again."""
    builds = [Task("build", variant) for variant in plan.builds if isinstance(variant, Variant)]
    checks = [Task("correct", variant, case) for variant, case in (*plan.checks, *plan.claims)]
    properties = [Task("property", variant, name) for variant, name in plan.properties]
    return [*builds, *checks, *properties, *(Task("speed", variant, case) for variant, case in plan.first_seeds)]
