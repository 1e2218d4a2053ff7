"""What the author of a variant reads about an exception: one line with its place, and only the author's own frames."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import pytest_fa
from pytest_fa.errors import FaError, WrongResult
from pytest_fa.wire.user_traceback import MAX_TRACEBACK_CHARACTERS, explanation_of, is_wrong_call, message_of


def raised_by(folder: Path, source: str) -> Exception:
    """The exception that a source file in `folder`, which is not the package's, raises when it is run."""
    path = folder / "entry.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {})  # noqa: S102  # a source of this test
    except Exception as problem:  # noqa: BLE001  # returned
        problem.__traceback__ = (
            problem.__traceback__.tb_next if problem.__traceback__ else None
        )  # not this test's frame
        return problem
    raise AssertionError("nothing was raised")


def test_traceback_ends_in_the_users_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of libraries below the user's are left out, and paths start at the current folder."""
    monkeypatch.chdir(tmp_path)
    problem = raised_by(
        tmp_path,
        """\
        import json
        def inner(text):
            return json.loads(text)
        inner("{")
        """,
    )
    first, *lines = explanation_of(problem).splitlines()
    assert first.startswith("JSONDecodeError: Expecting property name")
    assert first.endswith("(entry.py:3)")
    assert [line for line in lines if line.startswith("  File")] == [
        '  File "entry.py", line 4, in <module>',
        '  File "entry.py", line 3, in inner',
    ]


def test_a_cause_is_shown(tmp_path: Path) -> None:
    """An exception that another one caused is shown with it, as Python does."""
    problem = raised_by(
        tmp_path, "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e\n"
    )
    text = explanation_of(problem)
    assert text.startswith("ValueError: no (entry.py:4)\n")
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.rindex("ValueError: no")


def test_an_error_of_syntax_has_file_line_and_caret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """An error of syntax shows the file, the line and a caret below the character."""
    monkeypatch.chdir(tmp_path)
    problem = raised_by(tmp_path, "x = 1\ny = (2 +* 3)\n")
    assert snapshot == explanation_of(problem).splitlines()


def test_errors_of_this_package_have_no_traceback() -> None:
    """A `FaError` is its own message, unless an exception in a variant's code caused it."""
    assert explanation_of(WrongResult("max", "max error 1, allowed 0")) == "max error 1, allowed 0"


def test_the_cause_of_an_error_of_this_package(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A `FaError` that a variant's exception caused has the traceback of that exception."""
    problem = FaError("the entry cannot be imported")
    problem.__cause__ = raised_by(tmp_path, "import no_such_module_at_all\n")
    lines = explanation_of(problem).splitlines()
    assert lines[0] == "the entry cannot be imported"
    assert snapshot == lines[-1]
    assert "    import no_such_module_at_all" in lines


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    """An exception with a text of 1 MB becomes a text of a few thousand characters with its begin and its end."""
    text = explanation_of(raised_by(tmp_path, "raise ValueError('begin' + 'x' * 10**6 + 'end')\n"))
    assert len(text) < MAX_TRACEBACK_CHARACTERS + 11_000
    assert ("characters left out)" in text, text.endswith("end")) == (True, True)


@pytest.mark.parametrize(
    ("source", "is_wrong"),
    [
        ("def forward(q): pass", True),
        ("def forward(*, q): pass", True),
        ("def forward(*args, **kw): raise TypeError('f() got an unexpected keyword argument')", False),
        ("def forward(*args, **kw): int(x=1)", False),
    ],
    ids=["too few parameters", "keyword only", "raised by the variant", "raised below the variant"],
)
def test_a_wrong_signature_is_recognised(source: str, is_wrong: bool) -> None:  # noqa: FBT001  # a parameter
    """Only a call that this package makes, and whose arguments do not fit, is a wrong call of the entry."""
    namespace: dict[str, object] = {}
    exec(source, namespace)  # noqa: S102  # a source of this test
    with pytest.raises(TypeError) as raised:
        call_as_the_package_does(namespace["forward"])
    assert is_wrong_call(raised.value) is is_wrong
    assert ("pytest-fa calls f(q, k, v" in message_of(raised.value)) is is_wrong


def call_as_the_package_does(forward: object) -> None:
    """Call a function from a frame of this package, as `CheckedLaunch` does."""
    path = str(Path(pytest_fa.__file__).parent / "gpu" / "checked.py")
    code = compile("forward('q', 'k', 'v', scale=1.0, causal='none', out=None)", path, "exec")
    exec(code, {"forward": forward})  # noqa: S102  # a source of this test
