"""Compare two sides: differences of the environments first, then one row for each variant and shape."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pytest_fa.errors import UsageProblem
from pytest_fa.features.compare.sides import Side
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.intervals import PROCESS_SD
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.files import try_to_read
from pytest_fa.records.origin import origin_of
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import JUDGED_KINDS, Environment, Record
from pytest_fa.records.standing import day_of
from pytest_fa.records.timing import Speed

# What changed between two sides, which no record has; sorted by how much it matters to a reader.
RowVerdict = Literal[
    "wrong", "still wrong", "right", "slower", "faster", "stale", "not comparable", "gone", "new", "same"
]
VERDICTS: tuple[RowVerdict, ...] = get_args(RowVerdict)
# What makes a row wrong: all defects, but neither a refusal nor a file that changed, which say nothing of the results.
BAD = {each for each in Outcome if each.defect} - {Outcome.UNSUPPORTED, Outcome.BUILD_CHANGED}
NORMAL_995 = 2.807  # of a two-sided interval of 99.5 %, as in a gate: a comparison has hundreds of rows

ProcessSd = Callable[[str | None], float]  # the known standard deviation of process means of a GPU, as a log-ratio


class Difference(msgspec.Struct, frozen=True):
    """A property of the environment that is not the same on both sides, with all values that occur on each side."""

    name: str
    a: tuple[str, ...]
    b: tuple[str, ...]


class ComparedRow(msgspec.Struct, frozen=True):
    """One variant at one shape, or one of its gates.

    `checks_*` count the runs that passed and the runs that were judged.  `ratio` is B's `device_us` divided by A's,
    with a 99.5 % interval that contains the spread between processes.  `is_code_changed` is None if a side has no
    build.
    """

    variant: str
    shape_id: str
    verdict: RowVerdict
    reason: str = ""
    gpu: str = ""
    checks_a: tuple[int, int] | None = None
    checks_b: tuple[int, int] | None = None
    device_us_a: float | None = None
    device_us_b: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    is_code_changed: bool | None = None


class Comparison(msgspec.Struct, frozen=True):
    """What changed from side `a` to side `b`.  `rows` are sorted by verdict, `counts` has their numbers by verdict.

    `origin_*` say where and when the figures of each side were measured.  `hidden` names the times that do not count,
    because the newest result of their variant at their shape is a failure.
    """

    a: str
    b: str
    differences: tuple[Difference, ...]
    rows: tuple[ComparedRow, ...]
    counts: dict[str, int]
    complaints: tuple[str, ...] = ()
    origin_a: str = ""
    origin_b: str = ""
    hidden: tuple[str, ...] = ()


def compare(a: Side, b: Side, process_sd: ProcessSd) -> Comparison:
    """Compare the records of two sides.

    Rows are matched by GPU, variant and shape.  If the sides have no GPU in common, they are matched by variant and
    shape, and their times are not comparable.
    """
    shared = _gpus(a.records) & _gpus(b.records)
    groups_a, groups_b = (_groups(side.records, by_gpu=bool(shared)) for side in (a, b))
    keys = list(dict.fromkeys((*groups_a, *groups_b)))
    newest = _newest_code(b.records)
    rows = [_row(key, groups_a.get(key, []), groups_b.get(key, []), process_sd, newest) for key in keys]
    rows.sort(key=lambda row: VERDICTS.index(row.verdict))
    return Comparison(
        a=a.name,
        b=b.name,
        differences=tuple(_differences(a.records, b.records)),
        rows=tuple(rows),
        counts=dict(Counter(row.verdict for row in rows)),
        complaints=(*a.complaints, *b.complaints),
        origin_a=origin_of(a.records),
        origin_b=origin_of(b.records),
        hidden=tuple(f"{name}: {each.sentence}" for name, side in (("A", a), ("B", b)) for each in side.hidden),
    )


def compare_times(before: Record, after: Record, process_sd: ProcessSd) -> ComparedRow:
    """Compare the times of two records of one variant at one shape, measured one after the other."""
    row = ComparedRow(before.variant, _shape(before), "same")
    return _with_times(row, [before], [after], process_sd)


def process_sd_of(records_folder: Path, gpu: str | None) -> float:
    """The standard deviation of a GPU's process means, from its `noise.json`, or an H200's if there is none."""
    noise, _ = try_to_read(lambda: read_noise(records_folder, gpu))
    return noise.process_sd if noise is not None else PROCESS_SD


def require_verdicts(text: str) -> frozenset[str]:
    """The verdicts in a comma-separated list.  Raises `UsageProblem` for a word that is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in VERDICTS:
            raise UsageProblem(f"--fail-on: no verdict {word!r}; allowed: {', '.join(VERDICTS)}")
    return frozenset(words)


