"""What was asked for must run: an option that no test heeds ends the run, and does not leave it green."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Feature, FeatureOptions, features
from pytest_fa.options import command_line
from pytest_fa.plugin.items import is_shipped
from pytest_fa.plugin.kernel_fixtures import uses_kernels
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.usage_errors import usage_error
from pytest_fa.records.record import Record

ACTS_WITHOUT_TESTS = frozenset(("--fa-clean",))


def require_asked_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raise pytest's usage error if none of the selected tests does what a typed option asks for.

    A user's own test that uses `fa_run` may do what a feature offers; `unheeded` then decides at the end.
    """
    flags = _asking_flags(config)
    if not flags or not items:
        return
    if not any(uses_kernels(getattr(item, "fixturenames", ())) for item in items):
        raise _unheeded(config, flags, "no selected test uses kernels, so nothing would be judged")
    for feature in _asked_features(config):
        own = any("fa_run" in getattr(item, "fixturenames", ()) and not is_shipped(item) for item in items)
        if not own and not _has_test_of(feature, items):
            tests = " or ".join(test.name for test in feature.tests)
            raise _unheeded(config, _flags_of(feature, flags), f"{tests} is not among the selected tests")


def unheeded(config: pytest.Config, items: list[pytest.Item], records: Iterable[Record]) -> str:
    """Which typed options no test of a finished run heeded, and the command that does; empty if there are none."""
    flags, kinds = _asking_flags(config), {record.kind for record in records}
    for feature in _asked_features(config):
        if items and not _has_test_of(feature, items) and kinds.isdisjoint(test.kind for test in feature.tests):
            return _sentence(config, _flags_of(feature, flags), "no test of this run did that")
    return ""


def judged_nothing(config: pytest.Config) -> str:
    """The same for a run with `-n` in which no test used kernels: its workers collect the tests."""
    flags = _asking_flags(config)
    return _sentence(config, flags, "no test of this run used kernels, so nothing was judged") if flags else ""


def _asking_flags(config: pytest.Config) -> list[str]:
    return [flag for flag in command_line.typed_flags(config) if flag not in ACTS_WITHOUT_TESTS]


def _asked_features(config: pytest.Config) -> list[Feature]:
    """The features with tests in the file of the suite that runs, of which an option was typed."""
    flags, options = command_line.typed_flags(config), config.stash[OPTIONS_KEY]
    used = (feature for feature in features() if feature.name in options.used and _flags_of(feature, flags))
    return [each for each in used if any(test.file == FeatureOptions.suite_file for test in each.tests)]


def _flags_of(feature: Feature, flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag in {row.flag for row in feature.options}]


def _has_test_of(feature: Feature, items: list[pytest.Item]) -> bool:
    names = {test.name for test in feature.tests}
    return any(is_shipped(item) and getattr(item, "originalname", item.name) in names for item in items)


def _unheeded(config: pytest.Config, flags: list[str], why: str) -> pytest.UsageError:
    return usage_error(UsageProblem(_sentence(config, flags, why)))


def _sentence(config: pytest.Config, flags: list[str], why: str) -> str:
    names = ", ".join(dict.fromkeys(flags))
    return f"{names}: {why}; the shipped suite: {command_line.command_with_suite(config)}"
