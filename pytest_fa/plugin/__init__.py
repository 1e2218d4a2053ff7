"""The pytest plugin: the hooks and fixtures of this package.

Every pytest run in this environment imports it, so it imports neither torch nor the catalog.
"""

from pytest_fa.plugin.fixtures import (
    fa_benchmark,
    fa_builds,
    fa_case,
    fa_check,
    fa_clock,
    fa_inputs,
    fa_module,
    fa_property,
    fa_run,
    fa_sanitizer,
    fa_truth,
    fa_variant,
)
from pytest_fa.plugin.hooks import (
    pytest_addoption,
    pytest_benchmark_group_stats,
    pytest_benchmark_update_json,
    pytest_benchmark_update_machine_info,
    pytest_cmdline_main,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_pycollect_makeitem,
    pytest_report_header,
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_unconfigure,
)

__all__ = [
    "fa_benchmark",
    "fa_builds",
    "fa_case",
    "fa_check",
    "fa_clock",
    "fa_inputs",
    "fa_module",
    "fa_property",
    "fa_run",
    "fa_sanitizer",
    "fa_truth",
    "fa_variant",
    "pytest_addoption",
    "pytest_benchmark_group_stats",
    "pytest_benchmark_update_json",
    "pytest_benchmark_update_machine_info",
    "pytest_cmdline_main",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_pycollect_makeitem",
    "pytest_report_header",
    "pytest_report_teststatus",
    "pytest_runtest_makereport",
    "pytest_unconfigure",
]
