"""What `--ncu` adds to a run."""

from __future__ import annotations

import dataclasses

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import ONLY_COMPILES, Feature, FeatureOptions, OptionRow, Reader, SuiteTest
from pytest_fa.options.values import one_of

# `presets` has the same list; importing it costs a run that does not use this plugin several milliseconds.
SETS = ("verdict", "occupancy", "tensor", "memory", "stalls", "full")

OPTIONS = (
    OptionRow(
        "--ncu",
        "after the checks, profile each variant and shape with Nsight Compute in a separate process",
        why_once="it builds, checks and times, and profiles nothing",
        everyday=True,
        not_with=(("-n", "only one process at a time can read the counters of a GPU"), ONLY_COMPILES),
    ),
    OptionRow(
        "--ncu-set",
        "hardware counters that --ncu collects: verdict, occupancy, tensor, memory, stalls, full",
        "NAME",
        "verdict",
    ),
    OptionRow("--ncu-strict", "fail instead of skipping when Nsight Compute cannot read the counters"),
    OptionRow("--ncu-sudo", "run Nsight Compute with `sudo -n`"),
)


@dataclasses.dataclass(frozen=True)
class NcuOptions(FeatureOptions):
    """The counters that are collected, and how."""

    preset: str = SETS[0]
    strict: bool = False
    sudo: bool = False

    def rerun_words(self, kind: str, tool: str | None) -> list[str]:
        """The options without which the suite has no profile."""
        del tool
        if kind != "profile":
            return []
        switches = {"--ncu-strict": self.strict, "--ncu-sudo": self.sudo}
        return ["--ncu", f"--ncu-set={self.preset}", *(flag for flag, is_on in switches.items() if is_on)]


def read(reader: Reader) -> NcuOptions | None:
    """The options of the profiler; None without `--ncu`.  Raises `UsageProblem`."""
    if not reader.is_on("ncu"):
        if reader.is_typed("ncu_set"):
            raise UsageProblem("--ncu-set: without --ncu nothing is profiled; add --ncu")
        return None
    preset = one_of("--ncu-set", reader.text("ncu_set") or SETS[0], SETS)
    return NcuOptions(preset, reader.is_on("ncu_strict"), reader.is_on("ncu_sudo"))


FEATURE = Feature(
    "ncu",
    title="Nsight Compute",
    options=OPTIONS,
    read=read,
    tests=(SuiteTest("test_profile", "profile"),),
    run_methods=("profile",),
    added="nsight_report:NsightReport",
)
