"""The text of a record that says how a function is checked or timed again."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from pytest_fa.catalog.case import Case


def rerun_text(call: str, function: Callable[..., Any], case: Case, keywords: Mapping[str, object]) -> str:
    """The Python line that repeats `pytest_fa.check` or `.time`; a sentence if no name leads to the function.

    `keywords` are the other arguments; None stands for the default.
    """
    words = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
    if (names := _names(function)) is None:
        more = f" and {', '.join(words)}" if words else ""
        return f"call pytest_fa.{call} again with this function and case {case.id!r}{more}"
    module, name = names
    line = f"pytest_fa.{call}({', '.join((name, repr(case.id), *words))})"
    return line if module == "__main__" else f"import pytest_fa; from {module} import {name.partition('.')[0]}; {line}"


def _names(function: Callable[..., Any]) -> tuple[str, str] | None:
    """The module of a function and its name in it; None for a lambda, a local function, an object and the like."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)):
        return None
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in f"{module}.{name}".split(".")):
        return None
    try:
        named = attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return (module, name) if named is function else None
