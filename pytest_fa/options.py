"""The command line and the ini file, read once into a frozen `Options`.  Nothing else sees pytest's config."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fa.earlier import POLICIES, renamed
from pytest_fa.errors import UsageProblem, suggestion

if TYPE_CHECKING:
    import pytest

# The catalog's own, said again: it imports msgspec, which other runs must not pay for.  A test compares them.
ARCHES = ("sm_80", "sm_89", "sm_90a")
MOST_SEEDS = 100_000
SELFTEST_SUITE = Path(__file__).parent / "suite" / "selftest.py"
MOST_REPEATS = 1_000_000
MOST_WATCHDOG_SECONDS = 86_400.0
LEAST_GATE, MOST_GATE = 0.01, 100.0
TOLERANCES = ("same_precision", "absolute", "fp8")
NCU_SETS = ("verdict", "occupancy", "tensor", "memory", "stalls", "full")
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Options that decide how a variant is found, built or judged: a rerun command repeats them.
RERUN = ("fa_kernels", "fa_arch", "fa_tolerance", "fa_soak", "fa_watchdog", "fa_gate", "fa_gate_baseline", "fa_cache")
# Tests of the suite that are there only where they were asked for.
ON_REQUEST = {"test_gate": "gate", "test_profile": "ncu", "test_sanitize": "sanitizers"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for; an empty tuple or None means 'the default'.

    `timing` is False under --benchmark-disable; `rerun` begins the command that runs one item again; `is_given` says
    that at least one of our options was used.
    """

    rootdir: Path
    variants: tuple[str, ...]
    kernels: tuple[Path, ...]
    suites: tuple[str, ...]
    cases: tuple[str, ...]
    seeds: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    defines: tuple[str, ...]
    arches: tuple[str, ...]
    tolerance: str | None
    soak: int | None
    watchdog_seconds: float | None
    selftest: bool
    gate: float | None
    gate_baseline: str | None
    ncu: bool
    ncu_set: str
    ncu_strict: bool
    ncu_sudo: bool
    sanitizers: tuple[str, ...]
    static: bool
    cache: Path
    artifacts: Path
    records_folder: Path
    list_only: bool
    clean: bool
    no_build: bool
    require_gpu: bool
    save: bool
    timing: bool
    rerun: tuple[str, ...]
    is_given: bool
    notices: tuple[str, ...] = ()

    def offers(self, test: str) -> bool:
        """Whether a test of the shipped suite is there in this run: some only on request, one alone for --fa-static."""
        if self.static:
            return test == "test_build"
        return test not in ON_REQUEST or getattr(self, ON_REQUEST[test]) not in (None, (), False)


