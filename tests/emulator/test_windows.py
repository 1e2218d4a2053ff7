"""The rungs with windows and attention sinks, emulated on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.claims import claim_cases
from pytest_fa.gpu.inputs import make_inputs
from tests.emulator.conftest import Build, bits_of, complaints, is_found
from tests.emulator.emulated import Schedule
from tests.tiers import nightly_after, nightly_but

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

RUNG, LONG_RUNG, NEXT_S = "swizzle_window", "long_window", "long_next_s"
SHAPES = (
    "b2h4s70d64-fp16-win37_21-kv2-sk200-sink-bshd",
    "b1h6s150d64-fp16-causal_br-kv2-sk77-sink",  # the first queries see nothing but the sink, which one head lacks
    "b1h2s70d64-fp16-winm8_57-sk200",  # the last queries see no key
    "b1h2s70d64-fp16-win0_0",  # a side of 0 is not an open one
    "b1h2s1d64-fp16-win127_0-sk333",
    "b1h2s130d64-fp16-win64_0-sk200",  # a window begins with a key tile
    "b1h2s70d64-fp16-win9_21-sk30",
    "b1h2s130d64-fp16-wino_5-sk200",
    "b1h2s130d64-fp16-win20_o-sk200",
    "b1h2s130d64-fp16-winm100_o-sk200-sink",  # the last two blocks see no key
    "b1h2s70d64-fp16-win200_m70-sk333",
    "b1h2s70d64-fp16-win5_5-sk0-sink",
    "b1h2s70d64-fp16-win2147483647_0-sk100",
    "b1h2s70d64-fp16-winm2147483647_2147483647-sk100-sink",
    "b1h2s70d64-fp16-win37_0-sk100-scale0-sink",
    "b1h2s70d64-fp16-win37_0-sk100-scalem0p7-sink",
    "b1h6s70d64-fp16-causal-kv2-sk200-sink",
    "b2h4s70d128-fp16-win37_21-kv2-sk200-sink-bshd",
    "b1h2s70d128-fp16-winm8_57-sk200",
)
LONG_SHAPES = (
    "b2h4s300d64-fp16-win37_21-kv2-sk400-sink-bshd",
    "b1h2s130d96-fp16-win37_0-sk200-sink",
    *SHAPES,
    "b1h2s600d128-fp16-win200_0-sk900-sink",
    "b1h2s600d64-fp16-winm64_o-sk300-sink",
    "b1h3s300d80-fp16-causal-sk1100",
    "b2h4s333d80-fp16-win100_30-kv2-sk500-bshd",
    "b1h2s400d96-fp16-causal_br-sk700-bshd",
    "b1h2s130d112-fp16-sk0-sink",
    "b1h2s700d112-fp16-win64_0-sk300",
    "b1h2s300d192-fp16-causal-sk400-sink",
    "b2h4s150d192-fp16-win50_0-kv2-sk300-bshd",
    "b1h2s500d256-fp16-causal_br-sk100",  # work tiles without keys, whose O is written where Q would be
    "b1h2s300d256-fp16-win60_0-sink",
)
VALUES = (
    "b1h2s300d192-fp16-causal-sk400-dv128-sink",
    "b2h4s150d192-fp16-win50_0-kv2-sk300-dv128-bshd",
    "b1h2s500d192-fp16-causal_br-sk100-dv128",  # work tiles without keys
    "b2h2s333d192-fp16-sk900-dv128",
)
CAPPED = (
    "b1h2s130d64-fp16-cap2",
    "b1h2s130d64-fp16-sk300",
    "b1h2s130d128-fp16-win37_0-scalem0p7-cap30",
    "b1h2s130d128-fp16-causal-cap0p001",
    "b1h2s70d64-fp16-sk200-cap3000-sink",
    "b1h2s70d64-fp16-sk200-cap100000",
    "b1h2s70d64-fp16-sk200-scale0-cap5",
    "b1h2s70d64-fp16-cap0p000000001",
    "b1h2s70d64-fp16-sk200-scale3-cap50",
)
TILES = ((32, 16, 3), (128, 32, 2), (16, 64, 2), (32, 48, 4))  # queries, keys, stages
MISTAKES = {
    "wrong_window_begin_not_masked": "b1h2s70d64-fp16-win37_0-sk200",
    "wrong_window_begin_too_late": "b1h2s70d64-fp16-win37_0-sk200",
    "wrong_window_sink_not_in_max": "b1h6s70d64-fp16-kv2-sink",
    "wrong_long_begin_not_masked": "b1h2s70d64-fp16-win37_0-sk200",
    "wrong_long_begin_too_late": "b1h2s70d64-fp16-win37_0-sk400",
    "wrong_long_end_not_masked": "b1h2s70d64-fp16-win37_0-sk200",
    "wrong_long_sink_not_in_max": "b1h6s70d64-fp16-kv2-sink",
}


@pytest.mark.parametrize("shape", nightly_after(3, SHAPES))
def test_it_is_right(build: Build, shape: str) -> None:
    """Output and log-sum-exp are right, also in rows without keys."""
    assert complaints(build(RUNG, parse_case(f"{shape}-seed0").head_dim), shape, Schedule()) == []


@pytest.mark.parametrize("number", nightly_after(1, range(len(LONG_SHAPES))))
def test_the_long_rung_is_right(build: Build, number: int) -> None:
    """So are they with persistent blocks, in each order of copies and threads, and with other head sizes."""
    shape = LONG_SHAPES[number]
    head_dim = parse_case(f"{shape}-seed0").head_dim
    kernel = build(LONG_RUNG if head_dim in (64, 128) else "long_heads", head_dim)
    assert complaints(kernel, shape, Schedule(number, 2, early=number % 3 / 2)) == []


@pytest.mark.parametrize("number", nightly_after(1, range(len(LONG_SHAPES))))
def test_the_next_s_may_run_ahead(build: Build, number: int) -> None:
    """So are they if S of the next work tile is computed early, and if there is no next one or no key."""
    case = parse_case(f"{LONG_SHAPES[number]}-seed0")
    if case.head_dim not in (64, 128):
        pytest.skip("long_next_s has no other head sizes")
    with_one_warpgroup = (2,) if case.head_dim == 128 else (4, 3)
    kernel = build(NEXT_S, case.head_dim, ONLY_SHAPE=with_one_warpgroup[number % len(with_one_warpgroup)])
    assert complaints(kernel, LONG_SHAPES[number], Schedule(number, 2, early=number % 3 / 2)) == []


@pytest.mark.parametrize("number", nightly_after(1, range(len(VALUES))))
def test_values_with_fewer_columns_are_right(build: Build, number: int) -> None:
    """V and O have 128 columns where Q and K have 192."""
    assert complaints(build("long_mla", 192), VALUES[number], Schedule(number, 2, early=number % 3 / 2)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("shape", CAPPED)
def test_soft_caps_are_right(build: Build, shape: str) -> None:
    """A soft cap may be far above all scores or far below, with a negative scale, a window and a sink."""
    assert complaints(build("long_cap", parse_case(f"{shape}-seed0").head_dim), shape, Schedule()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("tile", range(5))
def test_the_long_rung_is_right_with_each_shape_of_work_tiles(build: Build, tile: int) -> None:
    """Warpgroups of a block that see different key tiles take their turns, and release the tiles that they skip."""
    kernel = build(LONG_RUNG, 64, ONLY_SHAPE=tile)
    shapes = [shape for shape in LONG_SHAPES if "d64" in shape]
    broken = {shape: complaints(kernel, shape, Schedule(tile, 3, early=tile % 3 / 2)) for shape in shapes}
    assert broken == {shape: [] for shape in shapes}


@pytest.mark.parametrize(
    ("rung", "defines"), nightly_after(1, [(RUNG, {}), (LONG_RUNG, {"ONLY_SHAPE": 4}), (NEXT_S, {"ONLY_SHAPE": 4})])
)
def test_hidden_tiles_are_not_read(build: Build, rung: str, defines: dict[str, int]) -> None:
    """NaN in key tiles that no query sees changes no bit: 64 queries see keys of the tiles 5 to 8 of 10."""
    case = parse_case("b1h1s64d64-fp16-win200_m100-sk640-seed0")
    inputs, kernel = make_inputs(case, torch.device("cpu")), build(rung, 64, **defines)
    expected = kernel(case, inputs, Schedule())
    for tensor in (inputs.k, inputs.v):
        tensor[:, :, : 5 * 64] = tensor[:, :, 9 * 64 :] = math.nan
    assert all(map(torch.equal, kernel(case, inputs, Schedule()), expected))


def test_rows_without_keys_are_zero_whatever_v_holds(build: Build) -> None:
    """The first P V is not added to zeros: where no query of a work tile sees a key, NaN in V must not stay in O."""
    case = parse_case("b1h2s150d64-fp16-causal_br-sk77-seed0")  # of the first 73 queries, 64 are a work tile
    inputs = make_inputs(case, torch.device("cpu"))
    inputs.v[:] = math.nan
    out, lse = build(NEXT_S, 64, ONLY_SHAPE=4)(case, inputs, Schedule())
    assert (out[:, :, :64] == 0).all()
    assert (lse[:, :, :64] == -math.inf).all()


@pytest.mark.parametrize("above", [62.0, 66.0])
def test_a_sink_may_be_far_above_all_scores(build: Build, above: float) -> None:
    """Below and above the limit from which O is rescaled, the log-sum-exp is the sink, and the output is next to 0."""
    case = parse_case("b1h2s70d64-fp16-win37_0-sk200-sink-seed0")
    inputs = make_inputs(case, torch.device("cpu"))
    inputs.q[:] = 0  # so that all scores are 0
    inputs.extra["sink"][:] = above * math.log(2)
    out, lse = build(NEXT_S, 64, ONLY_SHAPE=4)(case, inputs, Schedule())
    assert torch.allclose(lse, torch.full_like(lse, above * math.log(2)), atol=1e-4)
    assert not out.isnan().any()
    assert out.abs().max() <= 2.0**-24  # the least number in fp16


def test_the_next_s_needs_its_q(build: Build) -> None:
    """If Q is released before the last S that reads it, a result is wrong, or the kernel cannot end."""
    shape = "b1h3s700d64-fp16-win200_0"
    assert is_found(build("race_long_next_s_q_empty", ONLY_SHAPE=4), shape, sms=1)
    assert not is_found(build(NEXT_S, 64, ONLY_SHAPE=4), shape, sms=1)


def test_a_window_that_is_a_causal_mask_has_its_shape_of_work_tiles(build: Build) -> None:
    """The costs of short windows choose another shape, which adds in another order."""
    mask, window = (parse_case(f"b1h1s96d64-fp16-{hidden}-seed0") for hidden in ("causal", "win95_0"))
    kernel, schedule = build(LONG_RUNG, 64), Schedule(sms=1)
    assert all(map(torch.equal, bits_of(kernel, mask, schedule), bits_of(kernel, window, schedule)))


@pytest.mark.parametrize("name", nightly_but(MISTAKES, "wrong_window_begin_too_late"))
def test_each_mistake_is_found(build: Build, name: str) -> None:
    """A kernel with one mistake is wrong where the rung is right."""
    shape = MISTAKES[name]
    assert complaints(build(LONG_RUNG if "long" in name else RUNG, 64), shape, Schedule()) == []
    assert complaints(build(name), shape, Schedule()) != []


@pytest.mark.nightly
@pytest.mark.parametrize("tile", TILES)
def test_it_is_right_with_other_tiles(build: Build, tile: tuple[int, int, int]) -> None:
    """So it is with smaller and larger tiles and more stages, and in any order of copies."""
    kernel = build(RUNG, 64, **dict(zip(("BLOCK_M", "BLOCK_N", "STAGES"), tile, strict=True)))
    shapes = [shape for shape in SHAPES if "d64" in shape]
    schedules = [Schedule(number, early=number % 3 / 2) for number in range(len(shapes))]
    broken = {shape: complaints(kernel, shape, schedule) for shape, schedule in zip(shapes, schedules, strict=True)}
    assert broken == {shape: [] for shape in shapes}


@pytest.mark.nightly
@pytest.mark.parametrize("rung", [RUNG, LONG_RUNG, NEXT_S, "long_heads"])
def test_each_claim_is_right(build: Build, rung: str) -> None:
    """The cases of a default run are right, which have any two of the claims."""
    kernel = build(rung, dtypes=("fp16", "bf16"))
    cases = claim_cases(kernel.variant, ())
    broken = {case.id: complaints(kernel, case.shape_id, Schedule()) for case in cases}
    assert (broken, len(cases) > len(SHAPES)) == ({case.id: [] for case in cases}, True)
