"""What changed between two sets of records: verdicts of rows, differences of environments, intervals."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.errors import UsageProblem
from pytest_fa.features.compare.compare import Comparison, compare, process_sd_of, require_verdicts
from pytest_fa.features.compare.sides import Side
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Environment, MachineIdentity, Record
from pytest_fa.records.timing import Agreement, Clocks, Speed, Timing
from tests.factories import BUILD, OK, SHAPE, record

H200 = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")
CPU = Environment(None, None, None, None, "2.13", "3.12.1", "Linux 6", "a CPU", "0.1.0")


def _speed(*samples_us: float, sm_mhz: int = 1980, **changes: Any) -> Speed:
    median_us = sorted(samples_us)[len(samples_us) // 2]
    clocks = Clocks(sm_mhz, 2619, 300.0, 40, 0)
    timing = Timing("graph replay", samples_us, median_us, 20)
    agreement = Agreement(valid=None, reason="not profiled")
    plain = Speed(timing, timing, 1, False, (), "not read", clocks, clocks, clocks, agreement=agreement)
    return msgspec.structs.replace(plain, **changes)


def _timed(speed: Speed, environment: Environment = H200, variant: str = "mine", **changes: Any) -> Record:
    return record(variant, kind="speed", check=OK, speed=speed, environment=environment, **changes)


def _compare(a: list[Record], b: list[Record], process_sd: float = 0.008) -> Comparison:
    return compare(Side("A", tuple(a)), Side("B", tuple(b)), lambda _: process_sd)


@pytest.mark.parametrize(
    ("device_us", "verdict"), [(10.0, "same"), (10.2, "same"), (9.8, "same"), (10.5, "slower"), (9.5, "faster")]
)
def test_a_time_changed_if_the_interval_excludes_one(device_us: float, verdict: str) -> None:
    """A ratio within the spread between processes is no change; one beyond it is."""
    (row,) = _compare([_timed(_speed(10.0))], [_timed(_speed(device_us))]).rows
    assert row.verdict == verdict
    assert row.ratio == pytest.approx(device_us / 10)


def test_the_interval_contains_the_spread_between_processes() -> None:
    """The half-width is 2.807 times the root of both variances: of process means, and of samples over their number."""
    logs = (0.0, 0.02)
    samples = [10 * math.exp(value) for value in logs]
    (row,) = _compare([_timed(_speed(*samples))], [_timed(_speed(*samples))], process_sd=0.01).rows
    variance = 0.01**2 + 0.0002 / 2
    assert row.high is not None
    assert math.log(row.high) == pytest.approx(2.807 * math.sqrt(2 * variance))


def test_equal_kernels_seldom_differ() -> None:
    """Of 2,000 pairs of equal kernels whose process means vary as recorded, at most 1 % count as changed."""
    draw = random.Random(7)  # noqa: S311  # not for cryptography
    sides = []
    for _ in range(2):
        means = (10 * math.exp(draw.gauss(0, 0.008)) for _ in range(2000))
        rows = ([mean * math.exp(draw.gauss(0, 0.002)) for _ in range(8)] for mean in means)
        sides.append([_timed(_speed(*row), variant=f"v{index}") for index, row in enumerate(rows)])
    counts = _compare(sides[0], sides[1]).counts
    assert counts["same"] >= 1980
    assert sum(counts.values()) == 2000


def test_wide_cpu_samples_are_not_a_change() -> None:
    """On a CPU, the whole spread of the samples counts, because the spread between processes is not known."""
    noisy = (10.0, 20.0, 30.0, 12.0, 11.0)
    slower = tuple(1.6 * sample for sample in noisy)
    (row,) = _compare([_timed(_speed(*noisy), CPU)], [_timed(_speed(*slower), CPU)]).rows
    assert row.verdict == "same"


NOT_COMPARABLE: dict[str, dict[str, Any]] = {
    "GPU: NVIDIA H200 and NVIDIA H100": {"environment": msgspec.structs.replace(H200, gpu="NVIDIA H100")},
    "GPU: NVIDIA H200 and none": {"environment": CPU},
    "SM clocks: 1980 and 1755 MHz": {"speed": _speed(5.0, sm_mhz=1755)},
    "a time is not confirmed": {"speed": _speed(5.0, agreement=Agreement(valid=False, reason="clocks"))},
    "programmatic dependent launch on one side only": {"speed": _speed(5.0, order="programmatic")},
}


@pytest.mark.parametrize("reason", NOT_COMPARABLE)
def test_times_that_cannot_be_compared(reason: str) -> None:
    """Times of other hardware, clocks or methods are shown without a ratio, and the reason is named."""
    changed = msgspec.structs.replace(_timed(_speed(5.0)), **NOT_COMPARABLE[reason])
    if changed.environment is CPU:
        reason = "CPU: a CPU and another CPU"
        changed = msgspec.structs.replace(changed, environment=msgspec.structs.replace(CPU, cpu="another CPU"))
    (row,) = _compare([_timed(_speed(10.0, order="chain"))], [changed]).rows
    assert (row.verdict, row.reason, row.ratio) == ("not comparable", reason, None)
    assert (row.device_us_a, row.device_us_b) == (10.0, 5.0)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (Outcome.OK, Outcome.WRONG, "wrong"),
        (Outcome.WRONG, Outcome.OK, "right"),
        (Outcome.WRONG, Outcome.CRASHED, "still wrong"),
        (Outcome.OK, Outcome.OK, "same"),
    ],
)
def test_correctness_comes_before_times(before: Outcome, after: Outcome, verdict: str) -> None:
    """A failure on either side decides the verdict of a row; no ratio is given for it."""
    sides = [
        [_timed(_speed(us)), record("mine", f"{SHAPE}-seed1", outcome=outcome, message="why", environment=H200)]
        for us, outcome in ((10.0, before), (5.0, after))
    ]
    if verdict == "same":
        sides[1][0] = _timed(_speed(10.0))
    (row,) = _compare(sides[0], sides[1]).rows
    assert (row.verdict, row.checks_b) == (verdict, (1, 1) if after == "ok" else (1, 2))
    assert (row.ratio is None) == (verdict != "same")


def test_rows_of_one_side() -> None:
    """A row that only one side has is new or gone."""
    rows = _compare([record("old")], [record("fresh")]).rows
    assert {row.variant: row.verdict for row in rows} == {"old": "gone", "fresh": "new"}


def test_times_of_one_side() -> None:
    """If only one side has a time, the reason says so, and nothing else changed."""
    (row,) = _compare([_timed(_speed(10.0))], [record("mine", environment=H200)]).rows
    assert (row.verdict, row.reason) == ("same", "not timed in B")


def test_differences_of_the_settings() -> None:
    """ECC and the power limit are compared if both sides have them; which GPU it was is no difference."""
    before, after = MachineIdentity("a", "b", ecc=True, power_limit_watts=700.0), MachineIdentity("c", "d", ecc=False)
    sides = [record(machine=before)], [record(machine=after)]
    assert [(each.name, each.a, each.b) for each in _compare(*sides).differences] == [
        ("ecc", ("True",), ("False",)),
        ("power_limit_watts", ("700.0",), ("None",)),
    ]
    assert _compare([record()], [record(machine=after)]).differences == ()


def test_differences_of_the_environment() -> None:
    """Every property of environment and builds that differs is named with all of its values."""
    before = _timed(_speed(10.0), builds=(BUILD,))
    newer = msgspec.structs.replace(H200, torch="2.5", driver="590.2")
    built = msgspec.structs.replace(BUILD, compiler="13.1", environment={"NVCC_APPEND_FLAGS": "-lineinfo"})
    after = _timed(_speed(10.0), newer, builds=(built,))
    differences = {each.name: (each.a, each.b) for each in _compare([before], [after]).differences}
    assert differences == {
        "driver": (("580.1",), ("590.2",)),
        "torch": (("2.11",), ("2.5",)),
        "compiler": (("13.0",), ("13.1",)),
        "NVCC_APPEND_FLAGS": ((), ("-lineinfo",)),
    }


@pytest.mark.parametrize(("identity", "is_changed"), [("code", False), ("other", True), (None, None)])
def test_changed_machine_code(identity: str | None, is_changed: bool | None) -> None:  # noqa: FBT001
    """A row says whether the machine code differs, and says nothing if it is not known."""
    sides = [
        [_timed(_speed(10.0), builds=(msgspec.structs.replace(BUILD, code_identity=each),))]
        for each in ("code", identity)
    ]
    assert _compare(sides[0], sides[1]).rows[0].is_code_changed is is_changed


def test_records_of_older_code_are_stale() -> None:
    """A row of B is stale if newer records of B, of the same variant, have other machine code."""

    def built(shape: str, identity: str, measured_at: str) -> Record:
        build = msgspec.structs.replace(BUILD, variant="mine", code_identity=identity)
        return record(case=f"{shape}-seed0", kind="speed", builds=(build,), measured_at=measured_at)

    older, newer = built("b1h1s64d64-fp16", "a", "2026-01-01"), built("b1h1s128d64-fp16", "b", "2026-01-02")
    rows = {row.shape_id: row.verdict for row in _compare([older, newer], [older, newer]).rows}
    assert rows == {"b1h1s64d64-fp16": "stale", "b1h1s128d64-fp16": "same"}
    again = built("b1h1s64d64-fp16", "b", "2026-01-03")
    assert [row.verdict for row in _compare([older, newer], [older, again, newer]).rows] == ["same", "same"]


def test_rows_are_matched_by_gpu() -> None:
    """Records of several GPUs are compared with those of the same GPU."""
    h100 = msgspec.structs.replace(H200, gpu="NVIDIA H100")
    both = [_timed(_speed(10.0)), _timed(_speed(20.0), h100)]
    comparison = _compare(both, both)
    assert [(row.gpu, row.verdict) for row in comparison.rows] == [("NVIDIA H200", "same"), ("NVIDIA H100", "same")]


def test_verdicts_that_fail(snapshot: SnapshotAssertion) -> None:
    """--fail-on takes verdicts, and names the allowed ones for any other word."""
    assert require_verdicts(" wrong, slower ") == {"wrong", "slower"}
    assert require_verdicts("") == frozenset()
    with pytest.raises(UsageProblem) as error:
        require_verdicts("worse")
    assert snapshot == str(error.value)


def test_noise_of_a_gpu_that_was_not_measured(tmp_path: Any) -> None:
    """Without a `noise.json`, the spread is that of an H200."""
    assert process_sd_of(tmp_path, "NVIDIA H100") == 0.008


def test_a_test_without_a_verdict_is_counted_as_not_passed() -> None:
    """What could not be decided is one of M, not one of N."""
    undecided = record("mine", "b1h2s64d64-fp16-seed1", outcome=Outcome.INCONCLUSIVE)
    (row,) = _compare([record("mine", "b1h2s64d64-fp16-seed0", check=OK), undecided], []).rows
    assert row.checks_a == (1, 2)
