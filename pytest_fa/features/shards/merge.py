"""Merge the records of all shards of a run into one file; anything that is missing, doubled or mixed is named.

shard files -> one plan -> every shard once -> every test once -> every record once -> one machine code per build
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from pytest_fa.errors import UsageProblem
from pytest_fa.features.shards.shards import SHARD_SUFFIX, ShardFile, read_shard
from pytest_fa.records.files import read_record_file
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.text import printable
from pytest_fa.records.written import WRITTEN_SCHEMA, WrittenRecords, require_written, write_written

MAX_NAMED = 20  # ids in one sentence
PASSED, INCONCLUSIVE, FAILED = 0, 10, 1  # exit statuses of a shard and of the merged run
ResultId = tuple[str, str]  # the kind and the id of a record


class RunShard(msgspec.Struct, frozen=True):
    """One shard: its file, what it did, its records, and what cannot be read of them."""

    path: Path
    file: ShardFile
    records: tuple[Record, ...]
    complaint: str = ""


class MergedRun(msgspec.Struct, frozen=True):
    """The records of all shards in the order of the plan, the outcomes of the tests, and what does not fit together.

    `exit_status` is that of the whole run: 1 if a shard failed, else 10 if something had no verdict, else 0.
    """

    records: tuple[Record, ...]
    outcomes: dict[str, int]
    shards: int
    exit_status: int
    problems: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every test and every record is there once."""
        return not self.problems


def read_shards(folders: Sequence[Path]) -> list[RunShard]:
    """Return the shards whose files are anywhere below the folders.  Raises `UsageProblem` if there is none."""
    paths = {path.resolve(): path for folder in folders for path in sorted(folder.rglob(f"*{SHARD_SUFFIX}"))}
    shards = [_read(path) for path in paths.values()]
    if not shards:
        listed = ", ".join(map(str, folders))
        raise UsageProblem(f"no *{SHARD_SUFFIX} in {listed}; give the artifacts folders of runs with --fa-shard=I/N")
    return sorted(shards, key=lambda shard: (shard.file.shard, str(shard.path)))


def _read(path: Path) -> RunShard:
    file = read_shard(path)
    if file is None:
        raise UsageProblem(f"{path} was removed while it was read")
    records = read_record_file(path.with_name(Path(file.records).name))
    return RunShard(path, file, records.records, records.complaint)


def merge_shards(shards: Sequence[RunShard]) -> MergedRun:
    """Return the merged run.  With problems, its records are incomplete and must not be used."""
    problems = [*_of_plans(shards)]
    if not problems:
        checks: tuple[Callable[[Sequence[RunShard]], Iterator[str]], ...] = (
            _of_shards,
            _of_tests,
            _of_records,
            _of_code,
        )
        problems = [problem for check in checks for problem in check(shards)]
    statuses = {shard.file.exit_status for shard in shards}
    return MergedRun(
        records=tuple(_in_order(shards)),
        outcomes=dict(Counter(test.outcome for shard in shards for test in shard.file.finished.values())),
        shards=shards[0].file.count,
        exit_status=PASSED if statuses == {PASSED} else INCONCLUSIVE if statuses <= {PASSED, INCONCLUSIVE} else FAILED,
        problems=tuple(printable(problem) for problem in problems),
    )


