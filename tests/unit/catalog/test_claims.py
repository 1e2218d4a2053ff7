"""All that a manifest claims to support is judged: by cases beside those of the suite, and by the properties."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pytest_fa.attention.causal import Causal
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.claims import claim_cases, claims_of, unjudged
from pytest_fa.catalog.factors import claim_of
from pytest_fa.catalog.fit import EVERYTHING, cases_for
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.properties import MALFORMED, ON_GPU, ON_PLAIN_CASES, PROPERTIES, case_of_property
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import Role, Supports, Variant
from tests.factories import variant

ALL = Supports(
    dtype=("bf16", "fp16", "fp32"),
    head_dim=(64, 128),
    causal=("top_left", "none", "bottom_right"),
    layout=("bshd", "bhsd"),
    grouped_heads=True,
    seq_k_min=0,
)
SOME = Supports(dtype=("fp16", "bf16"), causal=("none", "top_left"), seq_q_multiple_of=64, seq_k_multiple_of=128)


def supporting(supports: Supports, role: Role = "candidate") -> Variant:
    """Return a variant with this `supports` and with all pairs of dtype and head_dim compiled."""
    pairs = tuple((dtype, dim) for dtype in supports.dtype for dim in supports.head_dim)
    return msgspec.structs.replace(variant("mine", role=role), supports=supports, instantiations=pairs)


def judged_cases(candidate: Variant, suite: str = "history") -> list[Case]:
    """Return the cases of a suite, adapted to a variant, and those of its claims."""
    cases = cases_for(candidate, SUITES[suite], EVERYTHING)
    return [*cases, *claim_cases(candidate, cases)]


@pytest.mark.parametrize("suite", ["history", "edge", "decode"])
@pytest.mark.parametrize("supports", [ALL, SOME, Supports()], ids=["all", "some", "one"])
def test_any_two_supported_values_occur_together(supports: Supports, suite: str) -> None:
    """Together with the suite, the cases of the claims have any two supported values; the variant takes all of them."""
    candidate = supporting(supports)
    judged = judged_cases(candidate, suite)
    pairs = {pair for case in judged for pair in claim_of(case).pairs}
    assert {pair for claim in claims_of(candidate) for pair in claim.pairs} <= pairs
    assert [candidate.refuses(case) for case in claim_cases(candidate, ())] == [None] * len(claim_cases(candidate, ()))
    assert unjudged(candidate, judged) == []


def test_the_cases_are_few_and_their_ids_can_be_named() -> None:
    """A kernel like ws_p2 has ten cases more; one that claims one value of each, five; a case id names each."""
    ws_p2 = Supports(dtype=("fp16", "bf16"), causal=("none", "top_left"), layout=("bhsd", "bshd"), grouped_heads=True)
    counts = [len(judged_cases(supporting(each))) - 12 for each in (ws_p2, Supports(), ALL)]
    assert counts == [10, 5, 14]
    ids = [case.id for case in claim_cases(supporting(ALL), (), seed=3)]
    assert [parse_case(text).id for text in ids] == ids
    assert all(text.endswith("-seed3") for text in ids)


@pytest.mark.parametrize("masks", [("none",), ("top_left",), ("bottom_right",), ("none", "bottom_right")], ids=str)
def test_lengths_are_judged_whatever_is_claimed(masks: tuple[Causal, ...]) -> None:
    """Each kind of lengths has a case in which most keys are visible, and a bottom-right mask has both kinds."""
    cases = claim_cases(supporting(Supports(causal=masks)), SUITES["history"])
    visible = [case for case in cases if case.visible_pairs >= min(case.seq_q, case.seq_k) ** 2 / 2]
    kinds = {(case.seq_q > case.seq_k) - (case.seq_q < case.seq_k) for case in visible}
    assert kinds >= {-1, 1}
    assert any(case.seq_k > 1024 for case in cases)
    assert {case.seq_k % 32 for case in cases} >= {1, 31}
    if "bottom_right" in masks:
        of_mask = {case.seq_q > case.seq_k for case in cases if case.causal == "bottom_right"}
        assert of_mask == {True, False}
    if masks != ("top_left",):  # under it, one query sees one key
        assert any(case.seq_q == 1 and case.visible_pairs > 1024 for case in cases)


def test_groups_that_are_no_power_of_two_are_judged() -> None:
    """Grouped heads are judged in groups of two, three and six, and with one query."""
    cases = claim_cases(supporting(Supports(grouped_heads=True)), SUITES["history"])
    assert {case.heads // case.kv_heads for case in cases} >= {2, 3, 6}
    assert any(case.seq_q == 1 and case.heads > case.kv_heads for case in cases)


def test_lengths_of_a_kernel_for_self_attention_are_equal() -> None:
    """Its cases have one length, and no line says that it was not judged with two."""
    candidate = supporting(Supports(self_attention_only=True, causal=("none", "bottom_right"), seq_k_min=0))
    judged = judged_cases(candidate)
    assert [case.id for case in judged if case.seq_q != case.seq_k] == []
    assert unjudged(candidate, judged) == []


def test_rows_without_keys() -> None:
    """Under bottom-right masks there are both more and fewer keys; a variant that claims so has a case without keys."""
    cases = claim_cases(supporting(ALL), ())
    shifts = {case.seq_k > case.seq_q for case in cases if case.causal == "bottom_right"}
    assert (shifts, [case.seq_k for case in cases].count(0)) == ({True, False}, 1)


@pytest.mark.parametrize("role", ["baseline", "wrong", "ablation", "overhead"])
def test_only_candidates_have_claims(role: Role) -> None:
    """The claims of companions and of deliberately wrong kernels are not tested."""
    assert claim_cases(supporting(ALL, role), ()) == []
    assert unjudged(supporting(ALL, role), ()) == []


def test_what_was_not_judged_in_words() -> None:
    """Pairs of dtype and head_dim, masks, layouts and groupings are named, each once."""
    judged = [parse_case("b1h2s64d64-fp16-seed0"), parse_case("b2h4s150d64-bf16-causal-kv2-seed0")]
    assert [(each.text, each.dtype) for each in unjudged(supporting(ALL), judged)] == [
        ("fp16 at D = 128", "fp16"),
        ("bf16 at D = 128", "bf16"),
        ("fp32 at D = 64", "fp32"),
        ("fp32 at D = 128", "fp32"),
        ("the bottom-right mask", None),
        ("layout bshd", None),
        ("one query", None),
        ("fewer queries than keys", None),
        ("more queries than keys", None),
        ("more than 1,024 keys", None),
    ]


def test_selected_dtypes() -> None:
    """With `--fa-dtype`, the claims of other dtypes are not judged."""
    candidate = supporting(ALL)
    assert {case.dtype for case in claim_cases(candidate, (), dtypes=("bf16",))} == {"bf16"}
    assert {case_of_property(candidate, name, ("bf16",)).dtype for name in PROPERTIES} == {"bf16"}


@pytest.mark.parametrize("supports", [ALL, SOME], ids=["all", "some"])
def test_properties_take_turns(supports: Supports) -> None:
    """Any supported value is that of a property that needs no GPU, and the variant takes the cases of all."""
    candidate = supporting(supports)
    cases = {name: case_of_property(candidate, name) for name in PROPERTIES}
    assert [name for name, case in cases.items() if candidate.refuses(case)] == []
    tested = [claim_of(case) for name, case in cases.items() if name not in ON_GPU]
    for place in range(len(tested[0].flat)):
        assert {claim.flat[place] for claim in claims_of(candidate)} == {claim.flat[place] for claim in tested}


def test_the_properties_of_other_roles_do_not_take_turns() -> None:
    """The self-test and the baselines keep one case for all properties."""
    names = [name for name in PROPERTIES if name not in (*ON_PLAIN_CASES, MALFORMED)]
    cases = {case_of_property(supporting(ALL, "wrong"), name).id for name in names}
    assert cases == {"b2h3s150d64-fp16-seed0"}


def test_a_plan_judges_claims_only_where_it_is_told_to() -> None:
    """The claims are beside the checks and are never timed; they have the seed of the run."""
    candidate, cases = supporting(SOME), tuple(case.with_seed(7) for case in SUITES["smoke"])
    plain = Plan((candidate,), (), cases, fits=EVERYTHING)
    plan = msgspec.structs.replace(plain, judges_claims=True)
    assert (plain.claims, plan.checks == plain.checks, plan.first_seeds == plain.first_seeds) == ([], True, True)
    claims = [case for _, case in plan.claims]
    assert claims
    assert [plan.is_claim(candidate, case) for case in claims] == [True] * len(claims)
    assert not any(plan.is_claim(candidate, case) for _, case in plan.checks)
    ids = list(itertools.chain(*plan.ids_with_seeds.values()))
    assert {case.seed for case in claims} == {7}
    assert {f"mine-{case.id}" for case in claims} <= set(ids)
