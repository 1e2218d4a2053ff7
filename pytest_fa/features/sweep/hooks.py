"""The hooks of the sweep: its tests, and what the terminal shows of it."""

from __future__ import annotations

import pytest

from pytest_fa.build import compile_batch  # noqa: F401  # its trials compile after kernels have run
from pytest_fa.catalog.plan import Plan
from pytest_fa.features.gate.gate_reports import GateReports
from pytest_fa.features.gate.opponents import gated_variants
from pytest_fa.features.sweep.plugin import options_of
from pytest_fa.features.sweep.sweep_space import Sweep, feasible_points
from pytest_fa.features.sweep.sweeping import check_sweep, write_sweep
from pytest_fa.plugin.items import parametrize_variants
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import SESSION_KEY


class Hooks(GateReports):
    """The sweep in one run, which ends with a gate."""

    def __init__(self, config: pytest.Config) -> None:
        del config

    def pytest_fa_check(self, config: pytest.Config) -> None:
        """Refuse a variant that cannot be swept."""
        check_sweep(config)

    def pytest_fa_parametrize(self, metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
        """Run `test_sweep` once for each trial, at most one for each feasible configuration; then `test_sweep_end`."""
        if metafunc.function.__name__ == "test_sweep_end":
            parametrize_variants(metafunc, gated_variants(plan))
            return True
        if "trial_number" not in metafunc.fixturenames:
            return None
        most, params = options_of(metafunc.config.stash[OPTIONS_KEY]).trials, []
        for variant in gated_variants(plan):
            sweep = Sweep.of(variant)
            feasible = len(feasible_points(sweep, variant.defines)) if sweep else 0
            numbers = range(1, min(most, feasible) + 1)
            params += [pytest.param(variant, number, id=f"{variant.name}-t{number:03d}") for number in numbers]
        metafunc.parametrize(("fa_variant", "trial_number"), params, indirect=["fa_variant"])
        return True

    @pytest.hookimpl(trylast=True)  # below the table
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the history of the search and how it ended."""
        if SESSION_KEY in terminalreporter.config.stash:
            write_sweep(terminalreporter)
