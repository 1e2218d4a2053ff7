"""`Options`: what the user requested on the command line and in the ini file."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import CaseRules, FeatureOptions, OptionRow, features, suite_tests
from pytest_fa.options import values
from pytest_fa.options.command_line import named_tests, rerun_words, typed_flags
from pytest_fa.options.flags import ALL, all_options
from pytest_fa.options.pairs import require_sensible

if TYPE_CHECKING:
    import pytest

Words = tuple[str, ...]
# With one of these, no earlier time stands for a new one: the workers must agree on the tests.
NEW_TIMES_OPTIONS = ("numprocesses", "tx")
P = TypeVar("P", bound=FeatureOptions)
NEW_TIMES_VARIABLES = frozenset(("CI", "PYTEST_XDIST_WORKER"))


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run.  An empty tuple or None means the default.

    `timing` is False under --benchmark-disable.  `rerun` holds the first words of the command that runs one test again,
    and `selection` the options that select the cases, as they were typed.  `reuses_times` says whether times of
    baselines from the last minutes may stand for new ones: not with -n, for a page, or in CI.
    `listed` are the names and globs of --fa-list, none of them for all variants, and None without that option.
    `tolerance` is a policy; None for that of each manifest, and for `--fa-tolerance=absolute:MAX`.
    `is_given` is True if an option of pytest-fa or the id of a shipped test was used.  `named_variants` and
    `named_cases` are those of the test ids on the command line.  `parts` are the options of the features that are used.
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
    baselines: str
    static: bool
    cache: Path
    artifacts: Path
    records_folder: Path
    clean: bool
    no_build: bool
    require_gpu: bool
    save: bool
    timing: bool
    rerun: tuple[str, ...]
    is_given: bool
    listed: tuple[str, ...] | None = None
    named_variants: tuple[str, ...] = ()
    named_cases: tuple[str, ...] = ()
    selection: tuple[str, ...] = ()
    reuses_times: bool = False
    parts: tuple[FeatureOptions, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the features that are used."""
        return tuple(part.feature for part in self.parts)

    def part(self, kind: type[P]) -> P | None:
        """The options of one feature; None if it is not used."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def chosen_cases(self) -> tuple[str, ...]:
        """The ids and globs of the cases that are run alone: those of a feature, else of `cases`."""
        return next((cases for part in self.parts if (cases := part.cases)), self.cases)

    @property
    def cases_flag(self) -> str:
        """The option that chose these cases."""
        return next((part.cases_flag for part in self.parts if part.cases), FeatureOptions.cases_flag)

    @property
    def suite_file(self) -> str:
        """The file of the shipped suite that runs."""
        return next(
            (part.suite_file for part in self.parts if part.suite_file != FeatureOptions.suite_file),
            FeatureOptions.suite_file,
        )

    @property
    def case_rules(self) -> CaseRules:
        """How the run's cases differ from those of other runs."""
        return next(
            (part.case_rules for part in self.parts if part.case_rules is not FeatureOptions.case_rules),
            FeatureOptions.case_rules,
        )

    @property
    def why_nothing(self) -> str:
        """What a run without a result is told."""
        return next(
            (part.why_nothing for part in self.parts if part.why_nothing != FeatureOptions.why_nothing),
            FeatureOptions.why_nothing,
        )

    def offers(self, test: str) -> bool:
        """Whether a test function of the shipped suite exists in this run."""
        if self.static:
            return test == "test_build"
        only = [name for part in self.parts for name in part.only_tests]
        if only:
            return test in only
        return test not in suite_tests() or test in self.feature_tests

    @functools.cached_property
    def feature_tests(self) -> tuple[str, ...]:
        """The tests of the shipped suite that the used features add."""
        return tuple(name for name, (feature, _) in suite_tests().items() if feature.name in self.used)


def wants_list(config: pytest.Config) -> bool:
    """Whether the run only lists the variants."""
    return _listed(config) is not None


