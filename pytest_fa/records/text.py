r"""Replace characters that change what a terminal shows by visible escapes, such as `\x1b` for ESC.

Kernels, compilers and manifests supply texts that are printed and recorded.  With control characters, such a text could
recolour or hide other lines of a terminal.  With bidirectional controls, it could change the order of its own letters.
A line that is a workflow command, such as `::set-output name=a::b`, would be executed by GitHub's runner, which reads
the terminal's output.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, TypeVar

import msgspec

AnyValue = TypeVar("AnyValue")

# C0 controls except \n and \t; DEL and C1 controls; bidirectional controls; surrogates, which UTF-8 cannot encode.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The first mark of what GitHub's runner takes for a command: `::name ...::` at the start of a line, `##[name ...]`
# anywhere.  It strips spaces of every kind before the first form, and ends lines only at \n and \r.
_COMMAND = re.compile(r"(?<![^\n])(?P<space>[^\S\n]*):(?=:[^\n]*?::)|(?P<marks>##)(?=\[)")
_CONTROL_ESCAPES = (rb"\b", rb"\f", rb"\r", rb"\u")  # of control characters in JSON, except tab and line break
_COMMAND_IN_JSON = re.compile(rb"""(?:"|\\n)(?: |\\t)*::""")  # it begins a string or follows a line break
_WITHOUT_TEXT = frozenset({int, float, bool, type(None)})


def printable(text: str) -> str:
    r"""Return `text` with each control character except \n and \t as an escape, such as `\x1b` or `\u202e`.

    The first mark of a workflow command becomes an escape as well: `::error::x` becomes `\x3a:error::x`.
    """
    return _COMMAND.sub(_disarm, _UNSAFE.sub(_escape, text))


def printable_struct(value: AnyValue) -> AnyValue:
    """Return a struct in which every string is printable, including those in its structs, tuples, lists and dicts.

    A part that needs no change is not copied; a struct without such characters is returned itself.
    """
    cleaned: AnyValue = _clean(value)
    return cleaned


def is_suspicious(encoded: bytes) -> bool:
    """Whether JSON may have a text that is not printable.  Every line is searched, so this is fast."""
    is_plain = encoded.isascii() and b"\x7f" not in encoded
    has_escape = b"\\" in encoded and any(escape in encoded for escape in _CONTROL_ESCAPES)
    has_command = b"##[" in encoded or (b"::" in encoded and bool(_COMMAND_IN_JSON.search(encoded)))
    return not is_plain or has_escape or has_command


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"  # noqa: PLR2004  # two or four digits


def _disarm(match: re.Match[str]) -> str:
    return r"\x23#" if match["marks"] else rf"{match['space']}\x3a"


def _clean(value: Any) -> Any:  # noqa: ANN401  # a value of any field
    if isinstance(value, Enum):  # one of our own words, even if it is a string
        return value
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changes = {name: cleaned for name, field in fields.items() if (cleaned := _clean(field)) is not field}
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        items = [(_clean(key), _clean(item)) for key, item in value.items()]
        return value if all(map(_is_same, items, value.items())) else dict(items)
    if isinstance(value, tuple | list) and not _WITHOUT_TEXT.issuperset(map(type, value)):
        parts = [_clean(item) for item in value]
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else type(value)(parts)
    return value


def _is_same(new: tuple[Any, Any], old: tuple[Any, Any]) -> bool:
    return new[0] is old[0] and new[1] is old[1]
