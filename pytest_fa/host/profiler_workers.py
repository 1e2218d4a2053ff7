"""The client's side of the profiler: a server of its own, with a judge and one candidate, which runs under it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pytest_fa.host.answers import LostWorker
from pytest_fa.host.client import WorkerError, Workers
from pytest_fa.host.fork_server import ProcessRole
from pytest_fa.host.job_output import JobOutput
from pytest_fa.wire.jobs import PrepareProfiler, ProfilerJob, ProfilerResult, Progress, encode

PROFILED: tuple[ProcessRole, ...] = ("profiled",)


class ProfilerWorkers(Workers):
    """A server, a judge, and one candidate that runs calls under torch's profiler.

    Do not time in them: a profiler slows down later launches of its process.
    """

    def __init__(self, cache: Path | None = None) -> None:
        super().__init__(cache)
        self._preparing: PrepareProfiler | None = None
        self._was_prepared = False

    def prepare(self) -> None:
        """Let the processes open the GPU and load the profiler while this process goes on; once, not during a timing.

        It waits for the server to have imported torch.  Does nothing if the processes were started before.
        """
        if self._was_prepared or self._judge is not None:
            return
        self._was_prepared = True
        with contextlib.suppress(WorkerError, OSError):  # the job of a call then says why there is no process
            _, worker = self._processes(PROFILED)
            worker.channel.send(encode(job := PrepareProfiler()))
            self._preparing = job

    def wait_until_prepared(self) -> None:
        """Wait until the processes are ready, at most 60 s.  Some that are not, or are lost, the next job replaces."""
        job, self._preparing = self._preparing, None
        if job is None or self._judge is None or self._server is None:
            return
        output = JobOutput(self._server.log, None)  # what it printed before concerns no variant
        last = [Progress(job.wanted_stages[0], job.watchdog_seconds)]
        try:
            with self._ended_if_lost(last):
                result = self._receive(job, ProfilerResult, self._server, self._judge, output, last)
        except LostWorker:
            return
        except BaseException:
            self.end_worker()  # its answer must not be taken for that of a later job
            raise
        if result.missing:
            self.end_worker()

    def run_profiler(self, job: ProfilerJob) -> ProfilerResult:
        """Profile calls, and judge what they wrote."""
        self.wait_until_prepared()
        result = self._profiled(job, () if self.unprotected else PROFILED)
        if not result.lacks_sharing:
            return result
        self.unprotected = result.missing or ""
        self.end_worker()
        return self._profiled(job, ())

    def _profiled(self, job: ProfilerJob, roles: tuple[ProcessRole, ...]) -> ProfilerResult:
        """Run the job with the variant in a process of its own, or, without roles, in that of the judge."""
        try:
            return self._run_in_worker(job, ProfilerResult, roles)
        except LostWorker as lost:
            return ProfilerResult(None, lost.message)

    def end_worker(self) -> None:
        """End the processes, and release what they hold on the GPU.  The next job gets new ones."""
        self._preparing = None
        super().end_worker()
        self._end_judge()

    def let_go(self) -> None:
        """Let the server end, which ends the processes at once."""
        self._preparing = None
        super().let_go()
