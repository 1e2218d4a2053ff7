"""The judge of profiled calls: `prepare` and `run_profiler`.  The variant runs under the profiler in another process.

Nothing is timed in either process.
"""

from __future__ import annotations

import torch

from pytest_fa.build.unchanged import FilesOfJob, require_unchanged
from pytest_fa.errors import DeviceLost
from pytest_fa.gpu.device import is_alive, open_device
from pytest_fa.gpu.device_tools import device_tools
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.gpu.profiler import load_profiler
from pytest_fa.gpu.shared_memory import NoSharing
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import FreshData, stacked
from pytest_fa.judge.clocks.measure import l2_bytes
from pytest_fa.judge.clocks.profiler_time import Profiled, profile_calls
from pytest_fa.judge.connection import CandidateLost
from pytest_fa.judge.output_check import check_outputs, require_passed
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.records.environment import clock_monitor
from pytest_fa.records.timing import PROFILED_OUTPUTS
from pytest_fa.wire.commands import Forget
from pytest_fa.wire.jobs import PrepareProfiler, ProfilerJob, ProfilerResult
from pytest_fa.wire.stages import ReportProgress, Stages
from pytest_fa.wire.user_traceback import message_of


def prepare(job: PrepareProfiler, candidate: Candidate) -> ProfilerResult:
    """Open the GPU, load the profiler, and wait until the candidate has done so, too.

    `missing` says why that is not possible; the first `ProfilerJob` reports it.
    """
    try:
        open_device("cuda")
        load_profiler()
        candidate.ask(Forget(), job.watchdog_seconds)
    except Exception as problem:  # noqa: BLE001  # the first `ProfilerJob` reports it
        return ProfilerResult(None, message_of(problem), context_lost=True)
    return ProfilerResult(None, None)


def run_profiler(
    job: ProfilerJob,
    report_progress: ReportProgress = lambda _: None,
    candidate: Candidate | None = None,
    truths: TruthStore | None = None,
) -> ProfilerResult:
    """Run calls under the profiler, and judge what they wrote.

    `candidate` is where the variant runs; without it, the variant runs in this process.  `truths` is the judge's store.
    An exception of the kernel is not raised, and a wrong output is no failure: both become the result's reason, because
    the verdict on the kernel is up to its `CaseJob`.
    """
    device, stages, truths = torch.device("cuda"), Stages(job, report_progress), truths or TruthStore(0)
    candidate, truths.announce = candidate or Candidate.in_this_process(), stages.announce_work
    try:
        stages.announce_work()
        stages.limit(candidate)
        open_device("cuda")
        require_unchanged(job.library, job.file_hashes)
        files = FilesOfJob({job.library: job.file_hashes}, (job.variant,))
        candidate.open(job.variant, job.library, "cuda", job.case.computes)
        inputs = truths.with_memory(lambda: make_inputs(job.case, device, job.variant.conventions))
        data = FreshData(candidate, job.case, inputs, l2_bytes(device))
        with clock_monitor("cuda") as clocks:
            profiled = profile_calls(data, job.device_us, device_tools(device.index or 0), clocks)
        stages.announce_work()
        if job.checks_output:
            _check_written(profiled, job, truths)
        candidate.end_job()
        files.require_unchanged()
        return ProfilerResult(profiled.time, None)
    except CandidateLost as lost:
        return ProfilerResult(None, str(lost), context_lost=True)
    except Exception as problem:  # noqa: BLE001  # a kernel may raise anything
        return _failure(problem, candidate, device)


def _check_written(profiled: Profiled, job: ProfilerJob, truths: TruthStore) -> None:
    """Require what profiled calls wrote to be right: a kernel that skips its work there has no time."""
    inputs, output = stacked(profiled.written)
    truth, more = truths.new_truth_of(job.case.computes, inputs, job.variant, job.policy)
    require_passed(check_outputs(output, truth, more, job.policy), f" {PROFILED_OUTPUTS}", "profiled outputs")


def _failure(problem: Exception, candidate: Candidate, device: torch.device) -> ProfilerResult:
    """The result of a job that an exception ended.  The candidate is replaced if it does not forget the job."""
    if isinstance(problem, NoSharing):
        return ProfilerResult(None, str(problem), lacks_sharing=True)
    context_lost = isinstance(problem, DeviceLost) or not is_alive(device)
    try:
        candidate.end_job()
    except Exception:  # noqa: BLE001  # the reason stands
        context_lost = True
    return ProfilerResult(None, message_of(problem), context_lost=context_lost)
