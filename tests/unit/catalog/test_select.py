"""Names, globs, definitions and cases on the command line: what they select, and the message if they are wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import GRAMMAR
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.select import expand_defines, select_cases, select_variants
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import BrokenVariant, Entry, Limits, Role, Supports, Variant
from pytest_fa.errors import UsageProblem


def variant(name: str, role: Role = "candidate", **defines: int | str) -> Variant:
    """Return a variant with this name, role and definitions."""
    return Variant(
        name=name,
        folder=f"kernels/{name}",
        root="kernels",
        role=role,
        entry=Entry(),
        arch=(),
        supports=Supports(),
        instantiations=(("fp16", 64),),
        defines=defines,
        flags=(),
        rounds=(),
        limits=Limits(),
        tolerance="same_precision",
        step="",
        parent=None,
        because="",
        expect="",
    )


CATALOG = Catalog(
    {
        entry.name: entry
        for entry in (
            variant("ws_p1", BLOCK_M=64, BLOCK_N=32, MODE="fast"),
            variant("ws_p2", BLOCK_M=64),
            variant("minimal"),
            variant("sdpa_math", role="baseline"),
            variant("empty", role="overhead"),
            variant("lost", role="ablation"),
        )
    },
    {"bad": BrokenVariant("bad", "its manifest cannot be read")},
)


def names(variants: tuple[Variant | BrokenVariant, ...]) -> list[str]:
    """Return the names of the selected variants, in order."""
    return [each.name for each in variants]


def refusal(work: Callable[[], object]) -> str:
    """Return the message of the `UsageProblem` that `work` raises."""
    with pytest.raises(UsageProblem) as problem:
        work()
    return str(problem.value)


# -- variants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), ["ws_p1", "ws_p2", "minimal", "bad"]),
        (("minimal",), ["minimal"]),
        (("sdpa_math", "minimal"), ["sdpa_math", "minimal"]),
        (("ws_*",), ["ws_p1", "ws_p2"]),
        (("ws_p?", "lost"), ["ws_p1", "ws_p2", "lost"]),
        (("ws_p[2-9]",), ["ws_p2"]),
        (("minimal", "*m*"), ["minimal", "sdpa_math", "empty"]),
        (("ws_p2", "ws_*", "ws_p2"), ["ws_p2", "ws_p1"]),
        (("bad",), ["bad"]),
        (("*",), ["ws_p1", "ws_p2", "minimal", "sdpa_math", "empty", "lost", "bad"]),
    ],
)
def test_patterns_select_variants(patterns: tuple[str, ...], expected: list[str]) -> None:
    """Variants are selected in the order of the patterns, each once; without patterns, all candidates are selected."""
    assert expected == names(select_variants(CATALOG, patterns))


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("ws_p3", "'ws_p3'; did you mean 'ws_p2'?"),
        ("minimum", "'minimum'; did you mean 'minimal'?"),
        ("zzz", "'zzz'"),
        ("zzz*", "'zzz*'"),
        ("WS_P1", "'WS_P1'"),
        ("min", "'min'; did you mean 'minimal'?"),
        ("zzz@BLOCK_M=64", "'zzz'"),
    ],
)
def test_an_unknown_variant_is_refused_with_a_suggestion(pattern: str, hint: str) -> None:
    """A pattern that matches nothing is refused, with the closest name if there is one."""
    expected = f"--fa-variant: no variant {hint} (see --fa-list)"
    assert expected == refusal(lambda: select_variants(CATALOG, ("minimal", pattern)))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("ws_p1@BLOCK_M=128", {"ws_p1@BLOCK_M=128": {"BLOCK_M": 128, "BLOCK_N": 32, "MODE": "fast"}}),
        (
            "ws_p1@BLOCK_M=16@BLOCK_N=16",
            {"ws_p1@BLOCK_M=16@BLOCK_N=16": {"BLOCK_M": 16, "BLOCK_N": 16, "MODE": "fast"}},
        ),
        ("ws_p1@MODE=slow", {"ws_p1@MODE=slow": {"BLOCK_M": 64, "BLOCK_N": 32, "MODE": "slow"}}),
        ("ws_p2@BLOCK_M=-1", {"ws_p2@BLOCK_M=-1": {"BLOCK_M": -1}}),
        (
            "ws_*@BLOCK_M=32",
            {
                "ws_p1@BLOCK_M=32": {"BLOCK_M": 32, "BLOCK_N": 32, "MODE": "fast"},
                "ws_p2@BLOCK_M=32": {"BLOCK_M": 32},
            },
        ),
    ],
)
def test_a_name_with_definitions_is_a_new_variant(pattern: str, expected: dict[str, dict[str, object]]) -> None:
    """`NAME@DEFINE=VALUE` gives a variant of that name, with this definition replaced and the others unchanged."""
    chosen = [each for each in select_variants(CATALOG, (pattern,)) if isinstance(each, Variant)]
    assert expected == {each.name: each.defines for each in chosen}


def test_definitions_do_not_change_the_catalog() -> None:
    """The variant in the catalog keeps its definitions."""
    select_variants(CATALOG, ("ws_p2@BLOCK_M=128",))
    assert CATALOG.variants["ws_p2"].defines == {"BLOCK_M": 64}


@pytest.mark.parametrize(
    "pattern",
    [
        "ws_p2@BLOCK_N=1",
        "minimal@X=1",
        "ws_p2@BLOCK_M",
        "ws_p2@BLOCK_M=",
        "ws_p2@=64",
        "ws_p2@",
    ],
)
def test_a_wrong_definition_is_refused(pattern: str, snapshot: SnapshotAssertion) -> None:
    """An unknown or malformed definition is refused, with what is allowed."""
    assert snapshot == refusal(lambda: select_variants(CATALOG, (pattern,)))


# -- definitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "definitions", "expected"),
    [
        (("ws_p2",), (), ["ws_p2"]),
        (("ws_p2",), ("BLOCK_M=64,128",), ["ws_p2@BLOCK_M=64", "ws_p2@BLOCK_M=128"]),
        (("ws_p2", "minimal", "bad"), ("BLOCK_M=32",), ["ws_p2@BLOCK_M=32", "minimal", "bad"]),
        (
            ("ws_p1", "ws_p2"),
            ("BLOCK_M=1,2", "BLOCK_N=3,4"),
            [
                "ws_p1@BLOCK_M=1@BLOCK_N=3",
                "ws_p1@BLOCK_M=1@BLOCK_N=4",
                "ws_p1@BLOCK_M=2@BLOCK_N=3",
                "ws_p1@BLOCK_M=2@BLOCK_N=4",
                "ws_p2@BLOCK_M=1",
                "ws_p2@BLOCK_M=2",
            ],
        ),
        (
            ("ws_p1@BLOCK_M=16", "ws_p1@BLOCK_M=32"),
            ("BLOCK_N=8",),
            ["ws_p1@BLOCK_M=16@BLOCK_N=8", "ws_p1@BLOCK_M=32@BLOCK_N=8"],
        ),
    ],
)
def test_definitions_give_all_combinations(
    patterns: tuple[str, ...], definitions: tuple[str, ...], expected: list[str]
) -> None:
    """Each combination of values gives one variant; variants without the definition do not change."""
    assert expected == names(expand_defines(select_variants(CATALOG, patterns), definitions))


@pytest.mark.parametrize(
    ("written", "value"), [("64", 64), ("-3", -3), ("fast", "fast"), ("1.5", "1.5"), ("--5", "--5")]
)
def test_a_value_is_a_number_or_a_word(written: str, value: int | str) -> None:
    """An integer becomes a number; any other value is kept as text."""
    (chosen,) = expand_defines(select_variants(CATALOG, ("ws_p2",)), (f"BLOCK_M={written}",))
    assert isinstance(chosen, Variant)
    assert {"BLOCK_M": value} == chosen.defines


@pytest.mark.parametrize(
    "definition",
    [
        "MOD=1",
        "BLOCK_M",
        "=1",
        "BLOCK_M=",
    ],
)
def test_a_definition_that_no_variant_has_is_refused(definition: str, snapshot: SnapshotAssertion) -> None:
    """A definition that no selected variant has is refused, with the names that they have."""
    chosen = select_variants(CATALOG, ("ws_p1", "minimal"))
    assert snapshot == refusal(lambda: expand_defines(chosen, (definition,)))


def test_variants_without_definitions_are_reported(snapshot: SnapshotAssertion) -> None:
    """If no selected variant has a definition, the message lists 'none'."""
    chosen = select_variants(CATALOG, ("minimal", "bad"))
    assert snapshot == refusal(lambda: expand_defines(chosen, ("X=1",)))


# -- cases ------------------------------------------------------------------------------------------------------------


def ids(suite: str) -> list[str]:
    """Return the ids of a suite."""
    return [case.id for case in SUITES[suite]]


@pytest.mark.parametrize(
    ("suites", "patterns", "dtypes", "seeds", "expected"),
    [
        (("history",), (), (), None, ids("history")),
        (("smoke", "mission"), (), (), None, [*ids("smoke"), *ids("mission")]),
        (("smoke", "smoke"), (), (), None, ids("smoke")),
        (("smoke",), ("*-causal-*",), (), None, ["b1h2s65d64-fp16-causal-seed0"]),
        (("smoke",), ("*bf16*", "*bf16*"), (), None, ["b1h2s64d64-bf16-seed0"]),
        (("smoke",), ("b9h1s7d64-fp16-seed5",), (), None, ["b9h1s7d64-fp16-seed5"]),
        (
            ("smoke",),
            ("b9h1s7d64-fp16-seed5", "*bf16*"),
            (),
            None,
            ["b9h1s7d64-fp16-seed5", "b1h2s64d64-bf16-seed0"],
        ),
        (("history",), ("b1h2s64d64-*",), (), (7, 3), ["b1h2s64d64-fp16-seed7", "b1h2s64d64-fp16-seed3"]),
        (("smoke",), ("b1h2s64d64-*",), ("bf16",), None, ["b1h2s64d64-bf16-seed0"]),
        (
            ("smoke",),
            ("b1h2s64d64-*",),
            ("bf16", "fp16"),
            (1,),
            ["b1h2s64d64-bf16-seed1", "b1h2s64d64-fp16-seed1"],
        ),
        (("smoke",), ("b1h2s64d64-fp16-seed0",), ("bf16",), (4,), ["b1h2s64d64-fp16-seed0"]),
        (("smoke",), (), (), (), []),
    ],
)
def test_cases_are_filtered_suites(
    suites: tuple[str, ...],
    patterns: tuple[str, ...],
    dtypes: tuple[str, ...],
    seeds: tuple[int, ...] | None,
    expected: list[str],
) -> None:
    """Dtypes and seeds replace those of suites, globs filter, a whole id is used as it is; no case is duplicated."""
    assert expected == [case.id for case in select_cases(suites, patterns, dtypes, seeds)]


@pytest.mark.parametrize(
    ("suites", "patterns", "dtypes", "expected"),
    [
        (
            ("histry",),
            (),
            (),
            f"--fa-suite: no suite 'histry'; did you mean 'history'? (allowed: {', '.join(SUITES)})",
        ),
        (
            ("smoke",),
            (),
            ("fp64",),
            "--fa-dtype: no dtype 'fp64'; did you mean 'fp16'? (allowed: fp16, bf16, fp32, e4m3)",
        ),
        (("smoke",), (), ("int8",), "--fa-dtype: no dtype 'int8' (allowed: fp16, bf16, fp32, e4m3)"),
        (
            ("smoke", "edge"),
            ("*d257*",),
            (),
            "--fa-case: '*d257*' matches no case of suite smoke,edge (see --collect-only -q)",
        ),
        (
            ("smoke",),
            ("*", "b1h2-seed0"),
            (),
            f"case 'b1h2-seed0' is malformed; the form is {GRAMMAR}, as in b1h8s512d64-fp16-seed0",
        ),
    ],
)
def test_a_wrong_case_option_is_refused_with_what_is_allowed(
    suites: tuple[str, ...], patterns: tuple[str, ...], dtypes: tuple[str, ...], expected: str
) -> None:
    """An unknown suite or dtype, a glob without a match and a malformed id are refused, with what is allowed."""
    assert expected == refusal(lambda: select_cases(suites, patterns, dtypes, None))
