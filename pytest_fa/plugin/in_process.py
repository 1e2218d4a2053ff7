"""The work of the fixtures for a user's own tests, in pytest's process: find the device, judge outputs, time calls.

This module imports torch, so it is imported only for such a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import build_library, open_forward
from pytest_fa.candidate.output import require_output
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant, tolerance_for
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.device import is_alive
from pytest_fa.gpu.inputs import Inputs, Output, make_inputs, poisoned_output
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.fresh_data import stacked
from pytest_fa.judge.clocks.measure import measure
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.markers import read_marker, tolerance_of
from pytest_fa.plugin.state import LOST_KEY, SESSION_KEY, session_of
from pytest_fa.records.checks import Check
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.timing import Speed
from pytest_fa.session.builds import device_of
from pytest_fa.session.refusals import CannotRun
from pytest_fa.table.failure import check_lines


@contextmanager
def open_module(request: pytest.FixtureRequest, variant: Variant) -> Iterator[Forward]:
    """The variant as a function of q, k, v and the keywords of a call, built and loaded into this process."""
    device, options = device_or_skip(variant), request.config.stash[OPTIONS_KEY]
    with device_kept(request, device):
        library = build_library(variant, options.cache, no_build=options.no_build)
        case: Case | None = request.getfixturevalue("fa_case") if "fa_case" in request.fixturenames else None
        with open_forward(variant, library, computes=case.computes if case else None) as forward:
            yield forward


@contextmanager
def open_inputs(request: pytest.FixtureRequest, case: Case) -> Iterator[Inputs]:
    """The arguments of a call on the case, on the GPU if there is one.  Skips the test if its variant refuses them."""
    _require_no_gradients(case)
    device, variant = "cuda" if find_gpu() else "cpu", variant_of(request)
    if variant:
        if reason := variant.refuses(case):
            pytest.skip(reason)
        device = device_or_skip(variant)
    with device_kept(request, device):
        yield make_inputs(case, torch.device(device), variant.conventions if variant else {}).placed()


def judge_truth(request: pytest.FixtureRequest, case: Case, inputs: Inputs) -> Truth:
    """Truth for the inputs, with the policy of the test.  Fails for gradients, and a truth of the user's."""
    _require_no_gradients(case)
    _require_no_own_truth(request)
    return truth_of(case.computes, inputs, (), policy_of(request, case))


@contextmanager
def device_kept(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """The context of an in-process test, which notices if the test loses the device.

    After a sticky CUDA error, such as an illegal address, a process cannot use the GPU any more.  Later tests then fail
    with the name of the test that lost it.
    """
    stash = request.config.stash
    if device != "cpu" and LOST_KEY in stash:
        pytest.fail(f"this process can no longer use the GPU: {stash[LOST_KEY]}", pytrace=False)
    yield
    if device != "cpu" and LOST_KEY not in stash and not is_alive(torch.device(device)):
        stash[LOST_KEY] = f"its CUDA context was lost in {request.node.nodeid}"


def device_or_skip(variant: Variant) -> str:
    """The device on which a variant runs on this machine; skips the test if there is none."""
    try:
        return device_of(variant)
    except CannotRun as reason:
        pytest.skip(str(reason))


def variant_of(request: pytest.FixtureRequest) -> Variant | None:
    """The variant under test; None if the test does not use `fa_variant`."""
    return request.getfixturevalue("fa_variant") if "fa_variant" in request.fixturenames else None


def policy_of(request: pytest.FixtureRequest, case: Case) -> str:
    """The tolerance policy of `--fa-tolerance`, else of the marker, else of the manifest, else `same_precision`."""
    variant = variant_of(request)
    marked = read_marker(tolerance_of, request.node)
    of_variant = tolerance_for(variant.tolerance, case.dtype) if variant else "same_precision"
    policy = request.config.stash[OPTIONS_KEY].tolerance or marked or of_variant
    if case.computes == "scores" and policy != "same_precision":
        reason = f"tolerance policy {policy} judges attention; {case.shape_id} is a case of scores (use same_precision)"
        pytest.fail(reason, pytrace=False)
    return policy


def _require_no_gradients(case: Case) -> None:
    """Fail the test if the case asks for gradients: a call in this process has one output."""
    if case.computes == "gradients":
        fixtures = "fa_inputs, fa_check, fa_truth and fa_benchmark"
        reason = f"{case.shape_id} asks for gradients, which {fixtures} do not have"
        pytest.fail(f"no verdict: {reason}; use fa_run.correct", pytrace=False)


def _require_no_own_truth(request: pytest.FixtureRequest) -> None:
    """Fail the test if the variant is compared with the user's functions: they run in another process."""
    if (variant := variant_of(request)) and variant.own_truth:
        reason = f"{variant.name} is judged {variant.own_truth.against}, which fa_check and fa_truth do not have"
        pytest.fail(f"no verdict: {reason}; use fa_run.correct", pytrace=False)


def judge_outputs(
    request: pytest.FixtureRequest, case: Case, inputs: Inputs, outputs: Iterable[torch.Tensor], where: str = ""
) -> Check:
    """Judge the outputs and return the check of the last one.  Fails with every bound of the first wrong output.

    `where` is appended to the message of a failure.
    """
    _require_no_gradients(case)
    _require_no_own_truth(request)
    variant, policy = variant_of(request), policy_of(request, case)
    truth = truth_of(case.computes, inputs, variant.rounds if variant else (), policy)
    like = poisoned_output(inputs, case.computes)
    for out in outputs:
        try:
            judged = inputs.dense_output(Output(require_output(out, like))).out
            check = check_output(judged, truth, policy)
        except WrongResult as problem:
            pytest.fail(f"{problem}{where}", pytrace=False)
        if not check.passed:
            pytest.fail(
                f"wrong: {check.complaint}{where}\n" + "\n".join(check_lines(check, case.computes)), pytrace=False
            )
    return check


def time_here(request: pytest.FixtureRequest, forward: Forward, case: Case, inputs: Inputs) -> Speed:
    """Time `forward` in this process, and return all times.

    Fails if an output of the timed calls is wrong, and for gradients.
    """
    _require_no_gradients(case)
    if SESSION_KEY in request.config.stash:
        session_of(request.config).runner.profiler_workers.wait_until_prepared()
    with timing_lock():
        candidate = Candidate.of_function(forward, "cuda" if inputs.q.is_cuda else "cpu", case.computes)
        speed, written = measure(candidate, case, inputs)
    variant = variant_of(request)
    if variant is None or variant.is_judged:
        read, output = stacked(written)
        judge_outputs(request, case, read, [output.out], " in an output of the timed calls")
    return speed
