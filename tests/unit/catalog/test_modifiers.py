"""The suite `modifiers` and the cases of claims have any two features that one case can have."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pytest_fa
from pytest_fa.attention import parts
from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Choice
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.catalog.factors import claim_of, tells
from pytest_fa.catalog.suites import SUITES, factors_of_modifiers, modifiers
from pytest_fa.catalog.variant import Supports, Variant
from pytest_fa.errors import UsageProblem
from tests.factories import variant
from tests.unit.attention.even_bias import PART as EVENS

MAX_CASES = 60
Values = dict[str, Any]  # of a case: of its dtype, its head_dim and its parts, by their names
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def values_of(case: Case, of: Iterable[Part]) -> Values:
    """What a case has."""
    return {"dtype": case.dtype, "head_dim": case.head_dim, **{part.name: part.claimed_by(case) for part in of}}


def pairs_of(rows: Iterable[Values]) -> set[Pair]:
    """Any two values of a case."""
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def case_with(values: Values, of: Iterable[Part]) -> Case | None:
    """The case with some values, which are written into its id and read back; None if there is none."""
    case = parse_case("b2h4s193d64-fp16-seed0").with_dtype(values.get("dtype", "fp16"))
    case = case.with_fields({"head_dim": values.get("head_dim", 64)})
    for part in of:
        if part.name in values:
            case = case.with_fields(part.fields_with(values[part.name], 4))
    try:
        same = parse_case(case.id)
    except UsageProblem:
        return None
    return same if values.items() <= values_of(same, of).items() else None


def possible_pairs(of: Mapping[str, Iterable[Any]], among: list[Part]) -> set[Pair]:
    """The pairs that a case can have beside plain values, or beside one other value of a third feature."""
    pairs = set()
    thirds: list[Values] = [{}, *({name: value} for name, values in of.items() for value in values)]
    for first, second in itertools.combinations(of, 2):
        for pair in itertools.product(of[first], of[second]):
            chosen = dict(zip((first, second), pair, strict=True))
            if any(case_with({**third, **chosen}, among) for third in thirds):
                pairs.add(((first, pair[0]), (second, pair[1])))
    return pairs


def check_modifiers(cases: Iterable[Case]) -> set[Pair]:
    """Check that the cases have all pairs that are possible beside one other value at most, and return these."""
    varied = [part for part in parts.PARTS if len(part.varied) > 1]
    dtypes, head_dims, *_ = factors_of_modifiers().values
    features = {"dtype": dtypes, "head_dim": head_dims, **{part.name: part.varied for part in varied}}
    possible = possible_pairs(features, varied)
    assert possible <= pairs_of(values_of(case, varied) for case in cases)
    return possible


def test_any_two_features_occur_together() -> None:
    """The suite has exactly the pairs that the parser of ids allows, in few cases."""
    cases = SUITES["modifiers"]
    possible = check_modifiers(cases)
    assert len(cases) <= MAX_CASES
    assert (("causal", "top_left"), ("window", "left")) not in possible
    assert (("window", "left"), ("softcap", True)) in possible
    assert (("head_dim", 128), ("head_dim_v", 128)) not in possible
    assert (("head_dim", 192), ("head_dim_v", 128)) in possible


def test_a_pair_counts_only_where_several_keys_are_seen() -> None:
    """Without the cases in which queries see one key, only one query under a causal mask is missing."""
    varied = [part for part in parts.PARTS if len(part.varied) > 1]
    missing = pairs_of(values_of(case, varied) for case in SUITES["modifiers"]) - pairs_of(
        values_of(case, varied) for case in SUITES["modifiers"] if tells(case)
    )
    assert missing == {(("causal", "top_left"), ("lengths", "one_query"))}


def test_fields_take_turns() -> None:
    """The suite has several windows of each kind, both caps, and groups of several sizes."""
    cases = SUITES["modifiers"]
    assert len({case.value_of("window") for case in cases}) >= 8
    assert {(case.value_of("softcap"), case.scale == 3) for case in cases} >= {(2.0, False), (50.0, True)}
    assert {case.heads // case.kv_heads for case in cases} >= {1, 3, 4, 6}
    assert {case.value_of(tensor) for case in cases for tensor in ("bias", "mask")} >= {None, "q", "h", "bq", "bhq"}


def test_the_list_is_the_same_in_each_process() -> None:
    """Other hash seeds give the same ids in the same order."""
    code = "from pytest_fa.catalog.suites import SUITES; print(*SUITES['modifiers'])"
    root = str(Path(pytest_fa.__file__).parents[1])
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.split()
        for seed in ("1", "4242")
    ]
    assert printed == [[case.id for case in SUITES["modifiers"]]] * 2


# -- parts that nobody else knows -------------------------------------------------------------------------------------


class Chapters(Part):
    """A made-up part that needs another one."""

    name = "chapters"
    summary = "keys lie in chapters"
    tokens = (Choice("chapters", (("chapters", True),), False),)
    supports = "chapters"
    claims = (False, True)
    words = {"chapters": ("chapters",)}  # noqa: RUF012  # as `Part` declares it

    def impossible(self, case: Shape) -> str | None:
        """Chapters of keys need the other part."""
        return "chapters need evens" if case.value_of("chapters") and not case.value_of("evens") else None


@pytest.fixture
def made_up() -> Iterator[None]:
    """Two more parts are on the list; one needs the other."""
    chapters = Chapters()
    parts.add(EVENS)
    parts.add(chapters)
    yield
    parts.remove(chapters)
    parts.remove(EVENS)


@pytest.mark.nightly
@pytest.mark.usefixtures("made_up")
def test_a_new_part_comes_in_by_itself() -> None:
    """A part on the list is combined with all others, also one that only cases with another part can have."""
    cases = modifiers()
    possible = check_modifiers(cases)
    assert len(cases) <= MAX_CASES
    assert (("dtype", "e4m3"), ("chapters", True)) in possible
    assert (("evens", 0.0), ("chapters", True)) not in possible


# -- what a variant claims --------------------------------------------------------------------------------------------

CLAIMS: dict[str, tuple[Any, ...]] = {"window": ("none", "left", "both", "negative"), "softcap": (False, True)}
SIZES: dict[str, tuple[Any, ...]] = {**CLAIMS, "head_dim_v": ("equal", 72, 128)}
TENSORS: dict[str, tuple[Any, ...]] = {
    "softcap": (True,),
    "head_dim_v": (72,),
    **dict.fromkeys(("bias", "alibi", "mask", "sink"), (False, True)),
}


def claiming(**more: tuple[Any, ...]) -> Variant:
    """A variant that claims two dtypes, two head_dims of which one dtype has one, masks, layouts, groups and `more`."""
    supports = Supports(
        dtype=("fp16", "bf16"),
        head_dim=(64, 128),
        causal=("none", "top_left", "bottom_right"),
        layout=("bhsd", "bshd"),
        grouped_heads=True,
        more=tuple(more.items()),
    )
    built = (("fp16", 64), ("fp16", 128), ("bf16", 64))
    return msgspec.structs.replace(variant("mine"), supports=supports, instantiations=built)


@pytest.mark.parametrize("suite", [(), SUITES["history"]], ids=["alone", "beside history"])
@pytest.mark.parametrize(
    "more",
    [{}, CLAIMS, {"softcap": (True,)}, SIZES, {"head_dim_v": (128,)}, TENSORS],
    ids=["masks", "windows", "always capped", "sizes of V", "one size of V", "tensors"],
)
def test_any_two_claims_occur_together(more: dict[str, tuple[Any, ...]], suite: tuple[Case, ...]) -> None:
    """The cases of a variant's claims have all pairs of the whole product that its manifest and the parts allow."""
    candidate, claimed = claiming(**more), parts.claimed_parts()
    accepted = [case for case in suite if candidate.refuses(case) is None]
    values = [part.supported(candidate.supports) for part in claimed]
    product = (
        case
        for (dtype, head_dim), *chosen in itertools.product(candidate.instantiations, *values)
        if (
            case := case_with(
                {
                    "dtype": dtype,
                    "head_dim": head_dim,
                    **{part.name: value for part, value in zip(claimed, chosen, strict=True)},
                },
                claimed,
            )
        )
    )
    judged = [*accepted, *claim_cases(candidate, suite)]
    assert {pair for case in product for pair in claim_of(case).pairs} <= {
        pair for case in judged if tells(case) for pair in claim_of(case).pairs
    }
    assert [candidate.refuses(case) for case in judged] == [None] * len(judged)


