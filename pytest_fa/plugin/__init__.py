"""The pytest plugin: the hooks of this package, which register its fixtures.

Every pytest run in this environment imports it, so it imports neither torch nor the catalog.
"""

from pytest_fa.plugin.hooks import (
    pytest_addhooks,
    pytest_addoption,
    pytest_cmdline_main,
    pytest_configure,
    pytest_generate_tests,
    pytest_load_initial_conftests,
    pytest_pycollect_makemodule,
    pytest_report_header,
    pytest_runtest_logreport,
)

__all__ = [
    "pytest_addhooks",
    "pytest_addoption",
    "pytest_cmdline_main",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_load_initial_conftests",
    "pytest_pycollect_makemodule",
    "pytest_report_header",
    "pytest_runtest_logreport",
]
