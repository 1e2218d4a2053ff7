"""Record types of what the tool itself costs: the seconds of one test's job, and of one run.

The seconds of a run are in a file beside its record file: `<run>.run.json` beside `<run>.jsonl`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.records.ranges import Natural, Seconds
from pytest_fa.regular_file import open_regular

RUN_SCHEMA = 1
MOST_BYTES = 2**20


class Costs(msgspec.Struct, frozen=True):
    """The seconds of one test outside and inside its job, by the clock of pytest's process.

    `waited_seconds` were spent waiting for the timing lock.  `job_seconds` is the whole job: its stages, and the start
    of its processes if they did not run yet.  `profiler_seconds` is the profiler's process, with its start.
    """

    waited_seconds: Seconds
    job_seconds: Seconds
    profiler_seconds: Seconds


class KindSeconds(msgspec.Struct, frozen=True):
    """The tests of one kind: how many there were, and the seconds of their calls, without fixtures."""

    count: Natural
    call_seconds: Seconds


class RunSeconds(msgspec.Struct, frozen=True):
    """Where the seconds of one run went, by the clock of pytest's own process.

    `start_seconds` is the time from the start of the process to that of pytest's session, `collection_seconds` from
    there to the first test.  `fixture_seconds` is the setup and teardown of all tests, which contains `build_seconds`,
    the one batch of builds.  `tests` has the calls by the kind of their records; `baseline` are timings of companions,
    `other` tests without a record.  `answer_seconds` is the time from the last test to the last line, `end_seconds`
    from there until all processes have ended.  The rest of `total_seconds` is pytest's own, between tests.  With
    `workers` processes of pytest-xdist, tests overlap.
    """

    schema: int
    total_seconds: Seconds
    start_seconds: Seconds
    collection_seconds: Seconds
    fixture_seconds: Seconds
    build_seconds: Seconds
    answer_seconds: Seconds
    end_seconds: Seconds
    tests: dict[str, KindSeconds]
    workers: Natural = 0


def run_file_of(record_file: Path) -> Path:
    """The path of the run's seconds beside its record file."""
    return record_file.with_name(f"{record_file.stem}.run.json")


def write_run_seconds(record_file: Path, seconds: RunSeconds) -> None:
    """Write the seconds of the run that wrote `record_file`."""
    run_file_of(record_file).write_bytes(msgspec.json.format(msgspec.json.encode(seconds)))


def read_run_seconds(record_file: Path) -> RunSeconds | str:
    """The seconds of the run that wrote `record_file`, or the reason why there are none."""
    path = run_file_of(record_file)
    try:
        with open_regular(path) as stream:
            seconds = msgspec.json.decode(stream.read(MOST_BYTES), type=RunSeconds)
    except FileNotFoundError:
        return f"there is no {path.name} beside the records"
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as problem:
        return f"{path.name} cannot be read: {problem}"
    return seconds if seconds.schema == RUN_SCHEMA else f"{path.name} has schema {seconds.schema}, not {RUN_SCHEMA}"
