"""The compact lines of a saved file, in which records share their environment, their builds and their command.

A line with `part` has fields that several records share, and a name for them.  A line with `parts` is a record: it
names its parts, whose lines stand above it, and has its other fields.  A field with its usual value is left out.  The
case is a case id, and left out if the id of the record ends with it.  A stage, a bound and the costs are each a list of
their values, without usual ones at its end.  Seconds of the tool itself have 4 significant digits; errors, times,
samples and ratios have all of theirs.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.errors import UsageProblem
from pytest_fa.records.checks import Bound, Check, Repeats
from pytest_fa.records.costs import Costs
from pytest_fa.records.record import Record, Stage, to_json
from pytest_fa.records.text import printable

Content = dict[str, Any]  # a JSON object

# Fields that records of one run, of one build, and of one command have in common.
GROUPS = (
    ("schema", "variant", "role", "environment", "machine", "source", "sources", "other_plugins", "unprotected"),
    ("builds",),
    ("rerun_command",),
)
# Usual values of fields that have no default.
USUAL: dict[type[msgspec.Struct], Content] = {
    Record: {
        "outcome": "ok",
        "message": "",
        "caught_by": (),
        "builds": (),
        **dict.fromkeys(("check", "repeats", "diagnosis", "speed")),
    },
    Check: {"policy": "same_precision", "passed": True, "nonfinite_count": 0, "bad_count": 0, "first_bad": None},
    Bound: {"holds": True},
    Repeats: {"differing": 0, "element_count": 0, "first": None, "why_no_smem_poison": None},
}
DIGITS = 4  # significant ones
SECONDS = ("stages", "costs", "compile_seconds")  # fields in which every fraction is one of seconds

_PLACEHOLDERS = re.compile(r"\{\{|\}\}|\{case\}|\{variant\}")
_TYPES = {field.name: field.type for field in msgspec.structs.fields(Record)}


class _Named(msgspec.Struct):
    parts: list[str]


# -- writing ----------------------------------------------------------------------------------------------------------


def compact_lines(records: Iterable[Record], encode: Callable[[Record], bytes] = to_json) -> Iterator[bytes]:
    """Yield a line of JSON for each record, and before it one for each part that it is the first to need.

    `encode` returns the JSON of a whole record.
    """
    contents = [_content(record, msgspec.json.decode(encode(record))) for record in records]
    all_parts = [dict(_parts(content)) for content in contents]
    uses = Counter(name for parts in all_parts for name in parts)
    written: set[str] = set()
    for content, parts in zip(contents, all_parts, strict=True):
        shared = {name: part for name, part in parts.items() if uses[name] > 1}
        yield from (part_line(name, part) for name, part in shared.items() if name not in written)
        written.update(shared)
        own = {key: value for key, value in content.items() if not any(key in part for part in shared.values())}
        yield msgspec.json.encode({"parts": list(shared), **own}) + b"\n"


def part_line(name: str, part: Content) -> bytes:
    """The line of a part."""
    return msgspec.json.encode({"part": name, **part}) + b"\n"


def _parts(content: Content) -> Iterator[tuple[str, Content]]:
    """Yield the fields of each group that a record has, with a name that another content would not have."""
    for group in GROUPS:
        part = {key: content[key] for key in group if key in content}
        if part:
            yield hashlib.sha256(msgspec.json.encode(part)).hexdigest()[:8], part


def _content(record: Record, whole: Content) -> Content:
    """The compact JSON object of a record, with the fields that it shares; `whole` is its whole JSON object."""
    content: Content = _slim(record, whole)
    content["stages"] = [_row(*each) for each in zip(record.stages, whole["stages"], strict=True)]
    if record.check:
        content["check"]["bounds"] = [
            _row(*each) for each in zip(record.check.bounds, whole["check"]["bounds"], strict=True)
        ]
    if record.added:
        content["added"] = {name: _slim(each, whole["added"][name]) for name, each in record.added.items()}
    if record.costs:
        content["costs"] = _row(record.costs, whole["costs"])
    content |= {name: _rounded(content[name]) for name in SECONDS if name in content}
    case = record.case.id if record.case and _is_named_by_its_id(record.case) else content["case"]
    content["case"] = case
    if case == _case_in_id(content):
        del content["case"]
    content["rerun_command"] = _template(whole["rerun_command"], whole["variant"], case)
    return content


def _slim(value: Any, content: Any) -> Any:  # noqa: ANN401  # a value of any field, and its JSON
    """Return the JSON of a value without usual values."""
    if isinstance(value, msgspec.Struct):
        usual = _usual_values(type(value))
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return {name: _slim(each, content[name]) for name, each in fields if name not in usual or usual[name] != each}
    if isinstance(value, tuple):
        return [_slim(*pair) for pair in zip(value, content, strict=True)]
    return content


def _row(value: msgspec.Struct, whole: Content) -> list[Any]:
    """The values of a struct's JSON object in the order of its fields, without usual ones at the end."""
    names, usual = list(whole), _usual_values(type(value))
    while names[-1] in usual and usual[names[-1]] == getattr(value, names[-1]):
        del names[-1]
    return [whole[name] for name in names]


