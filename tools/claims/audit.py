"""Whether the saved records of a GPU reproduce a published speed.

A time of one process says little about the next process, so its interval contains the known spread of processes of
this machine.  A ratio from a gate has one sample for each round, and the gate's own rules decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Literal, NamedTuple

from pytest_fa.features.gate.decision import CONFIDENCE, analyse
from pytest_fa.features.gate.gated import Gate, GateVerdict
from pytest_fa.features.gate.intervals import PROCESS_SD, Interval, t_interval
from pytest_fa.features.gate.noise import read_noise
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record
from pytest_fa.records.standing import day_of, words_of
from pytest_fa.records.timing import SM_CLOCK_SHARE, Speed, Timing
from tools.claims.published import ClaimSource, PublishedClaim, claimed_us
from tools.docs.block import is_failure, standing_of

LEAST_SHARE = 0.97  # of the claimed speed, that reproduces it
NOT_MEASURED = "not measured yet"

ClaimVerdict = Literal["REPRODUCED", "NOT REPRODUCED", "INCONCLUSIVE", "NOT COMPARABLE"]
OF_GATE: dict[GateVerdict | None, ClaimVerdict] = {"PASS": "REPRODUCED", "FAIL": "NOT REPRODUCED"}


class ClaimAudit(NamedTuple):
    """The verdict on a claim, the measured speed as a share of the claimed one, and the records that it is from.

    `share` is None without a verdict; `reason` then says why.
    """

    source: ClaimSource
    claim: PublishedClaim
    verdict: ClaimVerdict
    reason: str = ""
    share: Interval | None = None
    records: tuple[Record, ...] = ()


class NotComparable(Exception):  # it is a verdict
    """Why no record can be compared with a claim."""


def audit_claims(sources: Iterable[ClaimSource], folder: Path) -> list[ClaimAudit]:
    """The verdict on each claim by the records of one GPU, whose folder is `profiles/<gpu>`.

    Raises `UnreadableRecords` if a file there cannot be read.
    """
    noise = read_noise(folder.parent, folder.name)
    process_sd = noise.process_sd if noise else PROCESS_SD
    return [_audit(source, claim, folder, process_sd) for source in sources for claim in source.claims]


def is_of_gpu(source: ClaimSource, folder: Path) -> bool:
    """Whether the claims of a source are about the GPU of a records folder."""
    return gpu_folder(source.gpu) == folder.name


def _audit(source: ClaimSource, claim: PublishedClaim, folder: Path, process_sd: float) -> ClaimAudit:
    if not is_of_gpu(source, folder):
        return ClaimAudit(source, claim, "NOT COMPARABLE", f"claimed on an {source.gpu}")
    try:
        if claim.times_as_fast is None:
            return _audit_time(source, claim, folder, process_sd)
        if gated := _newest_gate(source, claim, folder):
            return _audit_gate(source, claim, *gated, process_sd)
        return _audit_ratio(source, claim, folder, process_sd)
    except NotComparable as problem:
        return ClaimAudit(source, claim, "NOT COMPARABLE", str(problem))


def _audit_time(source: ClaimSource, claim: PublishedClaim, folder: Path, process_sd: float) -> ClaimAudit:
    us = claimed_us(source, claim)
    if us is None:
        raise NotComparable("its source does not say which operations it counts")
    record, speed = _timed(source, claim.variant, claim.case, folder)
    return _audited(source, claim, us / speed.device.median_us, [speed], process_sd, (record,))


def _audit_ratio(source: ClaimSource, claim: PublishedClaim, folder: Path, process_sd: float) -> ClaimAudit:
    own, own_speed = _timed(source, claim.variant, claim.case, folder)
    rival, rival_speed = _timed(source, claim.rival, claim.case, folder)
    if not _are_of_one_run(own, rival):
        raise NotComparable("the two times are not of one commit and one card")
    share = rival_speed.device.median_us / own_speed.device.median_us / (claim.times_as_fast or math.nan)
    return _audited(source, claim, share, [own_speed, rival_speed], process_sd, (own, rival))


def _audited(
    source: ClaimSource,
    claim: PublishedClaim,
    share: float,
    speeds: list[Speed],
    process_sd: float,
    records: tuple[Record, ...],
) -> ClaimAudit:
    """The verdict on times of one process each: their own errors and the spread of processes make the interval."""
    of_processes = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * process_sd
    half = math.hypot(of_processes, *(_error(each.device) for each in speeds))
    interval = Interval(math.log(share), math.log(share) - half, math.log(share) + half)
    verdict: ClaimVerdict = "INCONCLUSIVE"
    if interval.low >= math.log(LEAST_SHARE):
        verdict = "REPRODUCED"
    elif interval.high < math.log(LEAST_SHARE):
        verdict = "NOT REPRODUCED"
    return ClaimAudit(source, claim, verdict, "", interval, records)


def _error(timing: Timing) -> float:
    """Half the width of the interval of the mean of the logarithms of samples; infinity if it has none."""
    if not all(timing.samples_us):
        return math.inf
    interval = t_interval([math.log(us) for us in timing.samples_us], CONFIDENCE)
    return interval.high - interval.mean


def _audit_gate(
    source: ClaimSource,
    claim: PublishedClaim,
    record: Record,
    gate: Gate,
    samples: PairSamples,
    process_sd: float,
) -> ClaimAudit:
    """The verdict of a gate whose threshold is the time that still reproduces the claim."""
    claimed = claim.times_as_fast or math.nan
    analysis = analyse([samples], 1 / (LEAST_SHARE * claimed), is_last=True, process_sd=process_sd)
    verdict = OF_GATE.get(analysis.verdict, "INCONCLUSIVE") if gate.verdict != "INCONCLUSIVE" else "INCONCLUSIVE"
    reason = "" if verdict != "INCONCLUSIVE" else gate.reason if gate.verdict == "INCONCLUSIVE" else analysis.reason
    (of_time,) = analysis.intervals
    shift = math.log(claimed)
    share = Interval(-of_time.mean - shift, -of_time.high - shift, -of_time.low - shift)
    return ClaimAudit(source, claim, verdict, reason, share, (record,))


# -- records ----------------------------------------------------------------------------------------------------------


def _timed(source: ClaimSource, variant: str, shape: str, folder: Path) -> tuple[Record, Speed]:
    """The saved time of a variant.  Raises `NotComparable` if there is none that the claim may be compared with."""
    saved = [each for each in standing_of(folder, variant) if each.case and each.case.shape_id == shape]
    if failures := sorted(filter(is_failure, saved), key=lambda each: each.measured_at):
        raise NotComparable(f"{variant}: {words_of(failures[-1])} ({day_of(failures[-1])})")
    times = [(each, each.speed) for each in saved if each.speed]
    if not times:
        without = [words_of(each) for each in saved if each.kind == "speed"]
        raise NotComparable(f"{variant}: {without[-1]}" if without else NOT_MEASURED)
    record, speed = times[-1]
    for problem in _problems(source, record, speed):
        raise NotComparable(f"{variant}: {problem}")
    return record, speed


def _problems(source: ClaimSource, record: Record, speed: Speed) -> Iterator[str]:
    """Why a time cannot be compared with a claim of this source."""
    if record.environment.gpu != source.gpu:
        yield f"it was measured on an {record.environment.gpu}"
    if is_unconfirmed(speed):
        yield "no other clock confirms its time"
    if speed.order == "programmatic":
        yield "its calls overlap"
    if source.sm_mhz is not None:
        clock = speed.clocks_during.sm_mhz if speed.clocks_during else 0
        if min(clock, source.sm_mhz) < (1 - SM_CLOCK_SHARE) * max(clock, source.sm_mhz):
            yield f"measured at {clock or 'an unknown number of'} MHz, claimed at {source.sm_mhz} MHz"


def _are_of_one_run(own: Record, rival: Record) -> bool:
    """Whether two times are of one commit without changes, and of one card."""
    cards = [each.machine.gpu_hash if each.machine else None for each in (own, rival)]
    commits = [each.source.commit if each.source.dirty is False else None for each in (own, rival)]
    return None not in (*cards, *commits) and cards[0] == cards[1] and commits[0] == commits[1]


def _newest_gate(source: ClaimSource, claim: PublishedClaim, folder: Path) -> tuple[Record, Gate, PairSamples] | None:
    """The newest gate of the variant against the rival at the case; None if there is none."""
    gates = [
        (record, gate, pair.samples)
        for record in standing_of(folder, claim.variant)
        if record.environment.gpu == source.gpu and (gate := Gate.of(record))
        for pair in gate.pairs
        if (pair.samples.baseline, pair.samples.shape_id) == (claim.rival, claim.case)
    ]
    return max(gates, key=lambda each: each[0].measured_at, default=None)
