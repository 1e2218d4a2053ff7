"""`Options`: what the user requested on the command line and in the ini file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pytest_fa.errors import UsageProblem
from pytest_fa.options import values
from pytest_fa.options.command_line import named_tests, rerun_words
from pytest_fa.options.flags import OPTIONS, OptionRow

if TYPE_CHECKING:
    import pytest

# Options that decide how a variant is selected, built or checked.  A rerun command repeats them.
RERUN = (
    "fa_kernels",
    "fa_arch",
    "fa_tolerance",
    "fa_soak",
    "fa_watchdog",
    "fa_gate",
    "fa_gate_baseline",
    "fa_gate_gpus",
    "fa_cache",
    "fa_allow_flag",
)
# Options that select the cases.  The command that a run proposes repeats them; a rerun command names its case instead.
SELECTION = ("fa_suite", "fa_case", "fa_seeds", "fa_dtype")
# Tests of the suite that exist only with an option, and the field that says so.
ON_REQUEST = {"test_gate": "gate", "test_profile": "ncu", "test_sanitize": "sanitizers"}
Words = tuple[str, ...]
NOT_IN_NAME = frozenset("*?[@")
SamplerName = Literal["tpe", "nsga2"]
# With one of these, no earlier time stands for a new one: workers must agree on the tests; a page or a log is kept.
NEW_TIMES_OPTIONS = ("numprocesses", "tx", "htmlpath", "fa_html")
NEW_TIMES_VARIABLES = frozenset(("CI", "PYTEST_XDIST_WORKER"))
SWEEP_TESTS = ("test_sweep", "test_sweep_end")  # the only ones of a run with --fa-sweep


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run.  An empty tuple or None means the default.

    `timing` is False under --benchmark-disable.  `rerun` holds the first words of the command that runs one test again,
    and `selection` the options that select the cases, as they were typed.  `reuses_times` says whether times of
    baselines from the last minutes may stand for new ones: not with -n, for a page, or in CI.
    `is_given` is True if an option of pytest-fa or the id of a shipped test was used.  `named_variants` and
    `named_cases` are those of the test ids on the command line.
    """

    rootdir: Path
    variants: tuple[str, ...]
    kernels: tuple[Path, ...]
    suites: tuple[str, ...]
    cases: tuple[str, ...]
    seeds: tuple[int, ...] | None
    dtypes: tuple[str, ...]
    defines: tuple[str, ...]
    allowed_flags: tuple[str, ...]
    arches: tuple[str, ...]
    tolerance: str | None
    soak: int | None
    watchdog_seconds: float | None
    selftest: bool
    gate: float | None
    gate_baseline: str | None
    gate_gpus: int | None
    sweep: str | None
    trials: int
    study: str | None
    sampler: SamplerName
    baselines: str
    watch: bool
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
    html: Path | None
    shard: tuple[int, int] | None
    timing: bool
    rerun: tuple[str, ...]
    is_given: bool
    named_variants: tuple[str, ...] = ()
    named_cases: tuple[str, ...] = ()
    selection: tuple[str, ...] = ()
    reuses_times: bool = False

    def offers(self, test: str) -> bool:
        """Whether a test function of the shipped suite exists in this run."""
        if self.static:
            return test == "test_build"
        if self.sweep:
            return test in SWEEP_TESTS
        if test in SWEEP_TESTS:
            return False
        return test not in ON_REQUEST or getattr(self, ON_REQUEST[test]) not in (None, (), False)


def wants_list(config: pytest.Config) -> bool:
    """Whether the run only lists the variants."""
    return _is_on(config, "fa_list")


def wants_benchmark_table(config: pytest.Config) -> bool:
    """Whether an option of pytest-benchmark was given: on the command line, in `addopts` or in PYTEST_ADDOPTS."""
    return any(word.startswith("--benchmark-") for word in _words(config))


def _words(config: pytest.Config) -> tuple[str, ...]:
    """The words of the command line, of `addopts` and of PYTEST_ADDOPTS."""
    words = (*config.invocation_params.args, *config.getini("addopts"), *os.environ.get("PYTEST_ADDOPTS", "").split())
    return tuple(str(word) for word in words)


def _benchmark_words(config: pytest.Config) -> list[str]:
    """The options of pytest-benchmark that were given, without those that only switch timings off."""
    words = [word for word in _words(config) if word.startswith("--benchmark-")]
    return [word for word in words if word not in ("--benchmark-disable", "--benchmark-skip")]


def read(config: pytest.Config) -> Options:
    """The options of this run.  Raises `UsageProblem` for a value that is not allowed."""
    variants, cases = named_tests(config)
    options = _read(config, variants, cases, tuple(rerun_words(config)))
    needs_new = NEW_TIMES_VARIABLES & os.environ.keys() or any(_is_used(config, dest) for dest in NEW_TIMES_OPTIONS)
    return dataclasses.replace(options, reuses_times=not needs_new)


