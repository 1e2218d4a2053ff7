"""The message of the self-test if a kernel was rejected by unexpected checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.features.selftest import selftest as run
from pytest_fa.features.selftest.selftest import run_selftest_kernel
from pytest_fa.host.client import Workers
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.record_factory import RecordFactory
from pytest_fa.session.run_plan import RunPlan
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, options, record


def test_it_says_what_each_check_said_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_variant: WriteVariant
) -> None:
    """The message has the first line of each check that rejected the kernel."""
    folder = write_variant("gain_only", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")

    def runs(*_: object) -> Iterator[Record]:
        yield record(outcome=Outcome.WRONG, caught_by=("gain",), message="the gain is 0.9\nmore")
        yield record(outcome=Outcome.FAILED, caught_by=("exception",), message="OutOfMemoryError: CUDA out of memory")
        yield record(outcome=Outcome.FAILED, caught_by=("exception",), message="a later one")

    monkeypatch.setattr(run, "_runs", runs)
    run_options = options(tmp_path)
    plan = RunPlan(run_options)
    builds, records = Builds(run_options, plan), RecordFactory(run_options)
    runner = CaseRunner(run_options, builds, records, Workers(), ProfilerWorkers())

    made = run_selftest_kernel(plan, runner, variant)

    assert made.message.splitlines() == [
        "only gain may reject this kernel; it was rejected by gain, exception",
        f"  gain of {record().id}: the gain is 0.9",
        f"  exception of {record().id}: OutOfMemoryError: CUDA out of memory",
    ]
    assert made.caught_by == ("gain", "exception")
