"""`fa-gates`: the ratios of a saved gate, their intervals, the A/A control of the same rounds, and the verdict."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from pytest_fa.features.gate.decision import CONFIDENCE, control_of
from pytest_fa.features.gate.gated import Gate, GatePair
from tools.docs.block import (
    NOTHING,
    Shown,
    ShownGate,
    figure,
    newest_gate,
    read_words,
    some_names_in,
    standing_of,
    table,
    with_origin,
)


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment: which gate of which variant, in which records."""

    profiles: str
    variant: str
    baseline: str
    cases: str
    ratio: float = 1.0


def block(words: str, root: Path) -> str:
    """The verdict, and a row for each shape; dashes for a gate that is not saved."""
    spec = read_words(words, Spec)
    wanted = _gate_of(spec)
    record = newest_gate(wanted, standing_of(root / spec.profiles, spec.variant))
    gate = Gate.of(record) if record else None
    pairs = {pair.samples.shape_id: pair for pair in gate.pairs} if gate else {}
    names = f"`{spec.variant}` / `{spec.baseline}`"
    heads = ["shape", names, f"{100 * CONFIDENCE:g} % interval", "A/A control, %", f"`{spec.baseline}` us"]
    rows = table([heads, *([f"`{shape}`", *_cells(pairs.get(shape))] for shape in wanted.shapes)])
    if record is None:
        return f"The gate `{' '.join(wanted.options)}` is not measured.\n\n{rows}"
    why_none = record.message.partition("\n")[0]
    verdict = f"{gate.verdict}, {gate.processes} rounds: {gate.reason}." if gate else f"No verdict: {why_none}"
    return with_origin(f"{verdict}\n\n{rows}", [record], has_times=False)


def contents(words: str, root: Path) -> Shown:  # noqa: ARG001  # as all blocks
    """What the table shows that was measured."""
    spec = read_words(words, Spec)
    return Shown(spec.profiles, gates=(_gate_of(spec),))


def _gate_of(spec: Spec) -> ShownGate:
    return ShownGate(spec.variant, spec.baseline, spec.ratio, tuple(some_names_in(spec.cases, "cases")))


def _cells(pair: GatePair | None) -> list[str]:
    if pair is None:
        return [NOTHING] * 4
    control, _ = control_of(pair.samples)
    percents = [100 * math.expm1(log_ratio) for log_ratio in (control.mean, control.low, control.high)]
    aa = "{:+.2f} ({:+.2f} to {:+.2f})".format(*percents)
    return [figure(pair.ratio, 3), f"{figure(pair.low, 3)} to {figure(pair.high, 3)}", aa, figure(pair.baseline_us)]
