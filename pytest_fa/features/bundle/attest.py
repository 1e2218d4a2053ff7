"""State what a verified bundle or its replay says as an in-toto statement, which a CI system can sign.

The envelope is the in-toto Statement v1, the predicate Test Result v0.1 (in-toto attestation framework).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.features.bundle.archive import read_archive
from pytest_fa.features.bundle.bundle_manifest import MANIFEST, BundleManifest, read_manifest
from pytest_fa.features.bundle.replay import Answer, Replay
from pytest_fa.features.bundle.seal import SEAL
from pytest_fa.features.bundle.verify import verify_bundle
from pytest_fa.records.files import read_stream
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
REPLAYED_AS: dict[Answer, str] = {"REPRODUCED": "passedTests", "NOT REPRODUCED": "failedTests"}


class CannotAttest(FaError):
    """A bundle about which nothing can be stated, because it is not verified."""


def attest_bundle(path: Path) -> bytes:
    """Return the statement of a bundle as JSON.

    The subject is the archive.  Each record is a passed, warned or failed test; warned are gates without a verdict and
    what could not be measured.  Raises `CannotAttest` for a bundle that is not verified, and `UnusableArchive`.
    """
    verification = verify_bundle(path)
    if not verification.is_verified:
        first = verification.problems[0]
        raise CannotAttest(f"{path.name} is broken ({first.step}: {first.text}); see `verify`")
    archive = read_archive(path, lambda name: name in (MANIFEST, SEAL) or name.endswith(".jsonl"))
    manifest = read_manifest(archive.files[MANIFEST].content or b"")
    records = read_stream(Path(manifest.records), io.BytesIO(archive.files[manifest.records].content or b"")).records
    return _statement(path, _predicate(manifest, records, verification.digest))


def replay_statement(path: Path, replay: Replay) -> bytes:
    """Return the statement of a replay of the bundle at `path` as JSON.

    The subject is the archive.  Each build, case or gate is a passed test if it was reproduced, a failed one if it was
    not, and otherwise a warned one.  The configuration names what was replayed, and has this machine's environment.
    """
    tests: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for item in replay.items:
        tests[REPLAYED_AS.get(item.answer, "warnedTests")].append(item.name)
    result = {"REPRODUCED": "PASSED", "NOT REPRODUCED": "FAILED"}.get(replay.answer, "WARNED")
    configuration = _configuration(replay.source_tree, replay.digest)
    configuration.append(_embedded("level and selection of the replay", {"level": replay.level, **_globs(replay)}))
    if replay.environment is not None:
        configuration.append(_embedded("environment of the replay", msgspec.to_builtins(replay.environment)))
    return _statement(path, {"result": result, "configuration": configuration, **tests})


def _globs(replay: Replay) -> dict[str, Any]:
    return dict(msgspec.to_builtins(replay.selection))


def _embedded(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """A resource descriptor of in-toto that contains its resource."""
    content = base64.b64encode(json.dumps(value).encode()).decode()
    return {"name": name, "mediaType": "application/json", "content": content}


def _statement(path: Path, predicate: dict[str, Any]) -> bytes:
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": path.name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}],
        "predicateType": PREDICATE,
        "predicate": predicate,
    }
    return json.dumps(statement, indent=1).encode() + b"\n"


def _predicate(manifest: BundleManifest, records: tuple[Record, ...], digest: str) -> dict[str, Any]:
    tests: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for record in records:
        tests[f"{_result_of(record)}Tests"].append(f"{record.kind} {record.id}")
    result = "FAILED" if manifest.pytest_exit_status or tests["failedTests"] else "PASSED"
    if result == "PASSED" and tests["warnedTests"]:
        result = "WARNED"
    configuration = _configuration(manifest.source_tree, digest)
    if manifest.source.commit and not manifest.source.dirty:
        configuration.append({"name": "commit", "digest": {"gitCommit": manifest.source.commit}})
    return {"result": result, "configuration": configuration, **tests}


def _configuration(source_tree: str, digest: str) -> list[dict[str, Any]]:
    return [
        {"name": "source tree", "digest": {"gitTree": source_tree}},
        {"name": "SHA256SUMS of the bundle", "digest": {"sha256": digest}},
    ]


def _result_of(record: Record) -> Literal["passed", "warned", "failed"]:
    if not record.outcome.is_verdict:
        return "warned"
    return "passed" if record.outcome == Outcome.OK else "failed"
