"""The baselines and empty kernels that a run does not time, and the lines below the table that say so."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from pytest_fa.options.options import wants_benchmark_table
from pytest_fa.plugin.state import session_of
from pytest_fa.records.record import Record
from pytest_fa.session.baseline_choice import LeftOut, left_out_lines
from pytest_fa.table.baselines import for_comparison


def left_out_of(config: pytest.Config) -> tuple[LeftOut, ...]:
    """The baselines and empty kernels that this run does not time; none if an option of pytest-benchmark was given."""
    return () if wants_benchmark_table(config) else session_of(config).left_out


def left_out_of_table(config: pytest.Config, records: Collection[Record]) -> list[str]:
    """Lines that name what was not timed at the shapes with a time."""
    shapes = _compared_shapes(records)
    if not shapes:
        return []
    lines = left_out_lines(left_out_of(config), shapes)
    return [*lines, *(line for each in _recent(config, records) if (line := _clock_line(each, records)))]


def reused_times(config: pytest.Config, records: Collection[Record]) -> list[LeftOut]:
    """The baselines whose recent times this run is compared with; their records stand for new ones."""
    return [each for each in _recent(config, records) if not _clock_line(each, records)]


def _recent(config: pytest.Config, records: Collection[Record]) -> list[LeftOut]:
    """The baselines with a recent time at the shapes of this run's times, without those that this run timed."""
    shapes = _compared_shapes(records)
    timed = {(record.variant, record.case.shape_id) for record in records if record.case and record.speed}
    listed = [each for each in left_out_of(config) if each.recent and each.shape_id in shapes] if shapes else []
    return [each for each in listed if (each.variant, each.shape_id) not in timed]


def _clock_line(recent: LeftOut, records: Iterable[Record]) -> str:
    """Why a time cannot be compared: the SM clock was another one than in this run.  Empty if it can.

    These are the clocks before a timing, the fastest ones of this run: a heavy kernel slows the clock down by itself.
    """
    then = recent.speed.clocks_before
    readings = [each.speed.clocks_before for each in records if each.speed and each.speed.clocks_before]
    now = max(readings, key=lambda clocks: clocks.sm_mhz, default=None)
    if then is None or now is None or then.is_near(now):
        return ""
    return (
        f"not compared with {recent.variant} at {recent.shape_id}: its recent time was measured at an SM clock of "
        f"{then.sm_mhz} MHz, this run at {now.sm_mhz} MHz; --fa-baselines=near measures it again"
    )


def _compared_shapes(records: Iterable[Record]) -> set[str]:
    """The shapes with a time of this run; for one in e4m3, also those with whose baselines it is compared."""
    cases = [record.case for record in records if record.case and record.speed]
    return {shape for case in cases for shape in (case.shape_id, *for_comparison(case))}
