"""Reads the study of a sweep from its file or database, for the commands that show it."""

from __future__ import annotations

from typing import Any, NamedTuple

from pytest_fa.errors import UsageProblem, suggestion
from pytest_fa.features.sweep.shared_study import SharedStudy
from pytest_fa.features.sweep.storage import open_storage, study_names
from pytest_fa.features.sweep.study_url import without_password
from pytest_fa.features.sweep.trial_result import SweepEnd, SweepTrial


class StoredStudy(NamedTuple):
    """What a study has: what it is about, its trials, and its end if it has one."""

    name: str
    facts: dict[str, Any]
    trials: list[SweepTrial]
    end: SweepEnd | None


def read_study(place: str, name: str | None) -> StoredStudy:
    """The study of this name, or the last one.  Raises `UsageProblem` if there is none."""
    names = study_names(place)
    if name is not None and name not in names:
        shown, listed = without_password(place), ", ".join(names)
        raise UsageProblem(f"{shown!r} has no study {name!r}{suggestion(name, names)} (it has: {listed})")
    study = SharedStudy(open_storage(place), name or names[-1])
    return StoredStudy(study.name, study.facts, study.trials(), study.end)
