"""Whether a variant computes attention itself: one call is judged in a process in which torch's attention is another.

Nothing that the variant's process says is needed for it.  While that call runs, every other process of variants is
stopped, so that none of them can compute in its place.
"""

from __future__ import annotations

import os

from pytest_fa.candidate.candidate import Candidate
from pytest_fa.candidate.connection import CandidateLost
from pytest_fa.candidate.user_traceback import message_of
from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.errors import DeviceLost, WrongResult
from pytest_fa.judge.check import judge
from pytest_fa.judge.checked import CheckedLaunch
from pytest_fa.judge.truth import Truth
from pytest_fa.processes import descendants_of, stopped
from pytest_fa.run.inputs import Inputs

WARM_UPS = 3  # calls in which a variant may compile, also in other processes
MOST_SECONDS = 20.0  # for the judged call
PLACE = "in a process in which torch's attention computes something else"


def require_own_work(
    bare: Candidate,
    variant: Variant,
    library: str | None,
    device: Device,
    computes: Computes,
    inputs: Inputs,
    truth: Truth,
    policy: Tolerance,
) -> None:
    """Raise `WrongResult` unless the variant is right without torch's attention and without other processes.

    `bare` is a candidate in a new process in which `replace_attention` was called.  `truth` is that of `inputs`.
    """
    try:
        bare.open(variant, library, device, computes)
        launch = CheckedLaunch(bare, inputs, computes)
        for _ in range(WARM_UPS):
            launch.call_and_wait()
        bare.limit_seconds = min(bare.limit_seconds, MOST_SECONDS)
        with stopped(lambda: _others(bare.pid)):
            out = launch.call_and_wait().clone()
    except CandidateLost as lost:
        raise _delegates(f"it ends or hangs {PLACE}, and the processes that it started are stopped ({lost})") from None
    except (DeviceLost, WrongResult):
        raise
    except Exception as problem:
        raise _delegates(f"it fails {PLACE}: {message_of(problem)}") from problem
    check = judge(out, truth, policy)
    if not check.passed:
        raise _delegates(f"it is wrong {PLACE}, and the processes that it started are stopped: {check.complaint}")


def _delegates(message: str) -> WrongResult:
    return WrongResult("delegation", f"{message}; it would be compared with itself")


def _others(pid: int) -> list[int]:
    """All processes of variants except one: what the server, which forked this process, has started besides it."""
    return [each for each in descendants_of(os.getppid()) if each not in (pid, os.getpid())]
