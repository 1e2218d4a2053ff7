"""What `--fa-gate` adds to a record: the intervals of each pair, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import msgspec

from pytest_fa.records.added import Added, Proposal
from pytest_fa.records.costs import Costs
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PARTS, PairSamples
from pytest_fa.records.ranges import Natural, Real, Seconds, Us
from pytest_fa.records.record import Record

OLDER_BUILD = "@key:"  # in the name of a baseline that is another build of the candidate, before its key

SHORT_DIGITS = 10  # of a commit's id in the name of a baseline

GateVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


class GpuRatio(msgspec.Struct, frozen=True):
    """The ratio candidate / baseline on one of several GPUs, which is named by the salted hash of its UUID."""

    gpu_hash: str
    ratio: Real | None


class GatePair(msgspec.Struct, frozen=True):
    """The result of one shape and one baseline: the raw blocks, the ratio candidate / baseline, and its intervals.

    A ratio or interval end that is not finite is None.  `baseline_us` is the baseline's median time in the gate, on the
    GPU of the pilot; older records have none.  On several GPUs, `gpu_ratios` has the ratio of each, and
    `gpu_sd` the standard deviation of the log-ratio between them, without the noise of the processes.
    """

    samples: PairSamples
    ratio: Real | None
    low: Real | None
    high: Real | None
    bootstrap_low: Real | None
    bootstrap_high: Real | None
    method: str = ""
    baseline_us: Us | None = None
    gpu_ratios: tuple[GpuRatio, ...] = ()
    gpu_sd: Real | None = None


class CodeOfRevision(msgspec.Struct, frozen=True):
    """What both sides of a gate have in common, so that nothing was timed.

    `identity` is the `code_identity` of both builds, or for a variant in Python the git tree of the kernels folder.
    """

    same: Literal["machine code", "sources"]
    identity: str


class GatedRevision(msgspec.Struct, frozen=True):
    """The commit whose variant is the baseline of a gate, and the git tree of its kernels folder.

    `revision` is what was typed.  `uncommitted` are the candidate's sources that differ from those of HEAD, by their
    paths in the repository.
    """

    revision: str
    commit: str
    tree: str
    uncommitted: tuple[str, ...] = ()
    code: CodeOfRevision | None = None

    def baseline(self, variant: str) -> str:
        """The name of a variant from the sources of this commit."""
        return f"{variant}@{self.commit[:SHORT_DIGITS]}"


def verdict_of_same_code(ratio: float) -> GateVerdict:
    """The verdict of a gate on two equal kernels, whose ratio is 1."""
    return "INCONCLUSIVE" if ratio == 1 else "PASS" if ratio > 1 else "FAIL"


class Gate(Added, frozen=True):
    """The settings and the verdict of one gate.

    `ratio` is the required upper bound of candidate / baseline.  `processes` counts those of all GPUs.  `seed`
    randomises the order of measurements.  `dropped_blocks` counts blocks that were measured while the GPU was
    throttled.  `detectable` is the smallest effect (log-ratio) that the gate can detect.  `process_sd` is the largest
    standard deviation of process means among the pairs, on several GPUs that within a GPU.  `left_out` names the shapes
    that were not gated, and why.  `least_sd_share` is the share of the known standard deviation below which none is
    trusted; records without it used 0.5.  `seconds` contains `pilot_seconds`.  `part_seconds` has the parts of one
    process, on average, by the names of `PARTS`; older records have neither.  `pilot_age_seconds` has the times in
    `pilot_us` that an earlier gate of the run measured: how old they were when they helped to select the baselines.
    `pilot_costs` are the sums over the timings of this gate's own pilot, all of them within `pilot_seconds`.
    `revision` is the commit of a baseline that is one; if its code is the candidate's, there are no processes and no
    pairs.
    """

    feature: ClassVar = "gate"
    kind: ClassVar = "gate"
    spans_cases: ClassVar = True
    prefix: ClassVar = "gate: "

    ratio: Real
    verdict: GateVerdict
    reason: str
    processes: Natural
    seed: Natural
    dropped_blocks: Natural
    detectable: Real
    process_sd: Real | None
    seconds: Seconds
    pilot_us: dict[str, dict[str, Us]]
    pairs: tuple[GatePair, ...]
    left_out: tuple[str, ...] = ()
    least_sd_share: Real = 0.5
    pilot_seconds: Seconds = 0.0
    part_seconds: dict[str, Seconds] = msgspec.field(default_factory=dict)
    pilot_age_seconds: dict[str, dict[str, Seconds]] = msgspec.field(default_factory=dict)
    pilot_costs: Costs | None = None
    revision: GatedRevision | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs, on each of which equally many processes ran side by side."""
        return max([1, *(len(set(pair.samples.gpus)) for pair in self.pairs)])

    def seconds_by_part(self) -> Iterator[tuple[str, float]]:
        """The pilot and the parts of all processes; those of several GPUs run side by side."""
        yield "gate: pilot", self.pilot_seconds
        for part, name in PARTS.items():
            yield f"gate: {name}", self.processes / self.gpus * self.part_seconds.get(part, 0.0)

    @classmethod
    def words(cls, records: Sequence[Record]) -> list[str]:
        """The verdicts, and whether a gate ended before it had one."""
        verdicts = [f"gate {gate.verdict} (< {gate.ratio:g} x baseline)" for gate in cls.all_of(records)]
        is_undecided = any(record.outcome == Outcome.INCONCLUSIVE and not cls.of(record) for record in records)
        return [*verdicts, *["no verdict"] * is_undecided]

    @classmethod
    def words_of_many(cls, records: Sequence[Record]) -> list[str]:
        """How many gates have which verdict, and whose those are that did not pass."""
        names: dict[str, list[str]] = {}
        for record in records:
            if record.kind == cls.kind:
                gate = cls.of(record)
                names.setdefault(gate.verdict if gate else "no verdict", []).append(record.variant)
        whose = {
            verdict: "" if verdict == "PASS" else f" ({', '.join(dict.fromkeys(each))})"
            for verdict, each in names.items()
        }
        counts = ", ".join(f"{len(each)} {verdict}{whose[verdict]}" for verdict, each in names.items())
        return [f"gates: {counts}"] if counts else []

    @classmethod
    def proposal(cls, records: Sequence[Record], *, is_faster: bool) -> Proposal | None:
        """A gate, after a faster time without one; nothing after a gate that passed."""
        verdicts = [gate.verdict for gate in cls.all_of(records)]
        if not verdicts and is_faster:
            return Proposal("next", ("--fa-gate=1.0",))
        return Proposal() if verdicts == ["PASS"] else None
