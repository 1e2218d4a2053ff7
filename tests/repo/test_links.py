"""Every link in the pages leads to a file of the repository, and to a heading that exists; the site has every page."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
GLOBS = ("*.md", "docs/**/*.md", "kernels/*.md", "profiles/*.md")
PAGES = sorted(page for glob in GLOBS for page in REPOSITORY.glob(glob))


def tokens_of(page: Path) -> Iterator[Token]:
    """The tokens of a page and those inside of them."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


def links_of(page: Path) -> list[str]:
    """The targets of the links and pictures of a page, without those in code."""
    targets = [token.attrGet("href") or token.attrGet("src") for token in tokens_of(page)]
    return [str(target) for target in targets if target]


@functools.cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them: lower case, without punctuation, `-` for a space."""
    tokens = list(tokens_of(page))
    texts = [
        "".join(part.content for part in following.children or ())
        for token, following in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-") for text in texts}


def problem_of(page: Path, target: str) -> str:
    """Why a link leads nowhere; empty if it leads somewhere, or out of the repository."""
    if re.match(r"[a-z]+:", target):
        return "" if target.startswith("https://") else f"{target} is no https link"
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists() or not path.is_relative_to(REPOSITORY):
        return f"{target} is not in the repository"
    return f"{target} is no heading" if anchor and anchor not in anchors_of(path) else ""


def test_every_link_leads_somewhere() -> None:
    """Each link of a page names a file and a heading that exist."""
    problems = [f"{page.name}: {problem_of(page, target)}" for page in PAGES for target in links_of(page)]
    assert [problem for problem in problems if not problem.endswith(": ")] == []


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("docs/how-to/ci.md", ""),
        ("docs/reference/outcomes.md#exit-status", ""),
        ("docs/nowhere.md", "docs/nowhere.md is not in the repository"),
        ("docs/how-to/ci.md#nothing", "docs/how-to/ci.md#nothing is no heading"),
        ("../elsewhere", "../elsewhere is not in the repository"),
        ("http://example.org", "http://example.org is no https link"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(target: str, problem: str) -> None:
    """`problem_of` names a missing file, a missing heading, and a link out of the repository that is not https."""
    assert problem_of(REPOSITORY / "README.md", target) == problem


def test_there_are_links() -> None:
    """The pages have links to pages, headings and pictures, so that the tests above test something."""
    links = [target for page in PAGES for target in links_of(page)]
    assert len(links) > 100
    assert any(target.endswith(".svg") for target in links)


# -- the site ---------------------------------------------------------------------------------------------------------


def menu_of(entries: Any) -> list[str]:
    """The pages of the menu in `mkdocs.yml`."""
    if isinstance(entries, str):
        return [entries]
    parts = entries.values() if isinstance(entries, dict) else entries
    return [page for part in parts for page in menu_of(part)]


def test_the_menu_has_every_page() -> None:
    """The menu of the site has every page of the repository once, and the report, which is made at build time."""
    yaml = pytest.importorskip("yaml")
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    pages = menu_of(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    expected = ["report-h200.html", *(str(page.relative_to(REPOSITORY)) for page in PAGES)]
    assert sorted(pages) == sorted(expected)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("material") is None, reason="MkDocs Material is not installed (extra `docs`)")
def test_the_site_is_built() -> None:
    """`.ci/docs` builds every page and the report, and no page loads a script, a style or a font from elsewhere."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    process = subprocess.run(
        [REPOSITORY / ".ci" / "docs"], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    site = REPOSITORY / "site"
    assert (site / "report-h200.html").stat().st_size > 100_000
    built = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert len(built) > len(PAGES)
    assert {
        url
        for text in built
        for url in re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=.?(https?://[^\"' >]+)", text)
    } == set()
