"""`--fa-shard=I/N`: runs one part of the tests, and writes down what all parts are and what this one did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_fa.catalog.variant import Variant
from pytest_fa.feature import suite_tests
from pytest_fa.features.shards.plugin import ShardOptions
from pytest_fa.features.shards.shard_split import RecordedSeconds, Work, source_hashes, split
from pytest_fa.features.shards.shards import (
    SHARD_SCHEMA,
    FinishedTest,
    PlannedTest,
    ShardFile,
    read_shard,
    shard_path,
    write_shard,
)
from pytest_fa.plugin.items import needed_variants, param_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_fa.options.options import Options

SHARD_FILE_KEY: pytest.StashKey[Path] = pytest.StashKey()
WORKER_INPUT = "fa_shard_file"  # of a pytest-xdist worker: where the first of them writes the plan
FIRST_WORKER = "gw0"
KINDS = {"test_build": "build", "test_property": "property", "test_speed": "speed"}  # other tests count as checks


def keep_shard(config: pytest.Config, items: list[pytest.Item], options: Options) -> None:
    """Deselect the tests of the other shards, and write the plan of all shards."""
    asked = options.part(ShardOptions)
    if asked is None:
        return
    number, count = asked.number, asked.count
    recorded = RecordedSeconds(options.records_folder)
    groups = {item: _group_of(item) for item in items}
    seconds: dict[str, float] = {}
    for item, group in groups.items():
        seconds[group] = seconds.get(group, 0.0) + recorded.of(_work_of(item))
    shards = split(seconds, count)
    tests = tuple(PlannedTest(item.nodeid, shards[groups[item]]) for item in items)
    if (path := _file_of(config)) and not config.getoption("collectonly"):
        sources = source_hashes(needed_variants(items).values())
        write_shard(
            path, ShardFile(SHARD_SCHEMA, number, count, tests, sources, path.name.partition(".")[0] + ".jsonl")
        )
    kept = [item for item in items if shards[groups[item]] == number]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if shards[groups[item]] != number])
        items[:] = kept


def _file_of(config: pytest.Config) -> Path | None:
    """The file that this process writes; of the workers of pytest-xdist, only the first has one."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return config.stash.get(SHARD_FILE_KEY, None)
    return Path(worker[WORKER_INPUT]) if worker["workerid"] == FIRST_WORKER else None


def _group_of(item: pytest.Item) -> str:
    """What stays together: tests of one shape, else those of one function and variant, else those of one file."""
    case, variant = param_of(item, "fa_case"), param_of(item, "fa_variant")
    if case is not None:
        return f"shape {case.shape_id}"
    return f"{_function_of(item)} {variant}" if variant is not None else item.nodeid.partition("::")[0]


def _work_of(item: pytest.Item) -> Work:
    case, variant = param_of(item, "fa_case"), param_of(item, "fa_variant")
    function = _function_of(item)
    kind = suite_tests()[function][1].kind if function in suite_tests() else KINDS.get(function, "correct")
    name = variant.name if isinstance(variant, Variant) else ""
    return Work(kind, name, case.shape_id if case is not None else None)


def _function_of(item: pytest.Item) -> str:
    return item.name.partition("[")[0]


class ShardLog:
    """Completes the file of a shard, in the process that writes its records to `records`."""

    def __init__(self, config: pytest.Config, records: Path) -> None:
        self._path = config.stash[SHARD_FILE_KEY] = shard_path(records)
        self._finished: dict[str, FinishedTest] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401  # a worker of pytest-xdist
        """Tell a worker of pytest-xdist where the plan is written."""
        node.workerinput[WORKER_INPUT] = str(self._path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test and its records; a failure in setup or teardown is one of the test."""
        before = self._finished.get(report.nodeid)
        if report.when == "call" or not report.passed:
            record = getattr(report, "fa_record", None)
            new = ((record.kind, record.id),) if record else ()
            self._finished[report.nodeid] = FinishedTest(report.outcome, (*(before.records if before else ()), *new))

    @pytest.hookimpl(wrapper=True)  # after the records have decided the exit status
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Complete the file, and set the exit status."""
        session.exitstatus = self._finish(session.exitstatus)
        return (yield)

    def _finish(self, status: int) -> int:
        """Complete the file, and return the exit status.  A shard for which no test is left has passed."""
        shard = read_shard(self._path)
        if shard is None:  # nothing was collected
            return status
        if status == pytest.ExitCode.NO_TESTS_COLLECTED and shard.tests and not shard.own():
            status = pytest.ExitCode.OK
        write_shard(self._path, msgspec.structs.replace(shard, finished=self._finished, exit_status=int(status)))
        return status
