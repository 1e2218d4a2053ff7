"""Records are made from results: the rerun command repeats the same test with the same options."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.records.record import RecordKind
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.worker.jobs import CaseResult
from tests.factories import options, variant

CASE = parse_case("b1h2s64d64-fp16-seed3")
RESULT = CaseResult("ok", "", ())


@pytest.mark.parametrize(
    ("kind", "property_name", "words"),
    [
        ("correct", None, "--fa-case=b1h2s64d64-fp16-seed3 -k test_correct"),
        ("speed", None, "--fa-case=b1h2s64d64-fp16-seed3 -k test_speed"),
        ("profile", None, "--ncu --ncu-set=verdict --fa-case=b1h2s64d64-fp16-seed3 -k test_profile"),
        ("sanitize", None, "--fa-sanitize=memcheck --fa-case=b1h2s64d64-fp16-seed3 -k test_sanitize"),
        ("property", "streams", "-k 'test_property and streams'"),
    ],
)
def test_the_rerun_command_selects_the_same_test(
    tmp_path: Path, kind: RecordKind, property_name: str | None, words: str
) -> None:
    """The command has the variant, the case, the options of the run, and those without which there is no such test."""
    given = options(tmp_path, rerun=("pytest", "--fa-soak=7"), sanitizers=("memcheck",))
    record = RecordFactory(given).make(kind, variant("mine"), CASE, RESULT, property_name=property_name)
    assert record.rerun_command == f"pytest --fa-soak=7 --fa-variant=mine {words}"


def test_stages_that_were_not_reached_are_named(tmp_path: Path) -> None:
    """A record lists every stage; those that the result does not have were not reached."""
    record = RecordFactory(options(tmp_path)).make("correct", variant("mine"), CASE, RESULT)
    states = {stage.name: stage.state for stage in record.stages}
    assert states == {
        "build": "ok",
        "launch": "not reached",
        "sanity": "not reached",
        "correct": "not reached",
        "speed": "not reached",
    }
