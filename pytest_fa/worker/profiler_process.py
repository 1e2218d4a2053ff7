"""The process of the profiler, in which nothing is timed: `prepare` and `run_profiler` run in it."""

from __future__ import annotations

import torch

from pytest_fa.build.unchanged import require_unchanged
from pytest_fa.candidate.user_traceback import message_of
from pytest_fa.errors import DeviceLost
from pytest_fa.measure.measure import time_with_profiler
from pytest_fa.measure.profiler_time import load_profiler
from pytest_fa.run.device import is_alive, open_device
from pytest_fa.run.inputs import make_inputs
from pytest_fa.run.module import open_forward
from pytest_fa.worker.jobs import ProfilerJob, ProfilerResult
from pytest_fa.worker.stages import ReportProgress, Stages


def prepare() -> ProfilerResult:
    """Open the GPU, and run something under the profiler, which loads it.  `missing` says why that is not possible."""
    try:
        open_device("cuda")
        load_profiler()
    except Exception as problem:  # noqa: BLE001  # the first `ProfilerJob` reports it
        return ProfilerResult(None, message_of(problem), context_lost=True)
    return ProfilerResult(None, None)


def run_profiler(job: ProfilerJob, report_progress: ReportProgress = lambda _: None) -> ProfilerResult:
    """Run one call under the profiler.  An exception of the kernel is not raised: it becomes the result's reason."""
    device, stages = torch.device("cuda"), Stages(job, report_progress)
    try:
        stages.announce_work()
        open_device("cuda")
        require_unchanged(job.library, job.file_hashes)
        with open_forward(job.variant, job.library, computes=job.case.computes) as forward:
            stages.announce_launch()
            profiler, missing = time_with_profiler(forward, job.case, make_inputs(job.case, device))
        return ProfilerResult(profiler, missing)
    except Exception as problem:  # noqa: BLE001  # the verdict on the kernel is up to its `CaseJob`
        context_lost = isinstance(problem, DeviceLost) or not is_alive(device)
        return ProfilerResult(None, message_of(problem), context_lost=context_lost)
