"""The exceptions that pytest-fa raises.

    FaError
    |-- UsageProblem       an option, a name or an id is wrong; pytest shows it as a usage error
    |   |-- UnknownVariant no variant has the name
    |   `-- UnusableRun    the catalog cannot be used: two variants of one name, or no variant
    |-- ManifestError      a variant.yaml or planted.yaml cannot be read
    |-- ToolchainError     a compiler or disassembler is missing or does not work
    |-- LockProblem        a lock is held for too long, or its file cannot be used
    |-- BuildError         a variant does not compile, or its build is not in the cache
    |-- UnsupportedCase    a kernel refused a case; the message is the reason
    |   `-- LacksMemory    the GPU has too little free memory for a case
    |-- OverLimit          a call needs more memory than its manifest allows
    |-- LaunchError        a kernel could not be launched
    |-- DeviceLost         the CUDA context is unusable; the process must be replaced
    |-- StoppedJudge       the judge was stopped again and again while it timed
    |-- ToolAttached       a profiler, checker or debugger is attached to a process that is to be timed
    `-- WrongResult        a kernel gave a wrong result; `caught_by` names the checks that detected it
        `-- Tampering      a variant did what only tampering with the judge does

`Interrupted` is no `FaError` but Ctrl-C itself, with what it interrupted.

Each message names the thing, the value found and what is allowed.  Only the package `plugin` converts `UsageProblem`
to `pytest.UsageError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FaError(Exception):
    """The base class of all errors that pytest-fa raises."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the message says what was interrupted, and what the user may do next."""


class UsageProblem(FaError):
    """An option, a name or an id is wrong."""


class UnknownVariant(UsageProblem):
    """No variant has the name `name`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class UnusableRun(UsageProblem):
    """No run can use the catalog: two variants have the same name, or there is no variant."""


class ManifestError(FaError):
    """A variant.yaml or planted.yaml cannot be read."""


class ToolchainError(FaError):
    """A compiler or disassembler is missing or does not work."""


class LockProblem(FaError):
    """A lock is held for too long, or its file cannot be used."""


class BuildError(FaError):
    """A variant does not compile, or its build is not in the cache."""


class ChangedBuild(FaError):
    """A file of a build is not the one that was built, or a file that a job depends on changed while it ran."""


class UnsupportedCase(FaError):
    """A kernel refused a case; the message is the reason."""


class LacksMemory(UnsupportedCase):
    """The GPU has too little free memory for a case."""


class NoTruth(FaError):
    """An output cannot be judged, because what it is compared with cannot be computed."""


class OverLimit(FaError):
    """A call needs more memory than the limits of its manifest allow, or such a limit cannot be checked."""


class LaunchError(FaError):
    """A kernel could not be launched."""


class DeviceLost(FaError):
    """The CUDA context is unusable; the process that holds it must be replaced."""


class StoppedJudge(FaError):
    """The judge's process was stopped again and again while it timed."""


class ToolAttached(FaError):
    """A profiler, checker or debugger is attached to a process that is to be timed."""


# In `caught_by`: the entry cannot be loaded or called, or gives no output, for whatever case.
ENTRY = "entry"


class WrongResult(FaError):
    """A kernel gave a wrong result; `caught_by` names the checks that detected it."""

    def __init__(self, caught_by: str | tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.caught_by = (caught_by,) if isinstance(caught_by, str) else caught_by


class Tampering(WrongResult):
    """A variant did what only tampering with the judge does; `caught_by` names the check that proves it.

    A mistake that an honest author can make is a `WrongResult`, also if it would be a way to cheat.
    """


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'ws_p2'?" with the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
