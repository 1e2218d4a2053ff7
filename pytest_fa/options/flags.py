"""The options that every run has: one row each, with its help text.  Those of a feature are in its folder."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pytest_fa.errors import suggestion
from pytest_fa.feature import OptionRow, features

if TYPE_CHECKING:
    import pytest


class CaseHelp(str):
    """A help text to which the form of a case's id is added when argparse prints it: a run without help needs none."""

    __slots__ = ()

    def __mod__(self, values: Any) -> str:  # noqa: ANN401  # as of str
        """The text with the form of an id, as argparse prints it."""
        from pytest_fa.attention import parts  # noqa: PLC0415  # only for `--help`

        return f"{super().__mod__(values)}; the form of an id: {parts.grammar()}"


PREFIXES = ("--fa", "--ncu")
LISTED = "NAME[,GLOB...]"
ALL = "true"  # the value of --fa-list without names, and of its ini key

RUN_OPTIONS: tuple[OptionRow, ...] = (
    OptionRow(
        "--fa-variant",
        "run these variants: names, globs, or NAME@DEFINE=VALUE; default: every candidate",
        "NAME[,GLOB...]",
        everyday=True,
    ),
    OptionRow(
        "--fa-list",
        "list the variants, a line for each, or show these whole, and stop",
        LISTED,
        bare=ALL,
        everyday=True,
    ),
    OptionRow(
        "--fa-kernels",
        "folders to search for <variant>/variant.yaml",
        "DIR[,DIR...]",
        "kernels",
        in_rerun=True,
        configures=True,
        everyday=True,
    ),
    OptionRow(
        "--fa-suite",
        "suites of cases to run: smoke, history, mission, edge, long, decode, serving, fp8, ragged, data, modifiers",
        "NAME[,NAME...]",
        "history",
        in_selection=True,
        everyday=True,
    ),
    OptionRow(
        "--fa-case",
        CaseHelp(
            "run only these cases, without property tests. An exact id need not be in a suite; a glob selects from the "
            "suite"
        ),
        "ID|GLOB[,...]",
        in_selection=True,
        everyday=True,
    ),
    OptionRow(
        "--fa-seeds",
        "random seeds: N runs seeds 0 to N-1, a list such as 3,7 (or 3,) runs those",
        "N|A,B,...",
        in_selection=True,
    ),
    OptionRow("--fa-dtype", "run every case in these dtypes: fp16, bf16, fp32", "DTYPE[,DTYPE...]", in_selection=True),
    OptionRow(
        "--fa-define",
        "build the selected variants for each value of this macro, in place of the manifest's; may be repeated",
        "NAME=V[,V...]",
        repeats=True,
        configures=True,
    ),
    OptionRow(
        "--fa-allow-flag",
        "let manifests use this compiler flag (or glob), which is not on the list of allowed flags; may be repeated",
        "FLAG",
        repeats=True,
        in_rerun=True,
        configures=True,
    ),
    OptionRow(
        "--fa-arch",
        "compile for these architectures, such as sm_90a,sm_120; default: that of the GPU, or without one the last of "
        "the manifest",
        "ARCH[,ARCH...]",
        in_rerun=True,
        configures=True,
    ),
    OptionRow(
        "--fa-tolerance",
        "use this tolerance policy instead of the manifests': same_precision, absolute, fp8; with a truth of your own, "
        "absolute:MAX allows errors up to MAX",
        "POLICY",
        in_rerun=True,
    ),
    OptionRow(
        "--fa-soak",
        "repeat every checked call N times and compare bit by bit; default: as many as fit in 0.5 s, at most 10,000 on "
        "a GPU and 100 on the CPU; for further seeds of a shape, a tenth of these numbers",
        "N",
        in_rerun=True,
    ),
    OptionRow(
        "--fa-watchdog",
        "report a launch that takes longer as a hang; default: 10, or 300 for kind python and on a CPU",
        "SECONDS",
        in_rerun=True,
        configures=True,
    ),
    OptionRow(
        "--fa-baselines",
        "SDPA backends and noop to time: all; near: only the backends that saved records show within 1.1 x of the "
        "fastest, and noop if it has no time yet; needed: like near, but times of the last 10 minutes are reused",
        "WHICH",
        "needed",
    ),
    OptionRow(
        "--fa-static",
        "only compile, for every architecture, and report the SASS and what does not fit; needs no GPU",
        why_once="it runs kernels, and --fa-static only compiles",
    ),
    OptionRow(
        "--fa-require-gpu",
        "fail instead of skipping when there is no GPU",
        not_with=(("--fa-static", "a run that only compiles needs no GPU"),),
    ),
    OptionRow(
        "--fa-clean",
        "first delete the cached builds of the selected variants",
        configures=True,
        not_with=(("--fa-no-build", "what it deletes must be compiled again"),),
    ),
    OptionRow(
        "--fa-cache",
        "cache folder of builds; default: pytest-fa in the user's cache folder",
        "DIR",
        in_rerun=True,
        configures=True,
    ),
    OptionRow(
        "--fa-no-build",
        "never compile: use cached builds only, including those made on another machine",
        why_once="a source that was saved must be compiled",
        configures=True,
    ),
    OptionRow(
        "--fa-save",
        "also save the results of this run, failures too, in the records folder, profiles/<gpu>/",
        why_once="records are saved from a run that ends",
        writes_records=True,
        everyday=True,
        not_with=(("--fa-static", "a run that only compiles has no records to save"),),
    ),
    OptionRow("--fa-artifacts", "folder for the records of every run", "DIR", "artifacts", configures=True),
    OptionRow(
        "--fa-profiles", "records folder of --fa-save, with one subfolder per GPU", "DIR", "profiles", configures=True
    ),
)


