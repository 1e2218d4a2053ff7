"""Split the tests of a run into shards, the same on every machine: by shape, longest first, by recorded seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from pytest_fa.catalog.variant import Variant
from pytest_fa.records.files import read_record_file
from pytest_fa.records.source import folder_hash

MIN_SECONDS = 0.01  # of one test, so that many short tests are spread, too
UNKNOWN_SECONDS = 1.0  # of a test whose kind has no saved record
WorkKey = TypeVar("WorkKey")


class Work(msgspec.Struct, frozen=True):
    """What decides how long a test takes: the kind of its record, its variant, and its shape, if it has one."""

    kind: str
    variant: str = ""
    shape_id: str | None = None


class RecordedSeconds:
    """The seconds that tests took according to the saved records in `<folder>/<gpu>/`.

    They do not depend on this machine: of several GPUs, the slowest counts.  A test without a record takes as long as
    the median of its kind at its shape, or of its kind.
    """

    def __init__(self, folder: Path) -> None:
        seconds: dict[Work, list[float]] = {}
        for path in sorted(folder.glob("*/*.jsonl")):
            for work, mean in _means(path).items():
                seconds.setdefault(work, []).append(mean)
        self._of_work = {work: max(values) for work, values in seconds.items()}
        self._of_shape = _medians(self._of_work, lambda work: (work.kind, work.shape_id))
        self._of_kind = _medians(self._of_work, lambda work: work.kind)

    def of(self, work: Work) -> float:
        """Return the estimated seconds of one test."""
        kind = self._of_kind.get(work.kind, UNKNOWN_SECONDS)
        shape = self._of_shape.get((work.kind, work.shape_id), kind)
        return max(self._of_work.get(work, shape), MIN_SECONDS)


def split(seconds: Mapping[str, float], count: int) -> dict[str, int]:
    """Return the shard of each group, counted from 1: the longest group first, each to the shard with least to do."""
    loads = [0.0] * count
    shards = {}
    for group in sorted(seconds, key=lambda name: (-seconds[name], name)):
        shard = min(range(count), key=lambda number: (loads[number], number))
        loads[shard] += seconds[group]
        shards[group] = shard + 1
    return shards


def source_hashes(variants: Iterable[Variant]) -> dict[str, str]:
    """Return a sha256 over the names and contents of the files in each variant's folder."""
    folders = {variant.name: Path(variant.folder) for variant in variants}
    of_folder = {folder: folder_hash(folder) for folder in set(folders.values())}
    return {name: of_folder[folder] for name, folder in sorted(folders.items())}


def _means(path: Path) -> dict[Work, float]:
    """The mean seconds of the records of one file, over seeds."""
    seconds: dict[Work, list[float]] = {}
    for record in read_record_file(path).records:
        work = Work(record.kind, record.variant, record.case.shape_id if record.case else None)
        seconds.setdefault(work, []).append(sum(stage.seconds for stage in record.stages))
    return {work: statistics.fmean(values) for work, values in seconds.items()}


def _medians(seconds: Mapping[Work, float], key_of: Callable[[Work], WorkKey]) -> dict[WorkKey, float]:
    groups: dict[WorkKey, list[float]] = {}
    for work, value in seconds.items():
        groups.setdefault(key_of(work), []).append(value)
    return {key: statistics.median(values) for key, values in groups.items()}
