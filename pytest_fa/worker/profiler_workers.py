"""The client's side of the profiler: a server of its own, with one process in which nothing is timed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pytest_fa.worker.answers import LostWorker
from pytest_fa.worker.client import WorkerError, Workers
from pytest_fa.worker.job_output import JobOutput
from pytest_fa.worker.jobs import PrepareProfiler, ProfilerJob, ProfilerResult, encode


class ProfilerWorkers(Workers):
    """A server and one process, which runs calls under torch's profiler.  It has no judge.

    Do not time in it: a profiler slows down later launches of its process.
    """

    def __init__(self, cache: Path | None = None) -> None:
        super().__init__(cache)
        self._preparing: PrepareProfiler | None = None
        self._was_prepared = False

    def prepare(self) -> None:
        """Let the process open the GPU and load the profiler while this process goes on; once, and not during a timing.

        It waits for the server to have imported torch.  Does nothing if the process was started before.
        """
        if self._was_prepared or self._judge is not None:
            return
        self._was_prepared = True
        with contextlib.suppress(WorkerError, OSError):  # the job of a call then says why there is no process
            _, worker = self._processes(())
            worker.channel.send(encode(job := PrepareProfiler()))
            self._preparing = job

    def wait_until_prepared(self) -> None:
        """Wait until the process is ready, at most 60 s.  One that is not, or is lost, is replaced by the next job."""
        job, self._preparing = self._preparing, None
        if job is None or self._judge is None or self._server is None:
            return
        output = JobOutput(self._server.log, None)  # what it printed before concerns no variant
        try:
            result = self._exchange(job, ProfilerResult, self._server, self._judge, output, is_sent=True)
        except LostWorker:
            return
        except BaseException:
            self.end_worker()  # its answer must not be taken for that of a later job
            raise
        if result.missing:
            self.end_worker()

    def run_profiler(self, job: ProfilerJob) -> ProfilerResult:
        """Profile one call."""
        self.wait_until_prepared()
        try:
            return self._run_in_worker(job, ProfilerResult, ())
        except LostWorker as lost:
            return ProfilerResult(None, lost.message)

    def end_worker(self) -> None:
        """End the process, and release what it holds on the GPU.  The next job gets a new one."""
        self._preparing = None
        super().end_worker()

    def let_go(self) -> None:
        """Let the server end, which ends the process at once."""
        self._preparing = None
        super().let_go()
