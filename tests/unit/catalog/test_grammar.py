"""Texts of a manifest: what is allowed, and that no other text reaches a shell, ninja or a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.grammar import (
    DEFINE_NAME,
    FOLDER_NAME,
    NAME,
    define_problem,
    flag_problem,
    name_problem,
    path_problem,
    real_path_problem,
)

# Texts that a shell, ninja, make or the preprocessor would interpret.
HOSTILE = [
    "1\n  command = touch /tmp/x",
    "$(touch x)",
    "${HOME}",
    "`touch x`",
    'a"b',
    "a'b",
    "a\\b",
    "a;b",
    "a#b",
    "a\tb",
    "a\rb",
    "a\x00b",
    "a\x1b[31mb",
    "a\u202eb",
    "a\x85b",
    "a\u2028b",
    "²",
    "x" * 201,
]
PROBLEMS: dict[str, Callable[[str], str | None]] = {
    "define": lambda text: define_problem("X", text),
    "flag": lambda text: flag_problem("flags:", f"-Xptxas={text}"),
    "path": lambda text: path_problem("entry.source is", text),
    "name": lambda text: name_problem("folder name", text, NAME),
    "define name": lambda text: name_problem("defines: name", text, DEFINE_NAME),
}


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_texts_are_refused(kind: str, text: str) -> None:
    """A text that some program would interpret is refused in one printable line that names it."""
    problem = PROBLEMS[kind](text)
    assert problem is not None
    assert problem.isprintable()
    assert problem.isascii()
    assert len(problem) <= 400


@pytest.mark.parametrize("text", ["a // b", "a /* b"])
def test_a_comment_in_a_define_is_refused(text: str) -> None:
    """A comment would hide the rest of the line."""
    assert define_problem("X", text) is not None


@pytest.mark.parametrize(
    "value",
    [64, -3, "", "fast", "1.5f", "(A < B) ? A : B", "std::pair<int, float>", "A | B && !C", "float[4]", "{1, 2}"],
)
def test_values_of_c_are_allowed(value: int | str) -> None:
    """Numbers, words, types and expressions are allowed."""
    assert define_problem("X", value) is None


@pytest.mark.parametrize("path", ["kernel.cu", "../../csrc/attention.cu", "a-b/c_d+e.cu", ".hidden/x.cu", "include/"])
def test_relative_paths_are_allowed(path: str) -> None:
    """Relative paths of ordinary characters are allowed, also upwards."""
    assert path_problem("entry.source is", path) is None


@pytest.mark.parametrize("path", ["", "/etc/passwd", "-o", "a//b", "~/x.cu", "a b.cu", "a:b", "*.cu"])
def test_other_paths_are_refused(path: str) -> None:
    """Absolute paths, paths that look like options, globs and paths with spaces are refused."""
    assert path_problem("entry.source is", path) is not None


@pytest.mark.parametrize(
    "flag", ["-O3", "--use_fast_math", "-Xcompiler=-fopenmp,-Wall", "-I../../include", "-std=c++20", "-DA=1"]
)
def test_ordinary_flags_are_allowed(flag: str) -> None:
    """The characters of ordinary flags are allowed."""
    assert flag_problem("flags:", flag) is None


@pytest.mark.parametrize("flag", ["", "fopenmp", "-Xcompiler -fopenmp", "-DA=(1)", "-Xcompiler='-a'", "@file", "-a|b"])
def test_other_flags_are_refused(flag: str) -> None:
    """A word without a dash, a flag with a space, a quote, a bracket or a pipe is refused."""
    assert flag_problem("flags:", flag) is not None


def test_a_long_name_is_refused(snapshot: SnapshotAssertion) -> None:
    """File names contain a variant's name, so it has at most 80 characters."""
    assert name_problem("folder name", "a" * 80, NAME) is None
    assert snapshot == name_problem("folder name", "a" * 81, NAME)


@pytest.mark.parametrize("name", ["kernels", "a-b", "Two Stages", "größe", "a(1)", "v1.2+x"])
def test_folder_names_of_people_are_allowed(name: str) -> None:
    """Folders with several variants may have letters of any language, spaces, dots and parentheses."""
    assert name_problem("folder name", name, FOLDER_NAME) is None


@pytest.mark.parametrize(
    "name", ["a\nb", "a$b", "a`b", "a'b", 'a"b', "a\\b", "a;b", "a|b", "-a", " a", "a\x1b", "a\u202eb"]
)
def test_folder_names_that_a_shell_would_interpret_are_refused(name: str) -> None:
    """The message says what is allowed, in words."""
    problem = name_problem("folder name", name, FOLDER_NAME)
    assert problem is not None
    assert problem.endswith("is malformed; allowed are letters, digits, spaces and _ . + - ( )")


@pytest.mark.parametrize("path", ["my kernel.cpp", "/usr/include", "größe/a(1).cu"])
def test_paths_of_an_extension_may_be_absolute_and_have_spaces(path: str) -> None:
    """PyTorch quotes the paths of an extension, so more characters are allowed there than in nvcc's command."""
    assert path_problem("entry.sources has", path, of_extension=True) is None
    assert path_problem("entry.source is", path) is not None


def test_a_symlink_to_a_hostile_name_is_refused(tmp_path: Path) -> None:
    """PyTorch writes the real path of a source into build.ninja, so that path must be harmless, too."""
    hostile = tmp_path / "x:compile|build.ninja\npost_cflags=;touch$${IFS}x;\n#.cpp"
    hostile.write_text("", encoding="utf-8")
    (tmp_path / "k.cpp").symlink_to(hostile)
    problem = real_path_problem("entry.sources has", tmp_path / "k.cpp")
    assert problem is not None
    assert problem.startswith("entry.sources has 'k.cpp'; its real path ")
    assert real_path_problem("entry.sources has", tmp_path / "other.cpp") is None


@pytest.mark.parametrize("flag", ["-Xptxas", "-Xcompiler", "-std", "--maxrregcount"])
def test_a_flag_without_its_value_says_how_to_write_it(flag: str) -> None:
    """The two-word form is not a flag; the message has the form with one word."""
    problem = flag_problem("flags:", flag)
    assert problem is not None
    assert f"write flag and value as one word, such as {flag}=" in problem
