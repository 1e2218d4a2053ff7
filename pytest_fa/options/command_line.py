"""Which tests a command line means, and the first words of the commands that run one test again.

The words that the user typed are `config.invocation_params.args`; pytest's own `config.args` also contains those of the
ini file.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fa.feature import FeatureOptions, suite_tests
from pytest_fa.options.flags import all_options

if TYPE_CHECKING:
    import pytest

SUITE = "pytest_fa.suite"
SUITE_FOLDER = Path(__file__).parents[1] / "suite"
SUITE_FILES = {"test_attention.py": f"{SUITE}.test_attention", "selftest.py": f"{SUITE}.selftest"}
# Options of pytest and pytest-benchmark that change what a test does.  A rerun command repeats them as they were typed.
_REPEATED = ("-p", "-o", "-c", "--rootdir", "--confcutdir", "--import-mode")
_REPEATED_SWITCHES = ("--noconftest", "--benchmark-disable")
_SUITE_TESTS = ("test_build", "test_correct", "test_property", "test_speed")
_WITH_CASE = re.compile(r"(?P<variant>.+?)-(?P<case>b\d+h\d+s\d+d\d+-.*?)(?:-[a-z]+check)?")
LAST_FAILED_HINT = "; --lf runs the failed tests of earlier runs; `pytest --cache-clear` makes pytest forget them"
_LONG_FORMS = {"-o": "--override-ini", "-c": "--config-file"}


def typed_flags(config: pytest.Config) -> list[str]:
    """The options of pytest-fa that the user typed; those of the ini file and of `addopts` do not count."""
    flags = {option.flag for option in all_options()}
    words = (str(word).partition("=")[0] for word in config.invocation_params.args)
    return [word for word in words if word in flags]


def is_typed(config: pytest.Config) -> bool:
    """Whether the user typed an option of pytest-fa."""
    return bool(typed_flags(config))


def implies_suite(config: pytest.Config) -> bool:
    """Whether the run is one of the shipped suite because an option of pytest-fa was typed, and no path.

    At pytest's root folder, the tests of `testpaths` are collected instead if the ini file sets it.
    """
    return config.args_source is config.ArgsSource.INVOCATION_DIR and is_typed(config)


def name_last_failed(config: pytest.Config) -> bool:
    """Name the failed tests of the shipped suite if a plain `pytest --lf` follows a run of it; return whether it does.

    They are added to the tests of the current folder, which `--lf` filters as usual; if no other test failed, they
    replace that folder.
    """
    is_plain = config.args_source is config.ArgsSource.INVOCATION_DIR and not is_typed(config)
    if not is_plain or not config.getoption("lf", default=False) or (cache := getattr(config, "cache", None)) is None:
        return False
    failed = [str(name) for name in cache.get("cache/lastfailed", {})]
    named = [name for word in failed if (name := suite_id(word, config.invocation_params.dir))]
    if named:
        config.args[:] = [*(config.args if len(named) < len(failed) else ()), *named]
    return bool(named)


def name_every_seed(config: pytest.Config, ids: dict[str, list[str]]) -> None:
    """Replace a test id of `test_correct` whose case has no seed by the ids with each seed of the run.

    `ids` maps the parameters of an id without its seed, `<variant>-<shape>`, to those with each seed.
    """
    words: list[str] = []
    for word in config.args:
        test, _, parameters = word.removesuffix("]").partition("[")
        every = ids.get(parameters, []) if test.endswith("::test_correct") else []
        words += [f"{test}[{each}]" for each in every] or [word]
    config.args[:] = words


def choose_tests(config: pytest.Config, suite_file: str) -> None:
    """Set the tests that pytest collects: the shipped suite if it is implied, and ids in the form that was printed."""
    named = [suite_id(word, config.invocation_params.dir) for word in config.args]
    is_other = suite_file != FeatureOptions.suite_file
    if is_other:
        module = SUITE_FILES[suite_file]
        config.args[:] = [name for name in named if name and name.startswith(f"{module}::")] or [module]
    elif implies_suite(config):
        config.args[:] = [SUITE]
    else:
        config.args[:] = [name or word for name, word in zip(named, config.args, strict=True)]
    config.option.pyargs |= is_other or config.args == [SUITE] or any(named)
    if config.option.deselect:
        config.option.deselect += [text for word in config.option.deselect for text in _other_forms(word, config)]


def suite_id(word: str, folder: Path) -> str | None:
    """The Python name of a test of the shipped suite; None if `word`, which was typed in `folder`, names another file.

    Accepted are the forms that the terminal and JUnit files show: `test_attention.py::test_correct[x]`, the path of
    that file in any repository, and `pytest_fa.suite.test_attention::test_correct`.
    """
    base, separator, test = word.partition("::")
    if base in (SUITE, *SUITE_FILES.values()):
        return word
    path = Path(base)
    if (folder / path).exists() and (folder / path).resolve().parent != SUITE_FOLDER.resolve():
        return None
    if path.parts[-2:] == ("pytest_fa", "suite") and not test:
        return SUITE
    parents, module = path.parts[:-1], SUITE_FILES.get(path.name)
    is_full_id = parents in ((), ("suite",)) and _is_suite_test(test)
    is_printed = is_full_id or parents[-2:] == ("pytest_fa", "suite")
    return f"{module}{separator}{test}" if module and is_printed else None


def _is_suite_test(test: str) -> bool:
    """Whether this is the full id of a test of the shipped suite."""
    name, bracket, _ = test.partition("[")
    return bool(bracket) and test.endswith("]") and name in (*_SUITE_TESTS, *suite_tests())


def named_tests(config: pytest.Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The variants and the cases of the test ids on the command line, such as `test_correct[x-<case>]`."""
    ids = [suite_id(str(word), config.invocation_params.dir) or "" for word in config.args]
    tests = [name.partition("::")[2].removesuffix("]").partition("[") for name in ids if name.endswith("]")]
    variants, cases = [], []
    for test, _, parameters in tests:
        match = _WITH_CASE.fullmatch(parameters)
        if match:
            variants.append(match["variant"])
            cases.append(match["case"])
        elif test not in suite_tests() or suite_tests()[test][1].file == FeatureOptions.suite_file:
            is_pair = test == "test_property" or (test in suite_tests() and suite_tests()[test][1].is_pair)
            variants.append(parameters.rpartition("-")[0] if is_pair else parameters)
    return tuple(dict.fromkeys(variants)), tuple(dict.fromkeys(cases))


