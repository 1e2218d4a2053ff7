"""Read a record from its JSON line, of the current schema or an earlier one."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_fa.records.earlier import EARLIEST_SCHEMA, upgrade_record
from pytest_fa.records.record import SCHEMA, Record

_CURRENT_START = f'{{"schema":{SCHEMA},'.encode()  # the first bytes of a line that this version wrote


def read_record(data: bytes | str | dict[str, Any]) -> Record:
    """Return a record from its JSON line, or from the output of `to_builtins`.

    Raises `msgspec.ValidationError` if it is not a record of a supported schema.
    """
    line = data.encode() if isinstance(data, str) else data
    if isinstance(line, bytes) and line.startswith(_CURRENT_START):
        return msgspec.json.decode(line, type=Record)
    content = msgspec.json.decode(line) if isinstance(line, bytes) else line
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema == SCHEMA:
        return msgspec.convert(content, Record)
    if not isinstance(schema, int) or not EARLIEST_SCHEMA <= schema < SCHEMA:
        supported = f"this version reads schemas {EARLIEST_SCHEMA} to {SCHEMA}"
        raise msgspec.ValidationError(f"record schema is {schema}; {supported}")
    record: Record = msgspec.convert({**upgrade_record(content), "schema": SCHEMA}, Record)
    return record
