"""The forms of texts in a manifest that become part of a command, a header or a file name.

No shell, ninja or compiler gives a special meaning to a text of these forms.  So a manifest is data: reading it runs
nothing, and no define, source or flag can add a command to a build.
"""

from __future__ import annotations

import re
from pathlib import Path

LONGEST_NAME = 80  # characters; file names contain a variant's name, a case id and a suffix
LONGEST_TEXT = 200

ARCH = r"sm_[1-9][0-9]{1,2}[af]?"
NAME = r"[a-z][a-z0-9_]*"
DEFINE_NAME = r"[A-Z][A-Z0-9_]*"
FOLDER_NAME = r"\w[\w. +()-]*"
PATH = r"[A-Za-z0-9_.][A-Za-z0-9_.+-]*(/[A-Za-z0-9_.][A-Za-z0-9_.+-]*)*/?"
EXTENSION_PATH = r"/?[\w.][\w. +()-]*(/[\w.][\w. +()-]*)*/?"  # torch quotes these itself
# What ninja or a shell would interpret in the real path of a source, to which a symlink may lead.
_INTERPRETED = re.compile(r"[\x00-\x1f\x7f$|:;&`'\"\\<>#*?]")
FLAG = r"-[A-Za-z0-9_.,:=+/@%-]+"
_TWO_WORDS = {  # flags that need a value, with an example
    "-Xptxas": "-v",
    "--ptxas-options": "-v",
    "-Xcompiler": "-Wall",
    "--compiler-options": "-Wall",
    "-Xlinker": "--as-needed",
    "-Xcudafe": "--display_error_number",
    "-std": "c++17",
    "--std": "c++17",
    "-maxrregcount": "128",
    "--maxrregcount": "128",
}
DEFINE_VALUE = r"[A-Za-z0-9_.,:+*/%()<>=\[\]{}&|^~!? -]*"


_IN_WORDS = {
    NAME: f"the form is {NAME}",
    DEFINE_NAME: f"the form is {DEFINE_NAME}",
    FOLDER_NAME: "allowed are letters, digits, spaces and _ . + - ( )",
}


def name_problem(where: str, name: str, form: str) -> str | None:
    """Return what is wrong with a name, or None."""
    if not re.fullmatch(form, name):
        return f"{where} {_shown(name)} is malformed; {_IN_WORDS[form]}"
    if len(name) > LONGEST_NAME:
        return f"{where} {_shown(name)} has {len(name)} characters; at most {LONGEST_NAME} are allowed"
    return None


def arch_problem(where: str, arch: str) -> str | None:
    """Return what is wrong with the form of an architecture, or None."""
    if re.fullmatch(ARCH, arch):
        return None
    return f"{where} {_shown(arch)}; an architecture is sm_ and a number, then perhaps a or f: sm_80, sm_90a, sm_120f"


def path_problem(key: str, path: str, *, of_extension: bool = False) -> str | None:
    """Return what is wrong with the path of a source file or an include folder, or None."""
    if len(path) <= LONGEST_TEXT and re.fullmatch(EXTENSION_PATH if of_extension else PATH, path):
        return None
    allowed = (
        "paths of letters, digits, spaces and _ . + - ( ) /"
        if of_extension
        else ("relative paths of letters, digits and _ . + - /")
    )
    return f"{key} {_shown(path)} is not a path; allowed are {allowed}, at most {LONGEST_TEXT} characters"


def real_path_problem(key: str, path: Path) -> str | None:
    """Return what is wrong with the place to which a path leads, with all symlinks resolved, or None."""
    try:
        real_path = str(path.resolve())
    except (OSError, RuntimeError):
        return f"{key} {_shown(path.name)}; its symlinks form a circle"
    if character := _INTERPRETED.search(real_path):
        return f"{key} {_shown(path.name)}; its real path {_shown(real_path)} contains {_shown(character[0])}"
    return None


def flag_problem(key: str, flag: str) -> str | None:
    """Return what is wrong with the characters of a compiler flag, or None."""
    if len(flag) <= LONGEST_TEXT and re.fullmatch(FLAG, flag) and flag not in _TWO_WORDS:
        return None
    if flag in _TWO_WORDS:
        return f"{key} {_shown(flag)} has no value; write flag and value as one word, such as {flag}={_TWO_WORDS[flag]}"
    return (
        f"{key} {_shown(flag)} is not a flag; a flag starts with -, has its value after = (such as -Xptxas=-O3), and "
        f"consists of letters, digits and _ . , : = + / @ % -, at most {LONGEST_TEXT} characters"
    )


def define_problem(name: str, value: int | str) -> str | None:
    """Return what is wrong with the value of a define, or None."""
    text = str(value)
    if len(text) <= LONGEST_TEXT and re.fullmatch(DEFINE_VALUE, text) and not re.search(r"//|/\*", text):
        return None
    return (
        f"the value {_shown(text)} of define {name} is not allowed; a value is one line of letters, digits, spaces and "
        f"_ . , : + - * / % ( ) < > = [ ] {{ }} & | ^ ~ ! ?, without comments, at most {LONGEST_TEXT} characters"
    )


def _shown(text: str) -> str:
    """Return the text in quotes, with escapes instead of control characters, and shortened."""
    shown = ascii(text)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 3]}..."