def _read(config: pytest.Config, named_variants: Words, named_cases: Words, rerun: Words) -> Options:
    """The options, with what the test ids of the command line name and the first words of a rerun command."""
    return Options(
        rootdir=(rootdir := config.rootpath),
        variants=values.words_of(_text(config, "fa_variant")),
        kernels=_kernels(config, rootdir),
        suites=values.words_of(_text(config, "fa_suite")) or ("history",),
        cases=values.words_of(_text(config, "fa_case")),
        seeds=values.seeds(_text(config, "fa_seeds")),
        dtypes=values.words_of(_text(config, "fa_dtype")),
        defines=_repeated(config, "fa_define"),
        allowed_flags=_repeated(config, "fa_allow_flag"),
        arches=values.arches(_text(config, "fa_arch")),
        tolerance=values.policy(_text(config, "fa_tolerance")),
        watchdog_seconds=values.watchdog_seconds(_text(config, "fa_watchdog")),
        selftest=_is_on(config, "fa_selftest"),
        gate=_gate(config),
        gate_baseline=_text(config, "fa_gate_baseline") or None,
        gate_gpus=values.gate_gpus(_text(config, "fa_gate_gpus")),
        sweep=_sweep(config),
        trials=values.trials(_text(config, "fa_trials")),
        study=_text(config, "fa_study") or None,
        sampler=cast("SamplerName", values.one_of("--fa-sampler", _text(config, "fa_sampler"), values.SAMPLERS)),
        baselines=values.one_of("--fa-baselines", _text(config, "fa_baselines"), values.BASELINES),
        watch=_watch(config),
        ncu=_ncu(config),
        ncu_set=values.one_of("--ncu-set", _text(config, "ncu_set") or values.NCU_SETS[0], values.NCU_SETS),
        ncu_strict=_is_on(config, "ncu_strict"),
        ncu_sudo=_is_on(config, "ncu_sudo"),
        sanitizers=_sanitizers(config),
        static=_is_on(config, "fa_static"),
        soak=values.repeats(_text(config, "fa_soak")),
        cache=values.folder(rootdir, _text(config, "fa_cache")) or default_cache(),
        artifacts=values.folder(rootdir, _text(config, "fa_artifacts")) or rootdir / "artifacts",
        records_folder=values.folder(rootdir, _text(config, "fa_profiles")) or rootdir / "profiles",
        list_only=_is_on(config, "fa_list"),
        clean=_is_on(config, "fa_clean") and not (_is_on(config, "fa_no_build") or config.getoption("collectonly")),
        no_build=_is_on(config, "fa_no_build"),
        require_gpu=_is_on(config, "fa_require_gpu"),
        save=_is_on(config, "fa_save"),
        html=values.html_file(rootdir, _text(config, "fa_html")),
        shard=values.shard(_text(config, "fa_shard")),
        timing=not config.getoption("benchmark_disable", default=False),
        rerun=(*rerun, *_repeated_options(config)),
        is_given=bool(named_variants) or any(_is_given(config, option) for option in OPTIONS),
        named_variants=named_variants,
        named_cases=named_cases,
        selection=_typed(config, SELECTION),
    )


def defaults(rootdir: Path) -> Options:
    """The options of a run in `rootdir` without a command line and without an ini file."""
    return _read(cast("pytest.Config", NothingGiven(rootdir)), (), (), ("pytest",))


class NothingGiven:
    """Answers as pytest's config does if no option was used and the ini file is empty."""

    def __init__(self, rootdir: Path) -> None:
        self.rootpath = rootdir

    def getoption(self, name: str, default: object = None) -> object:  # noqa: ARG002  # no option was used
        """The value of an option that was not used."""
        return default

    def getini(self, dest: str) -> Any:  # noqa: ANN401  # a text or False
        """The default of an ini key."""
        (row,) = (option for option in OPTIONS if option.dest == dest)
        return row.ini_default if row.metavar else False


def default_cache() -> Path:
    """`PYTEST_FA_CACHE`, which a run sets for its workers; else `pytest-fa` in the user's cache folder."""
    if folder := os.environ.get("PYTEST_FA_CACHE"):
        return Path(folder).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(base) / "pytest-fa").absolute()


def require_variants(folders: tuple[Path, ...]) -> None:
    """Raise `UsageProblem` for a kernels folder that exists but contains no variant."""
    for folder in folders:
        if folder.is_dir() and not any(folder.glob("*/variant.yaml")):
            raise UsageProblem(f"--fa-kernels: no <variant>/variant.yaml in {str(folder)!r}; {_remedy(folder)}")


