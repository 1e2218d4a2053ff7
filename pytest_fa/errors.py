"""Every error that pytest-fa raises on purpose.

    FaError
    |-- UsageProblem       a wrong option or name: pytest shows it as a usage error
    |-- ManifestError      a variant.yaml that cannot be read
    |-- ToolchainError     no compiler, or one that does not answer
    |-- BuildError         a variant that did not compile, or a build that is not there
    |-- UnsupportedCase    a kernel refused a case: the reason is the message
    |-- LaunchError        a kernel could not be started
    |-- DeviceLost         the device context is gone: the process must be replaced
    |-- ToolAttached       a profiler or a debugger sits in a process that is to be timed
    `-- WrongResult        a kernel that did something wrong, and the checks that found it

Each message names the thing, the value found and what is allowed.  `plugin.py` is the one place that turns
`UsageProblem` into `pytest.UsageError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FaError(Exception):
    """The root of the tree."""


class UsageProblem(FaError):
    """A wrong option, name or id."""


class ManifestError(FaError):
    """A variant.yaml that cannot be read."""


class ToolchainError(FaError):
    """No compiler, or one that does not answer."""


class BuildError(FaError):
    """A variant that did not compile, or whose build is not in the cache."""


class UnsupportedCase(FaError):
    """A kernel refused a case."""


class LaunchError(FaError):
    """A kernel could not be started."""


class DeviceLost(FaError):
    """The device context is gone; the process that held it must be replaced."""


class ToolAttached(FaError):
    """A profiler, a sanitizer or a debugger sits in a process that is to be timed."""


class WrongResult(FaError):
    """What a kernel did is wrong; `caught_by` names the checks that found it."""

    def __init__(self, caught_by: str | tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.caught_by = (caught_by,) if isinstance(caught_by, str) else caught_by


def suggestion(name: str, known: Iterable[str]) -> str:
    """'; did you mean 'ws_p2'?' for the known name nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