@functools.cache
def all_options() -> tuple[OptionRow, ...]:
    """The options of every run, then those of each feature."""
    return (*RUN_OPTIONS, *(row for feature in features() for row in feature.options))


def register(parser: pytest.Parser) -> None:
    """Add every option to pytest's command line and ini file.

    The everyday options come first, then the other ones of every run, then those of each feature in a group of its own.
    """
    _add_group(parser, "fa", "attention kernels (pytest-fa): every day", [row for row in all_options() if row.everyday])
    groups = [("fa-run", "which cases, how kernels are built, and where files are", RUN_OPTIONS)]
    groups += [(f"fa-{feature.name}", feature.title, feature.options) for feature in features()]
    for name, title, rows in groups:
        if rest := [row for row in rows if not row.everyday]:
            _add_group(parser, name, f"attention kernels: {title}", rest)


def unknown_option(parser: pytest.Parser, words: list[str]) -> str:
    """Return what is wrong with a word that begins as our options do and that no plugin knows; empty if there is none.

    Other words are left to pytest, which shows its usage for them.
    """
    known = [option.flag for option in all_options()]
    typed = [word for word in words if word.startswith(PREFIXES) and word.partition("=")[0] not in known]
    unknown = parser.parse_known_and_unknown_args(words)[1] if typed else []
    flag = next((word.partition("=")[0] for word in unknown if word in typed), "")
    return f"{flag}: there is no such option{suggestion(flag, known)} (see pytest --help)" if flag else ""


def _add_group(parser: pytest.Parser, name: str, title: str, rows: list[OptionRow]) -> None:
    group = parser.getgroup(name, title)
    for option in rows:
        default = f", default {option.ini_default}" if option.ini_default else ""
        help_text = type(option.help)(f"{option.help} (ini: {option.dest}{default})")
        if option.metavar is None:
            group.addoption(option.flag, action="store_true", default=None, help=help_text)
            parser.addini(option.dest, option.help, type="bool", default=False)
        elif option.bare:
            group.addoption(
                option.flag, nargs="?", const=option.bare, default=None, metavar=option.metavar, help=help_text
            )
            parser.addini(option.dest, option.help, default=option.ini_default)
        else:
            action = "append" if option.repeats else "store"
            group.addoption(option.flag, action=action, default=None, metavar=option.metavar, help=help_text)
            parser.addini(option.dest, option.help, default=option.ini_default)
