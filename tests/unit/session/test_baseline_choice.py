"""The baselines that a run leaves out, by the records of this GPU, driver and torch."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import COMPANION_ROLES, Supports
from pytest_fa.features.gate.plugin import GateOptions
from pytest_fa.features.shards.plugin import ShardOptions
from pytest_fa.options.options import Options
from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Environment, MachineIdentity, Record, to_json
from pytest_fa.records.timing import Agreement
from pytest_fa.session.baseline_choice import MAX_LOGS, RECENT_SECONDS, LeftOut, left_out_baselines, left_out_lines
from tests.factories import SHAPE, options, record, speed, variant

MEASURED_AT = "2026-02-01T12:00:00+00:00"
CARD = MachineIdentity("a host", "a GPU", mig=False, ecc=True, power_limit_watts=700.0)
MACHINE = Environment("A GPU", "9.0", "580.1", "13.0", "2.11.0", "3.12.1", "Linux 6", "a CPU", "0.1.0")
TIMES = {"sdpa_cudnn": 10.0, "sdpa_flash": 10.9, "sdpa_efficient": 11.1, "sdpa_math": 80.0}
SLOW = [("sdpa_efficient", SHAPE, 1.11), ("sdpa_math", SHAPE, 8.0)]


def timed(variant: str, device_us: float, environment: Environment = MACHINE, **changes: Any) -> Record:
    """A record of `test_speed`."""
    fields = {"role": "baseline", "speed": speed(device_us), "environment": environment, **changes}
    return record(variant, kind="speed", **fields)


def left_out(run: Options, **changes: Any) -> list[tuple[str, str, float | None]]:
    """What a run on the machine leaves out: variant, shape and ratio."""
    companions = tuple(each for each in discover(()).variants.values() if each.role in COMPANION_ROLES)
    plan = Plan(chosen=(), companions=companions, cases=(parse_case(f"{SHAPE}-seed0"),), gpu=True)
    entries = left_out_baselines(run, plan, msgspec.structs.replace(MACHINE, **changes))
    return [(each.variant, each.shape_id, each.ratio and round(each.ratio, 3)) for each in entries]


@pytest.fixture
def run(tmp_path: Path) -> Options:
    """The options of a run in a folder with saved records."""
    plain = options(tmp_path)
    save_records([timed(name, us) for name, us in TIMES.items()], plain.records_folder)
    return plain


def write_log(run: Options, name: str, *records: Record) -> None:
    """Write a record file of an earlier run."""
    path = run.artifacts / "records" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no record\n" + b"".join(to_json(each) + b"\n" for each in records))


def test_slow_ones_are_left_out(run: Options) -> None:
    """Those more than 10 % slower than the fastest are left out."""
    assert left_out(run) == SLOW


@pytest.mark.parametrize("change", [{"gpu": "Another GPU"}, {"gpu": None}, {"driver": "580.2"}, {"torch": "2.12.0"}])
def test_other_machines_do_not_count(run: Options, change: dict[str, str | None]) -> None:
    """Records of another GPU, driver or torch leave nothing out; neither does a machine without a GPU."""
    assert left_out(run, **change) == []


@pytest.mark.parametrize(
    "change", [{"baselines": "all"}, {"parts": (GateOptions(0.95),)}, {"save": True}, {"parts": (ShardOptions(1, 2),)}]
)
def test_runs_that_need_all(tmp_path: Path, run: Options, change: dict[str, Any]) -> None:
    """`--fa-baselines=all`, a gate, `--fa-save` and `--fa-shard` leave nothing out."""
    assert run.rootdir == tmp_path
    changed = options(tmp_path, **change)
    assert left_out(changed) == []


def test_the_newest_record_counts(run: Options) -> None:
    """A later record of a run counts instead of a saved one; after a failure, no time does; bad lines are skipped."""
    later = "2026-02-01T00:00:00+00:00"
    write_log(
        run,
        "20260201T000000Z-1.jsonl",
        timed("sdpa_efficient", 9.0, measured_at=later),
        timed("sdpa_math", 5.0, measured_at=later, outcome=Outcome.WRONG),
    )
    assert left_out(run) == [
        ("sdpa_cudnn", SHAPE, 1.111),
        ("sdpa_flash", SHAPE, 1.211),
    ]


def test_old_files_are_not_read(run: Options) -> None:
    """Only the newest record files are read."""
    write_log(run, "20250101T000000Z-1.jsonl", timed("sdpa_math", 5.0, measured_at="2027-01-01T00:00:00+00:00"))
    assert [variant for variant, _, _ in left_out(run)] == ["sdpa_cudnn", "sdpa_efficient", "sdpa_flash"]
    for day in range(MAX_LOGS):
        write_log(run, f"202601{day + 1:02}T000000Z-1.jsonl")
    assert left_out(run) == SLOW


def test_an_empty_kernel_is_timed_once(run: Options) -> None:
    """An empty kernel with a record at a shape is left out there, however fast it was; baselines are as without it."""
    write_log(run, "20260201T000000Z-1.jsonl", timed("noop", 0.5, role="overhead"))

    assert left_out(run) == [("noop", SHAPE, None), *SLOW]
    assert left_out(run, driver="580.2") == []
    assert left_out(dataclasses.replace(run, baselines="all")) == []


def test_a_shape_with_a_time_of_an_empty_kernel_alone(tmp_path: Path) -> None:
    """Without a record of a baseline, only the empty kernel is left out, and a line has its time."""
    run = options(tmp_path)
    write_log(run, "20260201T000000Z-1.jsonl", timed("noop", 0.5, role="overhead"))
    plan = Plan(chosen=(), companions=tuple(discover(()).variants.values()), cases=(), gpu=True)

    lines = left_out_lines(left_out_baselines(run, plan, MACHINE), {SHAPE})

    (line,) = lines
    assert line.startswith("not timed again: noop, an empty kernel: device_us 0.50, ")
    assert line.endswith(f" at {SHAPE} (2026-01-01); --fa-baselines=all times it")


def test_a_time_that_no_other_clock_confirms_does_not_count(run: Options) -> None:
    """It is measured again."""
    unconfirmed = msgspec.structs.replace(speed(0.01), agreement=Agreement(valid=False, reason="simulated"))
    write_log(run, "20260201T000000Z-1.jsonl", timed("noop", 0.01, role="overhead", speed=unconfirmed))

    assert left_out(run) == SLOW


def test_the_lines_below_the_table(run: Options) -> None:
    """A line names the shape, the baselines with ratio and day, the rule and the option."""
    plan = Plan(chosen=(), companions=tuple(discover(()).variants.values()), cases=(), gpu=True)
    entries = left_out_baselines(run, plan, MACHINE)
    expected = (
        f"not timed at {SHAPE}: sdpa_efficient (1.11 x, 2026-01-01), sdpa_math (8.00 x, 2026-01-01): more than 10 % "
        "slower than the fastest baseline by the records of this GPU, driver and torch; --fa-baselines=all times them"
    )
    assert left_out_lines(entries, {SHAPE}) == [expected]
    assert left_out_lines(entries, {"b1h1s64d64-fp16"}) == []


# -- recent times -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ran_before(run: Options) -> Options:
    """The same run, before which another one timed the backends near the fastest on this card."""
    near = [timed(name, TIMES[name], machine=CARD, measured_at=MEASURED_AT) for name in ("sdpa_cudnn", "sdpa_flash")]
    write_log(run, "20260201T120000Z-1.jsonl", *near)
    return run


def entries_after(run: Options, seconds: float, machine: MachineIdentity | None = CARD) -> tuple[LeftOut, ...]:
    """The baselines that a run on the machine does not time, this many seconds after the other one."""
    plan = Plan(chosen=(), companions=tuple(discover(()).variants.values()), cases=(), gpu=True)
    now = datetime.fromisoformat(MEASURED_AT) + timedelta(seconds=seconds)
    return left_out_baselines(run, plan, MACHINE, machine, now)


def reused(entries: tuple[LeftOut, ...]) -> list[str]:
    """The baselines whose records stand for new ones."""
    return [each.variant for each in entries if each.recent]


def test_a_recent_time_stands_for_a_new_one(ran_before: Options, snapshot: SnapshotAssertion) -> None:
    """The backends near the fastest are not timed again; their records and ages are known."""
    entries = entries_after(ran_before, 90.0)
    assert [(each.variant, each.age_seconds) for each in entries if each.recent] == [
        ("sdpa_cudnn", 90.0),
        ("sdpa_flash", 90.0),
    ]
    assert [each.recent.measured_at for each in entries if each.recent] == [MEASURED_AT] * 2
    assert [each.variant for each in entries if not each.recent] == ["sdpa_efficient", "sdpa_math"]
    assert snapshot == left_out_lines(entries, {SHAPE})[0]


@pytest.mark.parametrize("seconds", [-1.0, RECENT_SECONDS + 1.0])
def test_an_older_time_is_measured_again(ran_before: Options, seconds: float) -> None:
    """A time counts for ten minutes; one from the future does not."""
    assert reused(entries_after(ran_before, RECENT_SECONDS)) == ["sdpa_cudnn", "sdpa_flash"]
    assert reused(entries_after(ran_before, seconds)) == []


@pytest.mark.parametrize("change", [{"gpu_hash": "another GPU"}, {"gpu_hash": None}, {"power_limit_watts": 500.0}])
def test_a_time_of_another_card_is_measured_again(ran_before: Options, change: dict[str, Any]) -> None:
    """It must be the same GPU with the same settings; a machine that cannot be told apart has no recent times."""
    assert reused(entries_after(ran_before, 90.0, msgspec.structs.replace(CARD, **change))) == []
    assert reused(entries_after(ran_before, 90.0, None)) == []


@pytest.mark.parametrize("change", [{"baselines": "near"}, {"reuses_times": False}])
def test_runs_that_need_new_times(ran_before: Options, change: dict[str, Any]) -> None:
    """`--fa-baselines=near` times them again, and so does a run with -n, for a page, or in CI."""
    entries = entries_after(dataclasses.replace(ran_before, **change), 90.0)
    assert [each.variant for each in entries] == ["sdpa_efficient", "sdpa_math"]
    assert reused(entries) == []


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "wrong"},
        {"speed": msgspec.structs.replace(speed(10.0), agreement=Agreement(valid=False, reason="simulated"))},
    ],
)
def test_a_baseline_that_failed_later_is_timed_again(ran_before: Options, change: dict[str, Any]) -> None:
    """A later failure, or a later time that is not confirmed, must show again."""
    later = "2026-02-01T12:00:30+00:00"
    write_log(
        ran_before, "20260201T120030Z-1.jsonl", timed("sdpa_cudnn", 10.0, machine=CARD, measured_at=later, **change)
    )
    assert reused(entries_after(ran_before, 90.0)) == ["sdpa_flash"]


@pytest.mark.parametrize("change", [{"other_gpu_processes": ("4711 train.py",)}, {}])
def test_a_time_beside_another_process_is_measured_again(run: Options, change: dict[str, Any]) -> None:
    """What else used the GPU may have ended since."""
    disturbed = msgspec.structs.replace(speed(10.0), **change)
    write_log(
        run,
        "20260201T120000Z-1.jsonl",
        timed("sdpa_cudnn", 10.0, machine=CARD, measured_at=MEASURED_AT, speed=disturbed),
    )
    assert reused(entries_after(run, 90.0)) == ([] if change else ["sdpa_cudnn"])


def test_a_baseline_of_the_users_own_is_timed_again(run: Options) -> None:
    """Its code may have changed: its records do not tell."""
    own = msgspec.structs.replace(variant("own_baseline", role="baseline", kind="python"), supports=Supports())
    near = [timed(name, 10.0, machine=CARD, measured_at=MEASURED_AT) for name in ("own_baseline", "sdpa_cudnn")]
    write_log(run, "20260201T120000Z-1.jsonl", *near)
    plan = Plan(chosen=(), companions=(own, *discover(()).variants.values()), cases=(), gpu=True)
    now = datetime.fromisoformat(MEASURED_AT) + timedelta(seconds=90.0)
    assert reused(left_out_baselines(run, plan, MACHINE, CARD, now)) == ["sdpa_cudnn"]


def test_a_time_of_another_environment_is_measured_again(run: Options) -> None:
    """It must be the same version of Python and of this package, beside GPU, driver and torch."""
    other = msgspec.structs.replace(MACHINE, python="3.13.0")
    write_log(run, "20260201T120000Z-1.jsonl", timed("sdpa_cudnn", 10.0, other, machine=CARD, measured_at=MEASURED_AT))
    assert reused(entries_after(run, 90.0)) == []
