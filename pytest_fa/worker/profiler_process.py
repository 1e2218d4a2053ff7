"""`run_profiler`: one call under the profiler, in a process that times nothing."""

from __future__ import annotations

import torch

from pytest_fa.errors import DeviceLost
from pytest_fa.measure.measure import profile_call
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.inputs import make_inputs
from pytest_fa.run.module import open_forward
from pytest_fa.worker.jobs import ProfilerJob, ProfilerResult
from pytest_fa.worker.stages import Stages, Tell, message_of


def run_profiler(job: ProfilerJob, tell: Tell = lambda _: None) -> ProfilerResult:
    """One call under the profiler.  Never raises for what a kernel does."""
    device, stages = torch.device("cuda"), Stages(job, tell)
    try:
        stages.wait()
        open_device("cuda")
        with open_forward(job.variant, job.library, computes=job.case.computes) as forward:
            profiler, missing = profile_call(forward, job.case, make_inputs(job.case, device), stages.watch)
        return ProfilerResult(profiler, missing)
    except Exception as problem:  # noqa: BLE001  # what it does wrong is another job's to say
        lost = isinstance(problem, DeviceLost) or not is_alive(device)
        return ProfilerResult(None, message_of(problem), context_lost=lost)
