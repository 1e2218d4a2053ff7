"""What `--fa-selftest` adds to a run: in place of the user's variants, kernels that test the checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import ONLY_COMPILES, CaseRules, Feature, FeatureOptions, OptionRow, Reader, SuiteTest

FOLDER = Path(__file__).parent
REPEATS = 30  # of a judged call
WATCHDOG_SECONDS = 30.0  # the Python kernels of the self-test compile little
WRONG_WATCHDOG_SECONDS = 15.0  # its wrong kernels compile nothing; while one hangs, no other worker can time on the GPU

OPTIONS = (
    OptionRow(
        "--fa-selftest",
        "test the checks: every broken kernel must fail its check, every correct one must pass",
        why_once="the kernels of the self-test are not edited",
        not_with=(ONLY_COMPILES,),
    ),
)


def watchdog_seconds(variant: object, device: str) -> float | None:
    """The time limit of one launch of a kernel in Python."""
    if getattr(variant, "is_built", False):
        return None
    is_wrong_on_gpu = device == "cuda" and getattr(variant, "role", "") == "wrong"
    return WRONG_WATCHDOG_SECONDS if is_wrong_on_gpu else WATCHDOG_SECONDS


@dataclasses.dataclass(frozen=True)
class SelftestOptions(FeatureOptions):
    """The kernels of the self-test run, and every check on each of them."""

    suite_file = "selftest.py"
    kernels = FOLDER
    variants = ("*",)
    case_rules = CaseRules(
        confirms_times=False,
        repeats=REPEATS,
        watchdog_seconds=watchdog_seconds,
        always_own_work=True,
        excuses_neighbours=False,  # exploits of clocks must be blamed
        locks_cpu=False,
    )

    def rerun_words(self, kind: str, tool: str | None) -> list[str]:
        """The option without which these kernels are not found."""
        del kind, tool
        return ["--fa-selftest"]


def read(reader: Reader) -> SelftestOptions | None:
    """Whether the self-test runs.  Raises `UsageProblem`."""
    if not reader.is_on("fa_selftest"):
        return None
    if reader.text("fa_tolerance"):
        raise UsageProblem("--fa-selftest: the self-test uses its own tolerance policies; drop --fa-tolerance")
    return SelftestOptions()


FEATURE = Feature(
    "selftest",
    title="the checks are tested",
    options=OPTIONS,
    read=read,
    tests=(SuiteTest("test_judge", "selftest", file="selftest.py"),),
    requires=("gate",),
)
