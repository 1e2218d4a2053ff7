"""The seconds of a record by the part of the test that took them, and the slowest parts of a run, which `-v` shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from pytest_fa.records.added import added_to
from pytest_fa.records.record import Record

MAX_LINES = 5
MIN_SECONDS = 0.005  # of a part; less is shown as 0.0


def slowest_stage_lines(records: Iterable[Record], build_seconds: float) -> list[str]:
    """The slowest stages of a run with their seconds, and their shares of the seconds of all stages.

    `build_seconds` are those of the batch of builds: the records of builds that were in the cache have the seconds of
    an earlier run.
    """
    totals: defaultdict[str, float] = defaultdict(float, {"build": build_seconds})
    for record in records:
        for name, seconds in seconds_by_part(record):
            totals[f"{name} of baselines" if _is_baseline_time(record, name) else name] += seconds
    by_seconds = sorted(totals.items(), key=lambda item: item[1], reverse=True)
    slowest = [(name, seconds) for name, seconds in by_seconds[:MAX_LINES] if seconds >= MIN_SECONDS]
    if not slowest:
        return []
    total, width = sum(totals.values()), max(len(name) for name, _ in slowest)
    lines = [f"  {name:{width}} {seconds:7.1f} s {100 * seconds / total:4.0f} %" for name, seconds in slowest]
    return [f"slowest stages (all stages: {total:.1f} s):", *lines]


def seconds_by_part(record: Record) -> Iterator[tuple[str, float]]:
    """The parts of a test in their order, each with its seconds, without those of its build.

    Besides the stages, these are the wait for other timings, the start of processes with the import of torch, the
    first calls of a variant that compiles when it is called, and the profiler, and what features
    name.
    """
    stages = [stage for stage in record.stages if stage.name != "build"]
    if record.costs is not None:
        in_stages = sum(stage.seconds for stage in stages) + record.compile_seconds
        yield "wait for other timings", record.costs.waited_seconds
        yield "start of processes, import of torch", max(0.0, record.costs.job_seconds - in_stages)
    yield "first calls, which compile", record.compile_seconds
    for stage in stages:
        yield stage.name, stage.seconds
    if record.costs is not None:
        yield "profiler", record.costs.profiler_seconds
    for added in added_to(record):
        yield from added.seconds_by_part()


def _is_baseline_time(record: Record, name: str) -> bool:
    return name == "speed" and record.role in ("baseline", "overhead")
