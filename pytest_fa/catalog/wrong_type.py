"""Words for a value of the wrong type in a manifest: the key, the value found, and the line to write."""

from __future__ import annotations

import json
import re
from typing import Any

from pytest_fa.attention import parts
from pytest_fa.attention.dtypes import dtype_called
from pytest_fa.attention.sizes import RANGE

MAX_CHARACTERS = 60  # of a value that a message shows
KINDS = {dict: "object", list: "array", str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
WORDS = {
    "array": "a list",
    "object": "a mapping of keys to values",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
# What may be written for a key whose value is a mapping.
EXAMPLES = {
    "the manifest": "supports: {dtype: [fp16]}",
    "entry": 'entry: {target: "entry:forward"}',
    "supports": "supports: {dtype: [fp16]}",
    "limits": "limits: {spill_bytes: 0}",
    "instructions": "instructions: {HMMA: {min: 1}}",
    "defines": "defines: {BLOCK_M: 64}",
    "variants": "variants: {NAME: {}}",
    "suppressions": "suppressions: {racecheck: {most: 1, because: REASON}}",
    "call": "call: {arguments: [q, k, v]}",
    "keywords": "keywords: {scale: scale}",
}
NUMBERS = {"head_dim": "[64, 128]"}  # keys whose values are lists of numbers
TEXTS = ("step", "because", "expect", "omits", "constant")  # keys whose value is any text
_EXPECTED = re.compile(r"Expected `([^`]+)`(?:, got `(\w+)`)?(.*)", re.DOTALL)
_PLAIN = re.compile(r"[\w.+/=-]+(?:, *[\w.+/=-]+)*", re.ASCII)  # one word or several, which need no quotes in a list


def wrong_type(text: str, where: str, data: Any) -> str:  # noqa: ANN401  # any YAML value
    """Convert msgspec's message `text` about the place `where`, such as `$.supports.dtype`, of a manifest's `data`.

    A place in a mapping is `[...]`, whatever its key; then the value is in the message only if it is clear which it is.
    """
    key = where.removeprefix("$").lstrip(".") or "the manifest"
    match = _EXPECTED.fullmatch(text)
    if match is None:
        return f"{key}: {text}"
    expected, kind, limit = match[1].split(" | "), match[2], match[3]
    values = [value for value in wrong_values(data, where) if kind in (None, KINDS.get(type(value)))]
    subject = f"{key} is {_shown(values[0])}" if values and (kind or len(values) == 1) else f"{key} is wrong"
    return f"{subject}; {_what_to_write(key, expected, values[0] if values else None) if kind else _limited(limit)}"


def wrong_values(data: Any, where: str) -> list[Any]:  # noqa: ANN401  # any YAML value
    """The values at a place; several if the place contains `[...]`."""
    values = [data]
    for field, index in re.findall(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]", where):
        mappings = [value for value in values if isinstance(value, dict)]
        if field:
            values = [value[field] for value in mappings if field in value]
        elif index == "...":
            values = [value for mapping in mappings for value in mapping.values()]
        else:
            lists = [value for value in values if isinstance(value, list)]
            values = [items[int(index)] for items in lists if int(index) < len(items)]
    return values


def _shown(value: Any) -> str:  # noqa: ANN401  # any YAML value
    """A value as it may be written in YAML, in one short line."""
    if value is None:
        return "empty"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _what_to_write(key: str, expected: list[str], value: Any) -> str:  # noqa: ANN401  # any YAML value
    """The line to write, as far as the value shows it, or the types that are allowed."""
    name = key.rpartition(".")[2]
    is_scalar = isinstance(value, (str, int)) and not isinstance(value, bool)
    allowed = next((part.claims for part in parts.PARTS if part.supports == name), ())
    if expected[0] == "array" and name in NUMBERS and not str(value).isdecimal():
        return f"it must be a list of numbers, such as `{name}: {NUMBERS[name]}`, or a range, such as `{name}: {RANGE}`"
    if expected[0] == "array" and allowed and value not in allowed:
        return f"it must be a list of {', '.join(map(str, allowed))}"
    if expected[0] == "array" and is_scalar:
        text = _with_dtypes(str(value)) if name == "dtype" else str(value)
        return f"write `{name}: [{text if _PLAIN.fullmatch(text) else json.dumps(text)}]`"
    if expected[0] == "object" and (line := _source_line(name, value) or EXAMPLES.get(name)):
        return f"write {'keys and values' if name == 'the manifest' else 'a mapping'}, such as `{line}`"
    if name in TEXTS and is_scalar:
        return f"it must be text; write `{name}: {json.dumps(str(value))}`"
    return f"it must be {' or '.join(WORDS[kind] for kind in expected if kind in WORDS)}"


def _with_dtypes(text: str) -> str:
    """One word or several with commas, with the names of dtypes as a manifest has them."""
    return ", ".join(dtype_called(word.strip()) or word.strip() for word in text.split(","))


def _source_line(name: str, value: Any) -> str | None:  # noqa: ANN401  # any YAML value
    """The entry for a value that names a source or a function."""
    if name != "entry" or not isinstance(value, str) or not re.fullmatch(r"[\w.:]+", value, re.ASCII):
        return None
    if value.endswith(".cu"):
        return f"entry: {{source: {value}}}"
    module, _, function = value.partition(":")
    return f'entry: {{target: "{module.removesuffix(".py")}:{function or "forward"}"}}'


def _limited(limit: str) -> str:
    """The words for a limit, such as ` >= 1`, ` of length >= 1` and ` matching regex '...'`."""
    if "regex" in limit:
        return "its form is a dtype and a head_dim, such as `fp16-d64`"  # the only text with a form
    items = " items" if "length" in limit else ""
    bound = limit.replace(" of length", "").replace(">=", "at least").replace("<=", "at most").strip()
    if items and bound == "at least 1":
        return "it must not be empty"
    return f"it must {'have' if items else 'be'} {bound}{items}"
