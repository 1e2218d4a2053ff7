"""Attention functions of torch are judged with a manifest alone: every case that it claims is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from tests.adopted import FLEX, OPERATOR, SDPA, cases_of, manifest_of
from tests.factories import WriteVariant, cpu_job
from tests.tiers import nightly_after, nightly_but

MANIFESTS = {
    **dict.fromkeys(("theirs", "theirs_masked", "theirs_biased"), SDPA),
    **dict.fromkeys(("flex", "flex_lse"), FLEX),
    "operator": OPERATOR,
}
MANY_KEYS = 1200  # a case with more takes seconds
EVERY = 6  # of the cases, one for every change; the others are judged each night
# FlexAttention says that it is not compiled, and that `return_lse` has a successor.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")
VariantOf = Callable[[str], Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant) -> VariantOf:
    """`variant_of(name)`: one of `MANIFESTS`, of a folder of that name unless the manifest names it."""

    def named(name: str) -> Variant:
        folder = write_variant(name, manifest=MANIFESTS[name])
        return {each.name: each for each in read_manifest(folder / "variant.yaml", folder.parent)}[name]

    return named


def wrong_of(variant: Variant, cases: list[str]) -> dict[str, str]:
    """What is wrong with each case that is."""
    results = {case: run_case(cpu_job(variant, case, repeats=2)) for case in cases}
    return {case: f"{found.outcome}: {found.message}" for case, found in results.items() if found.outcome != "ok"}


def test_the_documented_manifest_calls_it_alike(variant_of: VariantOf, write_variant: WriteVariant) -> None:
    """The manifest of the documentation has the calls that are judged here, and claims less."""
    documented = manifest_of("scaled_dot_product_attention")
    folder = write_variant("documented", manifest=documented)
    read = read_manifest(folder / "variant.yaml", folder.parent)
    assert {each.name: each.entry for each in read} == {
        name: variant_of(name).entry for name in MANIFESTS if name.startswith("theirs")
    }


@pytest.mark.parametrize("name", nightly_but(MANIFESTS, *(name for name in MANIFESTS if name != "flex")))
def test_some_claims_are_right(variant_of: VariantOf, name: str) -> None:
    """Some cases of each manifest, of which each has other parts, dtypes and lengths."""
    cases = [case.id for case in cases_of(variant_of(name)) if case.seq_k <= MANY_KEYS][::EVERY]
    assert (wrong_of(variant_of(name), cases), len(cases) >= 4) == ({}, True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MANIFESTS)
def test_all_claims_are_right(variant_of: VariantOf, name: str) -> None:
    """All cases of each manifest, also masks and biases under which a query sees no key."""
    cases = [case.id for case in cases_of(variant_of(name))]
    assert (wrong_of(variant_of(name), cases), len(cases) >= 25) == ({}, True)


@pytest.mark.parametrize(("name", "rest"), nightly_after(2, [("theirs_masked", "mask"), ("theirs_biased", "bias")]))
def test_a_query_without_keys_is_zero(variant_of: VariantOf, name: str, rest: str) -> None:
    """Torch's rows without a key are 0, as the judge demands, so that no convention is declared for them."""
    cases = [f"b2h4s77d64-{dtype}-{rest}bhq-seed0" for dtype in ("fp16", "bf16", "fp32")]
    assert wrong_of(variant_of(name), cases) == {}


def test_flex_attention_rounds_p(variant_of: VariantOf, write_variant: WriteVariant) -> None:
    """Without a compiler, it divides before it rounds P; a manifest that does not declare that is told of an error."""
    folder = write_variant("undeclared", manifest=MANIFESTS["flex"].replace("rounds: [p]\n", ""))
    undeclared = read_manifest(folder / "variant.yaml", folder.parent)[0]
    case = "b2h4s150d32-bf16-kv2-dv16-scale0-bshd-seed0"  # all weights are 1 / 150, which is rounded alike
    assert [wrong_of(variant_of("flex"), [case]), len(wrong_of(undeclared, [case]))] == [{}, 1]
