"""The reference of a backward pass is right in judged and in timed calls, with every part of attention."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import case_of_property
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.pipeline import run_case
from tests.factories import cpu_job

KERNELS = Path(__file__).parents[3] / "kernels"


@pytest.fixture(name="reference")
def _reference() -> Variant:
    (variant,) = read_manifest(KERNELS / "reference_backward" / "variant.yaml", KERNELS)
    return variant


@pytest.mark.parametrize(
    "case",
    [
        "b1h2s48d64-fp16-causal-sk80-bwd-seed0",
        "b4h4s40d64-fp16-kv1-var3-sink-bshd-bwd-dlse-seed0",
        "b2h2s40d64-bf16-win10_0-biashq-maskbq-bwd-seed0",
        "b2h4s40d64-fp16-sk70-dv32-cap5-alibi-sink-bshd-bwd-seed0",
        "b4h3s40d64-fp16-var2-biasbhq-bwd-seed0",
        "b5h4s40d64-fp16-causal_br-kv2-var2-sink-thd-bwd-dlse-seed3",
        "b1h2s4d64-fp16-sk0-bwd-seed0",
        "b1h2s4d64-fp16-kv1-sk0-bwd-dlse-seed0",
    ],
)
def test_judged_and_timed(reference: Variant, case: str) -> None:
    """It is also right in a process without torch's attention; each gradient has its bounds."""
    result = run_case(cpu_job(reference, case, time=True), bare=Candidate.in_this_process())
    assert (result.outcome, result.message) == ("ok", "")
    assert result.check
    names = {bound.name.partition(" ")[0] for bound in result.check.bounds}
    of_parts = {f"d{part}" for part in ("bias", "sink") if f"-{part}" in case}
    assert names == ({"dq"} if "-sk0-" in case else {"dq", "dk", "dv"}) | of_parts


@pytest.mark.parametrize("name", ["new_shape", "new_lengths", "different_strides", "expanded_heads"])
def test_properties(reference: Variant, name: str) -> None:
    """Calls on memory that a property has changed have the results of their own forward pass."""
    result = run_case(cpu_job(reference, case_of_property(reference, name).id, property_name=name))
    assert (result.outcome, result.message) == ("ok", "")


OF_PARTS = ("b2h3s40d64-fp16-biashq-sink-bwd-dlse-seed0", "b2h3s40d64-fp16-sk50-cap2-biasbq-bwd-seed0")
MOVED = ("new_shape", "new_data", "padded_rows", "offset_pointers", "head_independence")


@pytest.mark.parametrize("case", OF_PARTS, ids=["bias of heads, sink", "bias of batches"])
@pytest.mark.parametrize("name", [*MOVED, "batch_invariance", "position_invariance"])
def test_properties_with_a_bias_and_a_sink(reference: Variant, name: str, case: str) -> None:
    """Their gradients have shapes of their own, and sums over batches or heads are judged where they are sums."""
    result = run_case(cpu_job(reference, case, property_name=name))
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("may_differ", [(), ("dq",)])
def test_two_groups_are_independent(reference: Variant, may_differ: tuple[str, ...]) -> None:
    """The other group's heads are compared or judged: none of them reads the larger head of K and V."""
    variant = msgspec.structs.replace(reference, may_differ=may_differ)
    result = run_case(cpu_job(variant, "b2h4s40d64-fp16-kv2-bwd-seed0", property_name="head_independence"))
    assert (result.outcome, result.message) == ("ok", "")


def test_dk_of_subnormal_keys_stays_in_the_range_of_fp16() -> None:
    """Q is large where K is tiny, and a large scale would make dK infinite in every kernel."""
    with pytest.raises(UsageProblem, match="with the scale 3, dK is beyond fp16; drop -data_subnormal"):
        parse_case("b1h1s6d64-fp16-sk5-scale3-bwd-data_subnormal-seed0")
    assert parse_case("b1h1s6d64-fp16-sk5-bwd-data_subnormal-seed0").value_of("profile") == "subnormal"


def test_weights_beside_a_sink_stay_normal() -> None:
    """A weight of exp(-100) has few bits in float32, in every kernel."""
    with pytest.raises(UsageProblem, match=r"weights are subnormal in float32.*drop -data_value_range"):
        parse_case("b1h1s1d112-fp32-sink-data_value_range-seed0")


def test_packed_sequences_without_keys(reference: Variant) -> None:
    """There is no row of K to look at."""
    result = run_case(cpu_job(reference, "b4h1s1d64-fp16-sk0-var2-thd-bwd-seed1"))
    assert (result.outcome, result.message) == ("ok", "")