@dataclasses.dataclass(frozen=True)
class _Option:
    """One row of the option table: a command-line flag and the ini key of the same name."""

    flag: str
    help: str
    metavar: str | None = None
    ini_default: str = ""
    repeats: bool = False

    @property
    def dest(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


OPTIONS = (
    _Option(
        "--fa-variant", "run these variants: names, globs, NAME@DEFINE=VALUE; default: all candidates", "NAME[,GLOB...]"
    ),
    _Option("--fa-list", "list the variants and stop"),
    _Option("--fa-kernels", "folders that hold <variant>/variant.yaml", "DIR[,DIR...]", "kernels"),
    _Option("--fa-suite", "cases to run: smoke, history, mission, edge, long", "NAME[,NAME...]", "history"),
    _Option(
        "--fa-case",
        "run these cases: ids (of any suite or none) or globs over the suite; then no properties",
        "ID|GLOB[,...]",
    ),
    _Option("--fa-seeds", "N for seeds 0 to N-1, or a list such as 3,7 (one seed: 3,)", "N|A,B,..."),
    _Option("--fa-dtype", "run every case in these dtypes: fp16, bf16", "DTYPE[,DTYPE...]"),
    _Option("--fa-define", "make a variant of every value; may be given again", "NAME=V[,V...]", repeats=True),
    _Option(
        "--fa-arch", "compile for these; default: the GPU's own, or all of them without one", "sm_80|sm_89|sm_90a[,...]"
    ),
    _Option("--fa-tolerance", "judge by this policy in place of the manifests' own: measured, absolute, fp8", "POLICY"),
    _Option("--fa-soak", "repeat every checked call N times; default: 100, or what half a second holds", "N"),
    _Option("--fa-watchdog", "a launch that takes longer hangs; default: 10, for Python entries 300", "SECONDS"),
    _Option("--fa-selftest", "judge the judge: run wrong kernels, each to be caught by its check, and right ones"),
    _Option(
        "--fa-gate",
        "pass only where device_us is below RATIO times that of the fastest SDPA backend, on every shape",
        "RATIO",
    ),
    _Option(
        "--fa-gate-baseline",
        "gate against this variant, or a build still in the cache, in place of SDPA",
        "NAME|key:KEY",
    ),
    _Option("--ncu", "profile each variant and shape with Nsight Compute, in a process of its own, after it was right"),
    _Option(
        "--ncu-set",
        "counters of --ncu: verdict, occupancy, tensor, memory, stalls, full",
        "NAME",
        "verdict",
    ),
    _Option("--ncu-strict", "fail where Nsight Compute cannot count, in place of skipping"),
    _Option("--ncu-sudo", "start Nsight Compute by `sudo -n`"),
    _Option(
        "--fa-sanitize",
        "run compute-sanitizer (memcheck, racecheck, synccheck, initcheck) on a small case or those of --fa-case",
        "TOOL[,TOOL...]",
    ),
    _Option("--fa-static", "only build, for every architecture, and show what the machine code says; needs no GPU"),
    _Option("--fa-require-gpu", "fail where there is no GPU, in place of skipping"),
    _Option("--fa-clean", "forget the cached builds of the selected variants first"),
    _Option("--fa-cache", "where builds are kept; default: pytest-fa in the user's cache folder", "DIR"),
    _Option("--fa-no-build", "compile nothing: use cached builds, also ones made on another machine"),
    _Option("--fa-save", "also keep this run's records under profiles/<gpu>/"),
    _Option("--fa-artifacts", "where each run writes its records", "DIR", "artifacts"),
    _Option("--fa-profiles", "where --fa-save keeps records", "DIR", "profiles"),
)


def register(parser: pytest.Parser) -> None:
    """Add every option to pytest's command line and ini file."""
    group = parser.getgroup("fa", "attention kernels (pytest-fa)")
    for option in OPTIONS:
        ini = f"(ini: {option.dest}{', default ' + option.ini_default if option.ini_default else ''})"
        if option.metavar is None:
            group.addoption(option.flag, action="store_true", default=None, help=f"{option.help} {ini}")
            parser.addini(option.dest, option.help, type="bool", default=False)
        else:
            action = "append" if option.repeats else "store"
            group.addoption(
                option.flag, action=action, default=None, metavar=option.metavar, help=f"{option.help} {ini}"
            )
            parser.addini(option.dest, option.help, default=option.ini_default)


def wants_list(config: pytest.Config) -> bool:
    """Whether the run is only to list the variants."""
    return _flag(config, "fa_list")


def read(config: pytest.Config) -> Options:
    """The options of this run.  Raises `UsageProblem` for a value that cannot be."""
    rootdir = config.rootpath
    return Options(
        rootdir=rootdir,
        variants=_words(_text(config, "fa_variant")),
        kernels=_kernels(config, rootdir),
        suites=_words(_text(config, "fa_suite")) or ("history",),
        cases=_words(_text(config, "fa_case")),
        seeds=_seeds(_text(config, "fa_seeds")),
        dtypes=_words(_text(config, "fa_dtype")),
        defines=_defines(config),
        arches=_allowed("--fa-arch", _words(_text(config, "fa_arch")), ARCHES),
        tolerance=_tolerance(_text(config, "fa_tolerance")),
        watchdog_seconds=_watchdog(_text(config, "fa_watchdog")),
        selftest=_flag(config, "fa_selftest"),
        gate=_gate(config),
        gate_baseline=_text(config, "fa_gate_baseline") or None,
        ncu=_ncu(config),
        ncu_set=_one_of("--ncu-set", _text(config, "ncu_set"), NCU_SETS) or NCU_SETS[0],
        ncu_strict=_flag(config, "ncu_strict"),
        ncu_sudo=_flag(config, "ncu_sudo"),
        sanitizers=_sanitizers(config),
        static=_flag(config, "fa_static"),
        soak=_soak(_text(config, "fa_soak")),
        cache=_folder(rootdir, _text(config, "fa_cache")) or default_cache(),
        artifacts=_folder(rootdir, _text(config, "fa_artifacts")) or rootdir / "artifacts",
        records_folder=_folder(rootdir, _text(config, "fa_profiles")) or rootdir / "profiles",
        list_only=_flag(config, "fa_list"),
        clean=_flag(config, "fa_clean") and not _flag(config, "fa_no_build") and not config.getoption("collectonly"),
        no_build=_flag(config, "fa_no_build"),
        require_gpu=_flag(config, "fa_require_gpu"),
        save=_flag(config, "fa_save"),
        timing=not config.getoption("benchmark_disable", default=False),
        rerun=_repeat(config),
        is_given=any(_is_given(config, option) for option in OPTIONS),
        notices=_notices(config),
    )


def default_cache() -> Path:
    """Where `PYTEST_FA_CACHE` says, which a run sets for its workers; else `pytest-fa` in the user's cache folder."""
    if given := os.environ.get("PYTEST_FA_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pytest-fa"


def _repeat(config: pytest.Config) -> tuple[str, ...]:
    """`pytest` with what decides how a variant is found, built and judged."""
    suite = ("--pyargs", "pytest_fa.suite") if config.getoption("pyargs") else ()
    given = [option for option in OPTIONS if option.dest in RERUN and config.getoption(option.dest) is not None]
    no_build = ("--fa-no-build",) if _flag(config, "fa_no_build") else ()
    return ("pytest", *suite, *(f"{option.flag}={config.getoption(option.dest)}" for option in given), *no_build)


def _is_given(config: pytest.Config, option: _Option) -> bool:
    """Whether an option was used, on the command line or in the ini file."""
    default = False if option.metavar is None else option.ini_default
    return config.getoption(option.dest) is not None or config.getini(option.dest) != default


def _text(config: pytest.Config, dest: str) -> str:
    given = config.getoption(dest)
    return str(config.getini(dest) if given is None else given)


def _flag(config: pytest.Config, dest: str) -> bool:
    given = config.getoption(dest)
    return bool(config.getini(dest) if given is None else given)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _defines(config: pytest.Config) -> tuple[str, ...]:
    given = config.getoption("fa_define")
    return tuple(given) if given is not None else tuple(str(config.getini("fa_define")).split())


def _kernels(config: pytest.Config, rootdir: Path) -> tuple[Path, ...]:
    """The kernels folders: those given must exist, the default one may be missing."""
    words = _words(_text(config, "fa_kernels"))
    folders = tuple(path for word in words if (path := _folder(rootdir, word)))
    if config.getoption("fa_kernels") is None and words == ("kernels",):
        return tuple(folder for folder in folders if folder.is_dir())
    for folder in folders:
        if folder.is_dir() and not any(folder.glob("*/variant.yaml")):
            hint = "; give the folder above it" if (folder / "variant.yaml").is_file() else ""
            raise UsageProblem(f"--fa-kernels: no <variant>/variant.yaml in {str(folder)!r}{hint}")
    return folders


def _folder(rootdir: Path, text: str) -> Path | None:
    return rootdir / Path(text).expanduser() if text else None


def _seeds(text: str) -> tuple[int, ...] | None:
    words = _words(text)
    if not words:
        return None
    for word in words:
        if not (word.isascii() and word.isdigit()):
            raise UsageProblem(f"--fa-seeds: {word!r} is no seed; give a count such as 5, or a list such as 3,7")
    if "," in text:
        return tuple(int(word) for word in words)
    if not 1 <= int(text) <= MOST_SEEDS:
        raise UsageProblem(f"--fa-seeds: {text} seeds; give 1 to {MOST_SEEDS}, or a list such as 0,")
    return tuple(range(int(text)))


def _soak(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_REPEATS):
        raise UsageProblem(f"--fa-soak: {text!r} repeats; give 1 to {MOST_REPEATS}")
    return int(text)


def _gate(config: pytest.Config) -> float | None:
    text = _text(config, "fa_gate")
    if not text and config.getoption("fa_gate") is None:
        return None
    if config.getoption("numprocesses", default=None):
        raise UsageProblem("--fa-gate: a gate starts its own processes, one at a time; drop -n")
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not LEAST_GATE <= ratio <= MOST_GATE:  # NaN too
        raise UsageProblem(f"--fa-gate: {text!r} is no ratio; give {LEAST_GATE:g} to {MOST_GATE:g}, such as 0.95")
    return ratio


def _ncu(config: pytest.Config) -> bool:
    asked = _flag(config, "ncu")
    if not asked and config.getoption("ncu_set") is not None:
        raise UsageProblem("--ncu-set: nothing is profiled; give --ncu too")
    if asked and config.getoption("numprocesses", default=None):
        raise UsageProblem("--ncu: one process at a time may count on a GPU; drop -n")
    return asked


def _sanitizers(config: pytest.Config) -> tuple[str, ...]:
    text = _text(config, "fa_sanitize")
    words = _allowed("--fa-sanitize", _words(text), SANITIZERS)
    if config.getoption("fa_sanitize") is not None and not words:
        raise UsageProblem(f"--fa-sanitize: {text!r} names no tool (allowed: {', '.join(SANITIZERS)})")
    return tuple(dict.fromkeys(words))


def _tolerance(text: str) -> str | None:
    return _one_of("--fa-tolerance", POLICIES.get(text, text), TOLERANCES)


def _notices(config: pytest.Config) -> tuple[str, ...]:
    """A line for each name of an earlier version that was given."""
    policy = _text(config, "fa_tolerance")
    return (f"--fa-tolerance: {renamed(policy, POLICIES[policy])}",) if policy in POLICIES else ()


def _watchdog(text: str) -> float | None:
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_WATCHDOG_SECONDS:  # NaN too
        raise UsageProblem(f"--fa-watchdog: {text!r} seconds; give a number above 0, at most {MOST_WATCHDOG_SECONDS:g}")
    return seconds


def _allowed(flag: str, words: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        if word not in allowed:
            raise UsageProblem(f"{flag}: no {word!r}{suggestion(word, allowed)} (allowed: {', '.join(allowed)})")
    return words


def _one_of(flag: str, text: str, allowed: tuple[str, ...]) -> str | None:
    return _allowed(flag, (text,), allowed)[0] if text else None
