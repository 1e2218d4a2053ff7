"""`--fa-sweep` in pytest's run: the sweep of this process, why a trial is skipped, and what the terminal shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_fa.catalog.sweep_space import point_text
from pytest_fa.catalog.variant import Variant
from pytest_fa.plugin.state import OPTIONS_KEY, progress_line, session_of
from pytest_fa.records.text import printable
from pytest_fa.report.sweep_lines import end_lines, history_lines, study_lines, takeover_lines
from pytest_fa.sweep.run import SweepRun, feasible_space, open_study, split_cases, study_place, sweep_of
from pytest_fa.sweep.shared_study import without_password

if TYPE_CHECKING:
    from pytest_fa.session.run_plan import RunPlan
    from pytest_fa.sweep.trial_result import SweepTrial

SWEEP_KEY: pytest.StashKey[SweepRun] = pytest.StashKey()


def sweep_run_of(config: pytest.Config, variant: Variant) -> SweepRun:
    """The sweep of this process, opened for its first trial."""
    if SWEEP_KEY not in config.stash:
        config.stash[SWEEP_KEY] = SweepRun(session_of(config), variant, progress_line(config))
    return config.stash[SWEEP_KEY]


def check_sweep(run_plan: RunPlan) -> None:
    """Raise `UsageProblem` before collection if the variant cannot be swept, or if Optuna is missing."""
    from pytest_fa.sweep.shared_study import require_optuna  # noqa: PLC0415

    require_optuna()
    variant = _swept(run_plan)
    split_cases(run_plan, variant, sweep_of(variant))
    feasible_space(variant)


def skip_reason(trial: SweepTrial | None) -> str:
    """Why the test of a trial is skipped; empty if its configuration is right and was timed."""
    if trial is None:
        return "no trial is left: the study has all of --fa-trials, every feasible configuration, or its end"
    if trial.is_right or trial.result is None:
        return ""
    return printable(f"{point_text(trial.point)}: {trial.result.outcome}: {trial.result.reason}")


def write_sweep(terminal: pytest.TerminalReporter) -> None:
    """Write the history of the search and how it ended; after a gate that passed, the lines to take over."""
    config = terminal.config
    if config.getoption("collectonly"):
        return
    options, run_plan = config.stash[OPTIONS_KEY], session_of(config).run_plan
    variant = _swept(run_plan)
    study, place = open_study(run_plan, variant), without_password(study_place(options, variant))
    trials, end = study.trials(), study.end
    terminal.section(f"sweep of {variant.name}")
    for line in (*study_lines(study.facts, trials), *history_lines(trials)):
        terminal.write_line(printable(line))
    for line in (*end_lines(end), *takeover_lines(end)):
        terminal.write_line(printable(line), green=end is not None and end.winner is not None)
    terminal.write_line(printable(f"study: {place}; python -m pytest_fa sweep show {place}"))


def _swept(run_plan: RunPlan) -> Variant:
    (variant,) = run_plan.plan.chosen
    assert isinstance(variant, Variant)  # noqa: S101  # a broken one that is named ends the run before
    return variant
