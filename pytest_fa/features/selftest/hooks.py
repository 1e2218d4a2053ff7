"""The hooks of the self-test: its test, and its table."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.plan import Plan
from pytest_fa.features.selftest.exploit_lines import exploit_lines
from pytest_fa.features.selftest.exploits import EXPLOITS, HONEST_TWINS
from pytest_fa.features.selftest.faults import FAULTS, TWINS
from pytest_fa.features.selftest.matrix import render_matrix
from pytest_fa.plugin.items import parametrize_variants
from pytest_fa.plugin.terminal import Results

MIN_WIDTH = 200
NAMES = frozenset((*FAULTS, *TWINS, *EXPLOITS, *HONEST_TWINS))


class Hooks:
    """The self-test in one run."""

    def __init__(self, config: pytest.Config) -> None:
        del config

    def pytest_fa_parametrize(self, metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
        """Run `test_judge` over wrong kernels, exploits, and correct twins of both."""
        if metafunc.function.__name__ != "test_judge" or "fa_run" not in metafunc.fixturenames:
            return None
        parametrize_variants(metafunc, [variant for variant in plan.runnable if variant.name in NAMES])
        return True

    def pytest_fa_table(self, results: Results, width: int) -> tuple[str, list[str]] | None:
        """One line for each kernel, with the checks that rejected it, and the counts of the exploits."""
        faults = [record for record in results.records if record.kind == "selftest"]
        if not faults:
            return None
        lines = [render_matrix(faults, max(width, MIN_WIDTH)), *exploit_lines(faults)]
        return "self-test: kernels and the checks that rejected them", lines