def write_merged(path: Path, merged: MergedRun) -> None:
    """Write the records of a complete run to one file, and beside it what was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    content = b"".join(to_json(record) + b"\n" for record in merged.records)
    scratch.write_bytes(content)
    scratch.replace(path)
    sha256 = hashlib.sha256(content).hexdigest()
    write_written(path, WrittenRecords(WRITTEN_SCHEMA, sha256, len(merged.records), merged.exit_status))


def _in_order(shards: Sequence[RunShard]) -> list[Record]:
    """The records in the order in which one run would have made them: that of the plan."""
    order: dict[ResultId, int] = {}
    position = {test.id: number for number, test in enumerate(shards[0].file.tests)}
    for shard in shards:
        for test_id, test in shard.file.finished.items():
            for key in test.records:
                order[key] = position.get(test_id, len(position))
    records = [record for shard in shards for record in shard.records]
    return sorted(records, key=lambda record: order.get(_key(record), len(position)))


# -- what does not fit together ---------------------------------------------------------------------------------------


def _of_plans(shards: Sequence[RunShard]) -> Iterator[str]:
    """Require one plan: the same tests, split in the same way."""
    first = shards[0]
    for shard in shards[1:]:
        if shard.file.plan_digest == first.file.plan_digest:
            continue
        reason = f"{len(first.file.tests)} tests and {len(shard.file.tests)} tests"
        if first.file.count != shard.file.count:
            reason = f"{first.file.count} shards and {shard.file.count} shards"
        elif len(first.file.tests) == len(shard.file.tests):
            pairs = zip(first.file.tests, shard.file.tests, strict=True)
            own, other = next((own, other) for own, other in pairs if own != other)
            reason = f"{own.id} in shard {own.shard}, and {other.id} in shard {other.shard}"
        yield (
            f"{first.path} and {shard.path} are of different runs: {reason}; every shard needs the same options, "
            f"sources and saved records"
        )


def _of_shards(shards: Sequence[RunShard]) -> Iterator[str]:
    """Require every shard once."""
    count = shards[0].file.count
    paths: dict[int, list[str]] = {number: [] for number in range(1, count + 1)}
    for shard in shards:
        paths[shard.file.shard].append(str(shard.path))
    for number, files in paths.items():
        own = [test.id for test in shards[0].file.tests if test.shard == number]
        if not files:
            yield f"shard {number}/{count} is missing: {_listed(own)}"
        elif len(files) > 1:
            yield f"shard {number}/{count} is there {len(files)} times ({', '.join(files)}): {_listed(own)}"


def _of_tests(shards: Sequence[RunShard]) -> Iterator[str]:
    """Require a result of each planned test of a shard, and no other."""
    for shard in shards:
        own = shard.file.own()
        missing = [test_id for test_id in own if test_id not in shard.file.finished]
        others = sorted(shard.file.finished.keys() - set(own))
        if shard.file.exit_status is None:
            yield f"shard {shard.file.name} did not finish; no result of {_listed(missing or own)}"
        elif missing:
            yield f"shard {shard.file.name} has no result of {_listed(missing)}"
        if others:
            yield f"shard {shard.file.name} has results that are not planned for it: {_listed(others)}"


def _of_records(shards: Sequence[RunShard]) -> Iterator[str]:
    """Require each record that a test made once, and no other.  A shard that did not finish is named already."""
    for shard in shards:
        if shard.file.exit_status is None:
            continue
        if shard.complaint:
            yield f"{shard.path.with_name(shard.file.records)}: {shard.complaint}"
        claimed = Counter(key for test in shard.file.finished.values() for key in test.records)
        try:
            if claimed or shard.records:  # a shard without tests writes no file
                require_written(shard.path.with_name(shard.file.records))
        except (UsageProblem, OSError) as problem:
            yield f"shard {shard.file.name}: {problem}"
        actual = Counter(_key(record) for record in shard.records)
        for text, keys in (("lacks", claimed - actual), ("has more than once or without a test", actual - claimed)):
            if keys:
                names = [" ".join(key) for key in keys]
                yield f"shard {shard.file.name} {text}: {_listed(names, 'record')}"


def _of_code(shards: Sequence[RunShard]) -> Iterator[str]:
    """Require one commit, one set of source files of each variant, and one machine code of each build."""
    values: dict[str, dict[str, str]] = {}
    for shard in shards:
        facts = {f"the source of {name}": sha256[:12] for name, sha256 in shard.file.sources.items()}
        for record in shard.records:
            facts["the commit"] = str(record.source.commit)
            facts["the version of pytest-fa"] = record.environment.pytest_fa
            facts |= {
                f"the machine code of {build.variant}/{build.arch}": str(build.code_identity)[:12]
                for build in record.builds
            }
        for name, value in facts.items():
            values.setdefault(name, {}).setdefault(value, shard.file.name)
    for name, shards_by_value in values.items():
        if len(shards_by_value) > 1:
            listed = ", ".join(f"{value} in shard {shard}" for value, shard in shards_by_value.items())
            yield f"{name} is not the same in all shards: {listed}"


def _key(record: Record) -> ResultId:
    return (record.kind, record.id)


def _listed(ids: Sequence[str], noun: str = "test") -> str:
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return f"{len(ids)} {noun}{'s' * (len(ids) != 1)}{': ' if ids else ''}{', '.join(ids[:MAX_NAMED])}{more}"
