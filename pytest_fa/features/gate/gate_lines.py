"""The lines of a gate: the verdict with its reason, the cost, and one line for each pair."""

from __future__ import annotations

from pytest_fa.features.gate.decision import CONFIDENCE
from pytest_fa.features.gate.gated import Gate, GatedRevision, GatePair
from pytest_fa.records.record import Record

MAX_NAMES = 3  # of files with uncommitted changes


def gate_lines(variant: str, gate: Gate) -> list[str]:
    """Verdict, cost and noise; then the ratio of each pair with the deciding interval and the bootstrap interval."""
    gpus = max((len(pair.gpu_ratios) for pair in gate.pairs), default=0)
    processes = f"{gate.processes} processes{f' on {gpus} GPUs' if gpus else ''}"
    pilot = f", {gate.pilot_seconds:.0f} s of them the pilot" if gate.pilot_seconds else ""
    cost = f"{processes}, {gate.seconds:.0f} s{pilot}{_age(gate)}, {gate.dropped_blocks} blocks dropped"
    process_sd = "unknown" if gate.process_sd is None else f"{100 * gate.process_sd:.2f} %"
    first_line = f"{gate.verdict} {variant} < {gate.ratio:g} x baseline: {gate.reason}"
    if gate.revision and gate.revision.code:
        return [first_line, *_revision_lines(variant, gate.revision)]
    lines = [
        first_line,
        f"  {cost}, seed {gate.seed}; standard deviation of the process means {process_sd}",
    ]
    width = max((len(pair.samples.shape_id) for pair in gate.pairs), default=0)
    for pair in gate.pairs:
        ratio = f"{pair.samples.shape_id + ':':{width + 1}} {_number(pair.ratio)} x {pair.samples.baseline}"
        interval = f"{100 * CONFIDENCE:g} % interval {_number(pair.low)} to {_number(pair.high)}"
        bootstrap = f"bootstrap 95 %: {_number(pair.bootstrap_low)} to {_number(pair.bootstrap_high)}"
        lines += [f"  {ratio}, {interval} ({bootstrap})", *_gpu_lines(pair)]
    lines += _revision_lines(variant, gate.revision) if gate.revision else []
    return [*lines, *(f"  excluded: {line}" for line in gate.left_out)]


def _revision_lines(variant: str, revision: GatedRevision) -> list[str]:
    """Which commit the baseline is, and which sources of the candidate are not committed."""
    names = [*revision.uncommitted[:MAX_NAMES], *(["..."] if len(revision.uncommitted) > MAX_NAMES else [])]
    changes = f"; the gated sources have uncommitted changes: {', '.join(names)}" if names else ""
    typed = "" if revision.commit.startswith(revision.revision) else f"git:{revision.revision}, "
    return [f"  {revision.baseline(variant)} is {typed}commit {revision.commit}{changes}"]


def _age(gate: Gate) -> str:
    """How old the times of slower baselines were, if an earlier gate of the run measured them."""
    ages = [age for row in gate.pilot_age_seconds.values() for age in row.values()]
    return f" (times of slower baselines up to {max(ages):.0f} s old)" if ages else ""


def _gpu_lines(pair: GatePair) -> list[str]:
    """On several GPUs, the ratio of each, and how much they differ without the noise of the processes."""
    if not pair.gpu_ratios:
        return []
    ratios = ", ".join(f"{each.gpu_hash} {_number(each.ratio)}" for each in pair.gpu_ratios)
    between = "unknown" if pair.gpu_sd is None else f"{100 * pair.gpu_sd:.2f} %"
    return [f"    by GPU: {ratios}; standard deviation between GPUs {between}"]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def gate_details(record: Record) -> list[str]:
    """What a record's gate adds to the text of a failure."""
    gate = Gate.of(record)
    return gate_lines(record.variant, gate) if gate else []
