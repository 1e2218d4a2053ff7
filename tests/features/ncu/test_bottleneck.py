"""What bounds a kernel: each class is recognised from the counters, and the sentence quotes the decisive ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pytest_fa.features.ncu import presets
from pytest_fa.features.ncu.bottleneck import bottleneck_of
from pytest_fa.features.ncu.counter_differences import differences
from pytest_fa.features.ncu.nsight_report import DURATION, Bottleneck, BoundBy, CountedKernel, NsightReport
from pytest_fa.features.ncu.raw_table import read_raw_table
from pytest_fa.records.log import read_records
from pytest_fa.table.tool_lines import short_name
from tests.factories import RECORDED

# A kernel that fills the chip, with no unit near its peak.
COUNTERS = {
    DURATION: 100_000.0,
    presets.ACTIVE_MAX: 170_000.0,
    presets.ELAPSED_MAX: 175_000.0,
    presets.MEMORY: 20.0,
    presets.DRAM: 5.0,
    presets.SM: 40.0,
    presets.TENSOR: 30.0,
    presets.XU: 25.0,
    presets.FMA: 10.0,
    presets.GRID: 512.0,
    presets.SMS: 132.0,
    presets.stall("barrier"): 2.0,
    presets.stall("wait"): 0.5,
    presets.stall("selected"): 1.0,
}


def kernel(**changes: float) -> CountedKernel:
    """The kernel above with changed counters, by their names in `presets`."""
    return CountedKernel("a_kernel", {**COUNTERS, **{getattr(presets, key): value for key, value in changes.items()}})


@pytest.mark.parametrize(
    ("changes", "bound_by", "decided_by", "words"),
    [
        (
            {"ACTIVE_MAX": 2000.0, "ELAPSED_MAX": 6000.0},
            "launch",
            ("ACTIVE_MAX", "ELAPSED_MAX"),
            "2,000 of 6,000 cycles (33%)",
        ),
        ({"MEMORY": 82.0, "DRAM": 80.0}, "memory", ("MEMORY", "DRAM"), "at 82 % of its peak; DRAM alone at 80 %"),
        ({"TENSOR": 71.0, "XU": 64.0}, "tensor", ("TENSOR", "SM"), "the tensor pipe runs at 71 % of its peak"),
        ({"TENSOR": 40.0, "XU": 75.0}, "exp", ("XU", "TENSOR"), "at 75 % of its peak; the tensor pipe at 40 %"),
        ({"TENSOR": 0.0, "FMA": 90.0}, "fma", ("FMA", "TENSOR"), "at 90 % of its peak; the tensor pipe at 0 %"),
        ({"GRID": 32.0}, "latency", ("TENSOR", "GRID"), "32 blocks leave 100 of 132 SMs empty"),
    ],
)
def test_each_class(changes: dict[str, float], bound_by: str, decided_by: tuple[str, ...], words: str) -> None:
    """Each class has the two decisive counters with their values, and a sentence that quotes them."""
    changed = kernel(**changes)
    bottleneck = bottleneck_of(changed)
    assert bottleneck is not None
    names = [getattr(presets, name) for name in decided_by]
    assert (bound_by, {name: changed.counters[name] for name in names}) == (bottleneck.bound_by, bottleneck.decided_by)
    assert bottleneck.sentence.startswith(f"{bound_by}-bound: ")
    assert words in bottleneck.sentence


def test_the_sentence_names_the_top_stall_reason() -> None:
    """If the chip is full and no unit is busy, the second counter is the most frequent stall reason."""
    bottleneck = bottleneck_of(kernel())
    assert bottleneck is not None
    assert {presets.TENSOR: 30.0, presets.stall("barrier"): 2.0} == bottleneck.decided_by
    assert "per issued instruction, 2.0 of 3.5 warps in flight wait for other warps at a barrier" in bottleneck.sentence


@pytest.mark.parametrize("name", ["ACTIVE_MAX", "ELAPSED_MAX", "MEMORY", "XU", "FMA", "TENSOR"])
def test_a_counter_that_is_missing_is_no_zero(name: str) -> None:
    """If a required counter is missing, there is no bottleneck."""
    counters = {key: value for key, value in COUNTERS.items() if key != getattr(presets, name)}
    assert bottleneck_of(CountedKernel("a_kernel", counters)) is None


@pytest.mark.parametrize("chip_name", [presets.TENSOR_HMMA, presets.TENSOR_BLACKWELL])
def test_the_tensor_pipe_by_any_name(chip_name: str) -> None:
    """The counter of the tensor pipe is used under each of its names on other chips."""
    counters = {key: value for key, value in COUNTERS.items() if key != presets.TENSOR}
    bottleneck = bottleneck_of(CountedKernel("a_kernel", {**counters, chip_name: 88.0}))
    assert bottleneck is not None
    assert (bottleneck.bound_by, bottleneck.decided_by[chip_name]) == ("tensor", 88.0)


def test_recorded_kernels(recorded_kernels: tuple[CountedKernel, ...]) -> None:
    """At the target shape on an H200 all SDPA kernels are latency-bound, and cuDNN's has only 32 blocks for 132 SMs."""
    bottlenecks = [bottleneck_of(kernel) for kernel in recorded_kernels]
    assert [each.bound_by if each else None for each in bottlenecks] == ["latency"] * 4
    sentences = [each.sentence for each in bottlenecks if each]
    assert (
        "32 blocks leave 100 of 132 SMs empty; in 46 of 198 samples a warp waits for data from L2 or DRAM"
        in sentences[0]
    )
    assert "a warp waits for instructions to be fetched" in sentences[1]
    assert "64 blocks leave 68 of 132 SMs empty" in sentences[3]


