"""Write an adapter: the lines of Python that call a function which no `entry.call` can call.

Such a function gets ragged batches, pages or one tensor for Q, K and V.  The adapter gives it sequences of equal
length, pages in order, or a packed copy, so that what the function computes is attention as it is judged.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pytest_fa.attention import parts
from pytest_fa.attention.layout import Layout
from pytest_fa.attention.not_judged import recognised

NAME = "fa_adapter"
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
PAGE = 256  # keys per page; FlashAttention takes multiples of 256
CUMULATIVE = r"cu_?seq_?lens?(_?(?P<of>q|k|kv))?"
LONGEST = r"max_?seq_?lens?(_?(?P<of>q|k|kv))?"
COUNTS = r"cache_?seq_?lens?|seq_?lens?(_?(?P<of>q|k|kv))?|seqused_?k"
TABLE = r"(block|page)_tables?"
CACHE = r"(?P<of>k|v|key|value)_?cache"
PACKED = r"(packed_)?(?P<of>q?kv)(_?packed)?"

_ROWS = """\
    def rows_of(x):  # [batch, heads, seq, dim] -> [batch * seq, heads, dim]
        return x.transpose(1, 2).flatten(0, 1)
"""
_STARTS = """\
    def starts_of(length):  # of sequences that are equally long
        return torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
"""
_PAGES = """\
    def pages_of(x):  # [batch, heads, seq, dim] -> [batch * pages, PAGE, heads, dim]
        x = torch.nn.functional.pad(x, (0, 0, 0, pages * PAGE - seq_k))
        return x.transpose(1, 2).reshape(batch * pages, PAGE, x.shape[1], dim)
"""
_HELPERS = {"rows_of": _ROWS, "starts_of": _STARTS, "pages_of": _PAGES}
# The lines that define sizes, by the names that need them.
_SIZES = {
    "batch|heads|seq_q|dim": "    batch, heads, seq_q, dim = q.shape",
    "seq_k|pages": "    seq_k = k.shape[2]",
    "pages": "    pages = -(-seq_k // PAGE)",
}


class Adapter(NamedTuple):
    """The adapter's lines, and what else the manifest must say."""

    lines: str
    needs_equal_lengths: bool


def needs_adapter(parameters: Iterable[inspect.Parameter]) -> bool:
    """Whether a parameter without a default takes what no word or constant of a manifest can be."""
    for parameter in _required(parameters):
        row = recognised(parameter.name)
        off = row.value_for(parameter.name) if row else ()
        if row and (not off or isinstance(off[0], tuple)):
            return True
    return False


def adapter_for(
    target: str,
    parameters: Iterable[inspect.Parameter],
    word_of: dict[str, str],
    layout: Layout = "bhsd",
    *,
    is_imported: bool,
) -> Adapter:
    """The adapter of the function `target` (`module:function`) with these parameters.

    `word_of` has the words of the parameters whose meaning is known.  VALUE stands for what is not known.  `layout` is
    that of the function's tensors, unless its parameters show another one.
    """
    module, _, function = target.partition(":")
    taken = list(parameters)
    writer = _Writer(tuple(each.name.lower() for each in _required(taken)), layout)
    passed = [
        (each, value)
        for each in taken
        if (value := writer.value_of(each, word_of)) is not None and each.kind not in VARIADIC
    ]
    arguments = [value if each.kind is each.POSITIONAL_ONLY else f"{each.name}={value}" for each, value in passed]
    text = "\n".join(arguments)
    helpers = [lines for name, lines in _HELPERS.items() if f"{name}(" in text]
    used = "\n".join((*helpers, text, writer.returned))
    sizes = [line for name, line in _SIZES.items() if re.search(rf"\b({name})\b", used)]
    page = [f"PAGE = {PAGE}  # keys; another number if the kernel needs it", ""] if "PAGE" in used else []
    lines = [
        *("import torch", ""),
        *((f"from {module} import {function}", "") if is_imported else ()),
        *page,
        "",
        f'def {NAME}(q, k, v, *, scale, causal="none", out=None):',
        *sizes,
        *([""] if sizes else []),
        *(line for each in helpers for line in (*each.splitlines(), "")),
        f"    result = {function}(",
        *(f"        {argument}," for argument in arguments),
        "    )",
        "    result = result[0] if isinstance(result, tuple) else result",
        f"    return {writer.returned}",
    ]
    return Adapter("\n".join(lines), writer.packs_q)


