"""The fixture `fa_sanitizer`, which a user's own tests may use without `--fa-sanitize`: they are then skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_fa.catalog.plan import Plan


@pytest.fixture
def fa_sanitizer(request: pytest.FixtureRequest) -> str:
    """The tool of `--fa-sanitize`.  A test with this fixture runs once for every selected variant and tool."""
    name: str = request.param
    return name


def pytest_fa_parametrize(metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
    """Run a test that uses `fa_sanitizer` over the tools."""
    if "fa_sanitizer" not in metafunc.fixturenames:
        return None
    from pytest_fa.features.sanitize.sanitized_cases import parametrize  # noqa: PLC0415  # it imports the catalog

    parametrize(metafunc, plan)
    return True
