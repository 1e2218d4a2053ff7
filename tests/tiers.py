"""Which parameters of a test run for every change, and which ones only in the nightly run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def nightly_but(names: Iterable[str], *kept: str) -> list[ParameterSet]:
    """Each name as a parameter; all are marked `nightly` but those in `kept`, which must be among the names."""
    known = list(names)
    unknown = set(kept) - set(known)
    assert not unknown, f"no parameters of this test: {sorted(unknown)}"
    return [pytest.param(name, marks=[] if name in kept else [pytest.mark.nightly]) for name in known]


def nightly_after(kept: int, rows: Iterable[Any], *, is_one_name: bool = False) -> list[Any]:
    """The rows of a test's parameters, each a value or a tuple; those after the first `kept` are marked `nightly`.

    With `is_one_name`, a tuple is the value of one parameter.
    """
    listed = list(rows)
    late = (row if isinstance(row, tuple) and not is_one_name else (row,) for row in listed[kept:])
    return [*listed[:kept], *(pytest.param(*row, marks=[pytest.mark.nightly]) for row in late)]


# Slow tests with parameters from several places: n, where every n-th parameter runs for every change.
EVERY_NTH = {
    "emulator/test_backward_mma.py::test_it_is_right": 2,
    "emulator/test_each_kernel.py::test_a_kernel_is_right": 3,
    "emulator/test_judged.py::test_a_backward_kernel_gets_what_the_judge_made": 4,
    "emulator/test_minimal.py::test_combinations_are_right": 2,
    "emulator/test_part_faults.py::test_each_mistake_is_caught": 3,
    "emulator/test_windows.py::test_it_is_right": 2,
    "features/gate/test_decision.py::test_differences_are_decided": 2,
    "features/gate/test_revision_run.py::test_a_commit_that_cannot_be_tested_is_skipped": 3,
    "features/html/test_page.py::test_the_page_stays_small": 2,
    "features/judge_command/test_judge_command.py::test_the_status_is_that_of_the_records": 3,
    "features/selftest/test_backward_faults.py::test_each_mistake_is_caught_and_named": 3,
    "features/selftest/test_part_faults.py::test_each_mistake_is_caught_and_gets_no_other_name": 3,
    "features/test_taking_out.py::test_the_rest_works": 3,
    "plugin/test_cases.py::test_a_named_case_that_is_not_judged_is_not_green": 3,
    "plugin/test_kills.py::test_order_after_a_kill": 2,
    "plugin/test_late_imports.py::test_nothing_is_imported_late": 3,
    "plugin/test_selection.py::test_node_ids_drop_companions_without_candidates": 3,
    "plugin/test_servers.py::test_no_server_is_left": 2,
    "plugin/test_terminal.py::test_an_option_of_pytest_benchmark_shows_its_table": 2,
    "plugin/test_varlen.py::test_the_lines_of_a_failure_make_a_function_right": 2,
    "repo/test_workflows.py::test_pytest_accepts_every_command_of_the_page": 3,
    "unit/attention/test_alibi_bias_mask.py::test_a_mistake_is_named": 3,
    "unit/attention/test_alibi_bias_mask.py::test_a_right_kernel_passes": 3,
    "unit/attention/test_cache_dtype.py::test_a_right_kernel_is_right_in_all_that_it_claims": 3,
    "unit/attention/test_conventions.py::test_all_conventions_are_declared_at_once": 3,
    "unit/attention/test_conventions.py::test_what_is_declared_and_not_so_is_named": 3,
    "unit/attention/test_conventions.py::test_what_is_declared_is_translated": 3,
    "unit/attention/test_conventions.py::test_what_is_not_declared_is_named": 3,
    "unit/attention/test_packed.py::test_every_claim_and_property_is_right": 3,
    "unit/attention/test_pages.py::test_a_right_kernel_is_right_in_all_that_it_claims": 2,
    "unit/attention/test_score_parts.py::test_a_mistake_in_a_pair_is_found": 3,
    "unit/attention/test_score_parts.py::test_a_mistake_is_named": 3,
    "unit/attention/test_sinks.py::test_a_mistake_is_named": 3,
    "unit/attention/test_sinks.py::test_a_right_kernel_passes": 3,
    "unit/build/test_cache.py::test_change_is_compiled": 2,
    "unit/build/test_cache.py::test_damaged_build_is_rebuilt_once": 2,
    "unit/build/test_exports.py::test_a_source_of_gradients_has_an_interface_of_its_own": 4,
    "unit/build/test_exports.py::test_what_the_source_does_not_export_is_named": 2,
    "unit/host/test_hostile_worker.py::test_a_change_of_a_parent_is_undone_and_named": 2,
    "unit/host/test_hostile_worker.py::test_a_hostile_message_costs_its_case": 2,
    "unit/host/test_hostile_worker.py::test_a_signal_to_the_judge_gives_no_verdict": 2,
    "unit/judge/test_diagnosis_matrix.py::test_other_policies": 3,
    "unit/judge/test_field_faults.py::test_what_is_declared_is_not_judged": 2,
    "unit/judge/test_float32.py::test_an_undeclared_rounding_is_named": 3,
    "unit/judge/test_float32.py::test_right_kernels_pass": 3,
    "unit/judge/test_fp8_kernels.py::test_wrong_kernels_are_rejected": 3,
    "unit/judge/test_gradient_data.py::test_right_kernel_passes_on_hard_data": 4,
    "unit/judge/test_gradient_mistakes.py::test_mistake_gets_its_sentence": 4,
    "unit/judge/test_gradients.py::test_right_kernel_passes": 4,
    "unit/judge/test_gradients.py::test_wrong_kernel_is_rejected": 4,
    "unit/judge/test_invariance.py::test_splits_that_depend_on_the_company_are_caught": 3,
    "unit/judge/test_kernels_on_hard_data.py::test_a_mistake_on_special_data_is_named": 4,
    "unit/judge/test_log_sum_exp.py::test_scores_in_13_bits": 3,
    "unit/judge/test_mutations.py::test_right_kernel_passes_on_special_values": 3,
    "unit/judge/test_ragged.py::test_a_kernel_that_takes_no_other_batches_keeps_every_property": 2,
    "unit/judge/test_reference_backward.py::test_judged_and_timed": 4,
}


def mark_nightly_parameters(items: Iterable[pytest.Item]) -> None:
    """Mark the other parameters of the tests in `EVERY_NTH` as `nightly`.

    It counts the parameters that would run for every change without it.
    """
    counts: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in EVERY_NTH and item.get_closest_marker("nightly") is None:
            if counts[name] % EVERY_NTH[name]:
                item.add_marker(pytest.mark.nightly)
            counts[name] += 1