def _listed(config: pytest.Config) -> Words | None:
    """The names and globs of `--fa-list`; none for all variants, None without the option."""
    text = _text(config, "fa_list")
    if text in ("", "false"):
        return None
    return () if text == ALL else values.words_of(text)


def wants_benchmark_table(config: pytest.Config) -> bool:
    """Whether an option of pytest-benchmark was given: on the command line, in `addopts` or in PYTEST_ADDOPTS."""
    return any(word.startswith("--benchmark-") for word in _words(config))


def _words(config: pytest.Config) -> tuple[str, ...]:
    """The words of the command line, of `addopts` and of PYTEST_ADDOPTS."""
    words = (*config.invocation_params.args, *config.getini("addopts"), *os.environ.get("PYTEST_ADDOPTS", "").split())
    return tuple(str(word) for word in words)


def read(config: pytest.Config) -> Options:
    """The options of this run.  Raises `UsageProblem` for a value that is not allowed."""
    variants, cases = named_tests(config)
    options = _read(config, variants, cases, tuple(rerun_words(config)))
    reader = ConfigReader(config, config.rootpath, os.environ)
    require_sensible(reader)
    parts = _parts(reader)
    needs_new = bool(NEW_TIMES_VARIABLES & os.environ.keys()) or any(map(reader.is_used, NEW_TIMES_OPTIONS))
    needs_new |= any(part.needs_new_times for part in parts)
    return dataclasses.replace(options, reuses_times=not needs_new, parts=parts)


def _read(config: pytest.Config, named_variants: Words, named_cases: Words, rerun: Words) -> Options:
    """The options, with what the test ids of the command line name and the first words of a rerun command."""
    tolerance = _text(config, "fa_tolerance")
    return Options(
        rootdir=(rootdir := config.rootpath),
        variants=values.words_of(_text(config, "fa_variant")),
        kernels=_kernels(config),
        suites=values.words_of(_text(config, "fa_suite")) or ("history",),
        cases=values.words_of(_text(config, "fa_case")),
        seeds=values.seeds(_text(config, "fa_seeds")),
        dtypes=values.words_of(_text(config, "fa_dtype")),
        defines=_repeated(config, "fa_define"),
        allowed_flags=_repeated(config, "fa_allow_flag"),
        arches=values.arches(_text(config, "fa_arch")),
        tolerance=None if values.max_error(tolerance) else values.policy(tolerance),
        watchdog_seconds=values.watchdog_seconds(_text(config, "fa_watchdog")),
        baselines=values.one_of("--fa-baselines", _text(config, "fa_baselines"), values.BASELINES),
        static=_is_on(config, "fa_static"),
        soak=values.repeats(_text(config, "fa_soak")),
        cache=_folder(config, "fa_cache") or default_cache(),
        artifacts=_folder(config, "fa_artifacts") or rootdir / "artifacts",
        records_folder=_folder(config, "fa_profiles") or rootdir / "profiles",
        listed=_listed(config),
        clean=_is_on(config, "fa_clean") and not (_is_on(config, "fa_no_build") or config.getoption("collectonly")),
        no_build=_is_on(config, "fa_no_build"),
        require_gpu=_is_on(config, "fa_require_gpu"),
        save=_is_on(config, "fa_save"),
        timing=not config.getoption("benchmark_disable", default=False),
        rerun=(*rerun, *_repeated_options(config)),
        is_given=bool(named_variants) or any(_is_given(config, option) for option in all_options()),
        named_variants=named_variants,
        named_cases=named_cases,
        selection=_typed(config, lambda row: row.in_selection),
    )


def defaults(rootdir: Path) -> Options:
    """The options of a run in `rootdir` without a command line and without an ini file."""
    nothing = cast("pytest.Config", NothingGiven(rootdir))
    options = _read(nothing, (), (), ("pytest",))
    return dataclasses.replace(options, parts=_parts(ConfigReader(nothing, rootdir, {})))


