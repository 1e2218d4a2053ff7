"""What tests of emulated kernels share: variants compiled once, and a judge of single calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.judge.check import judge
from pytest_fa.judge.log_sum_exp import judge_lse, make_lse_truth
from pytest_fa.judge.oracle import truth_of
from pytest_fa.run.inputs import make_inputs
from tests.emulator.emulated import Emulated, Emulator, Schedule, StuckKernel

KERNELS = Path(__file__).parents[2] / "kernels"
# Late: a copy arrives, and a wgmma reads shared memory, when nothing else can run.  Early: as soon as it may.
ORDERS = {"late": 0.0, "mixed": 0.5, "early": 1.0}

Build = Callable[..., Emulated]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Build:
    """`build("long_ring", 64, 128)`: a variant in fp16 for these head_dims, compiled once; for all without a number."""
    emulator = Emulator(tmp_path_factory.mktemp("emulator"), shared_cache)
    variants = discover((KERNELS,)).variants
    builds: dict[tuple[str, tuple[int, ...]], Emulated] = {}

    def build_once(name: str, *head_dims: int) -> Emulated:
        if (name, head_dims) not in builds:
            fp16 = [pair for pair in variants[name].instantiations if pair[0] == "fp16"]
            pairs = tuple(pair for pair in fp16 if not head_dims or pair[1] in head_dims)
            variant = msgspec.structs.replace(variants[name], instantiations=pairs)
            builds[name, head_dims] = Emulated(variant, emulator, tmp_path_factory.mktemp(name))
        return builds[name, head_dims]

    return build_once


def complaints(kernel: Emulated, shape: str, schedule: Schedule, calls: int = 1) -> list[str]:
    """The bounds that do not hold for a call, with that of the log-sum-exp; none if the variant refuses the shape."""
    case = parse_case(f"{shape}-seed0")
    if kernel.variant.refuses(case):
        return []
    inputs = make_inputs(case, torch.device("cpu"))
    out, lse = kernel(case, inputs.q, inputs.k, inputs.v, schedule, calls)
    check = judge(out, truth_of("attention", inputs, (), "same_precision"), "same_precision")
    bounds = (*check.bounds, judge_lse(lse, make_lse_truth(inputs))[0])
    return [bound.name for bound in bounds if bound.enforced and not bound.holds]


def count_caught(kernel: Emulated, shape: str, sms: int, resident_blocks: int = 8) -> int:
    """In how many of four orders a call is wrong, or does not end."""
    schedules = [Schedule(seed, sms, early, resident_blocks) for early in (0.0, 0.5) for seed in range(2)]
    return sum(is_caught(kernel, shape, schedule) for schedule in schedules)


def is_caught(kernel: Emulated, shape: str, schedule: Schedule) -> bool:
    """Whether a call is wrong, or does not end."""
    try:
        return complaints(kernel, shape, schedule) != []
    except StuckKernel:
        return True


def bits_of(kernel: Emulated, case: Case, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of output and log-sum-exp."""
    inputs = make_inputs(case, torch.device("cpu"))
    out, lse = kernel(case, inputs.q, inputs.k, inputs.v, schedule)
    return out.view(torch.int16), lse.view(torch.int32)
