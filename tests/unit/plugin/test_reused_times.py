"""Times of baselines from an earlier run: in the table, for the answer, and for `--fa-watch`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pytest_fa.plugin import left_out
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.record import Record
from pytest_fa.records.timing import Clocks, Speed
from pytest_fa.session.baseline_choice import LeftOut
from tests.factories import OK, SHAPE, SMALL_SHAPE, options, record, speed

HOOK = SimpleNamespace(pytest_fa_finish=lambda **_: [])  # no feature is used
CONFIG: Any = SimpleNamespace(get_verbosity=lambda: 0, stash=pytest.Stash(), hook=HOOK)


def at_clock(device_us: float, sm_mhz: int) -> Speed:
    """A time before which the SM clock was read."""
    return msgspec.structs.replace(speed(device_us), clocks_before=Clocks(sm_mhz, 2619, 100.0, 40, 0))


def recent(shape: str) -> LeftOut:
    """A baseline that an earlier run timed 125 s ago."""
    time = at_clock(10.0, 1980)
    earlier = record("sdpa_cudnn", f"{shape}-seed0", kind="speed", role="baseline", speed=time)
    return LeftOut("sdpa_cudnn", shape, time, "", 1.0, earlier, 125.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """A run at one shape, with recent times of a baseline at this and at another one."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    slow = LeftOut("sdpa_math", SHAPE, speed(80.0), "", 8.0)
    monkeypatch.setattr(left_out, "left_out_of", lambda _: (recent(SHAPE), recent(SMALL_SHAPE), slow))
    results = Results(options(tmp_path))
    own = record("mine", kind="speed", check=OK, speed=speed(9.0))
    times = {"when": "call", "start": 1.0, "stop": 2.0, "duration": 1.0}
    results.take(SimpleNamespace(failed=False, fa_record=own, fa_companion=False, **times))
    return results


def names(records: list[Record]) -> list[tuple[str, str]]:
    """Variant and shape of each record."""
    return [(each.variant, each.case.shape_id) for each in records if each.case]


def test_the_table_compares_with_a_recent_time(run: Results) -> None:
    """At the shape of the run, the baseline has a row with its age, and the ratio is that to its time."""
    run.finish(CONFIG)
    lines: list[str] = []
    terminal = SimpleNamespace(write_line=lambda line, **_: lines.append(line), config=CONFIG)
    run._write_rows(cast("Any", terminal), 160)
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert "2 min ago" in rows["sdpa_cudnn"]
    assert (rows["mine"].split()[1:3], rows["mine"].split()[-1]) == (["ok", "1/1"], "0.900")
    assert f"{SHAPE} (baseline: sdpa_cudnn)" in lines


def test_only_shapes_of_the_run_are_shown(run: Results) -> None:
    """The answer and `--fa-watch` get the recent time at the shape of the run; its file of records does not."""
    run.finish(CONFIG)
    assert names(run.shown_records) == [("mine", SHAPE), ("sdpa_cudnn", SHAPE)]
    assert run.file.log.path.read_text(encoding="utf-8").count("\n") == 1


def test_a_time_at_another_clock_is_not_compared(run: Results) -> None:
    """If somebody has locked the SM clock since, the old time is not shown, and a line says so.

    One slow reading beside a fast one is no locked clock: a heavy kernel came before it.
    """
    (own,) = run.shown_records
    near, locked = (msgspec.structs.replace(own, speed=at_clock(9.0, sm_mhz)) for sm_mhz in (1950, 1200))
    assert [each.variant for each in left_out.reused_times(CONFIG, [near])] == ["sdpa_cudnn"]
    assert [each.variant for each in left_out.reused_times(CONFIG, [near, locked])] == ["sdpa_cudnn"]
    assert left_out.reused_times(CONFIG, [locked]) == []
    (line,) = [line for line in left_out.left_out_of_table(CONFIG, [locked]) if "SM clock" in line]
    assert line.startswith(f"not compared with sdpa_cudnn at {SHAPE}: ")
    assert line.endswith("; --fa-baselines=near measures it again")


def test_a_new_time_counts_more(run: Results) -> None:
    """A baseline that this run has timed nevertheless has its new time alone."""
    (own,) = run.shown_records
    new = record("sdpa_cudnn", kind="speed", role="baseline", speed=speed(12.0))
    assert left_out.reused_times(CONFIG, [own, new]) == []


def test_a_shape_in_e4m3_has_the_recent_time_of_the_one_in_fp16(tmp_path: Path, run: Results) -> None:
    """SDPA lacks e4m3, so the run times it in fp16, and a recent time stands for that one."""
    fp8 = Results(options(tmp_path / "fp8"))
    own = record("mine", f"{SHAPE.replace('fp16', 'e4m3')}-seed0", kind="speed", check=OK, speed=speed(9.0))
    times = {"when": "call", "start": 1.0, "stop": 2.0, "duration": 1.0}
    fp8.take(SimpleNamespace(failed=False, fa_record=own, fa_companion=False, **times))
    for results in (run, fp8):
        results.finish(CONFIG)
    assert names(fp8.shown_records) == [("mine", SHAPE.replace("fp16", "e4m3")), ("sdpa_cudnn", SHAPE)]


def test_a_run_without_times_shows_none(run: Results, tmp_path: Path) -> None:
    """Nothing is compared in a run that only checks."""
    checked = Results(options(tmp_path / "other"))
    times = {"when": "call", "start": 1.0, "stop": 2.0, "duration": 1.0}
    own = record("mine", check=OK)
    checked.take(SimpleNamespace(failed=False, fa_record=own, fa_companion=False, **times))
    for each in (run, checked):
        each.finish(CONFIG)
    assert names(checked.shown_records) == [("mine", SHAPE)]
