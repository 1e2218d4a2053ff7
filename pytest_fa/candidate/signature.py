"""Compare a Python function's parameters with the call that it gets, and write the manifest's line for another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from pytest_fa.attention import parts
from pytest_fa.attention.backward import DOUT
from pytest_fa.attention.backward import LINE as BACKWARD_LINE
from pytest_fa.attention.layout import PART as LAYOUT
from pytest_fa.attention.not_judged import recognised, written
from pytest_fa.attention.pages import KV_CACHE
from pytest_fa.attention.pages import PART as PAGES
from pytest_fa.attention.thd import PART as THD
from pytest_fa.candidate.operators import signature_of
from pytest_fa.catalog.variant import Call, Entry

# Names that functions of attention libraries have for what is passed.
NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key", "k_cache", "key_cache"),
    "v": ("v", "value", "v_cache", "value_cache"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "out": ("out", "output", "o"),
    "dq": ("dq", "grad_q", "grad_query"),
    "dk": ("dk", "grad_k", "grad_key"),
    "dv": ("dv", "grad_v", "grad_value"),
    "dbias": ("dbias", "d_bias", "grad_bias", "dattn_bias"),
    "dsink": ("dsink", "dsinks", "d_sink", "grad_sink", "grad_sinks"),
}
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_problem(
    function: Callable[..., Any],
    entry: Entry,
    passed: tuple[str, ...] = ("out",),
    arguments: tuple[str, ...] = ("q", "k", "v"),
) -> str | None:
    """Return why a function does not accept the arguments that it gets, and the line to write, or None.

    Without `entry.call`, it gets `arguments` and the keywords scale, those of each call, and `passed`.
    A function without a readable signature, such as one of a C extension, is not compared.
    """
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):
        return None
    call = entry.call
    own = ("scale", *parts.always_passed(), *passed)
    count, keywords = (len(arguments), own) if call is None else (len(call.arguments), tuple(call.keywords))
    try:
        signature.bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as problem:
        called = f"f({', '.join((*_arguments(call, arguments), *_keywords(call, own)))})"
        answer = _answer(entry, list(signature.parameters.values()), gets_gradient=DOUT in arguments)
        return f"it is called as {called}, but its parameters are {signature}: {problem}; {answer}"
    return None


def _answer(entry: Entry, parameters: list[inspect.Parameter], *, gets_gradient: bool) -> str:
    """What to write so that a function with these parameters can be called, and what of it is not judged.

    `gets_gradient` is whether it gets the gradient of the output.
    """
    line = entry_line(entry, parameters)
    text = f"write in variant.yaml `{line}`"
    if "VALUE" in line:
        text += ", with a value in place of VALUE"
    if _takes(parameters, LAYOUT.made_words):
        text += "; and `layout: [packed], self_attention_only: true` in `supports`"
    required = [each for each in parameters if each.default is each.empty]
    if _takes(required, (DOUT,)) and not gets_gradient:
        text += f"; and {BACKWARD_LINE}"
    lengths, layout = ("both", "layout: [thd], ") if _takes(required, THD.tensors) else ("keys", "")
    if _takes(required, PAGES.words):
        sizes = "with the sizes of a page that the kernel takes"
        text += f"; and `{layout}ragged: [{lengths}], pages: [64]` in `supports`, {sizes}"
    elif layout:
        text += f"; and `{layout}ragged: [{lengths}]` in `supports`"
    if _takes(parameters, (KV_CACHE,)):
        text += f"; and `conventions: {{{KV_CACHE}: together}}`"
    return "; ".join((text, *dict.fromkeys(_not_judged(required))))


def _not_judged(required: Iterable[inspect.Parameter]) -> Iterator[str]:
    """What parameters without a default stand for that is not judged, and what switches it off."""
    for parameter in required:
        if row := recognised(parameter.name):
            off = _switched_off(parameter)
            off_words = f"{row.subject} not judged: {parameter.name} gets {off}, which switches it off"
            yield str(row) if off is None else off_words


def _takes(parameters: Iterable[inspect.Parameter], words: Container[str | None]) -> bool:
    """Whether a parameter gets one of these words."""
    word_of = _word_of()
    return any(word_of.get(each.name) in words for each in parameters)


def _has_cache(parameters: Iterable[inspect.Parameter]) -> bool:
    """Whether a parameter without a default is a cache or its table, as in libraries with [batch, seq, heads, dim]."""
    names = {*PAGES.words["block_table"], *(name for word in "kv" for name in NAMES[word] if name.endswith("_cache"))}
    return any(each.name in names for each in parameters if each.default is each.empty)


def _word_of() -> dict[str, str]:
    """The word that a parameter of each known name gets."""
    names_of = NAMES | parts.names_of_words()
    return {name: word for word, names in names_of.items() for name in names}


def _switched_off(parameter: inspect.Parameter) -> str | None:
    """The value for a parameter without a default of what is not judged, as a manifest writes it, or None."""
    row = recognised(parameter.name) if parameter.default is parameter.empty else None
    off = row.value_for(parameter.name) if row and parameter.kind not in VARIADIC else ()
    return written(off[0]) if off else None


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

    A parameter without a default gets the value that switches off what is not judged.  If its meaning is not known, it
    gets the text VALUE, which the user replaces.
    """
    word_of = _word_of()
    positional: list[str] = []
    keywords: list[str] = []
    taken: set[str | None] = set()
    is_left_out = False  # after a parameter that keeps its default, others are passed by name
    listed = list(parameters)
    needs_starts = _takes((each for each in listed if each.default is each.empty), THD.tensors)
    for parameter in listed:
        word = word_of.get(parameter.name)
        if word in THD.words and not needs_starts:
            word = None  # q may lie so, and need not
        if word in taken and parameter.default is not parameter.empty:
            word = None  # new keys that go into a cache
        taken.add(word)
        if word and parameter.kind in _POSITIONAL and not keywords and not is_left_out:
            positional.append(word)
        elif parameter.kind not in VARIADIC and (word or parameter.default is parameter.empty):
            keywords.append(f"{parameter.name}: {word or _switched_off(parameter) or 'VALUE'}")
        else:
            is_left_out = True
    call = [f"arguments: [{', '.join(positional)}]"]
    call += [f"keywords: {{{', '.join(keywords)}}}"] if keywords else []
    if needs_starts:
        call.append("layout: thd")
    elif _takes(listed, LAYOUT.made_words) or _has_cache(listed):
        call.append("layout: bshd")
    libraries = f", libraries: [{', '.join(entry.libraries)}]" if entry.libraries else ""
    return f'entry: {{target: "{entry.target}"{libraries}, call: {{{", ".join(call)}}}}}'


def _arguments(call: Call | None, arguments: tuple[str, ...]) -> list[str]:
    return [*arguments] if call is None else [_shown(argument) for argument in call.arguments]


def _keywords(call: Call | None, own: tuple[str, ...]) -> list[str]:
    passed = {word: word for word in own} if call is None else call.keywords
    return [f"{name}={_shown(value)}" for name, value in passed.items()]


def _shown(argument: object) -> str:
    """A word such as `q` as it is, a constant as Python writes it."""
    return argument if isinstance(argument, str) else repr(getattr(argument, "constant", argument))
