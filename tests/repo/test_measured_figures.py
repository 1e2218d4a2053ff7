"""No page has a measured figure that no saved record has, in its prose or in a table."""

from __future__ import annotations

import functools
from pathlib import Path

from pytest_fa.records.log import read_records
from tools.docs import table_figures
from tools.docs.measured_figures import problems_of

REPOSITORY = Path(__file__).parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))


def test_every_measured_figure_has_its_record() -> None:
    """Each is in a record of `profiles/` whose card, day and commit its paragraph names, or has 'no record'."""
    profiles, package = REPOSITORY / "profiles", REPOSITORY / "pytest_fa"
    problems = {
        str(page.relative_to(REPOSITORY)): problems_of(page.read_text(encoding="utf-8"), profiles, package)
        for page in PAGES
    }
    assert [f"{page}:{problem}" for page, listed in problems.items() for problem in listed] == []


def test_every_figure_of_a_table_has_its_record() -> None:
    """Each is in a record of the card, a day and a commit that the line below its table states."""
    read = functools.cache(read_records)
    problems = {
        page.relative_to(REPOSITORY).as_posix(): table_figures.problems_of(
            page.read_text(encoding="utf-8"), REPOSITORY, read
        )
        for page in (*PAGES, *sorted((REPOSITORY / "kernels").glob("*.md")))
    }
    assert [f"{page}:{problem}" for page, listed in problems.items() for problem in listed] == []
