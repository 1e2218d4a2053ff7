"""The plan of a run that is split into shards, and what one shard did: `<run>.shard.json` beside its record file.

The file is written before the first test runs and completed after the last one, so that a shard that was killed is not
taken for one that finished.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from pytest_fa.records.files import read_content

SHARD_SUFFIX = ".shard.json"
SHARD_SCHEMA = 1
REMEDY = "run this shard again"


class PlannedTest(msgspec.Struct, frozen=True):
    """One test of the whole run, and the shard that runs it, counted from 1."""

    id: str
    shard: int


class FinishedTest(msgspec.Struct, frozen=True):
    """The outcome of one test, and the kind and id of each of its records."""

    outcome: str
    records: tuple[tuple[str, str], ...] = ()


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shard of a run: the tests of all shards, and the results of its own.

    `sources` has a sha256 over the files of each selected variant.  `records` is the name of the record file, which
    lies in the same folder and does not exist if no test had a record.  `exit_status` is None until the shard ends.
    """

    schema: int
    shard: int
    count: int
    tests: tuple[PlannedTest, ...]
    sources: dict[str, str]
    records: str
    finished: dict[str, FinishedTest] = {}
    exit_status: int | None = None

    @property
    def plan_digest(self) -> str:
        """The sha256 of the plan: equal for all shards of one run."""
        return hashlib.sha256(msgspec.json.encode([self.count, self.tests])).hexdigest()

    @property
    def name(self) -> str:
        """The shard as `--fa-shard` has it."""
        return f"{self.shard}/{self.count}"

    def own(self) -> list[str]:
        """Return the ids of the tests of this shard."""
        return [test.id for test in self.tests if test.shard == self.shard]


def shard_path(records: Path) -> Path:
    """Return the file of a shard whose record file is `records`."""
    return records.with_suffix(SHARD_SUFFIX)


def write_shard(path: Path, shard: ShardFile) -> None:
    """Write the file of a shard; a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_bytes(msgspec.json.encode(shard) + b"\n")
    scratch.replace(path)


def read_shard(path: Path) -> ShardFile | None:
    """Return the content of a shard's file; None if there is none.  Raises `UnreadableRecords`."""
    return read_content(path, _decode, REMEDY)


def _decode(content: bytes) -> ShardFile:
    shard = msgspec.json.decode(content, type=ShardFile)
    if shard.schema != SHARD_SCHEMA:
        raise ValueError(f"its schema is {shard.schema}; this version reads schema {SHARD_SCHEMA}")
    if not 1 <= shard.shard <= shard.count:
        raise ValueError(f"it is shard {shard.name}")
    return shard
