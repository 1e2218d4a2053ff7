"""What `--fa-workload` adds to a run."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Feature, FeatureOptions, OptionRow, Reader

if TYPE_CHECKING:
    from pytest_fa.features.workload.workload import WeightedCase

FLAG = "--fa-workload"
OTHERS = ("--fa-case", "--fa-suite")  # select cases, too
OPTIONS = (
    OptionRow(
        FLAG,
        "run the cases of this file alone, and compare the variants with the baselines over its mix; shipped are "
        "llama_decode and llama_server",
        "FILE.yaml|NAME",
        in_selection=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class WorkloadOptions(FeatureOptions):
    """The file or the name as it was given, and the folder to which a file is relative."""

    name: str
    folder: Path

    cases_flag = FLAG

    @functools.cached_property
    def mix(self) -> tuple[WeightedCase, ...]:
        """The cases with their weights.  Raises `UsageProblem`."""
        from pytest_fa.features.workload.workload import read_workload  # noqa: PLC0415  # only runs with variants

        return read_workload(self.name, self.folder)

    @property
    def cases(self) -> tuple[str, ...]:
        """The ids of the file."""
        return tuple(each.id for each in self.mix)


def read(reader: Reader) -> WorkloadOptions | None:
    """The workload; None without one, or if another option selects cases in place of the ini file's workload.

    Raises `UsageProblem` if both were typed, or if the ini file has both.
    """
    if not (name := reader.text("fa_workload")):
        return None
    is_typed = reader.is_typed("fa_workload")
    for flag in OTHERS:
        dest = flag.removeprefix("--").replace("-", "_")
        if reader.is_typed(dest) and reader.text(dest):
            if is_typed:
                raise UsageProblem(f"{FLAG}: the workload selects the cases; drop {flag}")
            return None
    if not is_typed and reader.text("fa_case"):
        raise UsageProblem("fa_workload: the workload selects the cases; drop fa_case from the ini file")
    return WorkloadOptions(name, reader.base_of("fa_workload"))


FEATURE = Feature("workload", title="a mix of cases", options=OPTIONS, read=read)
