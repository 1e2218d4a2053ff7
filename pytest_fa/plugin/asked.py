"""What was asked for must run: an option that no test heeds ends the run, and does not leave it green."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Feature, FeatureOptions, features, suite_tests
from pytest_fa.options import command_line
from pytest_fa.options.flags import all_options
from pytest_fa.plugin.items import is_shipped
from pytest_fa.plugin.kernel_fixtures import uses_kernels
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.usage_errors import usage_error
from pytest_fa.records.record import Record


class Selected(NamedTuple):
    """What the selected tests of a run do, in one process or in all workers of pytest-xdist.

    `tests` are those that features add to the shipped suite.  `has_run` says that a user's own test uses `fa_run`,
    which may do what a feature offers, and `has_request` that one may ask for a fixture while it runs.
    """

    uses_kernels: bool = False
    has_run: bool = False
    has_request: bool = False
    tests: tuple[str, ...] = ()

    @classmethod
    def of(cls, items: Iterable[pytest.Item]) -> Selected:
        """What these tests do."""
        fixtures = [(item, set(getattr(item, "fixturenames", ()))) for item in items]
        names = {getattr(item, "originalname", item.name) for item, _ in fixtures if is_shipped(item)}
        return cls(
            any(uses_kernels(used) for _, used in fixtures),
            any("fa_run" in used for item, used in fixtures if not is_shipped(item)),
            any(_takes_request(item) for item, _ in fixtures if not is_shipped(item)),
            tuple(sorted(names & suite_tests().keys())),
        )

    def joined(self, other: Selected) -> Selected:
        """What the tests of both do."""
        return Selected(
            self.uses_kernels or other.uses_kernels,
            self.has_run or other.has_run,
            self.has_request or other.has_request,
            tuple(sorted({*self.tests, *other.tests})),
        )


def _takes_request(item: pytest.Item) -> bool:
    """Whether the function of a test itself takes `request`."""
    function = getattr(item, "function", None)
    return function is not None and "request" in inspect.signature(function).parameters


SELECTED_KEY = pytest.StashKey[Selected]()


def require_asked_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise pytest's usage error if none of the selected tests can do what a typed option asks for.

    `unheeded` decides at the end about what a user's own tests may do.
    """
    selected = config.stash[SELECTED_KEY] = Selected.of(items)
    flags = _asking_flags(config)
    if not flags or not items or selected.has_request:
        return
    if not selected.uses_kernels:
        raise _usage_error(config, flags, "no selected test uses kernels, so nothing would be judged")
    for feature in () if selected.has_run else _asked_features(config):
        if not _has_test_of(feature, selected):
            tests = " or ".join(test.name for test in feature.tests)
            raise _usage_error(config, _flags_of(feature, flags), f"{tests} is not among the selected tests")


def unheeded(config: pytest.Config, records: Iterable[Record], *, saw_kernels: bool) -> str:
    """Which typed options no test of a finished run heeded, and the command that does; empty if there are none."""
    selected = config.stash.get(SELECTED_KEY, Selected())
    flags, kinds = _asking_flags(config), {record.kind for record in records}
    writing = [flag for flag in flags if flag in {row.flag for row in all_options() if row.writes_records}]
    if flags and not (selected.uses_kernels or selected.has_request or saw_kernels):
        return _sentence(config, flags, "no test of this run used kernels, so nothing was judged")
    for feature in _asked_features(config):
        if not _has_test_of(feature, selected) and kinds.isdisjoint(test.kind for test in feature.tests):
            return _sentence(config, _flags_of(feature, flags), "no test of this run did that")
    if writing and not kinds:
        return _sentence(config, writing, "no test of this run judged a kernel, so nothing was written")
    return ""


def _asking_flags(config: pytest.Config) -> list[str]:
    asking = {row.flag for row in all_options() if not row.configures}
    return [flag for flag in command_line.typed_flags(config) if flag in asking]


def _asked_features(config: pytest.Config) -> list[Feature]:
    """The features with tests in the usual file of the suite, of which an option was typed."""
    flags, options = command_line.typed_flags(config), config.stash[OPTIONS_KEY]
    used = (feature for feature in features() if feature.name in options.used and _flags_of(feature, flags))
    return [each for each in used if any(test.file == FeatureOptions.suite_file for test in each.tests)]


def _flags_of(feature: Feature, flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag in {row.flag for row in feature.options}]


def _has_test_of(feature: Feature, selected: Selected) -> bool:
    return not {test.name for test in feature.tests}.isdisjoint(selected.tests)


def _usage_error(config: pytest.Config, flags: list[str], why: str) -> pytest.UsageError:
    return usage_error(UsageProblem(_sentence(config, flags, why)))


def _sentence(config: pytest.Config, flags: list[str], why: str) -> str:
    names = ", ".join(dict.fromkeys(flags))
    return f"{names}: {why}; the shipped suite: {command_line.command_with_suite(config)}"
