"""The tests that `--fa-sweep` runs in place of the shipped suite's others."""

from __future__ import annotations

import pytest

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sweep.sweeping import skip_reason, sweep_run_of
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.session.refusals import CannotRun


def test_sweep(fa_variant: Variant, trial_number: int, fa_run: FaRun) -> None:  # noqa: ARG001  # part of the test's id
    """One more configuration of `--fa-sweep` is judged, and timed if it is right."""
    obstacle, reason = None, ""
    try:
        sweep_run = sweep_run_of(fa_run.node.config, fa_variant)
        trial = sweep_run.next_trial()
        reason = skip_reason(trial, "" if trial else sweep_run.closed)
    except CannotRun as problem:
        obstacle = problem
    finally:
        fa_run.take_output()
    if obstacle:
        fa_run.end_without_verdict(obstacle)
    if reason:
        pytest.skip(reason)


def test_sweep_end(fa_variant: Variant, fa_run: FaRun) -> None:
    """The best configuration of `--fa-sweep` takes less time than the variant itself, which a gate confirms."""
    fa_run.finish(lambda: sweep_run_of(fa_run.node.config, fa_variant).end())
