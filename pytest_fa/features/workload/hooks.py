"""The hooks of the workload: its lines below the table."""

from __future__ import annotations

import pytest

from pytest_fa.features.workload.mix_lines import mix_lines
from pytest_fa.features.workload.plugin import WorkloadOptions
from pytest_fa.plugin.state import session_of
from pytest_fa.plugin.terminal import Results
from pytest_fa.table.layout import TextLine


class Hooks:
    """The workload in one run."""

    def __init__(self, config: pytest.Config) -> None:
        del config

    def pytest_fa_lines(self, results: Results, config: pytest.Config) -> list[TextLine]:
        """A line for each variant; none in a run that offers no timings, as with `--fa-static`."""
        asked = results.options.part(WorkloadOptions)
        if asked is None or not results.options.offers("test_speed"):
            return []
        return mix_lines(asked.name, asked.mix, session_of(config).run_plan.plan, results.shown_records)
