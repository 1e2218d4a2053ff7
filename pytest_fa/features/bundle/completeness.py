"""Whether the records of a bundle are those that its run wrote: each once, of its time and its sources.

None of this stops a maker who writes new records and new hashes.  Only a signature shows who made a bundle.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pytest_fa.features.bundle.bundle_manifest import BundleManifest
from pytest_fa.features.gate.gated import SHORT_DIGITS, Gate
from pytest_fa.records.record import Record, to_json
from pytest_fa.table.tolerance_lines import reference_lines

MAX_CLOCK_ERROR = timedelta(days=1)  # between the maker's clock and this one
MAX_NAMED = 3


def incomplete(manifest: BundleManifest, records: Sequence[Record]) -> Iterator[str]:
    """Yield how the records differ from what the run wrote, as the manifest has it."""
    written = manifest.written
    if written.difference:
        yield f"the run noticed that its records were changed: {written.difference}"
    if written.count != len(records):
        yield f"the run wrote {written.count} records, the bundle has {len(records)}"
    if written.exit_status != manifest.pytest_exit_status:
        yield f"the run ended with {written.exit_status}, the manifest says {manifest.pytest_exit_status}"
    keys = Counter((record.kind, record.id, to_json(record)) for record in records)
    for (kind, record_id, _), count in keys.items():
        if count > 1:
            yield f"{kind} {record_id}: this record occurs {count} times"


def in_the_future(manifest: BundleManifest, now: datetime | None = None) -> Iterator[str]:
    """Yield it if the bundle was made later than now, or at no time at all."""
    try:
        created = datetime.fromisoformat(manifest.created)
        is_later = created > (now or datetime.now(UTC)) + MAX_CLOCK_ERROR
    except (ValueError, TypeError):
        yield f"it was created at {manifest.created!r}, which is not a time with a time zone"
        return
    if is_later:
        yield f"it was created at {manifest.created}, which is in the future"


def changed_sources(records: Sequence[Record], hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield the source files that are in the bundle with another content than that which was judged.

    `hashes` has the sha256 of each file of the bundle.
    """
    judged: dict[tuple[str, str, str], None] = {}
    for record in records:
        judged |= {(record.variant, path, sha256): None for path, sha256 in record.sources.items()}
    for variant, path, sha256 in judged:
        if path in hashes and hashes[path] != sha256:
            yield f"{path}: its sha256 is {hashes[path][:16]}..., that of the judged {variant} is {sha256[:16]}..."


def repeated_keys(lines: bytes) -> Iterator[str]:
    """Yield each line of JSON with an object in which a key occurs twice: readers differ in which one they take."""
    for number, line in enumerate(lines.splitlines(), 1):
        repeated: list[str] = []

        def collect(pairs: list[tuple[str, Any]], repeated: list[str] = repeated) -> None:
            counts = Counter(key for key, _ in pairs)
            repeated += [key for key, count in counts.items() if count > 1]

        try:
            json.loads(line, object_pairs_hook=collect)
        except (ValueError, RecursionError):
            continue  # reading the records says what is wrong with it
        if repeated:
            yield f"line {number}: the key {repeated[0]!r} occurs twice in one object"


def notes(records: Sequence[Record], hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield what the bundle does not show although it is verified: what was not judged, and sources that it lacks."""
    variants = {record.variant: record for record in records if record.role == "candidate"}
    kinds = Counter((record.variant, record.kind) for record in records)
    for variant in variants:
        missing = [kind for kind in ("correct", "property") if not kinds[variant, kind]]
        if missing:
            yield f"{variant}: no record of kind {' and none of kind '.join(missing)}"
    lacking = sorted({path for record in records for path in record.sources if path not in hashes})
    if lacking:
        more = f" and {len(lacking) - MAX_NAMED} more" if len(lacking) > MAX_NAMED else ""
        yield f"sources that are not in the bundle: {', '.join(lacking[:MAX_NAMED])}{more}"
    for record in records:
        if (gate := Gate.of(record)) and gate.revision:
            commit = gate.revision.commit[:SHORT_DIGITS]
            yield f"{record.variant}: gated against commit {commit}, whose sources are not in the bundle"
    declared = {record.variant: record.own_tolerance for record in records if record.own_tolerance and record.check}
    yield from (f"{variant}: judged by its own manifest's {text}" for variant, text in declared.items())
    yield from reference_lines(records)
