"""What `--fa-gate` adds to a run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import ONLY_COMPILES, Feature, FeatureOptions, OptionRow, Reader, Subcommand, SuiteTest
from pytest_fa.options.values import is_whole_number, number

MIN_RATIO, MAX_RATIO = 0.01, 100.0
MAX_GPUS = 1024
ALL_GPUS = None  # the value of --fa-gate-gpus=all

OPTIONS = (
    OptionRow(
        "--fa-gate",
        "pass only if device_us is below RATIO times that of the fastest SDPA backend, on every shape",
        "RATIO",
        in_rerun=True,
        why_once="it builds, checks and times, and decides no gate",
        everyday=True,
        not_with=(
            ("-n", "a gate starts its own processes, one at a time"),
            ("--benchmark-disable", "a gate needs timings"),
            ("--benchmark-skip", "a gate needs timings"),
            ONLY_COMPILES,
        ),
    ),
    OptionRow(
        "--fa-gate-baseline",
        "gate against this variant, against a cached build, or against the variant at a git revision, instead of SDPA",
        "NAME|key:KEY|git:REV",
        in_rerun=True,
    ),
    OptionRow(
        "--fa-gate-gpus",
        "gate on the first N visible GPUs, or on all of them, at the same time: one verdict, and the ratio of each GPU",
        "N|all",
        in_rerun=True,
    ),
    OptionRow(
        "--fa-bisect",
        "end as `git bisect run` expects: 0 if every gate passed, 1 if one failed, 125 if there is no verdict",
    ),
)


@dataclasses.dataclass(frozen=True)
class GateOptions(FeatureOptions):
    """The ratio of `--fa-gate`, and with what and where the variant is compared.

    `baseline` is None for the SDPA backends.  `gpus` is the number of GPUs, `ALL_GPUS` for all that are visible.
    Without a ratio, that of a test's marker holds.  `bisects` says that the exit status is for `git bisect run`.
    """

    ratio: float | None = None
    baseline: str | None = None
    gpus: int | None = 1
    bisects: bool = False

    judges_named_cases = False
    needs_all_times = True


def read(reader: Reader) -> GateOptions | None:
    """The options of the gate; None without `--fa-gate`.  Raises `UsageProblem`."""
    text, baseline, gpus = (reader.text(name) for name in ("fa_gate", "fa_gate_baseline", "fa_gate_gpus"))
    if text or reader.is_typed("fa_gate"):
        return GateOptions(ratio_of(text), baseline or None, gpus_of(gpus), reader.is_on("fa_bisect"))
    if baseline:
        raise UsageProblem("--fa-gate-baseline: there is no gate; give --fa-gate=RATIO too")
    if gpus_of(gpus) != 1:
        raise UsageProblem("--fa-gate-gpus: there is no gate; give --fa-gate=RATIO too")
    if reader.is_on("fa_bisect"):
        raise UsageProblem("--fa-bisect: there is no gate; give --fa-gate=RATIO too")
    return None


def ratio_of(text: str) -> float:
    """The ratio of --fa-gate."""
    ratio = number(text)
    if not MIN_RATIO <= ratio <= MAX_RATIO:  # also false for NaN
        raise UsageProblem(f"--fa-gate: {text!r} is not a ratio; give {MIN_RATIO:g} to {MAX_RATIO:g}, such as 0.95")
    return ratio


def gpus_of(text: str) -> int | None:
    """The number of GPUs of --fa-gate-gpus; `ALL_GPUS` for all that are visible, 1 without a text."""
    if text in ("", "all"):
        return ALL_GPUS if text else 1
    if not (is_whole_number(text) and 1 <= int(text) <= MAX_GPUS):
        raise UsageProblem(f"--fa-gate-gpus: {text!r} GPUs; give 1 to {MAX_GPUS}, or all")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m pytest_fa noise`."""
    parser.add_argument("--profiles", type=Path, default=Path("profiles"))
    parser.add_argument("--processes", type=int, default=24, help="12 or more, about 10 s each")


FEATURE = Feature(
    "gate",
    title="a verdict against a baseline",
    options=OPTIONS,
    read=read,
    tests=(SuiteTest("test_gate", "gate", before="test_speed", times=True),),
    run_methods=("gate",),
    added="gated:Gate",
    early_hooks="bisect_status",
    markers=("fa_gate(ratio): ratio of fa_run.gate in this test; --fa-gate overrides it",),
    commands=(
        Subcommand(
            "noise",
            "measure the spread of times between processes, and save it there too",
            "noise_command",
            add_arguments,
        ),
    ),
)
