"""Merging shards: 1,000 tests in 1, 4 and 7 shards give the records of one run, and whatever is not there is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main
from pytest_fa.catalog.case import parse_case
from pytest_fa.features.shards.merge import merge_shards, read_shards
from pytest_fa.features.shards.shard_split import split
from pytest_fa.features.shards.shards import SHARD_SUFFIX, FinishedTest, PlannedTest, ShardFile, shard_path, write_shard
from pytest_fa.records.files import read_record_file
from pytest_fa.records.record import Record, Source, to_json
from pytest_fa.records.written import require_written
from tests.factories import BUILD, record
from tests.written_runs import end_run

CASES = [f"b1h1s{size}d64-fp16-seed{seed}" for size in range(1, 251) for seed in range(4)]
BUILT = msgspec.structs.replace(BUILD, code_identity="a" * 64)


def record_of(case: str) -> Record:
    """The record of one case."""
    return record("mine", case, source=Source("c0ffee", dirty=False, origin="git"), builds=(BUILT,))


def id_of(case: str) -> str:
    """The id of the test of one case."""
    return f"test_attention.py::test_correct[mine-{case}]"


def shards_of(count: int, cases: list[str]) -> dict[str, int]:
    """The shard of each case, split by shape; longer sequences take longer."""
    seconds: dict[str, float] = {}
    for case in map(parse_case, cases):
        seconds[case.shape_id] = seconds.get(case.shape_id, 0.0) + case.seq_q / 1000
    shards = split(seconds, count)
    return {case: shards[parse_case(case).shape_id] for case in cases}


def write_run(folder: Path, count: int, cases: list[str] = CASES) -> list[Path]:
    """Write the files of all shards of one run, as the shards' own processes do; return the folder of each."""
    shards = shards_of(count, cases)
    tests = tuple(PlannedTest(id_of(case), shards[case]) for case in cases)
    folders = []
    for number in range(1, count + 1):
        own = [case for case in cases if shards[case] == number]
        log = folder / f"shard-{number}" / "records" / "run.jsonl"
        log.parent.mkdir(parents=True)
        log.write_bytes(b"".join(to_json(record_of(case)) + b"\n" for case in reversed(own)))
        end_run(log, 0)
        finished = {id_of(case): FinishedTest("passed", (("correct", f"mine-{case}"),)) for case in own}
        write_shard(shard_path(log), ShardFile(1, number, count, tests, {"mine": "f" * 64}, log.name, finished, 0))
        folders.append(folder / f"shard-{number}")
    return folders


def change(folder: Path, edit: Callable[[ShardFile], ShardFile]) -> None:
    """Change the file of one shard."""
    (path,) = folder.rglob(f"*{SHARD_SUFFIX}")
    write_shard(path, edit(msgspec.json.decode(path.read_bytes(), type=ShardFile)))


def replaced(**changes: Any) -> Callable[[ShardFile], ShardFile]:
    """An edit that sets fields."""
    return lambda file: msgspec.structs.replace(file, **changes)