@functools.cache
def _usual_values(kind: type[msgspec.Struct]) -> Content:
    """The usual value of each field that may be left out: its default, or that of `USUAL`."""
    fields = msgspec.structs.fields(kind)
    defaults = {field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT}
    empty = {field.name: field.default_factory() for field in fields if field.default_factory is not msgspec.NODEFAULT}
    return {**defaults, **empty, **USUAL.get(kind, {})}


def _rounded(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {name: _rounded(item) for name, item in value.items()} if isinstance(value, dict) else value


def _is_named_by_its_id(case: Case) -> bool:
    try:
        return parse_case(case.id) == case
    except UsageProblem:
        return False


def _template(command: str, variant: str, case: object) -> str:
    """The rerun command with placeholders for the names that differ between the records of a run."""
    placeholders = {"{": "{{", "}": "}}", variant: "{variant}"} | ({case: "{case}"} if isinstance(case, str) else {})
    names = "|".join(re.escape(name) for name in placeholders if name not in "{}")
    pattern = rf"(?<![\w@-])(?:{names})(?![\w@-])|[{{}}]"
    return re.sub(pattern, lambda match: placeholders[match[0]], command)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_part(content: Content) -> Content:
    """Return the fields of a part, each as the value that a record has.

    Raises `msgspec.ValidationError` for a value of another type.
    """
    return {name: msgspec.convert(value, _TYPES[name]) for name, value in content.items() if name in _TYPES}


def part_names(line: bytes) -> list[str]:
    """The parts that a line names, if it is one of a record."""
    try:
        return msgspec.json.decode(line, type=_Named).parts
    except (ValueError, RecursionError):
        return []


def completed(content: Content, parts: Mapping[str, Content]) -> Content:
    """Return the JSON object of a record with the fields of its parts and all usual values that it needs.

    Raises `msgspec.ValidationError` if one of its parts is missing.
    """
    names = msgspec.convert(content["parts"], tuple[str, ...])
    if missing := [name for name in names if name not in parts]:
        raise msgspec.ValidationError(f"no line above it has its part {missing[0]!r}")
    complete = dict(USUAL[Record])
    for name in names:
        complete |= parts[name]
    complete |= content
    case = complete.get("case", _case_in_id(complete))
    if isinstance(template := complete.get("rerun_command"), str):
        complete["rerun_command"] = _command(template, complete.get("variant"), case)
    complete["case"] = _case(case)
    for name, kind in (("check", Check), ("repeats", Repeats)):
        if isinstance(complete[name], dict):
            complete[name] = USUAL[kind] | complete[name]
    _expand(complete, "stages", lambda rows: [_object(row, Stage) for row in rows])
    _expand(complete["check"], "bounds", lambda rows: [_object(row, Bound) for row in rows])
    _expand(complete, "costs", lambda row: _object(row, Costs))
    return complete


def _case_in_id(content: Content) -> object:
    """The case that a record's id names after its variant; None if the id is the variant's name."""
    record_id, start = str(content.get("id")), f"{content.get('variant')}-"
    return record_id[len(start) :] if record_id.startswith(start) else None


def _case(value: object) -> object:
    """The case of a case id.  Raises `msgspec.ValidationError` for a text that is none."""
    try:
        return parse_case(value) if isinstance(value, str) else value
    except UsageProblem as problem:
        raise msgspec.ValidationError(str(problem)) from None


def _command(template: str, variant: object, case: object) -> str:
    """The rerun command of a template."""
    names = {"{{": "{", "}}": "}", "{case}": str(case), "{variant}": str(variant)}
    return printable(_PLACEHOLDERS.sub(lambda match: names[match[0]], template))


def _expand(content: Any, name: str, change: Callable[[list[Any]], Any]) -> None:  # noqa: ANN401  # JSON
    """Replace a field that is a list."""
    if isinstance(content, dict) and isinstance(value := content.get(name), list):
        content[name] = change(value)


def _object(row: Any, kind: type[msgspec.Struct]) -> Any:  # noqa: ANN401  # JSON
    """The JSON object of a struct whose values are a list; what is no such list is returned itself."""
    names = kind.__struct_fields__
    fits = isinstance(row, list) and len(row) <= len(names)
    return USUAL.get(kind, {}) | dict(zip(names, row, strict=False)) if fits else row
