"""Every option of pytest-fa: one row each, with its help text."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class CaseHelp(str):
    """A help text to which the form of a case's id is added when argparse prints it: a run without help needs none."""

    __slots__ = ()

    def __mod__(self, values: Any) -> str:  # noqa: ANN401  # as of str
        """The text with the form of an id, as argparse prints it."""
        from pytest_fa.attention import parts  # noqa: PLC0415  # only for `--help`

        return f"{super().__mod__(values)}; the form of an id: {parts.grammar()}"


@dataclasses.dataclass(frozen=True)
class OptionRow:
    """A command-line flag and the ini key of the same name.  A row without a metavar is a switch."""

    flag: str
    help: str
    metavar: str | None = None
    ini_default: str = ""
    repeats: bool = False

    @property
    def dest(self) -> str:
        """The ini key and the attribute of pytest's config: `--fa-suite` is `fa_suite`."""
        return self.flag.removeprefix("--").replace("-", "_")


OPTIONS = (
    OptionRow(
        "--fa-variant",
        "run these variants: names, globs, or NAME@DEFINE=VALUE; default: every candidate",
        "NAME[,GLOB...]",
    ),
    OptionRow("--fa-list", "list the variants and stop"),
    OptionRow("--fa-kernels", "folders that contain <variant>/variant.yaml", "DIR[,DIR...]", "kernels"),
    OptionRow(
        "--fa-suite",
        "suites of cases to run: smoke, history, mission, edge, long, decode, fp8",
        "NAME[,NAME...]",
        "history",
    ),
    OptionRow(
        "--fa-case",
        CaseHelp("run only these cases: exact ids, of a suite or not, or globs over the suite; no property tests"),
        "ID|GLOB[,...]",
    ),
    OptionRow("--fa-seeds", "random seeds: N runs seeds 0 to N-1, a list such as 3,7 (or 3,) runs those", "N|A,B,..."),
    OptionRow("--fa-dtype", "run every case in these dtypes: fp16, bf16, fp32", "DTYPE[,DTYPE...]"),
    OptionRow(
        "--fa-define",
        "build the selected variants once more for every value of this macro; may be repeated",
        "NAME=V[,V...]",
        repeats=True,
    ),
    OptionRow(
        "--fa-allow-flag",
        "let manifests use this compiler flag (or glob), which is not on the list of allowed flags; may be repeated",
        "FLAG",
        repeats=True,
    ),
    OptionRow(
        "--fa-arch",
        "compile for these architectures, such as sm_90a,sm_120; default: that of the GPU, or without one the last of "
        "the manifest",
        "ARCH[,ARCH...]",
    ),
    OptionRow(
        "--fa-tolerance",
        "use this tolerance policy instead of the manifests': same_precision, absolute, fp8",
        "POLICY",
    ),
    OptionRow(
        "--fa-soak",
        "repeat every checked call N times and compare bit by bit; default: as many as fit in 0.5 s, on a GPU at most "
        "10,000 and on the CPU at most 100; once a shape was repeated, a tenth of these for its other seeds",
        "N",
    ),
    OptionRow(
        "--fa-watchdog",
        "report a launch that takes longer as a hang; default: 10, or 300 for variants of kind python",
        "SECONDS",
    ),
    OptionRow("--fa-selftest", "test the checks: every broken kernel must fail its check, every correct one must pass"),
    OptionRow(
        "--fa-gate",
        "pass only if device_us is below RATIO times that of the fastest SDPA backend, on every shape",
        "RATIO",
    ),
    OptionRow(
        "--fa-gate-baseline",
        "gate against this variant, or against a cached build, instead of SDPA",
        "NAME|key:KEY",
    ),
    OptionRow(
        "--fa-gate-gpus",
        "gate on the first N visible GPUs, or on all of them, at the same time: one verdict, and the ratio of each GPU",
        "N|all",
    ),
    OptionRow(
        "--fa-sweep",
        "search the values in the manifest's `sweep` for the fastest configuration, and gate it against the variant",
        "NAME",
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
    OptionRow(
        "--fa-baselines",
        "SDPA backends and noop to time: all; near (by earlier records of this GPU, those with at most 1.1 x the "
        "fastest one's time, and noop if it has none); or needed (of these, those that were not timed in the last 10 "
        "minutes)",
        "WHICH",
        "needed",
    ),
    OptionRow(
        "--fa-watch",
        "after the run stay; build, check and time a variant again whenever one of its files is saved",
    ),
    OptionRow("--ncu", "after the checks, profile each variant and shape with Nsight Compute in a separate process"),
    OptionRow(
        "--ncu-set",
        "hardware counters that --ncu collects: verdict, occupancy, tensor, memory, stalls, full",
        "NAME",
        "verdict",
    ),
    OptionRow("--ncu-strict", "fail instead of skipping when Nsight Compute cannot read the counters"),
    OptionRow("--ncu-sudo", "run Nsight Compute with `sudo -n`"),
    OptionRow(
        "--fa-sanitize",
        "run compute-sanitizer (memcheck, racecheck, synccheck, initcheck) on a small case or those of --fa-case",
        "TOOL[,TOOL...]",
    ),
    OptionRow(
        "--fa-static",
        "only compile, for every architecture, and report the SASS and what does not fit; needs no GPU",
    ),
    OptionRow("--fa-require-gpu", "fail instead of skipping when there is no GPU"),
    OptionRow("--fa-clean", "first delete the cached builds of the selected variants"),
    OptionRow("--fa-cache", "cache folder of builds; default: pytest-fa in the user's cache folder", "DIR"),
    OptionRow("--fa-no-build", "never compile: use cached builds only, including those made on another machine"),
    OptionRow("--fa-save", "also save the records of this run in the records folder, profiles/<gpu>/"),
    OptionRow(
        "--fa-shard", "run part I of N, split by shape; `python -m pytest_fa records merge` joins the parts", "I/N"
    ),
    OptionRow("--fa-html", "write the report of this run, one HTML file that opens offline", "FILE"),
    OptionRow("--fa-artifacts", "folder for the records of the latest run", "DIR", "artifacts"),
    OptionRow("--fa-profiles", "records folder of --fa-save, with one subfolder per GPU", "DIR", "profiles"),
)


def register(parser: pytest.Parser) -> None:
    """Add every option to pytest's command line and ini file."""
    group = parser.getgroup("fa", "attention kernels (pytest-fa)")
    for option in OPTIONS:
        default = f", default {option.ini_default}" if option.ini_default else ""
        help_text = type(option.help)(f"{option.help} (ini: {option.dest}{default})")
        if option.metavar is None:
            group.addoption(option.flag, action="store_true", default=None, help=help_text)
            parser.addini(option.dest, option.help, type="bool", default=False)
        else:
            action = "append" if option.repeats else "store"
            group.addoption(option.flag, action=action, default=None, metavar=option.metavar, help=help_text)
            parser.addini(option.dest, option.help, default=option.ini_default)
