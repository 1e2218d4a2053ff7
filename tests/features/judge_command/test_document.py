"""The published JSON Schema of the judge's document: it is what the code writes, and it only grows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pytest_fa
from pytest_fa.features.judge_command.conclude import status_of
from pytest_fa.features.judge_command.document import EXIT_STATUSES, JudgeDocument, Status, schema, schema_text
from pytest_fa.records.outcome import Outcome
from tests.factories import RECORDED

PUBLISHED = Path(pytest_fa.__file__).parent / "features" / "judge_command" / "judge.schema.json"
FIRST = RECORDED / "earlier" / "judge-1.0.schema.json"


def test_the_published_schema_is_that_of_the_code() -> None:
    """`judge.schema.json`, which the package carries, is the schema of the document that the code writes.

    `python -m pytest_fa judge --schema` prints the new one.
    """
    assert PUBLISHED.read_text(encoding="utf-8") == schema_text()


def lost(old: Any, new: Any, place: str = "$") -> Iterator[str]:
    """What `old` promises to a reader and `new` does not; a new field is nothing that a reader can miss."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key in ("title", "description", "default"):
                continue
            if key not in new:
                yield f"{place}.{key}"
            elif key == "required":
                yield from (f"{place}.required: {name}" for name in value if name not in new[key])
            elif key == "enum":
                yield from (f"{place}.enum: {name}" for name in value if name not in new[key])
            else:
                yield from lost(value, new[key], f"{place}.{key}")
    elif old != new:
        yield f"{place}: {old!r} became {new!r}"


def test_the_schema_keeps_the_promises_of_the_first_version() -> None:
    """Every field of version 1.0 is there, with the same type."""
    first = json.loads(FIRST.read_text(encoding="utf-8"))
    assert list(lost(first, schema())) == []


@pytest.mark.parametrize(
    ("change", "loss"),
    [
        (lambda fields: fields.pop("seconds"), "seconds"),
        (lambda fields: fields.update(seconds={"type": "string"}), "type"),
        (lambda fields: fields.update(later={"type": "string"}), ""),
    ],
    ids=["a field is gone", "a field has another type", "a new field"],
)
def test_a_lost_promise_is_seen(change: Any, loss: str) -> None:
    """A removed field and a changed type are seen; a new field is none."""
    new = json.loads(FIRST.read_text(encoding="utf-8"))
    change(new["$defs"]["JudgeDocument"]["properties"])
    texts = list(lost(json.loads(FIRST.read_text(encoding="utf-8")), new))
    assert (bool(texts), loss in "".join(texts)) == (bool(loss), True)


def test_every_status_has_an_exit_status() -> None:
    """The exit statuses are those that the page promises."""
    assert set(EXIT_STATUSES) == set(Status)
    names = ("faster", "slower", "usage", "machine", "undecided", "cheat")
    named = {name: EXIT_STATUSES[Status(name)] for name in names}
    assert named == {"faster": 0, "slower": 3, "usage": 4, "machine": 5, "undecided": 10, "cheat": 20}
    assert {status for name, status in EXIT_STATUSES.items() if name not in named} == {1}


def test_every_failure_has_a_status() -> None:
    """Every failure has a status whose exit status says so, and only a proven cheat is called one."""
    statuses = {outcome: status_of(outcome) for outcome in Outcome if outcome.is_failure}
    assert {EXIT_STATUSES[status] for status in statuses.values()} == {1, 20}
    assert [outcome for outcome, status in statuses.items() if status == Status.CHEAT] == [Outcome.CHEAT]


def test_a_document_of_a_later_minor_version_is_read() -> None:
    """A reader of 1.0 reads a document with a field that it does not know."""
    fields = schema()["$defs"]["JudgeDocument"]
    assert fields.get("additionalProperties", True) is True
    written = msgspec.json.schema(JudgeDocument)["$defs"]["JudgeDocument"]
    assert (list(written["properties"]), written["required"]) == (list(fields["properties"]), fields["required"])