def _required(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind not in VARIADIC:
            yield parameter


class _Writer:
    """Writes the value of each parameter, for a function whose parameters without a default have these names."""

    def __init__(self, names: tuple[str, ...], layout: Layout) -> None:
        def any_is(pattern: str) -> bool:
            return any(re.fullmatch(pattern, name) for name in names)

        self.is_ragged = any_is(CUMULATIVE)
        self.is_paged = any_is(TABLE)
        self.has_cache = any_is(CACHE)
        self.is_packed = any_is(PACKED)
        self.layout = layout
        self.packs_q = any(match["of"] == "qkv" for name in names if (match := re.fullmatch(PACKED, name)))

    @property
    def returned(self) -> str:
        """The result as [batch, heads, seq, dim]."""
        if self.is_ragged:
            return "result.view(batch, seq_q, heads, dim).transpose(1, 2)"
        return "result.transpose(1, 2)" if self._is_seq_first else "result"

    @property
    def _is_seq_first(self) -> bool:
        """Whether tensors are [batch, seq, heads, dim], as with every library that packs them or has a cache."""
        return self.is_packed or self.is_paged or self.has_cache or self.layout == "bshd"

    def value_of(self, parameter: inspect.Parameter, word_of: dict[str, str]) -> str | None:
        """The expression for a parameter; None for one that keeps its default."""
        name, word = parameter.name, word_of.get(parameter.name)
        if word == "scale":
            return "scale"
        if word == "causal":
            return 'causal != "none"'
        name = name.lower()
        if parameter.default is not parameter.empty and not self._must_pass(name):
            return None
        if word in ("q", "k", "v"):
            return self._tensor(word)
        return self._made(name) or self._plain(word or "") or self._switched_off(name)

    def _plain(self, word: str) -> str | None:
        """The value of a word in a call that does not have it."""
        part = parts.words().get(word)
        return repr(part.passed(word, part.plain_argument(word), {})) if part else None

    def _must_pass(self, name: str) -> bool:
        """Whether a parameter is needed in spite of its default: the lengths of full pages, and all that is ragged."""
        if self.is_paged and re.fullmatch(COUNTS, name):
            return True
        return self.is_ragged and any(re.fullmatch(pattern, name) for pattern in (CUMULATIVE, LONGEST))

    def _tensor(self, name: str) -> str:
        if name != "q" and self.is_paged:
            return f"pages_of({name})"
        if self.is_ragged:
            return f"rows_of({name})"
        return f"{name}.transpose(1, 2)" if self._is_seq_first else name

    def _made(self, name: str) -> str | None:
        """The expression for lengths, starts, tables and packed tensors."""
        if name == "page_size":
            return "PAGE"
        if re.fullmatch(TABLE, name):
            return "torch.arange(batch * pages, dtype=torch.int32, device=q.device).view(batch, pages)"
        if match := re.fullmatch(CUMULATIVE, name) or re.fullmatch(LONGEST, name) or re.fullmatch(COUNTS, name):
            return _lengths(name, match["of"])
        if match := re.fullmatch(CACHE, name):
            return f"pages_of({match['of'][0]})" if self.is_paged else f"{match['of'][0]}.transpose(1, 2)"
        if match := re.fullmatch(PACKED, name):  # [batch, seq, 2 or 3, heads, dim]
            packed = f"torch.stack([{', '.join(match['of'])}], dim=2).transpose(1, 3)"
            return f"{packed}.flatten(0, 1)" if self.is_ragged else packed
        return None

    def _switched_off(self, name: str) -> str:
        """The value that switches off what is not judged; VALUE if the meaning is not known."""
        row = recognised(name)
        off = row.value_for(name) if row else ()
        return repr(off[0]) if off else "VALUE"


def _lengths(name: str, of: str | None) -> str:
    """The expression for the starts of sequences, the longest length, or the length of each, which is that of keys."""
    if re.fullmatch(CUMULATIVE, name):
        return f"starts_of({_length(of)})"
    if re.fullmatch(LONGEST, name):
        return _length(of)
    return f"torch.full((batch,), {_length(of or 'k')}, dtype=torch.int32, device=q.device)"


def _length(of: str | None) -> str:
    return "seq_k" if of in ("k", "kv") else "seq_q"
