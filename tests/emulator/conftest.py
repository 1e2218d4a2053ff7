"""What tests of emulated kernels share: variants compiled once, and a judge of single calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.attention.lse import PART
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Tolerance
from pytest_fa.features.selftest.plugin import FOLDER as SELFTEST_KERNELS
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.row_outputs import check_rows, make_row_truth
from tests.emulator.emulated import Emulated, Emulator, Schedule, StuckKernel

KERNELS = Path(__file__).parents[2] / "kernels"
# Late: a copy arrives, and a wgmma reads shared memory, when nothing else can run.  Early: as soon as it may.
ORDERS = {"late": 0.0, "mixed": 0.5, "early": 1.0}

Build = Callable[..., Emulated]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Build:
    """`build("long_ring", 64, 128)`: a variant in fp16 or e4m3 for these head_dims, or for all, compiled once.

    `dtypes` are others than fp16 and e4m3.  Further keywords are defines that replace the variant's.
    """
    emulator = Emulator(tmp_path_factory.mktemp("emulator"), shared_cache)
    variants = discover((KERNELS, SELFTEST_KERNELS)).variants
    builds: dict[tuple[object, ...], Emulated] = {}

    def build_once(
        name: str, *head_dims: int, dtypes: tuple[str, ...] = ("fp16", "e4m3"), **defines: int | str
    ) -> Emulated:
        key = (name, head_dims, dtypes, frozenset(defines.items()))
        if key not in builds:
            fitting = [pair for pair in variants[name].instantiations if pair[0] in dtypes]
            pairs = tuple(pair for pair in fitting if not head_dims or pair[1] in head_dims)
            variant = msgspec.structs.replace(
                variants[name], instantiations=pairs, defines={**variants[name].defines, **defines}
            )
            builds[key] = Emulated(variant, emulator, tmp_path_factory.mktemp(name))
        return builds[key]

    return build_once


def complaints(kernel: Emulated, shape: str, schedule: Schedule, calls: int = 1) -> list[str]:
    """The bounds that do not hold for a call, with that of the log-sum-exp."""
    case = parse_case(f"{shape}-seed0")
    assert not kernel.variant.refuses(case)
    inputs = make_inputs(case, torch.device("cpu"))
    return broken_bounds(inputs, *kernel(case, inputs, schedule, calls))


def broken_bounds(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> list[str]:
    """The bounds that an output and a log-sum-exp do not hold."""
    policy: Tolerance = "same_precision" if inputs.descales is None else "fp8"
    check = check_output(out, truth_of("attention", inputs, (), policy), policy)
    bounds = (*check.bounds, check_rows("lse", lse, make_row_truth(PART, inputs, (), policy))[0])
    return [bound.name for bound in bounds if bound.enforced and not bound.holds]


def marks_left(kernel: Emulated) -> int:
    """How many marks of stored partial results the latest call has left in the workspace."""
    source = (Path(kernel.variant.folder) / kernel.variant.entry.source).read_text(encoding="utf-8")
    headers = [KERNELS / "include" / name for name in re.findall(r'#include "(fa/\w+\.cuh)"', source)]
    text = "".join([source, *(path.read_text(encoding="utf-8") for path in headers)])
    (mark,) = re.findall(r"constexpr uint64_t STORED = (0x\w{16})ull;", text)
    words = kernel.workspace[: len(kernel.workspace) // 8 * 8].view(torch.int64)
    return int((words == int(mark, 16) - (1 << 64)).sum())


def is_found(kernel: Emulated, shape: str, sms: int, resident_blocks: int = 8) -> bool:
    """Whether a call is wrong, or does not end, in at least one of four orders."""
    schedules = [Schedule(seed, sms, early, resident_blocks) for early in (0.0, 0.5) for seed in range(2)]
    return any(is_caught(kernel, shape, schedule) for schedule in schedules)


def is_caught(kernel: Emulated, shape: str, schedule: Schedule) -> bool:
    """Whether a call is wrong, or does not end."""
    try:
        return complaints(kernel, shape, schedule) != []
    except StuckKernel:
        return True


def bits_of(kernel: Emulated, case: Case, schedule: Schedule) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of output and log-sum-exp."""
    inputs = make_inputs(case, torch.device("cpu"))
    out, lse = kernel(case, inputs, schedule)
    return out.view(torch.int16), lse.view(torch.int32)