def _other_forms(word: str, config: pytest.Config) -> list[str]:
    """The ids under which pytest may know a test of the shipped suite that --deselect names."""
    name = suite_id(word, SUITE_FOLDER / "no-folder")
    if name is None or "::" not in name:
        return []
    module, _, test = name.partition("::")
    file = f"{module.rpartition('.')[2]}.py"
    relative = os.path.relpath(SUITE_FOLDER / file, config.rootpath)
    return [f"{path}::{test}" for path in (file, f"pytest_fa/suite/{file}", relative)]


def command_with_suite(config: pytest.Config) -> str:
    """The typed command with the shipped suite in place of its paths."""
    typed = [str(word) for word in config.invocation_params.args]
    words = [word for word in typed if word not in config.args and word != "--pyargs"]
    suite = [] if _is_suite_only(config.getini("testpaths"), config.rootpath) else ["--pyargs", SUITE]
    return shlex.join(["pytest", *suite, *words])


# -- rerun commands ---------------------------------------------------------------------------------------------------


def rerun_words(config: pytest.Config) -> list[str]:
    """`pytest`, the typed options that decide which ini file is read, and the words that select the shipped suite."""
    return ["pytest", *_typed_options(config), *_suite_words(config)]


def _typed_options(config: pytest.Config) -> list[str]:
    """The options of `_REPEATED` as they were typed, and the root folder if the typed paths decided it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _REPEATED:
        parser.add_argument(flag, *filter(None, [_LONG_FORMS.get(flag)]), action="append", default=[], dest=flag)
    for switch in _REPEATED_SWITCHES:
        parser.add_argument(switch, action="store_true", dest=switch)
    typed, _ = parser.parse_known_args([str(word) for word in config.invocation_params.args])
    words: list[str] = []
    for flag in _REPEATED:
        for value in getattr(typed, flag):
            words += [f"{flag}={value}"] if flag.startswith("--") else [flag, value]
    if not (getattr(typed, "-c") or getattr(typed, "--rootdir")):
        words += _root_words(config)
    return [*words, *(switch for switch in _REPEATED_SWITCHES if getattr(typed, switch))]


def _root_words(config: pytest.Config) -> list[str]:
    """The option that sets the root folder, if pytest found this folder by the paths that were typed."""
    here = config.invocation_params.dir
    if config.args_source is not config.ArgsSource.ARGS or config.option.pyargs or config.rootpath == here:
        return []
    if config.inipath is not None:
        return ["-c", os.path.relpath(config.inipath, here)]
    return [f"--rootdir={os.path.relpath(config.rootpath, here)}"]


def _suite_words(config: pytest.Config) -> list[str]:
    """The words that select the shipped suite; none if the typed command selects it without them."""
    source, sources = config.args_source, config.ArgsSource
    typed = {str(word) for word in config.invocation_params.args}
    if source is sources.ARGS and SUITE not in set(config.args) - typed:
        return ["--pyargs", SUITE] if typed & set(config.args) else []  # the others are in `addopts`
    is_plain = source is sources.INVOCATION_DIR or _is_suite_only(config.getini("testpaths"), config.rootpath)
    return [] if is_plain else ["--pyargs", SUITE]


def _is_suite_only(testpaths: list[str], root: Path) -> bool:
    """Whether `testpaths` contains no tests but the shipped suite."""
    return all(path == SUITE or (root / path).resolve() == SUITE_FOLDER.resolve() for path in testpaths)
