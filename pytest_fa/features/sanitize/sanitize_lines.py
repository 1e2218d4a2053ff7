"""The lines of sanitizer runs in the terminal."""

from __future__ import annotations

from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.records.record import Record

MAX_FINDINGS = 4


def sanitizer_lines(records: list[Record]) -> list[str]:
    """A line for each run of a sanitizer, with its findings below."""
    lines = [line for each in records if (result := Sanitized.of(each)) for line in _sanitized(each, result)]
    return [*(["compute-sanitizer"] if lines else []), *lines]


def sanitizer_properties(record: Record) -> list[tuple[str, str]]:
    """The JUnit properties of a sanitizer run: names and texts."""
    result = Sanitized.of(record)
    if not result:
        return []
    properties = (("status", result.status), ("log", result.log))
    return [(f"fa.sanitizer.{name}", text) for name, text in properties if text]


def _sanitized(record: Record, sanitized: Sanitized) -> list[str]:
    is_unmeasured = sanitized.status in ("not covered", "not measured")
    result = sanitized.message if is_unmeasured else f"{sanitized.status} {sanitized.message}"
    log = f"; {sanitized.log}" if sanitized.log else ""
    lines = [f"{record.id}: {result.strip()} ({sanitized.seconds:.1f} s{log})"]
    return [*lines, *(f"  {text}" for text in sanitized.findings[:MAX_FINDINGS])]
