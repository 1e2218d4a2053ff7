"""Read a record from its JSON line, of the current schema or an earlier one."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import UsageProblem
from pytest_fa.records.earlier import CURRENT_NAMES_SCHEMA, EARLIEST_SCHEMA, upgrade_record
from pytest_fa.records.record import SCHEMA, Record, RecordKind

WITH_CASE: tuple[RecordKind, ...] = ("correct", "property", "speed", "profile", "sanitize")
_CURRENT_START = f'{{"schema":{SCHEMA},'.encode()  # the first bytes of a line that this version wrote


def read_record(data: bytes | str | dict[str, Any]) -> Record:
    """Return a record from its JSON line, or from the output of `to_builtins`.

    A record of schema 3 gets the names of schema 4, and that number.
    Raises `msgspec.ValidationError` if it is not a record of a supported schema, if a figure is out of range, or if its
    case is missing or impossible.  Other malformed JSON raises another `ValueError`, or `RecursionError`.
    """
    record = _convert(data.encode() if isinstance(data, str) else data)
    if problem := _problem_of_case(record):
        raise msgspec.ValidationError(problem)
    return record


def _convert(data: bytes | dict[str, Any]) -> Record:
    if isinstance(data, bytes) and data.startswith(_CURRENT_START):
        return msgspec.json.decode(data, type=Record)
    content = msgspec.json.decode(data) if isinstance(data, bytes) else data
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, int) or not EARLIEST_SCHEMA <= schema <= SCHEMA:
        supported = f"this version reads schemas {EARLIEST_SCHEMA} to {SCHEMA}"
        raise msgspec.ValidationError(f"record schema is {schema}; {supported}")
    if schema < CURRENT_NAMES_SCHEMA:
        content = {**upgrade_record(content), "schema": CURRENT_NAMES_SCHEMA}
    return msgspec.convert(content, Record)


def _problem_of_case(record: Record) -> str:
    """Return why the record's case cannot be one, such as 8 heads that share 3 key/value heads; empty if it can."""
    if record.case is None:
        return f"a record of kind {record.kind} has no case" if record.kind in WITH_CASE or record.speed else ""
    try:
        parse_case(record.case.id)
    except UsageProblem as problem:
        return str(problem)
    return ""
