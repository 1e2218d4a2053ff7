"""The self-test's wrong backward kernels: the check that rejects each one, and what its message or diagnosis says."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.properties import properties_of
from pytest_fa.features.selftest.exploits import EXPLOITS, exploit_case
from pytest_fa.features.selftest.faults import FAULTS
from pytest_fa.judge.pipeline import run_case
from tests.factories import cpu_job
from tests.features.selftest.wrong_results import variants_in, wrong_results

DELTA = "delta = rowsum(dO * O)"
# A part of the sentence that names each mistake.
CAUSES = {
    "delta_missing": f"{DELTA} is missing in dS",
    "delta_of_next_row": f"{DELTA} is that of the next row",
    "dk_scale_missing": "the softmax scale is missing in dk",
    "ds_one_key_too_wide": "the causal mask is one key too wide",
    "dk_of_last_head": "only the last head of each group is in dk",
    "dq_last_block_lost": "the last 13 keys are missing in dq",
    "dv_unnormalised": "P is exp(S - max), not normalised: it must be exp(S - L) (in dv)",
    "lse_in_base_2": "P is exp2(S - L), it must be exp(S - L)",
    "dlse_ignored": "dlse, the gradient of the log-sum-exp, is ignored",
    "cap_slope_missing": "the derivative of the soft cap, 1 - tanh(S / cap)^2, is missing in dS",
    "dsink_of_next_head": "dsink is that of the next head",
    "dsink_of_first_batch": "dsink is that of batch 0 alone: add up all batches",
    "dbias_of_first_batch": "dbias is that of batch 0 alone: add up all batches",
    "dbias_scaled": "dbias is multiplied by the softmax scale, and must not be",
    "dk_zeroes_padding": "declare `conventions: {rows_past: zero}`",
    "clamped_dp": "hard_gradients (dO 100 times as large): dq max error",
    "dq_flickers": "20 of 30 repeats differ from the first call bit by bit",
    "gradients_kept_by_shape": "new_data: dq max error",
}
WRONG, BY_AUTOGRAD = variants_in("python_backward_faults"), variants_in("python_autograd")
TWINS = {"twin_right_backward": WRONG, "twin_right_autograd": BY_AUTOGRAD}


def test_every_kernel_is_listed() -> None:
    """Each wrong kernel has a sentence here."""
    assert {*WRONG} - {*TWINS} == {*CAUSES} <= {*FAULTS}


@pytest.mark.parametrize("name", TWINS)
def test_the_twins_are_right(name: str) -> None:
    """The sources have no mistake but those that are planted."""
    assert [result.message for result in wrong_results(TWINS[name][name])] == []
    assert "hard_gradients" in properties_of(TWINS[name][name])


@pytest.mark.parametrize("name", CAUSES)
def test_each_mistake_is_caught_and_named(name: str) -> None:
    """The check that must reject a kernel does; the diagnosis names its mistake, or the message what happened."""
    wrong = next(wrong_results(WRONG[name], repeats=30 if FAULTS[name].caught_by == "repeats" else 0))
    assert FAULTS[name].caught_by in wrong.caught_by
    assert not FAULTS[name].only or wrong.caught_by == (FAULTS[name].caught_by,)
    assert CAUSES[name] in f"{wrong.message}\n{wrong.diagnosis.cause if wrong.diagnosis else ''}"


@pytest.mark.parametrize("name", ["cheat_sdpa_backward", "cheat_sdpa_backward_in_autograd"])
def test_torchs_own_gradients_are_seen(name: str) -> None:
    """A kernel is caught that has torch's attention compute gradients, also in an autograd function of its own."""
    variant = {**variants_in("python_cheats"), **BY_AUTOGRAD}[name]
    result = run_case(cpu_job(variant, exploit_case(variant).id, repeats=0))
    assert result.caught_by == EXPLOITS[name].caught_by == ("delegation",)
    assert "it calls torch's own attention operator aten::" in result.message
