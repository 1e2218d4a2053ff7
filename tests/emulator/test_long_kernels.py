"""The kernels for long sequences, emulated on the CPU.

They are right in any order of copies and threads, and need each of their barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import Case, Dtype, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.check import judge
from pytest_fa.judge.log_sum_exp import judge_lse, make_lse_truth
from pytest_fa.judge.oracle import truth_of
from pytest_fa.run.inputs import make_inputs
from tests.emulator.emulated import Emulated, Schedule, StuckKernel

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

KERNELS = Path(__file__).parents[2] / "kernels"
TWO, FIVE, SEVEN, EIGHT = 2, 5, 7, 8  # SMs
# Late: a copy arrives, and a wgmma reads shared memory, when nothing else can run.  Early: as soon as it may.
ORDERS = {"late": 0.0, "mixed": 0.5, "early": 1.0}
RUNGS = ("long_ring", "long_turns", "long_sum", "long_next_q")  # between them, they have all paths of the source
SHAPES = (
    ("b1h2s1d64-fp16-sk127", TWO),  # one query, one key tile
    ("b1h2s130d64-fp16-sk0", TWO),  # no key
    ("b1h3s300d64-fp16-causal-sk1100", TWO),
    ("b1h2s700d64-fp16-causal_br-sk300", TWO),  # the first queries see no key
    ("b2h4s333d64-fp16-kv2-sk500", FIVE),
    ("b1h2s257d128-fp16-causal", TWO),
    ("b1h2s400d128-fp16-causal_br-sk700-bshd", FIVE),
    ("b1h3s300d128-fp16-sk513", FIVE),
)
# The keys of the last work tiles are divided here, into two to four parts.
SPLIT = (
    ("b1h3s400d128-fp16-sk1100", EIGHT),
    ("b1h1s384d128-fp16-sk2000", FIVE),
    ("b1h2s130d128-fp16-sk2500", SEVEN),
)
FAULTS = ("q_full", "k_full", "v_full", "q_empty", "k_empty", "v_empty", "o_written", "part_stored")


def of_dtype(variant: Variant, *dtypes: Dtype) -> Variant:
    """The variant, compiled for fewer dtypes."""
    pairs = tuple(pair for pair in variant.instantiations if pair[0] in dtypes)
    return msgspec.structs.replace(variant, instantiations=pairs)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Callable[[str], Emulated]:
    """`build("long_ring")`: a variant in fp16, compiled once."""
    variants = discover((KERNELS,)).variants
    builds: dict[str, Emulated] = {}

    def build_once(name: str) -> Emulated:
        if name not in builds:
            builds[name] = Emulated(of_dtype(variants[name], "fp16"), tmp_path_factory.mktemp(name), shared_cache)
        return builds[name]

    return build_once


def complaints(kernel: Emulated, case: Case, schedule: Schedule, calls: int = 1) -> list[str]:
    """What the judge says about a call: the bounds that do not hold, also those of the log-sum-exp."""
    inputs = make_inputs(case, torch.device("cpu"))
    out, lse = kernel(case, inputs.q, inputs.k, inputs.v, schedule, calls)
    check = judge(out, truth_of("attention", inputs, (), "same_precision"), "same_precision")
    bounds = (*check.bounds, judge_lse(lse, make_lse_truth(inputs))[0])
    return [bound.name for bound in bounds if bound.enforced and not bound.holds]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_is_right_in_any_order(build: Callable[[str], Emulated], rung: str, order: str) -> None:
    """Output and log-sum-exp are right on tails, masks and grouped heads, with more or fewer work tiles than SMs."""
    for number, (shape, sms) in enumerate(SHAPES):
        case = parse_case(f"{shape}-seed0")
        if (case.dtype, case.head_dim) in build(rung).variant.instantiations:
            assert complaints(build(rung), case, Schedule(number, sms, ORDERS[order])) == [], case.id


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("shape", "sms"), SPLIT)
def test_divided_work_tiles_are_merged(build: Callable[[str], Emulated], shape: str, sms: int, order: str) -> None:
    """The parts of a work tile give the right output, in the first call and in later ones with the same workspace."""
    kernel, case = build("long_next_q"), parse_case(f"{shape}-seed0")
    assert kernel.workspace_bytes(case, sms) > 0
    assert complaints(kernel, case, Schedule(1, sms, ORDERS[order], resident_blocks=20), calls=3) == []


def test_divided_work_tiles_always_have_the_same_bits(build: Callable[[str], Emulated]) -> None:
    """The order in which the parts are stored does not matter, nor how many blocks run at the same time."""
    kernel, case = build("long_next_q"), parse_case("b1h3s400d128-fp16-sk1100-seed0")
    inputs = make_inputs(case, torch.device("cpu"))
    results = []
    for seed in range(4):
        schedule = Schedule(seed, EIGHT, early=0.5, resident_blocks=1 + 4 * seed)
        results.append(kernel(case, inputs.q, inputs.k, inputs.v, schedule))
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_barrier_is_needed(build: Callable[[str], Emulated], fault: str) -> None:
    """Without a barrier, a result is wrong, or the kernel cannot end, in at least two of eight orders."""
    kernel = build(f"race_long_{fault}")
    shape, sms = ("b1h2s130d128-fp16-sk2500", SEVEN) if fault == "part_stored" else ("b1h3s700d64-fp16", TWO)
    case = parse_case(f"{shape}-seed0")
    schedules = [Schedule(seed, sms, early) for early in (0.0, 0.5) for seed in range(4)]
    assert sum(is_caught(kernel, case, schedule) for schedule in schedules) >= 2


def is_caught(kernel: Emulated, case: Case, schedule: Schedule) -> bool:
    """Whether a call is wrong, or does not end."""
    try:
        return complaints(kernel, case, schedule) != []
    except StuckKernel:
        return True
