"""The line of the terminal for a batch of builds."""

from __future__ import annotations

from pytest_fa.build.outcomes import BuildFailure, BuildReport


def test_a_batch_in_which_every_build_failed_was_built_nowhere() -> None:
    """Without any build, the line names no place and no compiler."""
    report = BuildReport({("mine", "sm_80"): BuildFailure("mine", "sm_80", "why")}, 0, 0, 0.5, 1)
    assert report.title == "builds: 1 failed, 0 compiled, 0 cached in 0.500 s"
