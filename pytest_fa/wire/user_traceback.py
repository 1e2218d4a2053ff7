"""Explain an exception to the author of a variant: one line with its place, and a traceback of the author's frames."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest_fa
from pytest_fa.attention import parts
from pytest_fa.errors import FaError, LacksMemory

# How the judge, torch, CUDA, cuBLAS and other libraries say that the memory of a GPU is used up.
_USED_UP = re.compile(r"out[ _]?of[ _]?memory|ALLOC_FAILED", re.IGNORECASE)
MAX_CHARACTERS = 10_000  # of a message, which a kernel may have made
MAX_LINE_CHARACTERS = 1_000
MAX_TRACEBACK_CHARACTERS = 6_000
_PACKAGE = Path(pytest_fa.__file__).parent
_VARIANT_FOLDERS = tuple(str(_PACKAGE / name) + os.sep for name in ("builtin", "selftest", "template"))
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
# How this package reaches a variant: through the import system and context managers.
_MACHINERY = (
    "<frozen importlib",
    str(_STANDARD_LIBRARY / "importlib") + os.sep,
    str(_STANDARD_LIBRARY / "contextlib.py"),
)
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# How Python and pybind11 say that a function was called with arguments that it does not take.
_SIGNATURE = r"unexpected keyword arg|positional arg|missing \d+ required|multiple values for|incompatible function arg"

CALL_HINT = f"; pytest-fa calls f(q, k, v, *, {', '.join(parts.keywords())}) unless the manifest has entry.call"


def message_of(problem: Exception) -> str:
    """The message of a `FaError`; for any other exception its type, first line, file and line number."""
    if isinstance(problem, FaError):
        return str(problem)[:MAX_CHARACTERS]
    text = str(problem.msg if isinstance(problem, SyntaxError) else problem)
    first_line = next(iter(text[:MAX_LINE_CHARACTERS].splitlines()), "")
    return f"{type(problem).__name__}: {first_line}{_place(problem)}{_call_hint(problem)}"


def explanation_of(problem: Exception) -> str:
    """`message_of`, and below it the traceback of the variant's own frames, if there are any.

    A `FaError` that another exception caused has the traceback of that one.
    """
    if explanation := getattr(problem, "explanation", ""):  # of another process
        return str(explanation)
    cause = problem.__cause__ if isinstance(problem, FaError) else problem
    text = _user_traceback(cause) if cause is not None else ""
    return f"{message_of(problem)}\n{text}" if text else message_of(problem)


def is_wrong_call(problem: Exception) -> bool:
    """Whether the variant's function does not take the arguments with which every variant of its kind is called."""
    if getattr(problem, "is_wrong_call", False):  # of another process
        return True
    if not isinstance(problem, TypeError) or not re.search(_SIGNATURE, str(problem)[:MAX_CHARACTERS]):
        return False
    frames = traceback.extract_tb(problem.__traceback__)
    return bool(frames) and _is_own(frames[-1].filename)


def lacks_memory(problem: Exception) -> bool:
    """Whether the memory of the GPU is used up, as the judge saw it or the variant's exception says."""
    return isinstance(problem, LacksMemory) or bool(_USED_UP.search(explanation_of(problem)))


def _call_hint(problem: Exception) -> str:
    is_keyword = "keyword" in str(problem) or "missing" in str(problem) or "positional" in str(problem)
    if not (is_wrong_call(problem) and is_keyword):
        return ""
    return CALL_HINT


def _place(problem: Exception) -> str:
    """The file and line of the deepest frame of the variant, or of a library if the variant has none."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f" ({Path(problem.filename).name}:{problem.lineno})"
    frames = traceback.extract_tb(problem.__traceback__)
    shown = _user_frames(frames) or ([] if is_wrong_call(problem) else frames[-1:])
    return f" ({Path(shown[-1].filename).name}:{shown[-1].lineno})" if shown else ""


def _user_traceback(problem: BaseException) -> str:
    """Python's own text of the exception and its causes, without frames of this package and below the variant's.

    Empty if the variant has no frame and no error of syntax.
    """
    explained = traceback.TracebackException.from_exception(problem, compact=True)
    has_place = False
    for each in _chain(explained):
        frames = _user_frames(each.stack)
        has_place |= bool(frames) or isinstance(problem, SyntaxError)
        for frame in frames:
            frame.filename = _short_path(frame.filename)
        each.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]  # no header
        if isinstance(problem, SyntaxError) and each is explained:
            each.filename = _short_path(str(each.filename))
    if not has_place:
        return ""
    text = "".join(explained.format()).rstrip()
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out)\n{text[-half:]}"
    return text


def _chain(explained: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """The exception, its cause, the cause of that, and so on."""
    links: traceback.TracebackException | None = explained
    while links is not None:
        yield links
        links = links.__cause__ or (None if links.__suppress_context__ else links.__context__)


def _user_frames(frames: traceback.StackSummary | list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames without those of this package and of the import system, down to the last one of the variant.

    Libraries that the variant calls are left out below it.  They are kept if the entry itself is in a library.
    """
    shown = [frame for frame in frames if not _is_own(frame.filename) and not _is_machinery(frame.filename)]
    own_code = [index for index, frame in enumerate(shown) if not _is_library(frame.filename)]
    return shown[: own_code[-1] + 1] if own_code else shown


def _is_own(filename: str) -> bool:
    return filename.startswith(str(_PACKAGE) + os.sep) and not filename.startswith(_VARIANT_FOLDERS)


def _is_machinery(filename: str) -> bool:
    return filename.startswith(_MACHINERY)


def _is_library(filename: str) -> bool:
    return filename.startswith((*_LIBRARIES, "<"))


def _short_path(filename: str) -> str:
    """The path from the current folder if the file is in it; otherwise the path itself."""
    try:
        return filename.removeprefix(os.getcwd() + os.sep)  # noqa: PTH109  # compared as text
    except OSError:  # the folder was deleted
        return filename
