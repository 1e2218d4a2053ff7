"""Whether a variant computes attention itself: one call is judged in a process in which torch's attention is another.

Nothing that the variant's process says is needed for it.  While that call runs, every other process of variants is
stopped, so that none of them can compute in its place.  Helper processes that this process has forked go on: torch's
attention is another one in them, too.  A new program that it starts would have torch's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from pytest_fa.catalog.variant import Device, Tolerance, Variant
from pytest_fa.errors import DeviceLost, WrongResult
from pytest_fa.gpu.inputs import Inputs, Output
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.checked_launch import CheckedLaunch
from pytest_fa.judge.connection import CandidateLost
from pytest_fa.judge.output_check import MoreTruth, check_outputs
from pytest_fa.judge.truth import Truth
from pytest_fa.processes import descendants_of, forks_of, stopped
from pytest_fa.wire.user_traceback import message_of

WARM_UPS = 3  # calls in which a variant may compile, also in other processes
MIN_SECONDS, SLOWER = 5.0, 20  # the judged call may take 5 s and 20 times as long as the call before it
PLACE = "in a process in which torch's attention computes something else"
STOPPED = "and the programs that it started are stopped"


def require_own_work(
    bare: Candidate,
    variant: Variant,
    library: str | None,
    device: Device,
    inputs: Inputs,
    truth: Truth,
    more: Mapping[str, MoreTruth],
    policy: Tolerance,
) -> None:
    """Raise `WrongResult` unless the variant is right without torch's attention and without other processes.

    `bare` is a candidate in a new process in which `replace_attention` was called.  `truth` is that of `inputs`, and
    `more` has that of other gradients.
    """
    try:
        bare.open(variant, library, device, variant.computes)
        launch = CheckedLaunch(
            bare, inputs, variant.computes, variant.returns[1:] if variant.computes == "gradients" else ()
        )
        for _ in range(WARM_UPS):
            start = time.monotonic()
            launch.call_and_wait()
        bare.limit_seconds = min(bare.limit_seconds, MIN_SECONDS + SLOWER * (time.monotonic() - start))
        with stopped(lambda: _others(bare.pid)):
            output = launch.dense(Output(launch.call_and_wait(), launch.more_buffers).clone())
    except CandidateLost as lost:
        raise _delegates(f"it ends or hangs {PLACE}, {STOPPED} ({lost})") from None
    except (DeviceLost, WrongResult):
        raise
    except Exception as problem:
        raise _delegates(f"it fails {PLACE}: {message_of(problem)}") from problem
    check = check_outputs(output, truth, more, policy)
    if not check.passed:
        raise _delegates(f"it is wrong {PLACE}, {STOPPED}: {check.complaint}")


def _delegates(message: str) -> WrongResult:
    return WrongResult("delegation", f"{message}; it would be compared with itself")


def _others(pid: int) -> list[int]:
    """All processes of variants except one and its forks: what the server, which forked this process, has started."""
    going_on = {pid, os.getpid(), *forks_of(pid)}
    return [each for each in descendants_of(os.getppid()) if each not in going_on]
