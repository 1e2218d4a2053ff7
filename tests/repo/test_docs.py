"""The documentation matches the code: options, manifest keys, tables, fixtures, and the header of every kernel."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_fa import plugin
from pytest_fa.catalog.manifest import MANIFEST_NAME, Manifest, Member
from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.catalog.variant import Call, Constant, Entry, InstructionLimit, Limits, Supports, Suppression
from pytest_fa.options.flags import OPTIONS
from pytest_fa.plugin import fixtures
from pytest_fa.report.markdown import rewrite

REPOSITORY = Path(__file__).parents[2]
FLAGS = [option.flag for option in OPTIONS]


def pages() -> dict[str, str]:
    """The text of every page by its file name; `kernels` is the page of the ladder."""
    paths = {path.name: path for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))}
    paths["kernels"] = REPOSITORY / "kernels" / "README.md"
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


# -- options and keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", FLAGS)
def test_every_option_is_documented(flag: str) -> None:
    """Every option appears in the README or in `docs` with its full name."""
    assert [name for name, text in pages().items() if re.search(rf"(?<![\w-]){flag}(?![\w-])", text)]


def test_no_page_names_an_unknown_option() -> None:
    """No page names an option that does not exist, such as one that was renamed or removed."""
    named = {flag for text in pages().values() for flag in re.findall(r"(?<![\w-])--fa-[a-z-]*[a-z]", text)}
    assert sorted(named - set(FLAGS)) == []


KEYS = [
    key
    for struct in (Manifest, Member, Entry, Call, Constant, Supports, Limits, InstructionLimit, Suppression)
    for key in struct.__struct_fields__
]


@pytest.mark.parametrize("key", sorted(set(KEYS)))
def test_every_manifest_key_is_documented(key: str) -> None:
    """`docs/variants.md` contains every manifest key."""
    assert re.search(rf"(?<!\w){key}(?!\w)", pages()["variants.md"])


def test_every_table_is_what_the_records_say() -> None:
    """The tables in the pages are those that `python -m pytest_fa.report.markdown` makes from the saved records."""
    assert {name: rewrite(text, REPOSITORY) for name, text in pages().items()} == pages()


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_is_documented(name: str) -> None:
    """`docs/correctness.md` describes each property in the same words as the code."""
    assert f"| `{name}` | {PROPERTIES[name]} |" in pages()["correctness.md"]


# -- fixtures ---------------------------------------------------------------------------------------------------------

FIXTURES = [name for name in vars(fixtures) if re.fullmatch(r"fa_\w+", name)]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of `pytest --fixtures` in an empty folder."""
    command = [sys.executable, "-m", "pytest", "--fixtures", "-p", "no:cacheprovider"]
    folder = tmp_path_factory.mktemp("empty")
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_every_fixture_is_offered() -> None:
    """The plugin module, in which pytest looks for fixtures, exports every fixture."""
    assert sorted(FIXTURES) == sorted(name for name in plugin.__all__ if name.startswith("fa_"))


@pytest.mark.parametrize("name", FIXTURES)
def test_every_fixture_is_shown_with_its_sentence(shown: str, name: str) -> None:
    """`pytest --fixtures` shows every fixture with the first paragraph of its docstring."""
    function: Any = getattr(fixtures, name)
    sentence = inspect.cleandoc(function.__doc__).split("\n\n", maxsplit=1)[0]
    entry = re.search(rf"^{name}(?: \[\w+ scope\])? -- .*\n((?: {{4}}.*\n)+)", shown, re.MULTILINE)
    assert entry is not None
    assert sentence == inspect.cleandoc("    " + entry[1].strip())


# -- headers ----------------------------------------------------------------------------------------------------------

TEXTS = ("step", "because", "expect")
FOLDERS = [REPOSITORY / "pytest_fa" / "builtin" / "noop"]
FOLDERS += [path.parent for path in sorted((REPOSITORY / "kernels").glob(f"*/{MANIFEST_NAME}"))]


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a folder as plain YAML data."""
    manifest: dict[str, Any] = yaml.safe_load((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    return manifest


def header_of(folder: Path) -> str:
    """The comment or docstring at the beginning of a variant's source, without comment marks."""
    entry = manifest_of(folder).get("entry", {})
    if entry.get("kind") == "python":
        source = folder / f"{entry['target'].partition(':')[0]}.py"
        return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    lines = (folder / entry.get("source", "kernel.cu")).read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines[:end])


def texts_of(header: str) -> dict[str, str]:
    """The `step:`, `because:` and `expect:` of a header; an indented line continues the one above it."""
    matches = re.findall(rf"^({'|'.join(TEXTS)}):((?:.*)(?:\n[ \t]+\S.*)*)", header, re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in matches}


def test_a_text_may_have_several_lines() -> None:
    """A text of several lines is joined, and ends at the next key."""
    header = "thing: a thing.\nstep:    one\n         and more\nbecause: two\nexpect:  three\n\n  no more\ntile: 4"
    assert texts_of(header) == {"step": "one and more", "because": "two", "expect": "three"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_header_says_what_its_manifest_says(folder: Path) -> None:
    """The header of a source has the same `step`, `because` and `expect` as its manifest."""
    manifest = manifest_of(folder)
    assert {key: " ".join(manifest[key].split()) for key in TEXTS} == texts_of(header_of(folder))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_header_begins_with_its_folder(folder: Path) -> None:
    """The first word in the header of a source is the name of its folder."""
    assert folder.name == header_of(folder).partition(":")[0]


def test_no_page_has_placeholders() -> None:
    """No page contains the mark `@@`, which is used for text that is still to be written."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    marked = [page.name for page in pages if "@@" in page.read_text(encoding="utf-8")]
    assert marked == []