def _gpus(records: Iterable[Record]) -> set[str | None]:
    return {record.environment.gpu for record in records}


GPU_SETTINGS = ("mig", "ecc", "power_limit_watts")
RowKey = tuple[str, str, str]  # the GPU, or "" if rows are not matched by GPU; the variant; the shape


def _groups(records: Iterable[Record], *, by_gpu: bool) -> dict[RowKey, list[Record]]:
    groups: dict[RowKey, list[Record]] = {}
    for record in records:
        gpu = (record.environment.gpu or "CPU") if by_gpu else ""
        groups.setdefault((gpu, record.variant, _shape(record)), []).append(record)
    return groups


def _shape(record: Record) -> str:
    if gate := Gate.of(record):
        shapes = ", ".join(dict.fromkeys(pair.samples.shape_id for pair in gate.pairs))
        return f"gate < {gate.ratio:g}{f' at {shapes}' if shapes else ''}"
    return record.case.shape_id if record.case else record.kind


def _newest_code(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """The code identity in the newest record of each variant and architecture."""
    return {
        (build.variant, build.arch): build.code_identity
        for record in sorted(records, key=lambda record: record.measured_at)
        for build in record.builds
        if build.code_identity
    }


def _is_stale(records: list[Record], newest: dict[tuple[str, str], str]) -> bool:
    """Whether all records that have builds were made with other machine code than the newest of their variant."""
    builds = [build for record in records for build in record.builds if build.code_identity]
    return bool(builds) and all(newest[build.variant, build.arch] != build.code_identity for build in builds)


def _row(
    key: RowKey, a: list[Record], b: list[Record], process_sd: ProcessSd, newest: dict[tuple[str, str], str]
) -> ComparedRow:
    gpu, variant, shape = key
    row = ComparedRow(
        variant=variant,
        shape_id=shape,
        verdict="same",
        gpu=gpu,
        checks_a=_checks(a),
        checks_b=_checks(b),
        device_us_a=_device_us(a),
        device_us_b=_device_us(b),
        is_code_changed=_is_code_changed(a, b),
    )
    if not a or not b:
        return msgspec.structs.replace(row, verdict="gone" if a else "new")
    if verdict := _correctness(a, b):
        failure = max((each for each in b if each.outcome in BAD), key=lambda each: each.measured_at, default=None)
        reason = f"{day_of(failure)}: {failure.message}".partition("\n")[0] if failure else ""
        return msgspec.structs.replace(row, verdict=verdict, reason=reason)
    if _is_stale(b, newest):
        return msgspec.structs.replace(row, verdict="stale", reason="B has newer records of other machine code")
    if Gate.of(a[0]) is not None:
        return _with_gate(row, a[0], b[0])
    return _with_times(row, a, b, process_sd)


def _checks(records: list[Record]) -> tuple[int, int] | None:
    """How many runs passed, of those that were judged or ended without a verdict; None if there are none."""
    not_passed = {*BAD, Outcome.INCONCLUSIVE}
    judged = [
        each
        for each in records
        if each.check or each.kind == "property" or (each.kind in JUDGED_KINDS and each.outcome in not_passed)
    ]
    return (sum(each.outcome not in not_passed for each in judged), len(judged)) if judged else None


def _correctness(a: list[Record], b: list[Record]) -> RowVerdict | None:
    """The verdict if at least one side has a failure; None if neither has."""
    was_bad, is_bad = (any(record.outcome in BAD for record in side) for side in (a, b))
    if was_bad and is_bad:
        return "still wrong"
    return "wrong" if is_bad else "right" if was_bad else None


def _with_gate(row: ComparedRow, a: Record, b: Record) -> ComparedRow:
    """The row of a gate: its verdicts are compared, because each side measured its own baseline."""
    before, after = (gate.verdict if gate else "INCONCLUSIVE" for gate in map(Gate.of, (a, b)))
    verdicts: dict[tuple[str, str], RowVerdict] = {("PASS", "FAIL"): "slower", ("FAIL", "PASS"): "faster"}
    verdict = verdicts.get((before, after), "same" if before == after else "not comparable")
    return msgspec.structs.replace(row, verdict=verdict, reason=f"{before} -> {after}")


def _with_times(row: ComparedRow, a: list[Record], b: list[Record], process_sd: ProcessSd) -> ComparedRow:
    timed_a, timed_b = _timed(a), _timed(b)
    if timed_a is None or timed_b is None or timed_a.speed is None or timed_b.speed is None:
        if timed_a is None and timed_b is None:
            return row
        return msgspec.structs.replace(row, reason=f"not timed in {'A' if timed_a is None else 'B'}")
    if reason := _why_not_comparable(timed_a, timed_b):
        return msgspec.structs.replace(row, verdict="not comparable", reason=reason)
    ratio, low, high = ratio_interval(
        timed_a.speed, timed_b.speed, process_sd(timed_a.environment.gpu), is_cpu=_is_cpu(timed_a)
    )
    verdict: RowVerdict = "faster" if high < 1 else "slower" if low > 1 else "same"
    return msgspec.structs.replace(row, verdict=verdict, ratio=ratio, low=low, high=high)


def _timed(records: list[Record]) -> Record | None:
    return next((record for record in records if record.speed), None)


def _device_us(records: list[Record]) -> float | None:
    timed = _timed(records)
    return timed.speed.device.median_us if timed and timed.speed else None


def _is_cpu(record: Record) -> bool:
    return record.environment.gpu is None or (record.speed is not None and record.speed.clocks_before is None)


def _why_not_comparable(a: Record, b: Record) -> str:
    """Why the times of two records cannot be compared; empty if they can."""
    processor = "cpu" if _is_cpu(a) or _is_cpu(b) else "gpu"
    before, after = getattr(a.environment, processor), getattr(b.environment, processor)
    if before != after:
        return f"{processor.upper()}: {before or 'none'} and {after or 'none'}"
    speeds = [record.speed for record in (a, b) if record.speed]
    if any(is_unconfirmed(speed) for speed in speeds):
        return "a time is not confirmed"
    if len({speed.order for speed in speeds}) > 1 and any(speed.order == "programmatic" for speed in speeds):
        return "programmatic dependent launch on one side only"
    clocks = [speed.clocks_during for speed in speeds if speed.clocks_during]
    if not all(clocks[0].is_near(other) for other in clocks[1:]):
        return f"SM clocks: {clocks[0].sm_mhz} and {clocks[1].sm_mhz} MHz"
    return ""


def ratio_interval(a: Speed, b: Speed, process_sd: float, *, is_cpu: bool) -> tuple[float, float, float]:
    """B's time divided by A's, with its 99.5 % limits.

    Each side is one process, and a GPU's process means vary more than the samples within a process.  So the variance of
    process means, which was measured, is part of each side's variance.  On a CPU it is not known: there, the whole
    variance of the samples is taken, as if they were one sample.
    """
    variance = sum(_log_variance(speed, process_sd, is_cpu=is_cpu) for speed in (a, b))
    center, half = math.log(b.device.median_us / a.device.median_us), NORMAL_995 * math.sqrt(variance)
    return math.exp(center), math.exp(center - half), math.exp(center + half)


def _log_variance(speed: Speed, process_sd: float, *, is_cpu: bool) -> float:
    logs = [math.log(sample) for sample in speed.device.samples_us if sample > 0]
    within = statistics.variance(logs) if len(logs) > 1 else 0.0
    if is_cpu:
        return max(within, process_sd**2)
    return process_sd**2 + within / max(len(logs), 1)


def _is_code_changed(a: list[Record], b: list[Record]) -> bool | None:
    identities = [
        {build.arch: build.code_identity for record in side for build in record.builds if build.code_identity}
        for side in (a, b)
    ]
    shared = identities[0].keys() & identities[1].keys()
    return any(identities[0][arch] != identities[1][arch] for arch in shared) if shared else None


def _differences(a: Iterable[Record], b: Iterable[Record]) -> list[Difference]:
    """The environment's properties whose values differ, in the order of `Environment`, then compilers and variables."""
    before, after = _properties(a), _properties(b)
    names = dict.fromkeys((*before, *after))
    return [
        Difference(name, values_a, values_b)
        for name in names
        if (values_a := tuple(sorted(before.get(name, ())))) != (values_b := tuple(sorted(after.get(name, ()))))
        and (name not in GPU_SETTINGS or (values_a and values_b))  # older records have no settings
    ]


def _properties(records: Iterable[Record]) -> dict[str, set[str]]:
    """All values of each property of the environments and builds of one side."""
    properties: dict[str, set[str]] = {}
    for record in records:
        for field in msgspec.structs.fields(Environment):
            properties.setdefault(field.name, set()).add(str(getattr(record.environment, field.name) or "none"))
        for name in GPU_SETTINGS if record.machine else ():
            properties.setdefault(name, set()).add(str(getattr(record.machine, name)))
        for build in record.builds:
            properties.setdefault("compiler", set()).add(build.compiler)
            for name, value in build.environment.items():
                properties.setdefault(name, set()).add(value)
    return properties
