"""The lines of a gate: the seconds of its pilot, and the age of times that it took from an earlier gate."""

from __future__ import annotations

import msgspec
import pytest

from pytest_fa.features.gate.gate_lines import gate_lines
from pytest_fa.features.gate.gated import Gate

GATE = Gate(0.95, "PASS", "", 6, 1, 2, 0.01, None, 26.0, {}, ())


@pytest.mark.parametrize(
    ("changes", "cost"),
    [
        ({}, "26 s"),
        ({"pilot_seconds": 11.0}, "26 s, 11 s of them the pilot"),
        (
            {"pilot_seconds": 11.0, "pilot_age_seconds": {"b1h8s512d64-fp16": {"slow": 80.0, "slower": 212.4}}},
            "26 s, 11 s of them the pilot (times of slower baselines up to 212 s old)",
        ),
    ],
    ids=["an older record", "with its pilot", "with shared times"],
)
def test_the_line_of_cost(changes: dict[str, object], cost: str) -> None:
    """The seconds of the pilot are a part of the gate's, and shared times are said with their age."""
    line = gate_lines("mine", msgspec.structs.replace(GATE, **changes))[1]
    assert line == f"  6 processes, {cost}, 2 blocks dropped, seed 1; standard deviation of the process means unknown"
