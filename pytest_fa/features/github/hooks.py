"""The hooks of GitHub Actions: the job summary and the annotations."""

from __future__ import annotations

import pytest

from pytest_fa.features.github.annotations import annotation_lines, command
from pytest_fa.features.github.plugin import GithubOptions
from pytest_fa.features.github.step_summary import append_summary
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import RESULTS_KEY, session_of
from pytest_fa.plugin.terminal import UNREPORTED, Results


class Hooks:
    """GitHub Actions in one run."""

    def __init__(self, config: pytest.Config) -> None:
        asked = config.stash[OPTIONS_KEY].part(GithubOptions)
        assert asked  # noqa: S101  # else these hooks are not registered
        self._asked = asked

    def pytest_fa_finish(self, results: Results) -> None:
        """Append the run to the job summary."""
        if results.records and self._asked.summary:
            append_summary(results.records, results.ceilings[0], self._asked.summary)

    @pytest.hookimpl(trylast=True)  # below all other lines
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the annotations: one for each variant and fault, and one if nothing ran or records were lost."""
        results = terminalreporter.config.stash[RESULTS_KEY]
        for line in self._annotations(results, terminalreporter.config) if self._asked.annotates else ():
            terminalreporter.write_line(line)

    def _annotations(self, results: Results, config: pytest.Config) -> list[str]:
        failed = results.failed_records
        catalog = session_of(config).run_plan.catalog if failed else None
        lines = annotation_lines(failed, catalog, self._asked.workspace) if catalog else []
        if results.is_fault_unreported:
            lines.append(command("error", "unreported fault", UNREPORTED))
        if results.nothing_ran:
            reasons = results.why_not_run.most_common(5)
            lines.append(command("error", "no kernel ran", "\n".join(f"{n} x {reason}" for reason, n in reasons)))
        if results.file.is_bad:
            lines.append(command("error", "records were lost", results.file.lost or results.file.changed))
        return lines
