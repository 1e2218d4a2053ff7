"""What the gates of one run know of each other."""

from __future__ import annotations

from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.record import Record
from pytest_fa.session.case_runner import CaseRunner


class GateMemory:
    """The gates so far, and the records of baselines that the pilot of an earlier gate made.

    `baseline_rows` maps (case id, baseline names) to the moment at which all of them were timed, and to their records.
    """

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.baseline_rows: dict[tuple[str, tuple[str, ...]], tuple[float, tuple[Record, ...]]] = {}

    @staticmethod
    def of(runner: CaseRunner) -> GateMemory:
        """That of a run."""
        memory: GateMemory = runner.of_features.setdefault(GateMemory, GateMemory())
        return memory