@pytest.mark.parametrize("limit", get_args(BoundBy))
def test_a_recorded_kernel_of_each_class(limit: str) -> None:
    """Kernels that are bound by one unit on purpose are recognised from the counters of an H200."""
    (kernel,) = read_raw_table((RECORDED / "ncu" / "verdict" / f"{limit}.csv").read_text(encoding="utf-8"))
    bottleneck = bottleneck_of(kernel)
    assert short_name(kernel.name) == f"only_{limit}"
    assert bottleneck is not None
    assert bottleneck.bound_by == limit


# -- compared with SDPA -----------------------------------------------------------------------------------------------


def test_differences_begin_with_the_most_important() -> None:
    """A factor of eight in time comes before the same factor in bank conflicts; equal counters are omitted."""
    candidate = kernel(CONFLICTS=80_000.0, DRAM=5.0)
    baseline = kernel(CONFLICTS=10_000.0, DRAM=4.0)
    baseline.counters[DURATION] = candidate.counters[DURATION] / 8
    sorted_differences = differences(candidate, baseline)
    assert [difference.label for difference in sorted_differences] == [
        "duration under the profiler, ns",
        "bank conflicts, shared memory",
        "DRAM throughput, %",
    ]
    assert (100_000.0, 12_500.0) == (sorted_differences[0].ours, sorted_differences[0].theirs)


def test_values_near_zero_are_no_difference() -> None:
    """0.1 warps against none, or 0.2 % against 0.0 %, does not count as a difference."""
    candidate, baseline = kernel(DRAM=0.2), kernel(DRAM=0.0)
    candidate.counters[presets.stall("drain")], baseline.counters[presets.stall("drain")] = 0.1, 0.0
    assert differences(candidate, baseline) == ()


def test_committed_counters_still_give_the_saved_bottleneck() -> None:
    """The saved counters of each committed record still give its saved class and decisive counters."""
    committed = [
        (record.id, kernel)
        for path in sorted((Path(__file__).parents[3] / "profiles").glob("*/*.jsonl"))
        for record in read_records(path)
        if (report := NsightReport.of(record))
        for kernel in report.kernels
    ]
    assert committed
    stale = [name for name, kernel in committed if _decision(kernel.bottleneck) != _decision(bottleneck_of(kernel))]
    assert stale == []


def _decision(bottleneck: Bottleneck | None) -> tuple[str, dict[str, float]] | None:
    """What the counters decide; the sentence about it may be reworded."""
    return None if bottleneck is None else (bottleneck.bound_by, bottleneck.decided_by)