def test_a_part_that_is_not_claimed_changes_no_case() -> None:
    """The cases of a manifest stay the same when the list has one more part."""
    before = claim_cases(claiming(**CLAIMS), SUITES["history"])
    parts.add(EVENS)
    try:
        assert claim_cases(claiming(**CLAIMS), SUITES["history"]) == before
    finally:
        parts.remove(EVENS)


@pytest.mark.parametrize(("claim", "token"), [("window", "-win"), ("softcap", "-cap")])
def test_a_claim_that_is_dropped_takes_its_cases_along(claim: str, token: str) -> None:
    """Without a claim, no case has the feature."""
    more = {name: values for name, values in CLAIMS.items() if name != claim}
    with_claim, without = (claim_cases(claiming(**each), ()) for each in (CLAIMS, more))
    assert (any(token in case.id for case in with_claim), any(token in case.id for case in without)) == (True, False)


@pytest.mark.parametrize("more", [CLAIMS, TENSORS], ids=["windows", "tensors"])
def test_all_that_a_part_varies_is_judged(more: dict[str, tuple[Any, ...]]) -> None:
    """Each window, cap, group and choice of axes of `fields_in_turn` is that of a case."""
    candidate = claiming(**more)
    cases = claim_cases(candidate, SUITES["history"])
    for part in parts.claimed_parts():
        for value in part.supported(candidate.supports):
            for fields in part.fields_in_turn(value, 4):
                shown = [case for case in cases if case.with_fields(fields) == case]
                assert shown, fields
