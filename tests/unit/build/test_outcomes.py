"""The line of the terminal for a batch of builds."""

from __future__ import annotations

from syrupy.assertion import SnapshotAssertion

from pytest_fa.build.outcomes import BuildFailure, BuildReport


def test_a_batch_in_which_every_build_failed_was_built_nowhere(snapshot: SnapshotAssertion) -> None:
    """Without any build, the line names no place and no compiler."""
    report = BuildReport({("mine", "sm_80"): BuildFailure("mine", "sm_80", "why")}, 0, 0, 0.5, 1)
    assert snapshot == report.title
