"""The hooks of every pytest run in this environment.

They add the options, and call the part of the plugin that uses kernels in a run that does.  Importing this module
imports neither torch nor that part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_fa.errors import FaError
from pytest_fa.feature import features
from pytest_fa.options import command_line, flags, kernel_paths, options
from pytest_fa.plugin import fixtures, hookspecs, markers
from pytest_fa.plugin.first_use import WAITING, Waiting, kernel_run_of
from pytest_fa.plugin.kernel_fixtures import parameters, uses_kernels
from pytest_fa.plugin.keys import IMPLIED_KEY, KERNEL_RUN_KEY, OPTIONS_KEY
from pytest_fa.plugin.without_benchmark import WithoutBenchmark

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks of features, the fixtures of this plugin and of some features, and their early hooks."""
    pluginmanager.add_hookspecs(hookspecs)
    pluginmanager.register(fixtures, "fa-fixtures")
    for feature in features():
        if feature.fixtures:
            pluginmanager.register(feature.module("fixtures"), f"fa-fixtures-{feature.name}")
        if feature.early_hooks:
            pluginmanager.register(feature.module(feature.early_hooks), f"fa-early-{feature.name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin, each with an ini key."""
    flags.register(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None, object, object]:
    """Refuse an option that looks like one of this plugin, with the nearest one, once every conftest.py has its own."""
    result = yield
    if problem := flags.unknown_option(parser, args):
        raise pytest.UsageError(problem)
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Read the options.  If any was given, start a worker server, and check the names in them before collection."""
    markers.register(config)
    repeats_failures = command_line.name_last_failed(config)
    try:
        kernel_paths.name_variants(config)
        config.stash[OPTIONS_KEY] = options.read(config)
        config.stash[IMPLIED_KEY] = command_line.implies_suite(config)
        command_line.choose_tests(config, config.stash[OPTIONS_KEY].suite_file)
        config.pluginmanager.register(Waiting(config), WAITING)
        if config.stash[OPTIONS_KEY].is_given and not config.getoption("help"):
            kernel_run_of(config).configure()
    except FaError as problem:
        from pytest_fa.plugin.usage_errors import usage_error  # noqa: PLC0415  # msgspec, only for this error

        raise usage_error(problem, command_line.LAST_FAILED_HINT if repeats_failures else "") from None
    if not config.pluginmanager.hasplugin("benchmark"):
        config.addinivalue_line("markers", "benchmark(...): an argument of pytest-benchmark, which is switched off")
        config.pluginmanager.register(WithoutBenchmark(), "fa-without-benchmark")


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """With `--fa-list`, print the list of variants and end the run."""
    if not options.wants_list(config):
        return None
    config._do_configure()  # noqa: SLF001  # pytest's own --markers and --fixtures do the same
    try:
        kernel_run_of(config).list_variants()
    except FaError as problem:
        from pytest_fa.plugin.usage_errors import usage_error  # noqa: PLC0415  # msgspec, only for this error

        raise usage_error(problem) from None
    config._ensure_unconfigure()  # noqa: SLF001
    return 0


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    """GPU, variants and cases, if the run uses kernels."""
    return config.stash[KERNEL_RUN_KEY].header if KERNEL_RUN_KEY in config.stash else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect a file of the shipped suite with the tests of the used features."""
    in_suite = module_path.parent == command_line.SUITE_FOLDER
    return kernel_run_of(parent.config).suite_module(module_path, parent) if in_suite else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Prepare for a test that uses a fixture of this plugin; parametrize it if that is one of variants or cases."""
    names = set(metafunc.fixturenames)
    if not uses_kernels(names):
        return
    run = kernel_run_of(metafunc.config)
    if "fa_run" in names:
        run.offer_run_methods(metafunc.definition)
    if names & parameters():
        run.parametrize(metafunc)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Generator[None]:
    """Decode the record of a report of another process, not in the threads of pytest-xdist that make the report."""
    if isinstance(record := getattr(report, "fa_record", None), dict):
        from pytest_fa.records.read import read_record  # noqa: PLC0415  # only runs with kernels need it

        report.fa_record = read_record(record)  # type: ignore[attr-defined]  # as `attach` sets it
    return (yield)
