"""What `--fa-sweep` adds to a run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import ONLY_COMPILES, Feature, FeatureOptions, OptionRow, Reader, Subcommand, SuiteTest
from pytest_fa.options.values import is_whole_number, one_of, words_of

if TYPE_CHECKING:
    from pytest_fa.options.options import Options

SamplerName = Literal["tpe", "nsga2"]
SAMPLERS = ("tpe", "nsga2")
MAX_TRIALS = 100_000
NOT_IN_NAME = frozenset("*?[@")
REFUSED = ("--fa-variant", "--fa-gate", "--fa-gate-gpus", "--fa-define", "--fa-shard")  # a sweep does these by itself

OPTIONS = (
    OptionRow(
        "--fa-sweep",
        "search the values in the manifest's `sweep` for the fastest configuration, and gate it against the variant",
        "NAME",
        why_once="it builds, checks and times, and searches nothing",
        not_with=(
            *((flag, "a sweep names its variant, searches and gates by itself") for flag in REFUSED),
            ("--benchmark-disable", "a sweep needs timings"),
            ("--benchmark-skip", "a sweep needs timings"),
            ONLY_COMPILES,
        ),
    ),
    OptionRow("--fa-trials", "configurations that --fa-sweep tries at most", "N", "100"),
    OptionRow(
        "--fa-study",
        "journal file, or URL of a database, of --fa-sweep; default: artifacts/sweeps/NAME.journal",
        "FILE|URL",
    ),
    OptionRow(
        "--fa-sampler",
        "how --fa-sweep searches a space with more configurations than --fa-trials: tpe, or nsga2 (evolutionary)",
        "NAME",
        "tpe",
    ),
)


@dataclasses.dataclass(frozen=True)
class SweepOptions(FeatureOptions):
    """The variant that is swept, how many configurations are tried, and where the study is.

    A file `study` is relative to `base`.
    """

    name: str
    trials: int = 100
    study: str | None = None
    base: Path = Path()
    sampler: SamplerName = "tpe"

    variants_flag = "--fa-sweep"
    only_tests = ("test_sweep", "test_sweep_end")
    why_nothing = "the sweep has not ended"

    @property
    def variants(self) -> tuple[str, ...]:  # type: ignore[override]  # a value there
        """The swept variant."""
        return (self.name,)


def read(reader: Reader) -> SweepOptions | None:
    """The options of the sweep; None without `--fa-sweep`.  Raises `UsageProblem`."""
    trials, study = trials_of(reader.text("fa_trials")), reader.text("fa_study") or None
    sampler = cast("SamplerName", one_of("--fa-sampler", reader.text("fa_sampler"), SAMPLERS))
    name = reader.text("fa_sweep")
    if not name:
        return None
    if len(words_of(name)) != 1 or not NOT_IN_NAME.isdisjoint(name):
        raise UsageProblem(f"--fa-sweep: {name!r} is not the name of one variant")
    return SweepOptions(name, trials, study, reader.base_of("fa_study"), sampler)


def options_of(options: Options) -> SweepOptions:
    """The options of a run that sweeps."""
    part = options.part(SweepOptions)
    assert part  # noqa: S101  # only a sweep asks
    return part


def trials_of(text: str) -> int:
    """The number of --fa-trials."""
    if not (is_whole_number(text) and 1 <= int(text) <= MAX_TRIALS):
        raise UsageProblem(f"--fa-trials: {text!r} trials; give 1 to {MAX_TRIALS}, such as 100")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m pytest_fa sweep`."""
    show = parser.add_subparsers(required=True).add_parser("show", help="print the history, the defines and the end")
    show.add_argument("study", metavar="STUDY", help="the journal file, or the URL of the database, of --fa-study")
    show.add_argument("--name", help="one of several studies; default: the last one")
    show.add_argument("--svg", type=Path, metavar="FILE", help="also draw the history and the values")


FEATURE = Feature(
    "sweep",
    title="a search for the fastest defines",
    options=OPTIONS,
    read=read,
    tests=(SuiteTest("test_sweep", "speed", times=True), SuiteTest("test_sweep_end", "gate", times=True)),
    manifest_key="sweep_space:Sweep",
    requires=("gate",),
    commands=(Subcommand("sweep", "show the trials and the end of a --fa-sweep", "show_command", add_arguments),),
)