def _parts(reader: ConfigReader) -> tuple[FeatureOptions, ...]:
    """The options of the features that are used."""
    return tuple(part for feature in features() if (part := feature.read(reader)) is not None)


class NothingGiven:
    """Answers as pytest's config does if no option was used and the ini file is empty."""

    def __init__(self, rootdir: Path) -> None:
        self.rootpath = rootdir
        self.invocation_params = SimpleNamespace(dir=rootdir, args=())

    def getoption(self, name: str, default: object = None) -> object:  # noqa: ARG002  # no option was used
        """The value of an option that was not used."""
        return default

    def getini(self, dest: str) -> Any:  # noqa: ANN401  # a text or False
        """The default of an ini key."""
        (row,) = (option for option in all_options() if option.dest == dest)
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
    return (*_typed(config, lambda row: row.in_rerun), *(("--fa-no-build",) if _is_on(config, "fa_no_build") else ()))


def _typed(config: pytest.Config, is_meant: Callable[[OptionRow], bool]) -> tuple[str, ...]:
    """The options of these rows that were typed, with their values."""
    used = [option for option in all_options() if is_meant(option) and config.getoption(option.dest) is not None]
    return tuple(f"{option.flag}={value}" for option in used for value in _as_list(config.getoption(option.dest)))


def _as_list(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _folder(config: pytest.Config, dest: str) -> Path | None:
    """The folder that an option names; None without a text."""
    return values.folder(base_of(config, dest), _text(config, dest))


def base_of(config: pytest.Config, dest: str) -> Path:
    """The folder to which a path is relative: the working folder; pytest's root folder for a path of the ini file."""
    if config.getoption(dest) is None:
        return config.rootpath
    (flag,) = (row.flag for row in all_options() if row.dest == dest)
    in_ini = any(str(word).partition("=")[0] == flag for word in config.getini("addopts"))
    return config.rootpath if in_ini and flag not in typed_flags(config) else config.invocation_params.dir


def _kernels(config: pytest.Config) -> tuple[Path, ...]:
    """The kernels folders.  The default folder may be missing, but a folder that the user names may not be empty."""
    words, root = values.words_of(_text(config, "fa_kernels")), config.rootpath
    if config.getoption("fa_kernels") is None and words == ("kernels",):
        folder = values.default_folder(config.invocation_params.dir, root)
        return (folder,) if folder.is_dir() else ()
    base = base_of(config, "fa_kernels")
    folders = tuple(path for word in words if (path := values.folder(base, word)))
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


class ConfigReader:
    """What features read: pytest's config, and the environment of the run."""

    def __init__(self, config: pytest.Config, rootdir: Path, environment: Mapping[str, str]) -> None:
        self._config, self.rootdir, self.environment = config, rootdir, environment

    @property
    def rows(self) -> tuple[OptionRow, ...]:
        """The options of pytest-fa and of its features."""
        return all_options()

    def text(self, dest: str) -> str:
        """The value of an option: as typed, else that of the ini file."""
        return _text(self._config, dest)

    def base_of(self, dest: str) -> Path:
        """The folder to which the path of an option is relative."""
        return base_of(self._config, dest)

    def is_on(self, dest: str) -> bool:
        """Whether a switch is on."""
        return _is_on(self._config, dest)

    def is_typed(self, dest: str) -> bool:
        """Whether an option was typed, of pytest-fa or of another plugin."""
        return self._config.getoption(dest, default=None) is not None

    def is_used(self, dest: str) -> bool:
        """Whether an option has a value, typed or in the ini file."""
        if self._config.getoption(dest, default=None):
            return True
        return any(option.dest == dest for option in all_options()) and bool(self._config.getini(dest))

    @property
    def benchmark_words(self) -> list[str]:
        """The options of pytest-benchmark that were given, without those that only switch timings off."""
        words = [word for word in _words(self._config) if word.startswith("--benchmark-")]
        return [word for word in words if word not in ("--benchmark-disable", "--benchmark-skip")]
