"""Records are made from results: the rerun command repeats the same test with the same options."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.features.ncu.plugin import NcuOptions
from pytest_fa.features.sanitize.plugin import SanitizeOptions
from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.features.selftest.plugin import SelftestOptions
from pytest_fa.host.job_output import RECORD_CHARACTERS
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Ablation, RecordKind
from pytest_fa.session.record_factory import Asker, RecordFactory
from pytest_fa.session.rerun import rerun_command
from pytest_fa.session.session import Session
from pytest_fa.wire.jobs import CaseResult
from tests.factories import options, variant

CASE = parse_case("b1h2s64d64-fp16-seed3")
RESULT = CaseResult(Outcome.OK, "", ())
KINDS: tuple[RecordKind, ...] = ("speed", "build")


@pytest.mark.parametrize(
    ("kind", "property_name", "words"),
    [
        ("correct", None, "--fa-case=b1h2s64d64-fp16-seed3 -k test_correct"),
        ("speed", None, "--fa-case=b1h2s64d64-fp16-seed3 -k test_speed"),
        ("profile", None, "--ncu --ncu-set=verdict --fa-case=b1h2s64d64-fp16-seed3 -k test_profile"),
        ("sanitize", None, "--fa-sanitize=memcheck --fa-case=b1h2s64d64-fp16-seed3 -k test_sanitize"),
        ("property", "streams", "--pyargs 'pytest_fa.suite.test_attention::test_property[mine-streams]'"),
        ("build", None, "--fa-case=b1h2s64d64-fp16-seed3 -k test_build"),
    ],
)
def test_the_rerun_command_selects_the_same_test(
    tmp_path: Path, kind: RecordKind, property_name: str | None, words: str
) -> None:
    """The command has the variant, the case, the options of the run, and those without which there is no such test."""
    given = options(tmp_path, rerun=("pytest", "--fa-soak=7"), parts=(SanitizeOptions(("memcheck",)), NcuOptions()))
    record = RecordFactory(given).make(kind, variant("mine"), CASE, RESULT, property_name=property_name)
    assert record.rerun_command == f"pytest --fa-soak=7 --fa-variant=mine {words}"


def test_the_rerun_command_of_the_self_test_needs_its_option(tmp_path: Path) -> None:
    """The kernels of the self-test exist only with --fa-selftest, and its tests are not in the shipped suite."""
    given = options(tmp_path, rerun=("pytest", "--pyargs", "pytest_fa.suite"), parts=(SelftestOptions(),))
    record = RecordFactory(given).make("selftest", variant("twin_right"), None, RESULT)
    assert record.rerun_command == "pytest --fa-selftest --fa-variant=twin_right"


def test_a_record_has_the_memory_of_its_result(tmp_path: Path) -> None:
    """Workspace and peak are those of the judged case."""
    result = CaseResult(Outcome.OK, "", (), workspace_bytes=64, peak_bytes=364)
    record = RecordFactory(options(tmp_path)).make("correct", variant("mine"), CASE, result)
    assert (record.workspace_bytes, record.peak_bytes) == (64, 364)


def test_a_name_that_k_would_confuse_is_rerun_by_id(tmp_path: Path) -> None:
    """`-k test_correct` selects every test of a variant with that text in its name, so the command has an id."""
    factory = RecordFactory(options(tmp_path, rerun=("pytest", "--pyargs", "pytest_fa.suite")))
    record = factory.make("correct", variant("my_test_correct"), CASE, RESULT)
    expected = "--fa-case=b1h2s64d64-fp16-seed3 --pyargs pytest_fa.suite.test_attention::test_correct"
    assert record.rerun_command == f"pytest --fa-variant=my_test_correct {expected}"


def test_a_profile_is_rerun_as_strictly(tmp_path: Path) -> None:
    """A profile that fails because of --ncu-strict is run again with it."""
    factory = RecordFactory(options(tmp_path, rerun=("pytest",), parts=(NcuOptions(strict=True, sudo=True),)))
    record = factory.make("profile", variant("mine"), CASE, RESULT)
    words = "--ncu --ncu-set=verdict --ncu-strict --ncu-sudo --fa-case=b1h2s64d64-fp16-seed3 -k test_profile"
    assert record.rerun_command == f"pytest --fa-variant=mine {words}"


def test_a_sanitizer_is_rerun_alone(tmp_path: Path) -> None:
    """The command of one sanitizer's test does not run the other sanitizers."""
    both = options(tmp_path, rerun=("pytest",), parts=(SanitizeOptions(("memcheck", "racecheck")),))
    assert "--fa-sanitize=racecheck " in rerun_command(both, "sanitize", "mine", CASE, tool="racecheck")


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


