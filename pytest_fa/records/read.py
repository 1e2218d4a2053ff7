"""A record from its line: today's schema, or an earlier one in today's names."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_fa.records.earlier import EARLIEST_SCHEMA, upgrade_record
from pytest_fa.records.record import SCHEMA, Record

_TODAY = f'{{"schema":{SCHEMA},'.encode()  # how a line begins that this version wrote


def read_record(data: bytes | str | dict[str, Any]) -> Record:
    """A record from its line or from builtins.

    Raises `msgspec.ValidationError` for anything that is no record of a known schema.
    """
    line = data.encode() if isinstance(data, str) else data
    if isinstance(line, bytes) and line.startswith(_TODAY):
        return msgspec.json.decode(line, type=Record)
    content = msgspec.json.decode(line) if isinstance(line, bytes) else line
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema == SCHEMA:
        return msgspec.convert(content, Record)
    if not isinstance(schema, int) or not EARLIEST_SCHEMA <= schema < SCHEMA:
        raise msgspec.ValidationError(f"schema is {schema}; {EARLIEST_SCHEMA} to {SCHEMA} can be read")
    record: Record = msgspec.convert({**upgrade_record(content), "schema": SCHEMA}, Record)
    return record
