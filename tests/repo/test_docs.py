"""The documentation matches the code: options, manifest keys, tables, fixtures, and the header of every kernel."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from pytest_fa.catalog.manifest import MANIFEST_NAME, Manifest, Member, keys_of
from pytest_fa.catalog.properties import PROPERTIES
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import Call, Constant, Entry, InstructionLimit, Limits, Supports, Suppression
from pytest_fa.options.flags import all_options
from pytest_fa.plugin import fixtures
from pytest_fa.records.record import RecordKind
from tools.docs.markdown import rewrite

REPOSITORY = Path(__file__).parents[2]
FLAGS = [option.flag for option in all_options()]


def pages() -> dict[str, str]:
    """The text of README, of every page of docs and of the ladders, by the path from the root folder."""
    paths = [
        REPOSITORY / "README.md",
        *(path for glob in ("kernels/*.md", "docs/**/*.md") for path in sorted(REPOSITORY.glob(glob))),
    ]
    return {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in paths}


# -- options and keys -------------------------------------------------------------------------------------------------


def test_every_option_is_documented() -> None:
    """Every option appears in the README or in `docs` with its full name."""
    text = "\n".join(pages().values())
    assert [flag for flag in FLAGS if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)] == []


def test_no_page_names_an_unknown_option() -> None:
    """No page names an option that does not exist, such as one that was renamed or removed."""
    named = {flag for text in pages().values() for flag in re.findall(r"(?<![\w-])--fa-[a-z-]*[a-z]", text)}
    assert sorted(named - set(FLAGS)) == []


KEYS = [
    key
    for struct in (Manifest, Member, Entry, Call, Constant, Supports, Limits, InstructionLimit, Suppression)
    for key in keys_of(struct)
]


def test_every_manifest_key_is_documented() -> None:
    """`docs/reference/manifest.md` contains every manifest key."""
    page = pages()["docs/reference/manifest.md"]
    assert [key for key in sorted(set(KEYS)) if not re.search(rf"(?<!\w){key}(?!\w)", page)] == []


def test_every_table_is_what_the_records_say() -> None:
    """The tables in the pages are those that `python -m tools.docs.markdown` makes from the saved records."""
    assert [name for name, text in pages().items() if rewrite(text, REPOSITORY) != text] == []


def test_every_property_is_documented() -> None:
    """`docs/reference/checks.md` has a row for each property."""
    page = pages()["docs/reference/checks.md"]
    assert [name for name in PROPERTIES if f"| `{name}` | " not in page] == []


def test_every_suite_is_documented() -> None:
    """`docs/reference/options.md` lists each suite, with as many shapes as it has where the page says how many."""
    page = pages()["docs/reference/options.md"]
    shapes = {name: len({case.shape_id for case in SUITES[name]}) for name in SUITES}
    listed = re.findall(
        r"^- `(\w+)`(?: \(default\))?: (?:(\d+) shapes)?", page.partition("The suites:")[2], re.MULTILINE
    )
    assert sorted(name for name, _ in listed) == sorted(shapes)
    assert {name: int(count) for name, count in listed if count and int(count) != shapes[name]} == {}


def test_every_extra_is_documented() -> None:
    """`docs/how-to/install.md` lists the extras, except those for the development of pytest-fa."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = pages()["docs/how-to/install.md"].partition("The extras:")[2].partition("\n## ")[0]
    extras = set(project["optional-dependencies"]) - {"docs", "test"}
    assert set(re.findall(r"^- `(\w+)`:", text, re.MULTILINE)) == extras


def test_every_kind_of_record_is_documented() -> None:
    """`docs/reference/results.md` lists the kinds of records."""
    text = pages()["docs/reference/results.md"].partition("Kinds are ")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", text)) == set(get_args(RecordKind))


# -- fixtures ---------------------------------------------------------------------------------------------------------

FIXTURES = [name for name in vars(fixtures) if re.fullmatch(r"fa_\w+", name)]


def test_every_fixture_is_offered(pytestconfig: pytest.Config) -> None:
    """The module of the fixtures is one in which pytest looks for fixtures."""
    assert (pytestconfig.pluginmanager.is_registered(fixtures), len(FIXTURES) > 0) == (True, True)


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


def test_a_header_says_what_its_manifest_says() -> None:
    """The header of a source begins with its folder, and has the `step`, `because` and `expect` of its manifest."""
    wrong = []
    for folder in FOLDERS:
        manifest, header = manifest_of(folder), header_of(folder)
        texts = {key: " ".join(manifest[key].split()) for key in TEXTS}
        if (folder.name, texts) != (header.partition(":")[0], texts_of(header)):
            wrong.append(folder.name)
    assert wrong == []


def test_a_manifest_is_about_its_kernel() -> None:
    """Ablations and wrong kernels are in `planted.yaml`; the manifest of one kernel has 30 lines at most."""
    texts = {folder.name: (folder / MANIFEST_NAME).read_text(encoding="utf-8") for folder in FOLDERS}
    lengths = {name: len(text.splitlines()) for name, text in texts.items() if "\nvariants:\n" not in text}
    assert [] == [name for name, text in texts.items() if "role: wrong" in text or "role: ablation" in text]
    assert {} == {name: length for name, length in lengths.items() if length > 30}


def test_no_page_has_placeholders() -> None:
    """No page contains the mark `@@`, which is used for text that is still to be written."""
    assert [name for name, text in pages().items() if "@@" in text] == []
