"""Replay a bundle on this machine: the same builds, the same cases, or the same gates, with this installation's judge.

Unlike `verify`, this compiles and runs the kernels of the bundle, which may be a stranger's code.

build  compile every variant again: is the machine code the same?
right  run every judged case again: are the inputs and the outcomes the same?
fast   ask every gate again: is the verdict the same?  Stored microseconds are never compared.
all    every level for which the bundle has something
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.features.bundle.archive import read_archive
from pytest_fa.features.bundle.bundle_manifest import (
    MANIFEST,
    BuildFacts,
    BundleManifest,
    builds_of,
    compilers_of,
    read_manifest,
)
from pytest_fa.features.bundle.libraries import LIBRARIES
from pytest_fa.features.bundle.questions import ReplayLevel, ReplaySelection, RequestedLevel, commands_of, levels_of
from pytest_fa.features.bundle.verify import verify_bundle
from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.files import read_record_file
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Environment, Record
from pytest_fa.records.text import printable

# The answer of a replay is the first of these that any of its items has.
Answer = Literal["NOT REPRODUCED", "NOT COMPARABLE", "INCONCLUSIVE", "REPRODUCED"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)
MAX_SECONDS = 4 * 3600.0
MANIFEST_NAME = "variant.yaml"
EVERYTHING = ReplaySelection()
ResultKey = tuple[str, str]  # the kind and the id of a record


class CannotReplay(FaError):
    """A bundle that cannot be replayed, with the reason."""


class Replayed(msgspec.Struct, frozen=True):
    """One build, case or gate: its name, the answer, and what the bundle and this machine say."""

    name: str
    answer: Answer
    reason: str


class Replay(msgspec.Struct, frozen=True):
    """The result of a replay.

    `digest` is that of the replayed bundle, `source_tree` the id of its source files, `environment` that of this
    machine.  `selection` says which part of the bundle was replayed.
    """

    file: str
    digest: str
    level: RequestedLevel
    answer: Answer
    items: tuple[Replayed, ...]
    environment: Environment | None
    source_tree: str = ""
    selection: ReplaySelection = EVERYTHING


def replay_bundle(
    path: Path,
    level: RequestedLevel,
    folder: Path,
    say: Callable[[str], None],
    *,
    use_libraries: bool = False,
    selection: ReplaySelection = EVERYTHING,
) -> Replay:
    """Verify a bundle, unpack its source into `folder`, run it there, and compare the new records with its own.

    `folder` must be empty.  With `use_libraries`, nothing is compiled: the libraries in the bundle are run.  Raises
    `CannotReplay` for a bundle that is broken or has nothing to replay at this level, and `UnusableArchive`.
    """
    verification = verify_bundle(path)
    if not verification.is_verified:
        first = verification.problems[0]
        raise CannotReplay(f"{path.name} is broken ({first.step}: {first.text}); see `verify`")
    source = folder / "source"
    manifest = _unpack(path, source)
    claimed = [each for each in read_record_file(source / manifest.records).records if selection.has_record(each)]
    levels = levels_of(level, claimed, use_libraries=use_libraries)
    commands = [command for each in levels for command in commands_of(each, claimed)]
    if not commands:
        raise CannotReplay(f"{path.name} has nothing to replay at level {level}{_of_selection(selection)}")
    cache_words = _cache_words(path, level, folder, use_libraries=use_libraries)
    new: list[Record] = []
    for number, command in enumerate(commands, start=1):
        say(f"run {number} of {len(commands)}: pytest {' '.join(command)}")
        new += _run([*cache_words, *command], source, folder, number)
    manifest = msgspec.structs.replace(manifest, builds=_selected_builds(manifest, selection))
    items = tuple(item for each in levels for item in _compare(each, manifest, claimed, new))
    return Replay(
        file=path.name,
        digest=verification.digest,
        level=level,
        answer=_answer_of(items),
        items=items,
        environment=new[0].environment if new else None,
        source_tree=verification.source_tree,
        selection=selection,
    )


def _answer_of(items: Iterable[Replayed]) -> Answer:
    answers = {item.answer for item in items}
    return next((each for each in ANSWERS if each in answers), "NOT COMPARABLE")


def _selected_builds(manifest: BundleManifest, selection: ReplaySelection) -> dict[str, BuildFacts]:
    """The builds of the selected variants; a build is named VARIANT/ARCHITECTURE."""
    return {name: facts for name, facts in manifest.builds.items() if selection.has_variant(name.rpartition("/")[0])}


def _of_selection(selection: ReplaySelection) -> str:
    words = {"--variant": selection.variants, "--case": selection.cases}
    text = " ".join(f"{option}={','.join(globs)}" for option, globs in words.items() if globs)
    return f" with {text}" if text else ""


def replay_text(replay: Replay) -> str:
    """Return one line for each item that was not reproduced, and the answer last."""
    lines = [f"{item.answer} {item.name}: {item.reason}" for item in replay.items if item.answer != "REPRODUCED"]
    counts = [f"{count} {name}" for name in ANSWERS if (count := sum(item.answer == name for item in replay.items))]
    where = f"at level {replay.level}{_of_selection(replay.selection)}"
    return "\n".join([*lines, f"{replay.answer} {replay.file} {where}: {', '.join(counts)}"])


def _unpack(path: Path, source: Path) -> BundleManifest:
    """Write every file of a verified archive below `source`, and return the manifest."""
    manifests = []

    def write(name: str, content: bytes, is_executable: bool) -> None:  # noqa: FBT001
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as stream:
            stream.write(content)
        file.chmod(0o755 if is_executable else 0o644)
        if name == MANIFEST:
            manifests.append(content)

    read_archive(path, lambda _: False, write)
    return read_manifest(manifests[0])


def _cache_words(path: Path, level: RequestedLevel, folder: Path, *, use_libraries: bool) -> list[str]:
    """The options that say where builds come from: an empty cache, or the libraries of the bundle."""
    if not use_libraries:
        return [f"--fa-cache={folder / 'cache'}"]
    if level == "build":
        raise CannotReplay("--use-libraries compiles nothing, so it does not fit --level=build; use right or fast")
    cache = folder / "source" / LIBRARIES
    if not cache.is_dir():
        raise CannotReplay(f"{path.name} has no libraries; `bundle make --with-libraries` packs them")
    return [f"--fa-cache={cache}", "--fa-no-build"]


# -- running ----------------------------------------------------------------------------------------------------------


def _run(command: list[str], source: Path, folder: Path, number: int) -> list[Record]:
    """Run the shipped suite of this installation on the kernels of the bundle; return its records.

    An ini file, a conftest, plugins and PYTEST_ADDOPTS of the bundle or of this machine do not take part.
    """
    artifacts, ini = folder / f"artifacts-{number}", folder / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    roots = sorted({manifest.parent.parent for manifest in source.glob(f"*/*/{MANIFEST_NAME}")})
    if not roots:
        raise CannotReplay(f"the bundle has no <folder>/<variant>/{MANIFEST_NAME}")
    fixed = [
        *("-c", str(ini), "--rootdir", str(source), "--noconftest", "-p", "no:cacheprovider", "-q"),
        *("--pyargs", "pytest_fa.suite", f"--fa-kernels={','.join(map(str, roots))}"),
        *(f"--fa-artifacts={artifacts}", f"--fa-profiles={source / 'profiles'}"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    with (folder / f"pytest-{number}.txt").open("wb") as log:
        subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pytest", *fixed, *command],
            cwd=source,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=MAX_SECONDS,
        )
    return [record for file in sorted(artifacts.glob("records/*.jsonl")) for record in read_record_file(file).records]


# -- comparing --------------------------------------------------------------------------------------------------------


def _compare(
    level: ReplayLevel, manifest: BundleManifest, claimed: Iterable[Record], new: list[Record]
) -> Iterator[Replayed]:
    if level == "build":
        yield from _compare_builds(manifest, new)
        return
    kind = "correct" if level == "right" else "gate"
    results: dict[ResultKey, Record] = {(record.kind, _name(record)): record for record in new}
    for record in claimed:
        if record.kind == kind and (Gate.of(record) is not None or level == "right"):
            result = results.get((record.kind, _name(record))) or results.get((record.kind, record.id))
            answer, reason = _compare_records(record, result)
            yield Replayed(_name(record), answer, printable(reason))


def _name(record: Record) -> str:
    gate = Gate.of(record)
    return f"{record.id} < {gate.ratio:g}" if gate else record.id


def _compare_builds(manifest: BundleManifest, new: list[Record]) -> Iterator[Replayed]:
    here, compilers = builds_of(new), compilers_of(new)
    for name, claim in manifest.builds.items():
        build = here.get(name)
        if build is None:
            yield Replayed(name, "NOT REPRODUCED", "it was not built here; pytest-1.txt says why")
        elif claim.code_identity is None or build.code_identity is None:
            yield Replayed(name, "NOT COMPARABLE", "the machine code of one side is not known")
        elif claim.code_identity == build.code_identity:
            yield Replayed(name, "REPRODUCED", "the machine code is the same")
        elif set(manifest.compilers) != set(compilers):
            reason = f"other compilers: {', '.join(manifest.compilers)} and {', '.join(compilers)}"
            yield Replayed(name, "NOT COMPARABLE", reason)
        else:
            yield Replayed(name, "NOT REPRODUCED", "the same compiler makes other machine code here")


def _compare_records(claim: Record, result: Record | None) -> tuple[Answer, str]:
    if (gate := Gate.of(claim)) and gate.revision:
        commit = gate.revision.commit
        return "NOT COMPARABLE", f"its baseline is of commit {commit}, and a bundle has no history; ask it in a clone"
    if result is None or result.outcome == Outcome.NOT_MEASURED:
        return "NOT COMPARABLE", "it did not run here (no such device, or skipped)"
    if gate:
        return _compare_gates(claim, gate, result)
    before, after = claim.fingerprints, result.fingerprints
    if before and after and before.inputs_sha256 != after.inputs_sha256:
        return "NOT COMPARABLE", "the random numbers of this machine's torch give other inputs"
    if claim.outcome != result.outcome:
        return "NOT REPRODUCED", f"the outcome was {claim.outcome}, here it is {result.outcome}"
    is_same = before is not None and after is not None and before.output_sha256 == after.output_sha256
    return "REPRODUCED", f"{result.outcome}{', the same output bit by bit' if is_same else ''}"


def _compare_gates(claim: Record, gate: Gate, result: Record) -> tuple[Answer, str]:
    if claim.environment.gpu != result.environment.gpu:
        return "NOT COMPARABLE", f"other GPUs: {claim.environment.gpu} and {result.environment.gpu}"
    found = Gate.of(result)
    if found is None and result.outcome.is_verdict:
        return "NOT REPRODUCED", f"the verdict was {gate.verdict}, here the gate ended as {_first_line(result)}"
    if found is None or found.verdict == "INCONCLUSIVE":
        return (
            "INCONCLUSIVE",
            f"the verdict was {gate.verdict}, here there is none: {_first_line(result)}",
        )
    ratios = "; ".join(_ratios(gate, found))
    if gate.verdict == "INCONCLUSIVE":
        return "INCONCLUSIVE", f"the bundle has no verdict, here it is {found.verdict}; {ratios}"
    same = gate.verdict == found.verdict
    return ("REPRODUCED" if same else "NOT REPRODUCED"), f"{gate.verdict}, here {found.verdict}; {ratios}"


def _first_line(record: Record) -> str:
    return record.message.partition("\n")[0]


def _ratios(claim: Gate, here: Gate) -> Iterator[str]:
    """Each pair's ratio in the bundle and here, and whether their intervals overlap."""
    pairs = {(pair.samples.shape_id, pair.samples.baseline): pair for pair in here.pairs}
    for pair in claim.pairs:
        other = pairs.get((pair.samples.shape_id, pair.samples.baseline))
        if other is not None and pair.ratio and other.ratio:
            low, high = max(pair.low or 0.0, other.low or 0.0), min(pair.high or math.inf, other.high or math.inf)
            fits = "the intervals overlap" if low <= high else "the intervals do not overlap"
            yield f"{pair.samples.shape_id} {pair.ratio:.4f} and {other.ratio:.4f}, {fits}"
