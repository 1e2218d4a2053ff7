"""The processes of a gate: on this machine's first GPU, or on several GPUs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock

import msgspec

from pytest_fa.host.client import Workers
from pytest_fa.host.job_output import Live
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.records.environment import Gpu
from pytest_fa.records.machine_identity import hash_of_gpu
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.jobs import PairedJob, PairedResult

# Runs one process of a gate for each job, the first job on the first GPU, and returns their results in this order.
RunProcesses = Callable[[Sequence[PairedJob]], list[PairedResult]]


@contextmanager
def gate_processes(first: Workers, gpus: Sequence[Gpu], cache: Path) -> Iterator[RunProcesses]:
    """Hold the timing locks of the GPUs, and start a server for each of them; without `gpus`, use `first`.

    The locks are taken in the order of the UUIDs, so that two runs never wait for each other.  What the processes print
    becomes output of `first`, with the number of the GPU.
    """
    with ExitStack() as stack:
        if not gpus:
            stack.enter_context(timing_lock())
            yield lambda jobs: [first.run_paired(job) for job in jobs]
            return
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            stack.enter_context(timing_lock(gpu=gpu))
        threads = stack.enter_context(ThreadPoolExecutor(len(gpus), "gate"))  # left last: its servers have ended then
        workers = [stack.enter_context(Workers(cache, gpu.uuid)) for gpu in gpus]
        shown_by_one = Lock()
        for number, each in enumerate(workers):
            each.show_live = first.show_live and _live_of(number, first.show_live, shown_by_one)
            each.start()
        yield lambda jobs: _run_side_by_side(first, workers, jobs, threads)


def _run_side_by_side(
    first: Workers, workers: Sequence[Workers], jobs: Sequence[PairedJob], threads: ThreadPoolExecutor
) -> list[PairedResult]:
    """The results of one process on each GPU; what they printed is added to the output of `first`."""
    try:
        results = list(threads.map(Workers.run_paired, workers, jobs))
    finally:
        for number, each in enumerate(workers):
            if text := each.take_output():
                first.add_output(f"(on GPU {number} of the gate:)\n{text}")
    return [_on_gpu(number, result) for number, result in enumerate(results)]


def _live_of(number: int, show: Live, shown_by_one: Lock) -> Live:
    """What shows the output of one GPU's processes while they run: each line begins with the number of the GPU."""

    def show_lines(text: str) -> None:
        with shown_by_one:
            show("\n".join(f"GPU {number} of the gate: {line}" for line in text.splitlines()))

    return show_lines


def _on_gpu(number: int, result: PairedResult) -> PairedResult:
    """The result of a process on one of several GPUs; a message says on which."""
    if result.outcome == Outcome.OK:
        return result
    return msgspec.structs.replace(result, message=f"on GPU {number} of the gate: {result.message}")


def gpu_hashes(gpus: Sequence[Gpu], cache: Path) -> tuple[str, ...]:
    """The names of the GPUs in records: salted hashes, or their numbers if no salt can be kept in the cache folder."""
    return tuple(hash_of_gpu(cache, gpu) or str(number) for number, gpu in enumerate(gpus))
