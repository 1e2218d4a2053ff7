"""Pairs of options that make no sense together end the run at once, with the reason and what to drop."""

from __future__ import annotations

import pytest

from pytest_fa.options.pairs import RefusedPair, refused_pairs
from tests.projects import NewProject, Project

VALUES = {"--fa-gate": "0.9", "--fa-sweep": "good", "-n": "2", "--fa-gate-gpus": "2", "--fa-define": "A=1"}
VALUES |= {"--fa-truth": "w.py:truth", "--fa-variant": "good", "--fa-shard": "1/2", "--fa-sanitize": "memcheck"}
VALUES |= {"--fa-hunt": "good", "--fa-case": "b1h1s1d64-fp16", "--fa-soak": "5"}


@pytest.fixture(scope="module")
def one(new_project: NewProject) -> Project:
    """A project with one variant."""
    project = new_project("pairs")
    project.python_variant("good")
    return project


def words(flag: str) -> list[str]:
    """An option as it is typed."""
    value = VALUES.get(flag)
    return [flag, *([value] if value else [])] if flag == "-n" else [f"{flag}={value}" if value else flag]


@pytest.mark.parametrize("pair", refused_pairs(), ids=lambda pair: f"{pair.flag} {pair.other}")
def test_a_senseless_pair_is_refused(one: Project, pair: RefusedPair) -> None:
    """Both options together are one line: the option, the reason, what to drop.  Nothing is collected."""
    complaint = f"ERROR: {pair.flag}: {pair.why}; drop {pair.other}"
    assert one.complaint(*words(pair.flag), *words(pair.other)) == [complaint]


def test_an_option_of_the_ini_file_is_named_as_such(one: Project) -> None:
    """What the ini file sets cannot be dropped from the command: the line says how to switch it off."""
    complaint = "ERROR: --fa-save: a run that only compiles has no records to save; the ini file sets fa_static; "
    assert one.complaint("--fa-save", "-o", "fa_static=true") == [f"{complaint}-o fa_static=false"]
    (line,) = one.complaint("--fa-sweep=good", "-o", "fa_variant=good")
    assert line.endswith("; the ini file sets fa_variant; -o fa_variant=")
