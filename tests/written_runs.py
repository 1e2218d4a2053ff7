"""Record files as runs leave them: with the file that says what was written."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pytest_fa.records.written import WRITTEN_SCHEMA, WrittenRecords, write_written


def end_run(records: Path, exit_status: int) -> Path:
    """Write beside a record file that its run wrote exactly this content, and ended with this status."""
    content = records.read_bytes()
    sha256, count = hashlib.sha256(content).hexdigest(), len(content.splitlines())
    write_written(records, WrittenRecords(WRITTEN_SCHEMA, sha256, count, exit_status))
    return records