def problems_of(folders: list[Path]) -> tuple[str, ...]:
    """What does not fit together in the shards of these folders."""
    return merge_shards(read_shards(folders)).problems


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_merged_records_are_those_of_one_run(
    tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 cases in 1, 4 or 7 shards give the same record file, in the order of one run."""
    folders = write_run(tmp_path, count)
    out = tmp_path / "merged.jsonl"
    assert main(["records", "merge", *map(str, folders), "-o", str(out)]) == 0
    assert list(read_record_file(out).records) == [record_of(case) for case in CASES]
    assert capsys.readouterr().out == f"{out}: 1000 records of {count} shards; tests: 1000 passed\n"


def test_a_lost_shard_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one shard nothing is written, the status is 1, and the shard and its tests are named."""
    folders = write_run(tmp_path, 7)
    out = tmp_path / "merged.jsonl"
    assert main(["records", "merge", *map(str, folders[:2] + folders[3:]), "-o", str(out)]) == 1
    first, last = capsys.readouterr().err.splitlines()
    lost = [id_of(case) for case, shard in shards_of(7, CASES).items() if shard == 3]
    assert first.startswith(f"shard 3/7 is missing: {len(lost)} tests: {lost[0]}, {lost[1]}, ")
    assert (last, out.exists()) == ("not merged: 1 problems", False)


def test_a_doubled_shard_is_named(tmp_path: Path) -> None:
    """A shard that was run twice is named with both files."""
    folders = write_run(tmp_path / "a", 2, CASES[:8])
    again = write_run(tmp_path / "b", 2, CASES[:8])
    (problem,) = problems_of([*folders, again[1]])
    assert problem.startswith("shard 2/2 is there 2 times (")
    assert problem.endswith(f": 4 tests: {', '.join(id_of(case) for case in CASES[:4])}")


def test_a_shard_that_was_killed_is_named(tmp_path: Path) -> None:
    """A shard that wrote its plan and did not end is not taken for one that passed."""
    folders = write_run(tmp_path, 2, CASES[:8])
    change(folders[0], replaced(exit_status=None, finished={}))
    expected = f"shard 1/2 did not finish; no result of 4 tests: {', '.join(map(id_of, CASES[4:8]))}"
    assert problems_of(folders) == (expected,)


def test_a_test_without_a_result_is_named(tmp_path: Path) -> None:
    """A test that the shard did not run, and one that it was not asked to run, are named."""
    folders = write_run(tmp_path, 2, CASES[:8])
    change(folders[1], lambda file: replaced(finished=dict(list(file.finished.items())[1:]))(file))
    change(folders[0], lambda file: replaced(finished={**file.finished, "other": FinishedTest("passed")})(file))
    assert problems_of(folders)[:2] == (
        "shard 1/2 has results that are not planned for it: 1 test: other",
        f"shard 2/2 has no result of 1 test: {id_of(CASES[0])}",
    )


def test_lost_and_doubled_records_are_named(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A record that a test made and that is not in the file, or is there twice, is named."""
    folders = write_run(tmp_path, 2, CASES[:8])
    (log,) = folders[0].rglob("*.jsonl")
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[1], *lines[1:]]))
    end_run(log, 0)
    assert snapshot == problems_of(folders)


def test_records_that_a_shard_did_not_write_are_refused(tmp_path: Path) -> None:
    """A shard whose records were changed after it wrote them is named, and the merged file says what was written."""
    folders = write_run(tmp_path, 2, CASES[:8])
    (log,) = folders[0].rglob("*.jsonl")
    log.write_bytes(log.read_bytes().replace(b"2026-01-01", b"2026-01-02"))
    (problem,) = problems_of(folders)
    assert problem.startswith(f"shard 1/2: {log} is not what its run wrote: its sha256 is ")
    folders = write_run(tmp_path / "unchanged", 2, CASES[:8])
    assert main(["records", "merge", *map(str, folders), "-o", str(tmp_path / "merged.jsonl")]) == 0
    written = require_written(tmp_path / "merged.jsonl")
    assert (written.count, written.exit_status) == (8, 0)


def test_shards_of_different_runs_are_refused(tmp_path: Path) -> None:
    """Shards of another number, and shards that split the tests in another way, are not merged."""
    four, seven = write_run(tmp_path / "a", 4), write_run(tmp_path / "b", 7)
    (problem,) = problems_of([four[0], seven[1]])
    assert "are of different runs: 4 shards and 7 shards; every shard needs the same options" in problem
    two, other = write_run(tmp_path / "c", 2, CASES[:8]), write_run(tmp_path / "d", 2, CASES[:12])
    (problem,) = problems_of([two[0], other[1]])
    assert "are of different runs: 8 tests and 12 tests" in problem


CODE = f"the machine code of {BUILT.variant}/{BUILT.arch}"
MIXED: dict[str, tuple[dict[str, Any], str]] = {
    "machine code": (
        {"builds": (msgspec.structs.replace(BUILT, code_identity="b" * 64),)},
        f"{CODE} is not the same in all shards: {'a' * 12} in shard 1/2, {'b' * 12} in shard 2/2",
    ),
    "commit": (
        {"source": Source("decaf", dirty=False, origin="git")},
        "the commit is not the same in all shards: c0ffee in shard 1/2, decaf in shard 2/2",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_code_is_refused(tmp_path: Path, name: str) -> None:
    """Shards that ran other machine code or another commit are refused, with both values."""
    changes, problem = MIXED[name]
    folders = write_run(tmp_path, 2, CASES[:8])
    (log,) = folders[1].rglob("*.jsonl")
    records = [msgspec.structs.replace(each, **changes) for each in read_record_file(log).records]
    log.write_bytes(b"".join(to_json(each) + b"\n" for each in records))
    end_run(log, 0)
    assert problems_of(folders) == (problem,)


def test_mixed_sources_are_refused(tmp_path: Path) -> None:
    """A variant that is not compiled is compared by its source files."""
    folders = write_run(tmp_path, 2, CASES[:8])
    change(folders[1], replaced(sources={"mine": "e" * 64}))
    expected = f"the source of mine is not the same in all shards: {'f' * 12} in shard 1/2, {'e' * 12} in shard 2/2"
    assert problems_of(folders) == (expected,)


@pytest.mark.parametrize(("statuses", "expected"), [((0, 0), 0), ((0, 10), 10), ((10, 1), 1), ((0, 2), 1)])
def test_the_status_of_the_whole_run(tmp_path: Path, statuses: tuple[int, int], expected: int) -> None:
    """A failed shard fails the merged run; a gate without a verdict leaves it undecided."""
    folders = write_run(tmp_path, 2, CASES[:8])
    for folder, status in zip(folders, statuses, strict=True):
        change(folder, replaced(exit_status=status))
    assert main(["records", "merge", *map(str, folders), "-o", str(tmp_path / "x.jsonl")]) == expected


def test_files_that_are_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without shards, and a shard file that cannot be read, end with status 2 and a sentence."""
    assert main(["records", "merge", str(tmp_path), "-o", str(tmp_path / "x")]) == 2
    assert "no *.shard.json in " in capsys.readouterr().err
    for content in ("{", '{"schema": 9}', "[]"):
        (tmp_path / f"a{SHARD_SUFFIX}").write_text(content, encoding="utf-8")
        assert main(["records", "merge", str(tmp_path), "-o", str(tmp_path / "x")]) == 2
        assert "cannot be read: " in capsys.readouterr().err


# -- the split --------------------------------------------------------------------------------------------------------


def test_every_group_is_in_one_shard_and_no_shard_is_overloaded() -> None:
    """The longest group comes first; no shard has more than the mean plus the longest group."""
    seconds = {f"shape {number}": float(number % 17 + 1) for number in range(100)}
    for count in (1, 4, 7):
        shards = split(seconds, count)
        assert shards.keys() == seconds.keys()
        loads = Counter[int]()
        for group, shard in shards.items():
            loads[shard] += seconds[group]  # type: ignore[assignment]
        assert max(loads.values()) <= sum(seconds.values()) / count + max(seconds.values())


def test_the_split_does_not_depend_on_the_order() -> None:
    """The same groups in another order are split in the same way, also with equal seconds."""
    seconds = {f"shape {number}": float(number % 3) for number in range(50)}
    assert split(dict(reversed(seconds.items())), 7) == split(seconds, 7)


def test_more_shards_than_groups() -> None:
    """Some shards stay empty; no group is lost."""
    assert split({"a": 2.0, "b": 1.0}, 5) == {"a": 1, "b": 2}
