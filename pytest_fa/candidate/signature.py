"""Compare a Python function's parameters with the call that it gets, and write the manifest's line for another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from pytest_fa.attention import parts
from pytest_fa.catalog.variant import Call, Entry

# Names that functions of attention libraries have for what is passed.
NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "out": ("out", "output", "o"),
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_problem(function: Callable[..., Any], entry: Entry, passed: tuple[str, ...] = ("out",)) -> str | None:
    """Return why a function does not accept the arguments that it gets, and the line to write, or None.

    Without `entry.call`, it gets q, k, v and the keywords scale, those of each call, and `passed`.
    A function without a readable signature, such as one of a C extension, is not compared.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    call = entry.call
    own = ("scale", *parts.always_passed(), *passed)
    count, keywords = (3, own) if call is None else (len(call.arguments), tuple(call.keywords))
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as problem:
        called = f"f({', '.join((*_arguments(call), *_keywords(call, own)))})"
        line = f"`{entry_line(entry, signature.parameters.values())}`"
        return f"it is called as {called}, but its parameters are {signature}: {problem}; write in variant.yaml {line}"
    return None


def defines_problem(function: Callable[..., Any], defines: Iterable[str]) -> str | None:
    """Return which define, passed as a keyword, a function does not accept, or None."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    for name in defines:
        if name not in parameters:
            listed = ", ".join(parameters)
            return f"it gets each define as a keyword, and has no parameter {name!r} (its parameters are: {listed})"
    return None


def entry_line(entry: Entry, parameters: Iterable[inspect.Parameter]) -> str:
    """Return the `entry` of a manifest that calls a function with these parameters.

    A parameter without a default whose meaning is not known gets the text VALUE, which the user replaces.
    """
    names_of = NAMES | parts.names_of_words()
    word_of = {name: word for word, names in names_of.items() for name in names}
    positional: list[str] = []
    keywords: list[str] = []
    for parameter in parameters:
        word = word_of.get(parameter.name)
        if word and parameter.kind in _POSITIONAL and not keywords:
            positional.append(word)
        elif parameter.kind not in _VARIADIC and (word or parameter.default is parameter.empty):
            keywords.append(f"{parameter.name}: {word or 'VALUE'}")
    call = [f"arguments: [{', '.join(positional)}]"]
    call += [f"keywords: {{{', '.join(keywords)}}}"] if keywords else []
    return f'entry: {{target: "{entry.target}", call: {{{", ".join(call)}}}}}'


def _arguments(call: Call | None) -> list[str]:
    return ["q", "k", "v"] if call is None else [_shown(argument) for argument in call.arguments]


def _keywords(call: Call | None, own: tuple[str, ...]) -> list[str]:
    passed = {word: word for word in own} if call is None else call.keywords
    return [f"{name}={_shown(value)}" for name, value in passed.items()]


def _shown(argument: object) -> str:
    """A word such as `q` as it is, a constant as Python writes it."""
    return argument if isinstance(argument, str) else repr(getattr(argument, "constant", argument))
