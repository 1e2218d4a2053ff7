"""The options of the self-test."""

from __future__ import annotations

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.options import options


def test_the_self_test_has_its_own_policies(pytester: pytest.Pytester) -> None:
    """Another policy would decide whether a fault is found."""
    with pytest.raises(UsageProblem, match="--fa-selftest: the self-test uses its own tolerance policies"):
        options.read(pytester.parseconfig("--fa-selftest", "--fa-tolerance=fp8"))
