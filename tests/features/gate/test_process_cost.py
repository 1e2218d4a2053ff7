"""How long a gate takes: measured in this run, else by records of this machine, else a usual time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.features.gate.gated import Gate, GatePair
from pytest_fa.features.gate.process_cost import USUAL, ProcessCost, correction, cost_of, expected_cost, part_seconds
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Environment, to_json
from pytest_fa.wire.jobs import PairedResult
from tests.factories import options, record

PAIR = GatePair(PairSamples("b1h8s512d64-fp16", "fast", (), ()), 0.9, 0.8, 1.0, 0.8, 1.0)
HERE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")
ELSEWHERE = msgspec.structs.replace(HERE, gpu="NVIDIA L4")


def gate(pairs: int = 2, **seconds: float) -> Gate:
    """A gate whose processes took these seconds in their parts."""
    return Gate(0.95, "PASS", "", 6, 1, 0, 0.01, None, 40.0, {}, (PAIR,) * pairs, part_seconds=seconds)


def result(**seconds: float) -> PairedResult:
    """The result of one process that took these seconds in its parts."""
    return PairedResult(Outcome.OK, "", (), seconds=seconds)


def write_log(folder: Path, name: str, environment: Environment, *gates: Gate) -> None:
    """The record file of an earlier run with these gates."""
    logs = options(folder).artifacts / "records"
    logs.mkdir(parents=True, exist_ok=True)
    records = [record("mine", kind="gate", added={"gate": each}, environment=environment) for each in gates]
    logs.joinpath(name).write_bytes(b"".join(to_json(each) + b"\n" for each in records))


def test_parts_are_means_over_processes() -> None:
    """Each part is the mean over the processes, in the order of the parts; processes without seconds do not count."""
    results = [result(samples=1.0, processes=0.2), result(samples=3.0, processes=0.4), PairedResult(Outcome.OK, "", ())]
    assert list(part_seconds(results).items()) == [("processes", pytest.approx(0.3)), ("samples", 2.0)]


def test_a_gate_costs_a_fixed_part_and_one_for_each_pair() -> None:
    """The start of processes and the hashes are there once; all other parts grow with the pairs."""
    cost = cost_of(gate(2, processes=0.5, files=0.1, samples=3.0, proof=1.0))
    assert cost == pytest.approx((0.6, 2.0))
    assert cost is not None
    assert cost.seconds(3, processes=6) == pytest.approx(6 * (0.6 + 3 * 2.0))
    assert cost_of(gate(2)) is None
    assert cost_of(gate(2, samples=0.0)) is None


def test_this_run_counts_more_than_records(tmp_path: Path) -> None:
    """The last gate of this run says what the next one takes; an earlier run's does only without one."""
    write_log(tmp_path, "20260101.jsonl", HERE, gate(1, samples=7.0))
    assert expected_cost((gate(1, samples=5.0), gate(1, samples=6.0)), options(tmp_path), HERE) == (0.0, 6.0)
    assert expected_cost((), options(tmp_path), HERE) == (0.0, 7.0)


def test_the_newest_record_of_this_machine_counts(tmp_path: Path) -> None:
    """Of the record files, the last gate of the newest one counts, of this GPU only; without one, a usual time."""
    write_log(tmp_path, "20260101.jsonl", HERE, gate(1, samples=1.0), gate(1, samples=2.0))
    write_log(tmp_path, "20260102.jsonl", ELSEWHERE, gate(1, samples=9.0))
    write_log(tmp_path, "20260103.jsonl", HERE, gate(1))  # its processes were not timed
    assert expected_cost((), options(tmp_path), HERE) == (0.0, 2.0)
    assert expected_cost((), options(tmp_path), msgspec.structs.replace(HERE, gpu=None)) == USUAL


def test_a_damaged_record_file_is_passed_over(tmp_path: Path) -> None:
    """A line that is no record costs nothing but itself."""
    write_log(tmp_path, "20260101.jsonl", HERE, gate(1, samples=1.0))
    with (options(tmp_path).artifacts / "records" / "20260101.jsonl").open("ab") as stream:
        stream.write(b'{"gate":{"part_seconds":{"\n')
    assert expected_cost((), options(tmp_path), HERE) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (3.8, "gate mine: each process takes about 3.8 s: 6 take about 23 s, 12 about 46 s"),
        (3.7, ""),
        (2.3, ""),
        (2.2, "gate mine: each process takes about 2.2 s: 6 take about 13 s, 12 about 26 s"),
    ],
)
def test_an_unexpected_second_process_is_said(seconds: float, expected: str) -> None:
    """If the second process takes 25 % longer or shorter than announced, a line says what the gate takes."""
    cost = ProcessCost(1.0, 2.0)
    assert correction("mine", cost, [result(samples=9.0), result(samples=seconds)], 1, 1) == expected


def test_only_the_second_processes_correct_the_estimate() -> None:
    """Nothing is said after the first or third process, or if it was not timed; on two GPUs, after two on each."""
    cost = ProcessCost(1.0, 2.0)
    assert correction("mine", cost, [result(samples=9.0)], 1, 1) == ""
    assert correction("mine", cost, [result(samples=9.0)] * 3, 1, 1) == ""
    assert correction("mine", cost, [PairedResult(Outcome.OK, "", ())] * 2, 1, 1) == ""
    assert correction("mine", cost, [result(samples=9.0)] * 2, 1, 2) == ""
    assert correction("mine", cost, [result(samples=9.0)] * 4, 1, 2) != ""


def test_a_record_without_time_breaks_no_later_gate(tmp_path: Path) -> None:
    """A record whose parts took no time is passed over, and the usual time counts."""
    write_log(tmp_path, "20260101.jsonl", HERE, gate(1, samples=0.0))
    assert expected_cost((), options(tmp_path), HERE) == USUAL