def test_a_failed_record_has_what_its_test_knows(tmp_path: Path) -> None:
    """Other plugins, the command of a user's own test, the end of the output, and whether the case is a claim."""
    factory, own = RecordFactory(options(tmp_path, rerun=("pytest",))), "tests/test_mine.py::test_it[mine]"
    factory.asker = Asker(("randomly",), own, lambda: f"first{'.' * RECORD_CHARACTERS}", lambda *_: True)
    wrong = factory.make("correct", variant("mine"), CASE, CaseResult(Outcome.WRONG, "", ()))
    assert wrong.rerun_command == f"pytest --fa-variant=mine --fa-case={CASE.id} '{own}'"
    assert (wrong.other_plugins, wrong.output, wrong.is_claim) == (("randomly",), "." * RECORD_CHARACTERS, True)
    right = factory.make("speed", variant("mine"), CASE, RESULT)
    assert (right.output, right.is_claim) == ("", False)


def test_a_record_for_no_test_has_none_of_it(tmp_path: Path) -> None:
    """Without a test that asks, as from Python, a record names no plugin and has no output."""
    record = RecordFactory(options(tmp_path)).make("correct", variant("mine"), CASE, CaseResult(Outcome.WRONG, "", ()))
    assert (record.other_plugins, record.output, record.is_claim) == ((), "", False)


def test_only_the_record_of_a_case_says_what_an_ablation_omits(tmp_path: Path) -> None:
    """The record of the ablation's build is one of a build like any other."""
    ablation = msgspec.structs.replace(variant("mine"), omits="softmax", parent="whole")
    factory = RecordFactory(options(tmp_path))
    records = [factory.make(kind, ablation, CASE, RESULT) for kind in KINDS]
    assert [each.ablation for each in records] == [Ablation("softmax", "whole"), None]


def test_the_payload_of_a_feature_is_printable(tmp_path: Path) -> None:
    """A tool's words may be those of a kernel; the id has the name of the tool."""
    found = Sanitized("memcheck", "found", "a \x1b[31m red line", "", 0.0, ())
    factory = RecordFactory(options(tmp_path, parts=(SanitizeOptions(("memcheck", "racecheck")),)))
    record = factory.make("sanitize", variant("mine"), CASE, RESULT, tool="memcheck", added=found)
    sanitized = Sanitized.of(record)
    assert sanitized is not None
    assert (sanitized.message, record.id) == (r"a \x1b[31m red line", f"mine-{CASE.id}-memcheck")
    assert "--fa-sanitize=memcheck " in record.rerun_command


def test_a_wrong_case_is_the_record_of_the_test_that_needed_it(tmp_path: Path) -> None:
    """A profile of a wrong variant has the record of its check, with its command unless another is given."""
    factory = RecordFactory(options(tmp_path, rerun=("pytest",)))
    check = factory.make("correct", variant("mine"), CASE, CaseResult(Outcome.WRONG, "too far", ()))
    profile, gate = factory.of_kind("profile", check), factory.of_kind("gate", check, "pytest --fa-gate=0.9")
    assert (profile.kind, profile.message, profile.rerun_command) == ("profile", "too far", check.rerun_command)
    assert (gate.kind, gate.rerun_command) == ("gate", "pytest --fa-gate=0.9")


def test_a_session_knows_what_its_workers_have_printed(tmp_path: Path) -> None:
    """A test that asks gets the output up to its failure, which its report still has afterwards."""
    session = Session(options(tmp_path))
    session.runner.workers.add_output("words")
    session.asked_by(("randomly",))
    record = session.records.make("speed", variant("mine"), CASE, CaseResult(Outcome.WRONG, "", ()))
    assert (record.other_plugins, record.output, session.runner.take_output()) == (("randomly",), "words\n", "words\n")
    assert session.runner.output() == ""
