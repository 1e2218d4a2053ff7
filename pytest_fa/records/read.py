"""Read a record from its JSON, or from a line of a file, which may be compact."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.feature_keys import converted
from pytest_fa.errors import UsageProblem
from pytest_fa.records.added import added_kinds, added_types
from pytest_fa.records.compact import Content, completed, read_part
from pytest_fa.records.record import JUDGED_KINDS, SCHEMA, Record, RecordKind, to_json
from pytest_fa.records.text import printable_struct

_ADDED = added_types()  # imported with this module, so that reading a record later imports nothing
_WITH_CASE: tuple[RecordKind, ...] = (*JUDGED_KINDS, *added_kinds(spans_cases=False))
_CURRENT_START = f'{{"schema":{SCHEMA},'.encode()  # the first bytes of a line of a run


class EarlierRecord(msgspec.ValidationError):
    """A record of an earlier schema.  `content` is its JSON object."""

    def __init__(self, schema: int, content: Content) -> None:
        advice = "measure it again with --fa-save, or use the version of pytest-fa that wrote it"
        super().__init__(f"record schema is {schema}, and this version reads schema {SCHEMA}: {advice}")
        self.content = content


def read_record(data: bytes | str | dict[str, Any]) -> Record:
    """Return a record from its JSON line, or from the output of `to_builtins`.

    Raises `msgspec.ValidationError` if it is not a record of this schema, if a figure is out of range, or if its case
    is missing or impossible; `EarlierRecord` for an earlier schema.  Other malformed JSON raises another `ValueError`,
    or `RecursionError`.
    """
    record = _convert(data.encode() if isinstance(data, str) else data)
    if problem := _problem_of_case(record):
        raise msgspec.ValidationError(problem)
    return msgspec.structs.replace(record, added=_typed(record.added)) if record.added else record


def why_unreadable(record: Record) -> str:
    """Why a record could not be read again, such as a figure that is out of range; empty if it could."""
    try:
        read_record(to_json(record))
    except ValueError as problem:
        return str(problem)
    return ""


def read_line(line: bytes, parts: dict[str, Content]) -> Record | None:
    """Return the record of a line of a file.  A line with a part of records is added to `parts`, and gives None.

    Raises the same as `read_record`.
    """
    content = None if line.startswith(_CURRENT_START) else msgspec.json.decode(line)
    if not isinstance(content, dict) or not content.keys() & {"part", "parts"}:
        return read_record(line)
    if "parts" in content:
        return read_record(completed(content, parts))
    if "schema" in content:
        _require_schema(content)
    parts[msgspec.convert(content["part"], str)] = printable_struct(read_part(content))
    return None


def _convert(data: bytes | dict[str, Any]) -> Record:
    if isinstance(data, bytes) and data.startswith(_CURRENT_START):
        return msgspec.json.decode(data, type=Record)
    content = msgspec.json.decode(data) if isinstance(data, bytes) else data
    _require_schema(content)
    return msgspec.convert(content, Record)


def _typed(added: Content) -> Content:
    """What features added, each with the type of its feature.  What an absent feature added stays as it is."""
    return {
        name: converted(value, _ADDED[name], f"$.added.{name}") if name in _ADDED else value
        for name, value in added.items()
    }


def _require_schema(content: Any) -> None:  # noqa: ANN401  # any JSON
    """Raise `EarlierRecord` or `msgspec.ValidationError` for another schema than that of this version."""
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, int) and not isinstance(schema, bool) and schema < SCHEMA:
        raise EarlierRecord(schema, content)
    if schema != SCHEMA:
        raise msgspec.ValidationError(f"record schema is {schema!r}; this version reads schema {SCHEMA}")


def _problem_of_case(record: Record) -> str:
    """Return why the record's case cannot be one, such as 8 heads that share 3 key/value heads; empty if it can."""
    if record.case is None:
        return f"a record of kind {record.kind} has no case" if record.kind in _WITH_CASE or record.speed else ""
    try:
        parse_case(record.case.id)
    except UsageProblem as problem:
        return str(problem)
    return ""
