"""Texts of kernels, compilers and manifests: what changes a terminal's display becomes a visible escape."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.records.outcome import Outcome
from pytest_fa.records.text import printable, printable_struct
from pytest_fa.wire.jobs import CaseResult
from tests.factories import RECORD


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;a title\x07", r"\x1b]0;a title\x07"),
        ("\x9b31mred", r"\x9b31mred"),
        ("12 us\r 1 us", r"12 us\x0d 1 us"),
        ("a\x00b\x08c\x7f", r"a\x00b\x08c\x7f"),
        ("a\x0bb\x0cc\x85d", r"a\x0bb\x0cc\x85d"),
        ("\u202egnp.exe\u202c", r"\u202egnp.exe\u202c"),
        ("\u2066a\u2069\u200e\u200f\u061c", r"\u2066a\u2069\u200e\u200f\u061c"),
        ("half \ud83d of a pair", r"half \ud83d of a pair"),
    ],
    ids=["colour", "title", "C1", "carriage return", "NUL and DEL", "line breaks", "override", "isolates", "surrogate"],
)
def test_a_control_character_becomes_visible(text: str, expected: str) -> None:
    """Each control character and bidirectional control is replaced by its escape; the other characters stay."""
    assert expected == printable(text)


def test_every_control_character_but_newline_and_tab_is_replaced() -> None:
    """No C0 or C1 control is left, except newline and tab."""
    controls = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0))))
    assert [character for character in printable(controls) if character in controls] == ["\t", "\n"]


@pytest.mark.parametrize("text", ["", "a\n\tb", "max error 1e-3 \N{GREEK SMALL LETTER MU}s", "\u4e2d\u6587 \U0001f600"])
def test_other_text_stays(text: str) -> None:
    """Newlines, tabs and letters of any script stay, and a text that needs no change is returned itself."""
    assert printable(text) is text


def test_a_printable_text_does_not_change_again() -> None:
    """`printable` of a printable text is that text."""
    once = printable("\x1b[2J \u202e")
    assert once == printable(once)


# -- structs ----------------------------------------------------------------------------------------------------------


def test_every_string_of_a_struct_becomes_printable() -> None:
    """Strings in fields, tuples, nested structs, and keys and values of dicts are replaced."""
    kernel = msgspec.structs.replace(RECORD.builds[0].kernels[0], name="\x1bk", instructions={"\x1bHMMA": 1})
    build = msgspec.structs.replace(RECORD.builds[0], kernels=(kernel,), command=("nvcc", "\x1b"))
    cleaned = printable_struct(msgspec.structs.replace(RECORD, message="\x1b[2J", caught_by=("\r",), builds=(build,)))
    assert (cleaned.message, cleaned.caught_by) == (r"\x1b[2J", (r"\x0d",))
    assert cleaned.builds[0].command == ("nvcc", r"\x1b")
    (cleaned_kernel,) = cleaned.builds[0].kernels
    assert (cleaned_kernel.name, cleaned_kernel.instructions) == (r"\x1bk", {r"\x1bHMMA": 1})


def test_a_result_of_a_worker_becomes_printable() -> None:
    """`printable_struct` accepts any struct, such as the result that a worker process sends."""
    result = CaseResult(Outcome.FAILED, "\x1b]0;title\x07", (), ("\x9b",))
    assert printable_struct(result) == CaseResult(Outcome.FAILED, r"\x1b]0;title\x07", (), (r"\x9b",))


def test_a_struct_without_such_characters_is_returned_itself() -> None:
    """A record that needs no change is not copied."""
    assert printable_struct(RECORD) is RECORD


@pytest.mark.parametrize(
    ("value", "expected"),
    [(["\x1b", 1], [r"\x1b", 1]), ({"a": ("\x1b",)}, {"a": (r"\x1b",)}), ("\x1b", r"\x1b"), (1.5, 1.5), (None, None)],
)
def test_other_values_become_printable(value: object, expected: object) -> None:
    """Lists, dicts and strings are accepted as well; numbers and None stay."""
    assert expected == printable_struct(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("::set-output name=a::b", r"\x3a:set-output name=a::b"),
        ("first\n::error file=x::y", "first\n" + r"\x3a:error file=x::y"),
        ("first\n \t\u00a0\u2028::add-mask::y", "first\n \t\u00a0\u2028" + r"\x3a:add-mask::y"),
        ("first\r::stop-commands::x", r"first\x0d::stop-commands::x"),
        ("in a line ##[error]x", r"in a line \x23#[error]x"),
        ("Failed: ::error::x", "Failed: ::error::x"),
        ("test.py::test_a[b]\n  ::Tensor x", "test.py::test_a[b]\n  ::Tensor x"),
        ("## heading", "## heading"),
    ],
)
def test_no_text_is_a_workflow_command(text: str, expected: str) -> None:
    """A line that GitHub's runner would execute gets an escape in place of its first mark; other text stays."""
    assert printable(text) == expected
    assert printable(expected) == expected
