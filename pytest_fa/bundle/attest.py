"""State what a verified bundle says as an in-toto statement, which a CI system can sign.

The envelope is the in-toto Statement v1, the predicate Test Result v0.1 (in-toto attestation framework).
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any, Literal

from pytest_fa.bundle.archive import read_archive
from pytest_fa.bundle.bundle_manifest import MANIFEST, NOT_A_FAILURE, BundleManifest, read_manifest
from pytest_fa.bundle.seal import SEAL
from pytest_fa.bundle.verify import verify_bundle
from pytest_fa.errors import FaError
from pytest_fa.records.files import read_stream
from pytest_fa.records.record import Record

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
WARNED = frozenset({"not_measured", "inconclusive"})


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
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": path.name, "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}],
        "predicateType": PREDICATE,
        "predicate": _predicate(manifest, records, verification.digest),
    }
    return json.dumps(statement, indent=1).encode() + b"\n"


def _predicate(manifest: BundleManifest, records: tuple[Record, ...], digest: str) -> dict[str, Any]:
    tests: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for record in records:
        tests[f"{_result_of(record)}Tests"].append(f"{record.kind} {record.id}")
    result = "FAILED" if manifest.pytest_exit_status or tests["failedTests"] else "PASSED"
    if result == "PASSED" and tests["warnedTests"]:
        result = "WARNED"
    configuration = [
        {"name": "source tree", "digest": {"gitTree": manifest.source_tree}},
        {"name": "SHA256SUMS of the bundle", "digest": {"sha256": digest}},
    ]
    if manifest.source.commit and not manifest.source.dirty:
        configuration.append({"name": "commit", "digest": {"gitCommit": manifest.source.commit}})
    return {"result": result, "configuration": configuration, **tests}


def _result_of(record: Record) -> Literal["passed", "warned", "failed"]:
    if record.outcome in WARNED:
        return "warned"
    return "passed" if record.outcome in NOT_A_FAILURE else "failed"
