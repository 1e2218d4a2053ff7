"""`--fa-sweep` in pytest's run: the sweep of this process, why a trial is skipped, and what the terminal shows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sweep.closed import closed_line
from pytest_fa.features.sweep.plugin import options_of
from pytest_fa.features.sweep.study_facts import study_facts
from pytest_fa.features.sweep.study_url import without_password
from pytest_fa.features.sweep.sweep import SweepRun, open_study, study_place
from pytest_fa.features.sweep.sweep_lines import end_lines, history_lines, study_lines, takeover_lines
from pytest_fa.features.sweep.sweep_space import point_text
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import progress_line, session_of
from pytest_fa.records.text import printable

if TYPE_CHECKING:
    from pytest_fa.features.sweep.trial_result import SweepTrial
    from pytest_fa.session.run_plan import RunPlan


class SweepStart(NamedTuple):
    """What the study is about, read before collection, and the time at which this run began."""

    facts: dict[str, Any]
    began: float


START_KEY: pytest.StashKey[SweepStart] = pytest.StashKey()
SWEEP_KEY: pytest.StashKey[SweepRun] = pytest.StashKey()


def sweep_run_of(config: pytest.Config, variant: Variant) -> SweepRun:
    """The sweep of this process, opened for its first trial."""
    if SWEEP_KEY not in config.stash:
        config.stash[SWEEP_KEY] = SweepRun(
            session_of(config), variant, config.stash[START_KEY].facts, progress_line(config)
        )
    return config.stash[SWEEP_KEY]


def check_sweep(config: pytest.Config) -> None:
    """Read what the study is about, before collection.

    Raises `UsageProblem` if the variant cannot be swept.
    """
    session = session_of(config)
    config.stash[START_KEY] = SweepStart(study_facts(session, _swept(session.run_plan)), time.time())


def skip_reason(trial: SweepTrial | None, closed: str = "") -> str:
    """Why the test of a trial is skipped; empty if its configuration is correct and was timed.

    `closed` says why the study takes no trial, if it is closed.
    """
    if trial is None:
        all_done = "no trial is left: the study has all of --fa-trials, every feasible configuration, or its end"
        return closed or all_done
    if trial.is_right or trial.result is None:
        return ""
    return printable(f"{point_text(trial.point)}: {trial.result.outcome}: {trial.result.reason}")


def write_sweep(terminal: pytest.TerminalReporter) -> None:
    """Write the history of the search and how it ended; after a gate that passed, the lines to take over."""
    config = terminal.config
    if config.getoption("collectonly"):
        return
    options, start = config.stash[OPTIONS_KEY], config.stash[START_KEY]
    variant = _swept(session_of(config).run_plan)
    place = without_password(study_place(options, variant))
    sweep_run = config.stash.get(SWEEP_KEY, None)  # none in a process whose workers run the trials
    study = sweep_run.study if sweep_run else open_study(options, variant, start.facts)
    trials, end = study.trials(), study.end
    terminal.section(f"sweep of {variant.name}")
    for line in (*study_lines(study.facts, trials), *history_lines(trials)):
        terminal.write_line(printable(line))
    late = closed_line(trials, options_of(options).trials, int(study.facts["feasible"])) if end else ""
    for line in (*([late] if late else []), *end_lines(end, start.began), *takeover_lines(end, study.facts)):
        terminal.write_line(printable(line), green=end is not None and end.winner is not None)
    terminal.write_line(printable(f"study: {place}; python -m pytest_fa sweep show {place}"))


def _swept(run_plan: RunPlan) -> Variant:
    (variant,) = run_plan.plan.chosen
    assert isinstance(variant, Variant)  # noqa: S101  # a broken one that is named ends the run before
    return variant
