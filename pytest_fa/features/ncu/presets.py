"""The counters of each preset of `--ncu-set`, by compute capability.

Every preset contains the counters from which `bottleneck.py` derives what bounds a kernel, and adds its own.  The names
are those of Nsight Compute, including their suffixes.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.features.ncu.nsight_report import DURATION

Capability = tuple[int, int]


class Preset(NamedTuple):
    """One preset on one chip: the names of its counters, and additional flags of ncu."""

    metrics: tuple[str, ...]
    flags: tuple[str, ...] = ()


ACTIVE_MAX, ELAPSED_MAX = "sm__cycles_active.max", "sm__cycles_elapsed.max"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
L2_HIT = "lts__t_sector_hit_rate.pct"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
TENSOR_HMMA = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"  # for chips without TENSOR
TENSOR_BLACKWELL = "sm__pipe_tensor_subpipe_hmma_cycles_active.avg.pct_of_peak_sustained_active"
XU = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"
FMA = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active"
ALU = "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
OCCUPANCY_LIMIT = "sm__maximum_warps_per_active_cycle_pct"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
REGISTERS = "launch__registers_per_thread"
SMEM = "launch__shared_mem_per_block"
GRID, BLOCK, SMS = "launch__grid_size", "launch__block_size", "launch__sm_count"

STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
STALL_SAMPLES = "smsp__pcsamp_warps_issue_stalled_"
HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)


def stall(reason: str) -> str:
    """The counter of one stall reason: the number of warps that wait for it, per issued instruction."""
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def stall_samples(reason: str) -> str:
    """The counter of the program counter samples in which a warp waits for one stall reason."""
    return f"{STALL_SAMPLES}{'no_instructions' if reason == 'no_instruction' else reason}"


_VERDICT = (
    DURATION,
    ACTIVE_MAX,
    ELAPSED_MAX,
    SM,
    MEMORY,
    DRAM,
    L2_HIT,
    XU,
    FMA,
    ALU,
    ISSUE,
    OCCUPANCY,
    OCCUPANCY_LIMIT,
    CONFLICTS,
    WAVEFRONTS,
    REGISTERS,
    SMEM,
    GRID,
    BLOCK,
    SMS,
)
_OCCUPANCY = (
    "launch__waves_per_multiprocessor",
    *(f"launch__occupancy_limit_{resource}" for resource in ("blocks", "registers", "shared_mem", "warps")),
    "sm__cycles_active.avg",
    "smsp__warps_eligible.avg.per_cycle_active",
    "smsp__warps_active.avg.per_cycle_active",
    "launch__shared_mem_config_size",
)
_TENSOR = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__inst_executed.sum",
    "sm__inst_executed.avg.per_cycle_active",
)
_MEMORY = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l1tex__t_sector_hit_rate.pct",
    "lts__t_sectors.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "smsp__sass_inst_executed_op_local_ld.sum",
    "smsp__sass_inst_executed_op_local_st.sum",
)
_TMA = (
    "sm__pipe_tma_cycles_active.avg.pct_of_peak_sustained_active",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
)
_SOURCE = ("--section", "SourceCounters", "--import-source", "yes")

PRESETS = ("verdict", "occupancy", "tensor", "memory", "stalls", "full")


def preset(name: str, capability: Capability) -> Preset:
    """The preset `name` on a chip.

    `stalls` and `full` also sample source lines; `full` collects everything that Nsight Compute offers.
    """
    common = (*_VERDICT, *_tensor_pipe(capability), *map(stall, _stalls_of(capability)))
    additional: dict[str, Preset] = {
        "verdict": Preset(()),
        "occupancy": Preset((*_OCCUPANCY, *(("launch__cluster_size",) if capability >= HOPPER else ()))),
        "tensor": Preset((*_TENSOR, *_tensor_instructions(capability))),
        "memory": Preset((*_MEMORY, *(_TMA if capability >= HOPPER else ()))),
        "stalls": Preset((), _SOURCE),
        "full": Preset((), ("--set", "full", "--import-source", "yes")),
    }
    added = additional[name]
    return Preset(tuple(dict.fromkeys((*common, *added.metrics))), added.flags)


def _tensor_pipe(capability: Capability) -> tuple[str, ...]:
    if capability >= BLACKWELL:
        return (TENSOR_BLACKWELL,)
    return (TENSOR,) if capability in ((8, 0), HOPPER) else (TENSOR, TENSOR_HMMA)


def _tensor_instructions(capability: Capability) -> tuple[str, ...]:
    """The counters of tensor instructions.  `hmma` counts mma.sync only; wgmma has its own counter, on Hopper."""
    hmma = "sm__inst_executed_pipe_tensor_op_hmma.sum"
    return (hmma, "sm__inst_executed_pipe_tensor_op_gmma.sum") if capability == HOPPER else (hmma,)


def _stalls_of(capability: Capability) -> tuple[str, ...]:
    return STALLS if capability == HOPPER else tuple(each for each in STALLS if each != "gmma")
