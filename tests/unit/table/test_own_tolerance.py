"""A tolerance that a kernel's own manifest chooses stands beside its verdict, and `judge` does not take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.own_tolerance import own_tolerance
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.judge_command.document import Status
from pytest_fa.features.judge_command.judging import _tolerance_step
from pytest_fa.features.judge_command.question import Question
from pytest_fa.features.judge_command.verdict_text import verdict_text
from pytest_fa.records.outcome import Outcome
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.table.answer import RunFacts, answer_lines
from pytest_fa.table.rows import notes
from pytest_fa.wire.jobs import CaseResult
from tests.factories import options, right_record, variant


def declaring(**changes: Any) -> Variant:
    """A variant whose manifest has these fields."""
    return msgspec.structs.replace(variant("mine"), **changes)


@pytest.mark.parametrize(
    ("changes", "dtype", "policy", "expected"),
    [
        ({}, "fp16", None, ""),
        ({"tolerance": "absolute"}, "fp16", None, "tolerance: absolute"),
        ({"tolerance": "absolute"}, "fp16", "same_precision", ""),
        ({"tolerance": "fp8"}, "e4m3", None, "tolerance: fp8"),
        ({"tolerance": "fp8"}, "fp16", None, ""),
        ({"tolerance": "fp8"}, "", None, "tolerance: fp8"),
        ({"rounds": ("q", "p")}, "fp16", None, "rounds: q, p"),
        ({"tolerance": "absolute", "rounds": ("p",)}, "fp16", None, "tolerance: absolute; rounds: p"),
    ],
)
def test_what_a_manifest_declares(changes: dict[str, Any], dtype: str, policy: str | None, expected: str) -> None:
    """Only what makes the checks of the dtype less strict counts, and a policy of the run replaces the manifest's."""
    assert expected == own_tolerance(declaring(**changes), dtype, policy)


@pytest.mark.parametrize(("policy", "expected"), [(None, "tolerance: absolute"), ("same_precision", "")])
def test_a_record_has_it(tmp_path: Path, policy: str | None, expected: str) -> None:
    """Each record says what its manifest declared, unless the run chose the policy."""
    factory = RecordFactory(options(tmp_path, tolerance=policy))
    case = right_record().case
    made = factory.make("correct", declaring(tolerance="absolute"), case, CaseResult(Outcome.OK, "", ()))
    assert made.own_tolerance == expected


def test_the_table_and_the_answer_name_it() -> None:
    """A line below the table and the answer name the policy of one variant; of several, the answer names those."""
    lenient = right_record("lenient", own_tolerance="tolerance: absolute")
    strict = right_record("strict")
    line = "lenient: judged by its own manifest's tolerance: absolute"
    assert line in notes([lenient, strict])
    (first, *_) = answer_lines([lenient], RunFacts())
    assert "; judged by its own manifest's tolerance: absolute" in first.text
    (first, *_) = answer_lines([lenient, strict], RunFacts())
    assert "judged by their own manifests' tolerance or rounds: lenient" in first.text
    (first, *_) = answer_lines([strict], RunFacts())
    assert "manifest" not in first.text
    assert [line for line in notes([strict]) if "manifest" in line] == []


def test_a_baseline_is_not_named() -> None:
    """Only what is judged for its own sake is named."""
    baseline = right_record("sdpa_math", role="baseline", own_tolerance="rounds: s")
    assert [line for line in notes([baseline]) if "manifest" in line] == []


def test_judge_takes_the_policy_from_its_caller(tmp_path: Path) -> None:
    """Without --tolerance the policy is the strictest one, and the run gets it in any case."""
    assert Question("mine", ("mine",)).policy == "same_precision"
    options = Question("mine", ("mine",)).options(tmp_path)
    assert (options.tolerance, "--fa-tolerance=same_precision" in options.rerun) == ("same_precision", True)
    options = Question("mine", ("mine", "--tolerance=fp8"), tolerance="fp8").options(tmp_path)
    assert (options.tolerance, "--fa-tolerance=fp8" in options.rerun) == ("fp8", True)
    with pytest.raises(UsageProblem, match="no 'loose'"):
        _ = Question("mine", ("mine",), tolerance="loose").policy


def test_judge_says_how_to_accept_it() -> None:
    """After a wrong result, the next step names the policy that the manifest asks for."""
    step = "its manifest asks for another tolerance policy; if you accept that: --tolerance=absolute"
    assert _tolerance_step(declaring(tolerance="absolute"), Status.WRONG, "same_precision") == (step,)
    assert _tolerance_step(declaring(tolerance="absolute"), Status.WRONG, "absolute") == ()
    assert _tolerance_step(declaring(), Status.WRONG, "same_precision") == ()
    assert _tolerance_step(declaring(tolerance="absolute"), Status.FASTER, "same_precision") == ()


def test_the_text_of_judge_names_it() -> None:
    """The lines for people say which policy was used and what the manifest declares."""
    from pytest_fa.features.judge_command.judging import document_of_usage

    document = document_of_usage(Question("mine", ("mine",)), "a problem")
    lenient = msgspec.structs.replace(document, own_tolerance="tolerance: absolute")
    line = "judged by policy same_precision; its own manifest declares tolerance: absolute"
    assert (line in verdict_text(lenient), line in verdict_text(document)) == (True, False)
