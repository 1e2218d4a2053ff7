"""`--fa-bisect`: the exit status of a run, as `git bisect run` reads it.

0 is a good commit, 1 a bad one, and 125 one that cannot be tested.  A failed build, a wrong output, or a name that the
commit does not have says nothing about the question of the gate, so it is 125.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

from pytest_fa.options.options import ConfigReader

GOOD, BAD, SKIP = 0, 1, 125
VERDICTS_KEY: pytest.StashKey[frozenset[str]] = pytest.StashKey()  # those of the gates, set at the end of the run


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """Replace the exit status at the very end; that of a usage error, too, which pytest would return after this."""
    if not ConfigReader(config, config.rootpath, os.environ).is_on("fa_bisect"):
        return (yield)
    try:
        status = yield
    except pytest.UsageError as problem:
        sys.stderr.writelines(f"ERROR: {line}\n" for line in problem.args)
        status = pytest.ExitCode.USAGE_ERROR
    status = status_for_bisect(status, config.stash.get(VERDICTS_KEY, frozenset()))
    if status == SKIP:
        sys.stdout.write(f"fa: --fa-bisect: no verdict on this commit, exit status {SKIP}\n")
    return status


def status_for_bisect(status: object, verdicts: frozenset[str]) -> int:
    """The status for a run that would end with `status`, and whose gates have these verdicts."""
    if status == pytest.ExitCode.OK and verdicts == {"PASS"}:
        return GOOD
    return BAD if status == pytest.ExitCode.TESTS_FAILED and "FAIL" in verdicts else SKIP
