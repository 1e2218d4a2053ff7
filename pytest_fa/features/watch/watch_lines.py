"""The lines of `--fa-watch`: one for each timed shape, with the change against the last time."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.features.compare.compare import ProcessSd, compare_times
from pytest_fa.records.built import Build
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.spread import is_clear_ratio

HUNDRED, THOUSAND = 100.0, 1000.0


def time_line(record: Record, before: Record | None, baseline: Record | None, process_sd: ProcessSd) -> str:
    """The time of a right variant at one shape, the change, and the ratio to the fastest baseline of the first run."""
    parts = [f"{_change(record, before, process_sd)}, correct"]
    if record.speed and baseline and baseline.speed and is_clear_ratio(record.speed, baseline.speed):
        ratio = record.speed.device.median_us / baseline.speed.device.median_us
        parts.append(f"{ratio:.3g} x {baseline.variant}")
    return f"{_title(record)}: {', '.join(parts)}"


def untimed_line(record: Record) -> str:
    """A shape whose timing gave no time, or a wrong output."""
    verdict = "correct" if record.outcome == Outcome.OK else record.outcome
    return f"{_title(record)}: {verdict}, not timed"


def wrong_shape_line(records: list[Record]) -> str:
    """A shape of which at least one check failed."""
    bad = [record for record in records if record.outcome != Outcome.OK]
    outcomes = ", ".join(dict.fromkeys(record.outcome for record in bad))
    return f"{_title(bad[0])}: {outcomes} in {len(bad)} of {len(records)} checks, not timed"


def build_line(variant: str, builds: Iterable[Build], before: Iterable[Build], *, is_cached: bool = False) -> str:
    """How long the builds took, with registers and spilled bytes; each figure with the one before if it changed.

    Architectures with the same figures share a part of the line.
    """
    earlier = {build.arch: _figures(build) for build in before}
    parts: dict[str, list[Build]] = {}
    for build in builds:
        old = earlier.get(build.arch, (None, None))
        registers, spilled = (_was(each, was) for each, was in zip(_figures(build), old, strict=True))
        parts.setdefault(f"{registers} registers, {spilled} B spilled", []).append(build)
    texts = [f"{_built(group, is_cached=is_cached)}, {figures}" for figures, group in parts.items()]
    return f"{variant}: built for {'; '.join(texts)}"


def _built(builds: list[Build], *, is_cached: bool) -> str:
    """The architectures, and how long the slowest of their compilers took."""
    slowest = max(builds, key=lambda build: build.build_seconds)
    others = [name for name in slowest.shared_by if name != slowest.variant]
    shared = f" (shared with {', '.join(others)})" if others else ""
    place = "from the cache" if is_cached else f"in {slowest.build_seconds:.1f} s{shared}"
    return f"{', '.join(build.arch for build in builds)} {place}"


def _figures(build: Build) -> tuple[int, int]:
    """The most registers and spilled bytes of a build's kernels."""
    registers = max((kernel.registers_per_thread for kernel in build.kernels), default=0)
    return registers, max((kernel.spill_bytes for kernel in build.kernels), default=0)


def _was(figure: int, before: int | None) -> str:
    return str(figure) if before in (None, figure) else f"{before} -> {figure}"


def _change(record: Record, before: Record | None, process_sd: ProcessSd) -> str:
    """The time, and how it differs from the one before: in percent, or the reason why that would mean nothing."""
    after_us = record.speed.device.median_us if record.speed else 0.0
    if before is None or before.speed is None:
        return f"{_us(after_us)} us"
    row = compare_times(before, record, process_sd)
    text = f"{_us(before.speed.device.median_us)} -> {_us(after_us)} us"
    if record.speed and not is_clear_ratio(record.speed, before.speed):
        return f"{text} (too noisy for a ratio)"
    if row.ratio is None:
        return f"{text} ({row.verdict}: {row.reason})"
    text += f", {HUNDRED * (row.ratio - 1):+.1f} %"
    return f"{text} (within noise)" if row.verdict == "same" else text


def _us(value: float) -> str:
    """Microseconds with two decimals, fewer if the number is large."""
    return f"{value:.2f}" if value < HUNDRED else f"{value:.1f}" if value < THOUSAND else f"{value:.0f}"


def _title(record: Record) -> str:
    return f"{record.variant} {record.case.shape_id}" if record.case else record.variant
