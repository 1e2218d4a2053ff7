"""The finals of a sweep close its study: whatever `--fa-trials` says, no trial begins any more."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fa.features.sweep.sweep_space import point_text
from pytest_fa.features.sweep.trial_result import SweepTrial


def closed_line(trials: Sequence[SweepTrial], budget: int, feasible: int) -> str:
    """What a run is told whose trials come too late; empty if it would not have added any to a closed study."""
    counted = sum(trial.is_counted for trial in trials)
    tried = {point_text(trial.point) for trial in trials if trial.state != "released"}
    if counted >= budget or len(tried) >= feasible:
        return ""
    has = f"{counted} trial{'s' * (counted != 1)}"
    return (
        f"the finals of this study began with {has}, so --fa-trials={budget} adds none; "
        "for another search, name another file with --fa-study"
    )
