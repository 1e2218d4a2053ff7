"""The words of kernels and manifests: control characters reach neither the terminal nor a file of the run raw."""

from __future__ import annotations

import re

import pytest

from tests.factories import MANIFEST, PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import CASE, ONE_CASE, NewProject, Project, Run

# ESC, BEL, C1, DEL, backspace and a bidirectional override, as a Python string and as they are shown.
WORDS = r"\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\x08\u202egnp.exe"
UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

RAISES = PYTHON_SOURCE.replace("    scores =", f'    raise RuntimeError("{WORDS}")\n    scores =', 1)
DIES = PYTHON_SOURCE.replace(
    "    scores =", f'    import os\n    os.write(2, "{WORDS}".encode())\n    os._exit(3)\n    scores =', 1
)
REFUSES = "from pytest_fa.errors import UnsupportedCase\n" + RAISES.replace("RuntimeError", "UnsupportedCase")


@pytest.fixture(scope="module")
def project_with_words(new_project: NewProject) -> Project:
    """Variants that raise, die and refuse with control characters in their words, and manifests with such texts."""
    project = new_project("words")
    project.python_variant("raises", RAISES)
    project.python_variant("dies", DIES)
    project.python_variant("refuses", REFUSES)
    texts = MANIFEST.replace("a test's variant", r'"\e[2J a \u202e step"')
    project.python_variant("texts", manifest=PYTHON_MANIFEST.replace(MANIFEST, texts))
    project.write("kernels/broken/variant.yaml", MANIFEST + r'"\e[2J\u202e": 1' + "\n")
    return project


@pytest.fixture(scope="module")
def run(project_with_words: Project) -> Run:
    """A run of every variant on one case, and of the build of the broken one."""
    options = ("-k", "test_correct or test_build", "-rA", "-v")
    return project_with_words.suite(ONE_CASE, "--fa-variant=raises,dies,refuses,texts", *options)


def test_the_terminal_shows_escapes(run: Run) -> None:
    """The words of a kernel that raises, dies or refuses are shown with escapes in place of control characters."""
    outcomes = {name: run.outcomes[f"test_correct[{name}-{CASE}]"] for name in ("raises", "dies", "refuses", "texts")}
    assert outcomes == {"raises": "failed", "dies": "failed", "refuses": "failed", "texts": "passed"}, run.text
    assert UNSAFE.findall(run.text) == []
    failures = {name: "".join(run.failure(f"test_correct[{name}-{CASE}]")) for name in outcomes}
    assert [name for name, text in failures.items() if WORDS in text] == ["raises", "refuses"]
    assert WORDS in run.outlines  # a line of the section with what `dies` printed


def test_files_of_the_run_have_escapes(project_with_words: Project, run: Run) -> None:
    """The JUnit file and the strings of the records contain no control characters."""
    junit = (project_with_words.folder / "junit.xml").read_text(encoding="utf-8")
    assert (UNSAFE.findall(junit), WORDS in junit) == ([], True)
    (path,) = project_with_words.logs
    raw = path.read_bytes()
    assert run.outcomes
    assert (re.findall(rb"\\u00|\\[bfr]|[\x7f-\xff]", raw), WORDS.replace("\\", "\\\\").encode() in raw) == ([], True)


def test_the_list_shows_escapes(project_with_words: Project) -> None:
    """`--fa-list` shows escapes in the texts of manifests and in the problems of broken ones."""
    listed = project_with_words.run_here("--fa-list")
    assert UNSAFE.findall(listed.text) == []
    assert r"\x1b[2J a \u202e step" in listed.text
    assert "broken: " in listed.text


def test_a_usage_error_shows_escapes(project_with_words: Project) -> None:
    """The problem of a broken manifest in a usage error has no control characters."""
    result = project_with_words.run_here("--collect-only", "--fa-variant=broken")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert UNSAFE.findall(result.text) == []
    assert "broken cannot be used" in result.text


@pytest.mark.needs_nvcc
def test_a_build_log_shows_escapes(project: Project) -> None:
    """A compiler's message that quotes control characters of the source has escapes in their place."""
    project.cuda_variant("noisy", '#error "\x1b[2J\x9b31m\u202e and more"\n')
    run = project.suite("--fa-variant=noisy", "-k", "test_build")
    assert UNSAFE.findall(run.text) == []
    assert r"\u202e and more" in run.text
