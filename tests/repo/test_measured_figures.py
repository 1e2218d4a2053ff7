"""No page has a measured figure that no saved record has."""

from __future__ import annotations

from pathlib import Path

from tools.docs.measured_figures import problems_of

REPOSITORY = Path(__file__).parents[2]
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
OPEN = {  # how many figures of a page still lack something; no page is added here
    "docs/decisions/clocks.md": 8,
    "docs/fp8.md": 1,
    "docs/isolation.md": 5,
    "docs/measuring.md": 16,
    "docs/quick-runs.md": 2,
}


def test_every_measured_figure_has_its_record() -> None:
    """Each is in a record of `profiles/` whose card, day and commit its paragraph names, or has 'no record'."""
    profiles, package = REPOSITORY / "profiles", REPOSITORY / "pytest_fa"
    problems = {
        str(page.relative_to(REPOSITORY)): problems_of(page.read_text(encoding="utf-8"), profiles, package)
        for page in PAGES
    }
    lines = [f"{page}:{problem}" for page, listed in problems.items() if page not in OPEN for problem in listed]
    assert lines == []
    assert {page: len(problems.get(page, [])) for page in OPEN} == OPEN
