"""The lines of `--fa-watch`."""

from __future__ import annotations

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.watch.watch_lines import build_line, time_line, untimed_line, wrong_shape_line
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.timing import ON_CPU, Clocks
from tests.factories import SHAPE, build, record, speed

PROCESS_SD = 0.001


def timed(device_us: float, variant: str = "mine", sm_mhz: int = 1980) -> Record:
    """A record on a GPU with this time."""
    clocks = Clocks(sm_mhz, 2619, 700.0, 40, 0)
    made = msgspec.structs.replace(speed(device_us), clocks_before=clocks, clocks_during=clocks)
    environment = msgspec.structs.replace(record().environment, gpu="NVIDIA H200")
    return record(variant, kind="speed", speed=made, environment=environment)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, timed(11.4), "11.40 us, correct"),
        (timed(12.9), timed(11.4), "12.90 -> 11.40 us, -11.6 %, correct"),
        (timed(11.4), timed(12.9), "11.40 -> 12.90 us, +13.2 %, correct"),
        (timed(11.40), timed(11.41), "11.40 -> 11.41 us, +0.1 % (within noise), correct"),
        (timed(939.0), timed(2870.0), "939.0 -> 2870 us, +205.6 %, correct"),
        (
            timed(12.9, sm_mhz=1500),
            timed(11.4),
            "12.90 -> 11.40 us (not comparable: SM clocks: 1500 and 1980 MHz), correct",
        ),
    ],
)
def test_the_change_of_a_time(before: Record | None, after: Record, expected: str) -> None:
    """The time, the one before, and the change in percent, unless that is noise or means nothing."""
    assert f"mine {SHAPE}: {expected}" == time_line(after, before, None, lambda _: PROCESS_SD)


def test_the_ratio_to_the_baseline(snapshot: SnapshotAssertion) -> None:
    """The ratio to the fastest baseline of the first run follows."""
    line = time_line(timed(11.4), None, timed(9.15, "sdpa_cudnn"), lambda _: PROCESS_SD)
    assert snapshot == line


def test_shapes_without_a_time(snapshot: SnapshotAssertion) -> None:
    """A shape that was not timed says why; one with failed checks says how many."""
    wrong = record(outcome=Outcome.WRONG)
    assert untimed_line(record(kind="speed")) == f"mine {SHAPE}: correct, not timed"
    assert untimed_line(record(kind="speed", outcome=Outcome.WRONG)) == f"mine {SHAPE}: wrong, not timed"
    assert snapshot == wrong_shape_line([record(), wrong, record(outcome=Outcome.HUNG)])


def test_registers_and_spills_of_a_build(snapshot: SnapshotAssertion) -> None:
    """A figure that changed is shown with the one before."""
    before, after = build("sm_90a", k=(96, 0, 0)), build("sm_90a", k=(101, 0, 0), small=(40, 0, 0))
    assert snapshot == build_line("mine", [after], [])
    assert snapshot == build_line("mine", [after], [], is_cached=True)
    assert snapshot == build_line("mine", [after], [before])
    shared = msgspec.structs.replace(after, shared_by=("mine", "twin"))
    assert snapshot == build_line("mine", [shared], [])


def test_architectures_with_the_same_figures_share_a_part(snapshot: SnapshotAssertion) -> None:
    """Architectures are listed together if their figures are equal, with the seconds of the slowest."""
    slow = msgspec.structs.replace(build("sm_89", k=(96, 0, 0)), build_seconds=9.5)
    builds = [build("sm_80", k=(96, 0, 0)), slow, build("sm_90a", k=(101, 8, 0))]
    assert snapshot == build_line("mine", builds, [])


def test_a_noisy_change_is_none(snapshot: SnapshotAssertion) -> None:
    """Between two times on the CPU that scatter, no change is shown, as the table shows no ratio."""
    timing = msgspec.structs.replace(speed(100.0).device, samples_us=(50.0, 100.0, 300.0, 400.0))
    noisy = msgspec.structs.replace(speed(100.0), device=timing, cold_missing=ON_CPU)
    records = [record(kind="speed", speed=noisy), record(kind="speed", speed=noisy)]
    line = time_line(records[1], records[0], None, lambda _: PROCESS_SD)
    assert snapshot == line
