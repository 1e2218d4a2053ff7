"""The lines below the table that name what manifests claim and no case of the run has judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Supports, Variant
from pytest_fa.records.outcome import Outcome
from pytest_fa.table.unjudged_lines import unjudged_lines
from tests.factories import options, record, variant

SUPPORTS = Supports(dtype=("fp16", "bf16"), head_dim=(64, 128), causal=("none", "top_left"))
LENGTHS = "one query, fewer queries than keys, more queries than keys, more than 1,024 keys"
JUDGED = ("b1h2s64d64-fp16-seed0", "b2h4s150d128-fp16-causal-seed0")


def candidate(name: str) -> Variant:
    """Return a variant that supports two dtypes, two head_dims and two masks."""
    pairs = tuple((dtype, dim) for dtype in SUPPORTS.dtype for dim in SUPPORTS.head_dim)
    return msgspec.structs.replace(variant(name), supports=SUPPORTS, instantiations=pairs)


def test_the_reason_of_each_claim(snapshot: SnapshotAssertion) -> None:
    """A dtype that --fa-dtype excludes has that reason; variants with the same claims and reason share a line."""
    plan = Plan((candidate("one"), candidate("two"), candidate("idle")), (), (), judges_claims=True)
    records = [record(name, case) for name in ("one", "two") for case in JUDGED]
    records.append(record("two", "b2h4s150d64-bf16-seed0"))
    left_out = options(Path(), dtypes=("fp16",))
    assert snapshot == unjudged_lines(records, plan, left_out)
    assert snapshot == unjudged_lines(records[:4], plan, options(Path()))


def test_named_cases_and_other_suites(snapshot: SnapshotAssertion) -> None:
    """Where the user selected the cases, the option that selected them is the reason."""
    chosen, records = (candidate("one"),), [record("one", JUDGED[0])]
    rest = f"one: fp16 at D = 128, bf16 at D = 64, bf16 at D = 128, the top-left mask, {LENGTHS}: not judged, "
    named = unjudged_lines(records, Plan(chosen, (), (), cases_are_named=True), options(Path()))
    other = unjudged_lines(records, Plan(chosen, (), ()), options(Path(), suites=("smoke", "long")))
    assert named == [f"{rest}--fa-case left it out"]
    short = unjudged_lines(records, Plan(chosen, (), (), cases_are_named=True), options(Path()), most=3)
    assert short == ["one: fp16 at D = 128 and 7 more: not judged, --fa-case left it out"]
    assert snapshot == other


def test_a_case_that_was_not_judged_does_not_count() -> None:
    """A refused case and a property judge no claim; a wrong output does."""
    plan = Plan((candidate("one"),), (), (), judges_claims=True)
    refused = record("one", "b2h4s150d64-bf16-seed0", outcome=Outcome.UNSUPPORTED)
    wrong = record("one", "b2h4s150d64-bf16-seed0", outcome=Outcome.WRONG)
    held = record("one", "b2h4s150d64-bf16-seed0", "property")
    base = [record("one", case) for case in JUDGED]
    texts = [unjudged_lines([*base, each], plan, options(Path()))[0] for each in (refused, held, wrong)]
    assert [text.split(":")[1].strip() for text in texts] == [
        f"bf16 at D = 64, bf16 at D = 128, {LENGTHS}",
        f"bf16 at D = 64, bf16 at D = 128, {LENGTHS}",
        f"bf16 at D = 128, {LENGTHS}",
    ]
