"""Hypothesis strategies of the fuzz tests: JSON values and bytes that are arbitrary, or changed in a few places."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

# Numbers at the ends of ranges and types, and texts that change a terminal or that a parser may take for something.
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 4, 5, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1e-6, 5e-324, 1e11, 1e12, 1e99, 1e100, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "\x1b[2J", "\x9b31m\x7f\r", "\u202e", "\ud800", "\0", "a" * 2000, "../../x", "/etc/passwd", "$x$", "[/red]"),
    *("NaN", "1e308", "{", "%s", "b1h1s1d1-fp16-seed0", [], {}, [[]], [{}], {"": None}),
)
ODD_BYTES = (
    b"\n",
    b"\r",
    b"\0",
    b"\xff",
    b"\x1b[2J",
    b"\xed\xa0\x80",
    b'"',
    b"\\",
    b"\\u0000",
    b"[" * 2000,
    b"9" * 5000,
)


def any_json() -> st.SearchStrategy[Any]:
    """Any JSON value, and numbers that only Python writes: NaN, Infinity, and integers of any size."""
    scalars = st.one_of(
        st.sampled_from(ODD_VALUES).map(copy.deepcopy), st.integers(), st.floats(), st.text(max_size=20)
    )
    return st.recursive(scalars, _containers)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.lists(children, max_size=5), st.dictionaries(st.text(max_size=10), children, max_size=5))


@st.composite
def changed_json(draw: st.DrawFn, values: list[Any]) -> Any:
    """One of `values` with one to three of its parts replaced, removed, renamed or repeated."""
    value = copy.deepcopy(draw(st.sampled_from(values)))
    for _ in range(draw(st.integers(1, 3))):
        places = _places(value)
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        _change(draw, container, key)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a value with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [*((value, key) for key in keys), *(place for key in keys for place in _places(value[key]))]


def _change(draw: st.DrawFn, container: Any, key: Any) -> None:
    way = draw(st.sampled_from(("similar", "similar", "similar", "replace", "remove", "rename", "repeat")))
    if way == "similar":
        container[key] = draw(_similar(container[key]))
    elif way == "replace":
        container[key] = draw(any_json())
    elif way == "remove":
        del container[key]
    elif isinstance(container, dict):
        container[draw(st.text(max_size=10))] = container.pop(key) if way == "rename" else container[key]
    else:
        container.append(container[key])


def _similar(value: Any) -> st.SearchStrategy[Any]:
    """A value of the same type, which a reader may accept."""
    if isinstance(value, bool) or value is None:
        return st.sampled_from((None, True, False))
    if isinstance(value, str):
        return st.one_of(st.sampled_from([odd for odd in ODD_VALUES if isinstance(odd, str)]), st.text(max_size=20))
    if isinstance(value, int):
        return st.one_of(st.integers(0, 9), st.integers(0, 2**53))
    if isinstance(value, float):
        return st.one_of(st.floats(0, 10), st.floats(1e-6, 1e11), st.sampled_from((-1.0, 5e-324, -1e99, 1e99)))
    return st.just(type(value)())


@st.composite
def changed_bytes(draw: st.DrawFn, contents: list[bytes]) -> bytes:
    """One of `contents` with one to four pieces inserted, removed or replaced."""
    content = draw(st.sampled_from(contents))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from((0, 0, 1, 10, 1000))))
        piece = draw(st.one_of(st.sampled_from(ODD_BYTES), st.binary(max_size=10)))
        content = content[:start] + piece + content[end:]
    return content


def as_json(value: Any) -> bytes:
    """A value as Python writes it in JSON: on one line, with NaN, and with surrogates as escapes."""
    return json.dumps(value).encode()
