"""What a gate says: the verdict and why, then one line for each pair."""

from __future__ import annotations

from pytest_fa.gate.verdict import CONFIDENCE
from pytest_fa.report.record import Gate


def gate_lines(variant: str, gate: Gate) -> list[str]:
    """Verdict, cost and noise, then each pair's ratio with the interval that decides and the one that does not."""
    cost = f"{gate.processes} processes, {gate.seconds:.0f} s, {gate.dropped_blocks} blocks dropped, seed {gate.seed}"
    lines = [
        f"{gate.verdict} {variant} < {gate.ratio:g}: {gate.reason}",
        f"  {cost}; spread of processes {100 * gate.process_sd:.2f} %",
    ]
    width = max((len(each.samples.shape_id) for each in gate.pairs), default=0)
    for each in gate.pairs:
        against = f"{each.samples.shape_id:{width}}  / {each.samples.baseline}"
        lines.append(
            f"  {against}: {each.ratio:.4f}, {100 * CONFIDENCE:g} % interval {each.low:.4f} to {each.high:.4f} "
            f"(bootstrap 95 %: {each.bootstrap_low:.4f} to {each.bootstrap_high:.4f})"
        )
    return lines
