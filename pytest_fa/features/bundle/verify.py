"""Verify a bundle without a GPU, without unpacking it, and without running anything from it.

archive -> seal -> manifest -> records -> every verdict computed again -> plausibility

A verified bundle is unchanged since it was made, and its verdicts follow from its raw numbers.  It does not prove that
the numbers were measured, or that its maker left no record out: raw numbers that were invented consistently are only
revealed by a replay, or by not trusting the signer.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pytest_fa.features.bundle.archive import Archive, read_archive
from pytest_fa.features.bundle.bundle_manifest import (
    MANIFEST,
    RESULTS,
    BundleManifest,
    BundleManifestProblem,
    builds_of,
    compilers_of,
    outcomes_of,
    problem_of_status,
    read_manifest,
)
from pytest_fa.features.bundle.completeness import changed_sources, in_the_future, incomplete, notes, repeated_keys
from pytest_fa.features.bundle.libraries import library_problems
from pytest_fa.features.bundle.plausible import implausible
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.bundle.seal import SEAL, BrokenSeal, digest_of, git_tree, read_seal
from pytest_fa.features.gate.intervals import PROCESS_SD
from pytest_fa.features.gate.noise import decode_noise, noise_path
from pytest_fa.records.ceilings import Ceilings, ceilings_path
from pytest_fa.records.files import RecordFile, read_stream
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable

Step = Literal["integrity", "consistency", "recomputation", "plausibility"]
RECORDS_FOLDER = Path("profiles")
MAX_PROBLEMS = 1000


class Problem(msgspec.Struct, frozen=True):
    """One thing that does not hold: the step that noticed it, and a sentence."""

    step: Step
    text: str


class Verification(msgspec.Struct, frozen=True):
    """The result of `verify_bundle`.

    `digest` is the sha256 of the seal.  `records` counts the records whose verdicts were computed again.  `dirty` says
    whether the sources differ from those of `commit`.  `notes` say what the bundle does not show although it is
    verified.
    """

    file: str
    digest: str
    records: int
    problems: tuple[Problem, ...]
    commit: str | None = None
    dirty: bool | None = None
    source_tree: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether there is no problem."""
        return not self.problems


def verify_bundle(path: Path) -> Verification:
    """Verify one bundle.  Raises `UnusableArchive` if the file is no archive that can be read safely."""
    archive = read_archive(path, _is_wanted)
    content = {name: file.content for name, file in archive.files.items() if file.content is not None}
    problems = list(_of_seal(archive, content.get(SEAL)))
    manifest: BundleManifest | None = None
    records: tuple[Record, ...] = ()
    try:
        manifest = read_manifest(content.get(MANIFEST, b""))
    except BundleManifestProblem as problem:
        problems.append(Problem("consistency", str(problem)))
    if manifest is not None:
        file = _record_file(manifest, content)
        records = file.records
        problems += [Problem("consistency", text) for text in _of_manifest(manifest, file, archive)]
        problems += [Problem("consistency", text) for text in _of_completeness(manifest, records, content, archive)]
        problems += _of_records(records, content)
    return Verification(
        file=path.name,
        digest=digest_of(content.get(SEAL, b"")),
        records=len(records),
        problems=tuple(Problem(each.step, printable(each.text)) for each in problems[:MAX_PROBLEMS]),
        commit=manifest.source.commit if manifest else None,
        dirty=manifest.source.dirty if manifest else None,
        source_tree=manifest.source_tree if manifest else "",
        notes=tuple(map(printable, notes(records, _hashes(archive)))),
    )


def verification_text(verification: Verification) -> str:
    """Return the result as lines: each problem with its step, what the bundle is, and the answer last."""
    lines = [f"{problem.step}: {problem.text}" for problem in verification.problems]
    lines += [
        *(f"note: {note}" for note in verification.notes),
        f"digest {verification.digest}",
        f"commit {_commit_text(verification)}, source tree {verification.source_tree or 'unknown'}",
    ]
    count = f"{verification.records} records, {len(verification.problems)} problems"
    return "\n".join([*lines, f"{'VERIFIED' if verification.is_verified else 'BROKEN'} {verification.file}: {count}"])


def _commit_text(verification: Verification) -> str:
    states = {True: " with changes", False: " without changes", None: ""}
    return f"{verification.commit}{states[verification.dirty]}" if verification.commit else "unknown"


def _is_wanted(name: str) -> bool:
    """Whether the content of a file is needed: seal, manifest, records of the run, and what is known of the GPUs."""
    is_record = name.startswith(RESULTS) and name.endswith(".jsonl")
    is_knowledge = name.startswith(f"{RECORDS_FOLDER}/") and name.endswith(("/ceilings.json", "/noise.json"))
    return name in (SEAL, MANIFEST) or is_record or is_knowledge


# -- integrity --------------------------------------------------------------------------------------------------------


