"""Judges a function in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from pytest_fa.candidate.forward import Forward
from pytest_fa.errors import DeviceLost
from pytest_fa.gpu.device import is_alive, open_device, without_gradients
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult, Progress


def judge_here(job: CaseJob, forward: Forward, report: Callable[[Progress], None]) -> CaseResult:
    """Run one job on a function.  Raises `DeviceLost` if an earlier call has lost the context of this process."""
    if not is_alive(open_device(job.device)):
        raise DeviceLost("this process can no longer use the GPU, because its CUDA context was lost; restart it")
    candidate = Candidate.in_this_process(lambda *_: nullcontext(forward))
    with without_gradients():  # the parameters of a module may need gradients; its output must not
        return run_case(job, report, candidate)
