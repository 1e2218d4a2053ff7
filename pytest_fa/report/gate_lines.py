"""What a gate says: the verdict and why, then one line for each pair."""

from __future__ import annotations

from pytest_fa.gate.decision import CONFIDENCE
from pytest_fa.records.gated import Gate


def gate_lines(variant: str, gate: Gate) -> list[str]:
    """Verdict, cost and noise, then each pair's ratio with the interval that decides and the one that does not."""
    cost = f"{gate.processes} processes, {gate.seconds:.0f} s, {gate.dropped_blocks} blocks dropped, seed {gate.seed}"
    spread = "unknown" if gate.process_sd is None else f"{100 * gate.process_sd:.2f} %"
    lines = [f"{gate.verdict} {variant} < {gate.ratio:g}: {gate.reason}", f"  {cost}; spread of processes {spread}"]
    width = max((len(each.samples.shape_id) for each in gate.pairs), default=0)
    for each in gate.pairs:
        against = f"{each.samples.shape_id:{width}}  / {each.samples.baseline}"
        decides = f"{100 * CONFIDENCE:g} % interval {_number(each.low)} to {_number(each.high)}"
        beside = f"bootstrap 95 %: {_number(each.bootstrap_low)} to {_number(each.bootstrap_high)}"
        lines.append(f"  {against}: {_number(each.ratio)}, {decides} ({beside})")
    return [*lines, *(f"  left out: {each}" for each in gate.left_out)]


def _number(value: float | None) -> str:
    return "open" if value is None else f"{value:.4f}"
