"""A sweep in the T4 form of kernel_tuner, for tools that compare autotuners.

The schema is `kernel_tuner/schema/T4/1.0.0/results-schema.json` of https://github.com/KernelTuner/kernel_tuner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pytest_fa.features.sweep.trial_result import SweepTrial, TrialOutcome, TrialResult

T4_VERSION = "1.0.0"
_INVALIDITY: dict[TrialOutcome, str] = {
    TrialOutcome.RIGHT: "correct",
    TrialOutcome.NOT_BUILT: "compile",
    TrialOutcome.OVER_LIMIT: "constraints",
    TrialOutcome.REFUSED: "constraints",
    TrialOutcome.WRONG: "correctness",
    TrialOutcome.HUNG: "timeout",
    TrialOutcome.CRASHED: "runtime",
    TrialOutcome.NOT_TIMED: "runtime",
}


def t4_results(trials: Sequence[SweepTrial]) -> dict[str, Any]:
    """The trials as T4 results.  Repetitions, for which nothing ran, are left out.

    `time_ratio`, the objective, is the time divided by that of the parent in the same process.
    """
    results = [_t4_result(trial, trial.result) for trial in trials if trial.result and trial.is_counted]
    return {"schema_version": T4_VERSION, "results": results}


def _t4_result(trial: SweepTrial, result: TrialResult) -> dict[str, Any]:
    times_us = [{"name": shape, "value": each.candidate_us, "unit": "us"} for shape, each in result.shapes.items()]
    counters = [{"name": name, "value": value, "unit": ""} for name, value in result.counters.items()]
    ratio = (
        [] if result.log_ratio is None else [{"name": "time_ratio", "value": math.exp(result.log_ratio), "unit": ""}]
    )
    return {
        "timestamp": datetime.fromtimestamp(trial.begun, UTC).isoformat(),
        "configuration": trial.point,
        "objectives": ["time_ratio"],
        "times": {
            "compilation_time": 1000 * result.build_seconds,  # milliseconds, as kernel_tuner has them
            "runtimes": [each.candidate_us / 1000 for each in result.shapes.values()],
            "validation": 1000 * max(0.0, result.seconds - result.build_seconds),
        },
        "invalidity": _INVALIDITY[result.outcome],
        "correctness": int(result.outcome in (TrialOutcome.RIGHT, TrialOutcome.NOT_TIMED)),
        "measurements": [*ratio, *times_us, *counters],
    }
