"""Cases in e4m3: their ids, the variants that get them, and that no other variant does."""

from __future__ import annotations

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.attention.dtypes import Dtype
from pytest_fa.attention.e4m3 import SPECIAL
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.entry import entry_problem
from pytest_fa.catalog.fit import EVERYTHING, cases_for
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.properties import PROPERTIES, case_of_property
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import Call, Entry, Supports, Variant
from pytest_fa.errors import UsageProblem
from tests.factories import variant

IDS = (
    "b1h8s512d64-e4m3-seed0",
    "b2h4s77d64-e4m3-causal-kv1-sk90-bshd-out_bf16-outlier-seed3",
    "b1h8s512d64-e4m3-tiny-seed0",
    "b1h8s512d64-e4m3-out_bf16-zero_head-seed1",
)
E4M3 = Supports(dtype=("e4m3",), fp8_out=("bf16", "fp16"), causal=("none", "top_left"), grouped_heads=True)


def supporting(supports: Supports) -> Variant:
    """Return a candidate with this `supports` and with all pairs of dtype and head_dim compiled."""
    pairs = tuple((dtype, dim) for dtype in supports.dtype for dim in supports.head_dim)
    return msgspec.structs.replace(variant("mine"), supports=supports, instantiations=pairs)


@pytest.mark.parametrize("text", IDS)
def test_an_id_and_its_case(text: str) -> None:
    """The id of a parsed case is the parsed text."""
    assert parse_case(text).id == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("b1h8s512d64-fp16-tiny-seed0", "-out_bf16, -zero_head, -outlier and -tiny need the dtype e4m3"),
        ("b1h8s512d64-fp16-out_bf16-seed0", "-out_bf16, -zero_head, -outlier and -tiny need the dtype e4m3"),
        ("b1h8s512d64-e4m3-scores-seed0", "scores are not computed in e4m3; write fp16, bf16 or fp32"),
    ],
)
def test_parts_that_do_not_fit_together(text: str, reason: str) -> None:
    """What applies to e4m3 alone is refused for another dtype, and scores are for e4m3."""
    with pytest.raises(UsageProblem) as problem:
        parse_case(text)
    assert str(problem.value) == f"case {text!r}: {reason}"


@pytest.mark.parametrize(("part", "out", "bytes_moved"), [("", "fp16", 5), ("-out_bf16", "bf16", 5)])
def test_the_output_has_its_own_dtype(part: str, out: Dtype, bytes_moved: int) -> None:
    """Inputs have one byte per element, the output two."""
    case = parse_case(f"b1h1s64d64-e4m3{part}-seed0")
    assert (case.out_dtype, case.bytes_per_call) == (out, bytes_moved * 64 * 64)
    assert case.with_dtype(out) == parse_case(f"b1h1s64d64-{out}-seed0")


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("dtypes", [("fp16",), ("bf16", "fp16"), ("fp32",)])
def test_other_variants_get_no_case_in_e4m3(suite: str, dtypes: tuple[Dtype, ...]) -> None:
    """A variant that does not declare e4m3 gets none from any suite, claim or property, and no special heads."""
    candidate = supporting(Supports(dtype=dtypes))
    cases = [*cases_for(candidate, SUITES[suite], EVERYTHING), *claim_cases(candidate, ())]
    cases += [case_of_property(candidate, name) for name in PROPERTIES]
    assert {case.dtype for case in cases} <= set(dtypes)
    assert {(case.data, case.fp8_out) for case in cases} == {("normal", "fp16")}


@pytest.mark.parametrize("suite", SUITES)
def test_a_variant_in_e4m3_gets_every_suite_in_e4m3(suite: str) -> None:
    """All cases of a suite become e4m3, with an output that the variant writes, and none is refused for its dtype."""
    candidate = supporting(msgspec.structs.replace(E4M3, fp8_out=("bf16",)))
    cases = cases_for(candidate, SUITES[suite], EVERYTHING)
    assert {(case.dtype, case.out_dtype) for case in cases} == {("e4m3", "bf16")}
    assert not any("dtype is" in str(candidate.refuses(case)) for case in cases)


def test_special_heads_are_judged_for_each_variant_in_e4m3() -> None:
    """The claims have a case with each kind of special heads and with each output dtype, and the variant takes it."""
    candidate = supporting(E4M3)
    cases = claim_cases(candidate, ())
    assert [case.data for case in cases if case.data != "normal"] == list(SPECIAL)
    assert {case.fp8_out for case in cases} == {"fp16", "bf16"}
    assert [candidate.refuses(case) for case in cases] == [None] * len(cases)
    assert not any(case.data in SPECIAL for case in claim_cases(candidate, SUITES["fp8"]))


def test_a_variant_in_two_dtypes_gets_e4m3_from_its_claims() -> None:
    """A variant in fp16 and e4m3 keeps the suite's fp16 and gets e4m3 from the claims, unless `--fa-dtype` omits it."""
    candidate = supporting(Supports(dtype=("fp16", "e4m3")))
    assert {case.dtype for case in cases_for(candidate, SUITES["history"], EVERYTHING)} == {"fp16"}
    claims = [case for case in claim_cases(candidate, SUITES["history"]) if case.seq_q == case.seq_k]
    assert [case.dtype for case in claims] == ["e4m3"] * 4
    assert {case.dtype for case in claim_cases(candidate, SUITES["history"], dtypes=("fp16",))} == {"fp16"}


def test_an_output_that_is_not_supported_is_refused(snapshot: SnapshotAssertion) -> None:
    """A case with an output in bf16 is refused by a variant that writes fp16 only."""
    case = parse_case("b1h8s512d64-e4m3-out_bf16-seed0")
    refusal = supporting(Supports(dtype=("e4m3",))).refuses(case)
    assert snapshot == refusal


def test_a_baseline_without_e4m3_is_timed_in_the_dtype_of_the_output() -> None:
    """Beside an e4m3 shape, SDPA runs the same shape in fp16 under that shape's name; noop runs it in e4m3."""
    sdpa = variant("sdpa", role="baseline", kind="python")
    noop = msgspec.structs.replace(
        variant("noop", role="overhead"), supports=Supports(dtype=("fp16", "e4m3")), instantiations=(("e4m3", 64),)
    )
    cases = tuple(parse_case(f"b1h2s64d64-{dtype}-seed0") for dtype in ("e4m3", "fp16"))
    candidate = supporting(Supports(dtype=("e4m3", "fp16")))
    for chosen in (cases, cases[:1]):
        timings = Plan((candidate,), (sdpa, noop), chosen).timings
        shapes: dict[str, list[Case]] = {}
        for each, case in timings:
            shapes.setdefault(each.name, []).append(case)
        assert (shapes["sdpa"], shapes["noop"]) == ([cases[1]], list(chosen))


def test_a_call_must_pass_the_descales(snapshot: SnapshotAssertion) -> None:
    """A manifest whose call forgets a descale is refused, and names the word."""
    call = Call(arguments=("q", "k", "v", "q_descale", "k_descale"))
    problem = entry_problem(Entry(kind="python", target="a:b", call=call), Supports(dtype=("e4m3",)), None)  # type: ignore[arg-type]
    assert snapshot == problem