def _text(config: pytest.Config, dest: str) -> str:
    value = config.getoption(dest)
    return str(config.getini(dest) if value is None else value)


def _is_on(config: pytest.Config, dest: str) -> bool:
    value = config.getoption(dest)
    return bool(config.getini(dest) if value is None else value)


def _is_given(config: pytest.Config, option: OptionRow) -> bool:
    """Whether an option was used, on the command line or in the ini file."""
    default = False if option.metavar is None else option.ini_default
    return config.getoption(option.dest) is not None or config.getini(option.dest) != default


def _repeated_options(config: pytest.Config) -> tuple[str, ...]:
    """The options that decide how a variant is selected, built and checked."""
    return (*_typed(config, RERUN), *(("--fa-no-build",) if _is_on(config, "fa_no_build") else ()))


def _typed(config: pytest.Config, names: tuple[str, ...]) -> tuple[str, ...]:
    """The options of these names that were typed, with their values."""
    used = [option for option in OPTIONS if option.dest in names and config.getoption(option.dest) is not None]
    return tuple(f"{option.flag}={value}" for option in used for value in _as_list(config.getoption(option.dest)))


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _kernels(config: pytest.Config, rootdir: Path) -> tuple[Path, ...]:
    """The kernels folders.  The default folder may be missing, but a folder that the user names may not be empty."""
    words = values.words_of(_text(config, "fa_kernels"))
    folders = tuple(path for word in words if (path := values.folder(rootdir, word)))
    if config.getoption("fa_kernels") is None and words == ("kernels",):
        return tuple(folder for folder in folders if folder.is_dir())
    require_variants(folders)
    return folders


def _remedy(folder: Path) -> str:
    """What to type instead of a kernels folder without variants."""
    if (folder / "variant.yaml").is_file():
        return "give the folder above it"
    from pytest_fa.catalog.kernels_folder import how_to_make  # noqa: PLC0415  # only this error needs it

    return how_to_make("NAME", folder)


def _repeated(config: pytest.Config, dest: str) -> tuple[str, ...]:
    """The values of an option that may be repeated; in the ini file, they are separated by spaces."""
    values_given = config.getoption(dest)
    return tuple(str(config.getini(dest)).split() if values_given is None else values_given)


def _sweep(config: pytest.Config) -> str | None:
    """The name of the swept variant."""
    name = _text(config, "fa_sweep")
    if not name:
        return None
    for dest in ("fa_variant", "fa_gate", "fa_gate_gpus", "fa_define", "fa_shard"):
        if config.getoption(dest) is not None:
            flag = f"--{dest.replace('_', '-')}"
            raise UsageProblem(f"--fa-sweep: a sweep names its variant, searches and gates by itself; drop {flag}")
    if len(values.words_of(name)) != 1 or not NOT_IN_NAME.isdisjoint(name):
        raise UsageProblem(f"--fa-sweep: {name!r} is not the name of one variant")
    return name


def _gate(config: pytest.Config) -> float | None:
    text = _text(config, "fa_gate")
    if not text and config.getoption("fa_gate") is None:
        return None
    if config.getoption("numprocesses", default=None):
        raise UsageProblem("--fa-gate: a gate starts its own processes, one at a time; drop -n")
    return values.gate_ratio(text)


def _ncu(config: pytest.Config) -> bool:
    is_on = _is_on(config, "ncu")
    if not is_on and config.getoption("ncu_set") is not None:
        raise UsageProblem("--ncu-set: without --ncu nothing is profiled; add --ncu")
    if is_on and config.getoption("numprocesses", default=None):
        raise UsageProblem("--ncu: only one process at a time can read the counters of a GPU; drop -n")
    return is_on


def _watch(config: pytest.Config) -> bool:
    is_on = _is_on(config, "fa_watch")
    used = next((name for name in values.NOT_WATCHED if is_on and _is_used(config, name)), None)
    if used:
        flag, reason = values.NOT_WATCHED[used]
        raise UsageProblem(f"--fa-watch: {reason}; drop {flag}")
    if is_on and (words := _benchmark_words(config)):
        raise UsageProblem(f"--fa-watch: its times are not those of one pytest-benchmark run; drop {words[0]}")
    return is_on


def _is_used(config: pytest.Config, dest: str) -> bool:
    """Whether an option of pytest-fa or of another plugin is in use."""
    if config.getoption(dest, default=None):
        return True
    return any(option.dest == dest for option in OPTIONS) and bool(config.getini(dest))


def _sanitizers(config: pytest.Config) -> tuple[str, ...]:
    text = _text(config, "fa_sanitize")
    tools = values.sanitizers(text)
    if config.getoption("fa_sanitize") is not None and not tools:
        raise UsageProblem(f"--fa-sanitize: {text!r} names no tool (allowed: {', '.join(values.SANITIZERS)})")
    return tools