def _of_seal(archive: Archive, seal: bytes | None) -> Iterator[Problem]:
    """Compare the seal with the archive: every file must be listed with its hash, and nothing else."""
    if seal is None:
        yield Problem("integrity", f"there is no {SEAL}; bundles of this version have one")
        return
    try:
        listed = read_seal(seal)
    except BrokenSeal as problem:
        yield Problem("integrity", str(problem))
        return
    actual = {name: file.sha256 for name, file in archive.files.items() if name != SEAL}
    for name in sorted(listed.keys() | actual.keys()):
        if name not in actual:
            yield Problem("integrity", f"{name} is listed in {SEAL} and not in the archive")
        elif name not in listed:
            yield Problem("integrity", f"{name} is in the archive and not listed in {SEAL}")
        elif listed[name] != actual[name]:
            yield Problem("integrity", f"{name} has another sha256 than {SEAL} says")


# -- consistency ------------------------------------------------------------------------------------------------------


def _record_file(manifest: BundleManifest, content: dict[str, bytes]) -> RecordFile:
    name = manifest.records
    if name not in content:
        return RecordFile(Path(name), problem="it is not in the archive")
    return read_stream(Path(name), io.BytesIO(content[name]))


def _of_manifest(manifest: BundleManifest, file: RecordFile, archive: Archive) -> Iterator[str]:
    if file.complaint:
        yield f"{file.path}: {file.complaint}"
    records = file.records
    source = [each for each in archive.files.values() if each.name != SEAL and not each.name.startswith(RESULTS)]
    tree = git_tree((each.name, each.git_blob, each.is_executable) for each in source)
    if tree != manifest.source_tree:
        yield f"the source files are tree {tree}, the manifest says {manifest.source_tree}"
    facts = {
        "builds": (manifest.builds, builds_of(records)),
        "compilers": (manifest.compilers, compilers_of(records)),
        "outcomes": (manifest.outcomes, outcomes_of(records)),
    }
    for name, (stated, expected) in facts.items():
        if stated != expected:
            yield f"{name} of the manifest differ from those of the records"
    if problem := problem_of_status(manifest.pytest_exit_status, records):
        yield problem
    yield from library_problems(records, _hashes(archive))
    yield from _of_origins(manifest, records)


def _hashes(archive: Archive) -> dict[str, str]:
    return {file.name: file.sha256 for file in archive.files.values()}


def _of_completeness(
    manifest: BundleManifest, records: tuple[Record, ...], content: dict[str, bytes], archive: Archive
) -> Iterator[str]:
    """Require the records that the run wrote, with the sources that it judged, and JSON that has one meaning."""
    yield from in_the_future(manifest)
    yield from incomplete(manifest, records)
    yield from changed_sources(records, _hashes(archive))
    yield from (f"{manifest.records}: {text}" for text in repeated_keys(content.get(manifest.records, b"")))


def _of_origins(manifest: BundleManifest, records: tuple[Record, ...]) -> Iterator[str]:
    """Require one environment, one commit and one build of each variant, and no record from after the bundle."""
    roles: dict[str, str] = {}
    identities: dict[str, tuple[str, str | None]] = {}
    for record in records:
        for name, facts_of_build in builds_of([record]).items():
            identity = (facts_of_build.key, facts_of_build.code_identity)
            if identities.setdefault(name, identity) != identity:
                yield f"{record.id}: its build {name} has another key or code identity than in other records"
        if roles.setdefault(record.variant, record.role) != record.role:
            yield f"{record.id}: its role is {record.role!r}, in other records {roles[record.variant]!r}"
        if record.environment != manifest.environment:
            yield f"{record.id}: its environment differs from the manifest's"
        if record.source.commit != manifest.source.commit:
            yield f"{record.id}: its commit is {record.source.commit}, the manifest's is {manifest.source.commit}"
        if record.source.dirty and not manifest.source.dirty:
            yield f"{record.id}: it was measured on changed sources, but the manifest says that they are unchanged"
        if record.measured_at > manifest.created:
            yield f"{record.id}: it was measured at {record.measured_at}, after the bundle was made"


# -- recomputation and plausibility -----------------------------------------------------------------------------------


def _of_records(records: tuple[Record, ...], content: dict[str, bytes]) -> Iterator[Problem]:
    for gpu in dict.fromkeys(record.environment.gpu for record in records):
        ceilings, known_sd, problems = _knowledge(gpu, content)
        yield from (Problem("consistency", text) for text in problems)
        for record in records:
            if record.environment.gpu == gpu:
                name = f"{record.kind} {record.id}"
                for text in contradictions(record, ceilings, known_sd):
                    yield Problem("recomputation", f"{name}: {text}")
                for text in implausible(record):
                    yield Problem("plausibility", f"{name}: {text}")


def _knowledge(gpu: str | None, content: dict[str, bytes]) -> tuple[Ceilings | None, float, list[str]]:
    """Return a GPU's ceilings and its standard deviation of process means from the bundle, and what cannot be read."""
    ceilings, known_sd, problems = None, PROCESS_SD, []
    name = str(ceilings_path(RECORDS_FOLDER, gpu))
    if name in content:
        try:
            ceilings = msgspec.json.decode(content[name], type=Ceilings)
        except (ValueError, RecursionError) as problem:
            problems.append(f"{name} cannot be read: {problem}")
    name = str(noise_path(RECORDS_FOLDER, gpu))
    if name in content:
        try:
            known_sd = decode_noise(content[name]).process_sd
        except (ValueError, RecursionError) as problem:
            problems.append(f"{name} cannot be read: {problem}")
    return ceilings, known_sd, problems
