"""What a replay asks: which builds, cases and gates of a bundle, and the options of pytest that ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal, get_args

import msgspec

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.record import Record

ReplayLevel = Literal["build", "right", "fast"]
REPLAY_LEVELS: tuple[ReplayLevel, ...] = get_args(ReplayLevel)
RequestedLevel = Literal["build", "right", "fast", "all"]
REQUESTED_LEVELS: tuple[RequestedLevel, ...] = get_args(RequestedLevel)


class ReplaySelection(msgspec.Struct, frozen=True):
    """Which variants, and which of their judged cases, a replay runs: lists of globs; an empty list accepts all."""

    variants: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()

    def has_variant(self, variant: str) -> bool:
        """Whether the builds and the gates of a variant are replayed."""
        return _matches(variant, self.variants)

    def has_record(self, record: Record) -> bool:
        """Whether a record is replayed; `cases` selects judged cases only."""
        is_case = record.kind == "correct" and record.case is not None
        case_id = record.case.id if is_case and record.case else ""
        return self.has_variant(record.variant) and (not is_case or _matches(case_id, self.cases))


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fnmatchcase(name, glob) for glob in globs)


def levels_of(level: RequestedLevel, claimed: Iterable[Record], *, use_libraries: bool) -> list[ReplayLevel]:
    """Return the levels to replay; for `all`, those for which the records have something.

    With `use_libraries` nothing is compiled, so that `all` does not contain `build`.
    """
    if level != "all":
        return [level]
    records = list(claimed)
    return [
        each for each in REPLAY_LEVELS if any(commands_of(each, records)) and not (use_libraries and each == "build")
    ]


def commands_of(level: ReplayLevel, claimed: Iterable[Record]) -> Iterator[list[str]]:
    """Yield the options of each pytest run, without those that are the same for all of them."""
    if level == "build":
        builds = {build.variant: build for record in claimed for build in record.builds}
        arches = {build.arch for record in claimed for build in record.builds}
        if builds:
            yield [f"--fa-variant={','.join(sorted(builds))}", f"--fa-arch={','.join(sorted(arches))}", "--fa-static"]
    elif level == "right":
        yield from _of_cases(claimed)
    else:
        for record in claimed:
            if (gate := Gate.of(record)) and not gate.revision:  # a bundle has no history
                yield [f"--fa-variant={record.variant}", *_question(gate), "-k", "test_gate"]


def _of_cases(claimed: Iterable[Record]) -> Iterator[list[str]]:
    """One run for all variants that have the same cases."""
    cases: dict[str, list[str]] = {}
    for record in claimed:
        if record.kind == "correct" and record.case:
            cases.setdefault(record.variant, []).append(record.case.id)
    by_cases: dict[tuple[str, ...], list[str]] = {}
    for variant, ids in cases.items():
        by_cases.setdefault(tuple(sorted(ids)), []).append(variant)
    for case_ids, variants in by_cases.items():
        yield [f"--fa-variant={','.join(variants)}", f"--fa-case={','.join(case_ids)}", "-k", "test_correct"]


def _question(gate: Gate) -> list[str]:
    shapes = dict.fromkeys(pair.samples.shape_id for pair in gate.pairs)
    baselines = dict.fromkeys(pair.samples.baseline for pair in gate.pairs)
    words = [f"--fa-gate={gate.ratio:g}", f"--fa-case={','.join(f'{shape}-seed0' for shape in shapes)}"]
    is_sdpa = all(name.startswith("sdpa_") for name in baselines)
    return words if is_sdpa else [*words, f"--fa-gate-baseline={next(iter(baselines))}"]
