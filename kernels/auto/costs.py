"""The expected time of each rung: fitted from saved records by `python -m kernels.auto.costs profiles/nvidia-h200 ...`.

`costs.json` has, for each GPU, rung and kind of problem (`d64`, or `d64-masked`), the microseconds of each term of
`work.py`, and the measured times.  An expected time is the sum of the terms.  The errors of that sum at the nearest
measured problems correct it.  A problem that was measured on the same GPU is expected to take what it took.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytest_fa.catalog.case import parse_case
from pytest_fa.records.ceilings import Ceilings, read_ceilings
from pytest_fa.records.files import UnreadableRecords
from pytest_fa.records.log import read_records
from pytest_fa.records.record import JUDGED_KINDS, Record
from pytest_fa.records.standing import standing_results

from .problem import Problem
from .rung_times import RungTimes, read_rung_times
from .work import FEW_QUERIES, RUNGS, Terms

COSTS = Path(__file__).with_name("costs.json")
DTYPE = "fp16"  # of the records that are fitted
LENGTH_SCALE = 1.0  # of the Gaussian weights: at this distance, a measured problem counts e times less
PRIOR = 0.3  # the weight of "no correction" beside those of measured problems
MIN_MEASURED = 12  # measured problems for a fit, more than there are terms
SMS = 132  # of a GPU with records alone

Measured = dict[str, dict[str, dict[str, dict[str, float]]]]  # us by GPU, rung, kind and shape
Table = Mapping[str, Mapping[str, Any]]  # by GPU: `sms`, `copy_gb_per_s`, `rungs` (see above)


def main(folders: list[str]) -> int:
    """Fit what is saved in the folders, and write it into `costs.json`, whose other GPUs stay.

    Returns 2 after one line if a file cannot be read, or if no folder has enough times.
    """
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.jsonl"))]
    try:
        records = standing_results(record for path in paths for record in read_records(path)).records
        side_by_side = [times for folder in folders if (times := read_rung_times(Path(folder)))]
        gpus = {record.environment.gpu for record in records}
        ceilings = [read_ceilings(Path(folder).parent, gpu) for folder in folders for gpu in gpus]
    except UnreadableRecords as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    table = fitted(records, side_by_side, [each for each in ceilings if each])
    if not any(of_gpu["rungs"] for of_gpu in table.values()):
        sys.stderr.write(f"no times of the rungs in {', '.join(folders) or 'no folder'}; give profiles/<gpu>\n")
        return 2
    COSTS.write_text(_as_json({**_table(), **table}), encoding="utf-8")
    return 0


def fitted(
    records: Iterable[Record], side_by_side: Sequence[RungTimes] = (), ceilings: Iterable[Ceilings] = ()
) -> Table:
    """The costs of the rungs that were never wrong, by GPU.  Times of rungs that took turns come before records."""
    measured: Measured = {}
    wrong = set()
    for record in records:
        if record.kind in JUDGED_KINDS and record.outcome.defect:
            wrong.add(record.variant)
        case, gpu, speed = record.case, record.environment.gpu, record.speed
        if record.kind != "speed" or not speed or not case or not gpu or record.variant not in RUNGS:
            continue
        if case.dtype == DTYPE and case.layout == "bhsd" and speed.device.median_us > 0:
            _keep(measured, gpu, record.variant, case.shape_id, speed.device.median_us)
    sms = {str(times.environment.gpu): times.sms for times in side_by_side}
    for times in side_by_side:
        for shape, us in times.us.items():
            for rung in us.keys() & RUNGS.keys():  # a rung may have been dropped since
                _keep(measured, str(times.environment.gpu), rung, shape, us[rung])
    copy_rates = {str(each.environment.gpu): each.copy_gb_per_s for each in ceilings}
    return {
        gpu: {
            "sms": sms.get(gpu, SMS),
            "copy_gb_per_s": copy_rates.get(gpu),
            "rungs": {
                rung: _of_kinds(rung, kinds, sms.get(gpu, SMS))
                for rung, kinds in sorted(rungs.items())
                if rung not in wrong and any(len(times) >= MIN_MEASURED for times in kinds.values())
            },
        }
        for gpu, rungs in sorted(measured.items())
    }


def _of_kinds(rung: str, kinds: Mapping[str, Mapping[str, float]], sms: int) -> dict[str, Any]:
    return {
        kind: {"us": _fit(rung, times, sms), "measured": dict(sorted(times.items()))}
        for kind, times in sorted(kinds.items())
        if len(times) >= MIN_MEASURED
    }


def _keep(measured: Measured, gpu: str, rung: str, shape: str, us: float) -> None:
    kinds = measured.setdefault(gpu, {}).setdefault(rung, {})
    kinds.setdefault(kind_of(rung, _problem(shape)), {})[shape] = round(us, 2)


def kind_of(rung: str, problem: Problem) -> str:
    """Problems of one kind have costs of their own: a head_dim, and for rungs with many queries the mask."""
    masked = "-masked" * (problem.is_masked and rung not in FEW_QUERIES)
    return f"d{problem.head_dim}{masked}"


def _fit(rung: str, times: Mapping[str, float], sms: int) -> list[float]:
    """The microseconds of each term, none below 0, for which the sum of relative errors is small."""
    import numpy as np  # noqa: PLC0415  # a call needs the result alone
    from scipy.optimize import nnls  # noqa: PLC0415

    terms = np.array([RUNGS[rung](_problem(shape), sms) for shape in times])
    us = np.array(list(times.values()))
    weights = 1 / us
    for _ in range(7):  # least squares, in which a problem with a large error counts less each time
        costs, _ = nnls(terms * weights[:, None], us * weights)
        weights = 1 / us / np.sqrt(np.abs(terms @ costs / us - 1) + 0.02)
    return [float(f"{cost:.4g}") for cost in costs]


def _as_json(table: Table) -> str:
    """The table with one line for each kind."""
    lines: dict[str, str] = {}
    outline = {
        gpu: {
            **of_gpu,
            "rungs": {
                rung: {kind: _marked(lines, costs) for kind, costs in kinds.items()}
                for rung, kinds in of_gpu["rungs"].items()
            },
        }
        for gpu, of_gpu in table.items()
    }
    text = json.dumps(outline, indent=1)
    for mark, line in lines.items():
        text = text.replace(f'"{mark}"', line)
    return f"{text}\n"


def _marked(lines: dict[str, str], costs: Any) -> str:  # noqa: ANN401  # any JSON value
    """A mark in the place of a value, whose line is added to `lines`."""
    mark = f"<{len(lines)}>"
    lines[mark] = json.dumps(costs)
    return mark


class Costs:
    """The expected times of the rungs on one GPU."""

    def __init__(self, gpu: str, of_gpu: Mapping[str, Any], sms: int, *, is_own: bool = True) -> None:
        """`gpu` was measured, and `of_gpu` is its part of the table; `sms` is the number of SMs to compute for.

        `is_own` says that this is the GPU that was measured: then a measured time is one to expect.
        """
        self.gpu, self._rungs, self._sms = gpu, of_gpu["rungs"], sms
        self._is_own, self._measured_sms = is_own, of_gpu["sms"]
        self._copy_gb_per_s = of_gpu["copy_gb_per_s"]

    def ranked(self, problem: Problem) -> list[Expected]:
        """The rungs with costs for such a problem, fastest first."""
        return sorted(expected for rung in self._rungs if (expected := self.of(rung, problem)))

    def of(self, rung: str, problem: Problem) -> Expected | None:
        """The expected time of a rung; None without costs for such a problem."""
        kind = kind_of(rung, problem)
        if kind not in self._rungs[rung]:
            return None
        measured = self._errors(rung, kind)
        if self._is_own and problem in measured:
            return Expected(measured[problem].us, rung, is_measured=True)
        position = problem.position()
        weights = [
            math.exp(-((math.dist(position, other.position) / LENGTH_SCALE) ** 2)) for other in measured.values()
        ]
        weighted = sum(weight * other.error for weight, other in zip(weights, measured.values(), strict=True))
        correction = math.exp(weighted / (sum(weights) + PRIOR))
        us = _sum(RUNGS[rung](problem, self._sms), self._rungs[rung][kind]["us"])
        return Expected(max(us * correction, self._least_us(problem)), rung, is_measured=False)

    def _least_us(self, problem: Problem) -> float:
        """What the bytes take at the rate of a copy, if the call before can leave few of them in L2."""
        size, beyond_l2 = problem.memory()
        return size * 1e3 / self._copy_gb_per_s if self._copy_gb_per_s and beyond_l2 > size / 2 else 0.0

    @functools.cache  # noqa: B019  # there is one for each GPU of the process
    def _errors(self, rung: str, kind: str) -> dict[Problem, _Measured]:
        """The measured problems of a rung, each with the logarithm of its time over the sum of its terms."""
        costs = self._rungs[rung][kind]
        found = {}
        for shape, us in costs["measured"].items():
            problem = _problem(shape)
            error = math.log(us / _sum(RUNGS[rung](problem, self._measured_sms), costs["us"]))
            found[problem] = _Measured(us, error, problem.position())
        return found


class Expected(NamedTuple):
    """What a rung is expected to take."""

    us: float
    rung: str
    is_measured: bool


class _Measured(NamedTuple):
    us: float
    error: float  # log(measured / sum of terms)
    position: tuple[float, ...]


def costs_of(gpu: str, sms: int) -> Costs | None:
    """The costs on a GPU: its own, else those of the first GPU with records; None if there is none."""
    table = _table()
    measured = gpu if gpu in table else next(iter(table), None)
    return None if measured is None else Costs(measured, table[measured], sms, is_own=measured == gpu)


@functools.cache
def _table() -> Table:
    table: Table = json.loads(COSTS.read_text(encoding="utf-8"))
    return table


@functools.cache
def _problem(shape: str) -> Problem:
    return Problem.of(parse_case(f"{shape}-seed0"))


def _sum(terms: Terms, us: list[float]) -> float:
    return max(0.1, sum(term * cost for term, cost in zip(terms, us, strict=True)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
