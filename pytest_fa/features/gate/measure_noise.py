"""`python -m pytest_fa noise`: measures how far process means vary, with SDPA backends in many fresh processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.features.gate.decision import ANALYSES
from pytest_fa.features.gate.noise import Noise
from pytest_fa.host.client import Workers
from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.records.environment import find_gpu, read_environment
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.source import read_source
from pytest_fa.wire.jobs import Arm, ArmPair, PairedJob, PairedResult

TARGET_CASE = "b1h8s512d64-fp16-seed0"
SMALL = "b1h4s128d64-fp16-seed0"
# Case, candidate, baseline.  One pair is of two different backends, the others are of a backend against itself.
PAIRS = (
    (TARGET_CASE, "sdpa_flash", "sdpa_cudnn"),
    (TARGET_CASE, "sdpa_cudnn", "sdpa_cudnn"),
    (TARGET_CASE, "sdpa_flash", "sdpa_flash"),
    (SMALL, "sdpa_flash", "sdpa_flash"),
    (SMALL, "sdpa_efficient", "sdpa_efficient"),
)
MIN_PROCESSES = ANALYSES[-1]


class CannotMeasure(FaError):
    """The noise cannot be measured: no GPU, too few processes, or a process that failed."""


def measure_noise(root: Path, processes: int, say: Callable[[str], object]) -> Noise:
    """Run `processes` fresh processes, about 10 s each.  Raises `CannotMeasure`."""
    if find_gpu() is None:
        raise CannotMeasure("this machine has no GPU; noise is measured on a GPU")
    if processes < MIN_PROCESSES:
        raise CannotMeasure(f"{processes} processes are too few; give {MIN_PROCESSES} or more, as many as one gate has")
    variants = discover(()).variants
    arm_pairs = tuple(
        _arm_pair(parse_case(case), variants[candidate], variants[baseline]) for case, candidate, baseline in PAIRS
    )
    results: list[PairedResult] = []
    start = time.monotonic()
    first_seed = random.SystemRandom().randrange(2**31)
    with timing_lock(), Workers() as workers:
        for number in range(processes):
            seed = first_seed + number  # consecutive seeds give each order of set-up equally often
            plans = results[-1].plans if results else ()  # as in a gate
            result = workers.run_paired(PairedJob(arm_pairs, "cuda", "same_precision", seed, plans=plans))
            if result.outcome != Outcome.OK:
                raise CannotMeasure(f"process {number}: {result.outcome}: {result.message}")
            if any(pair.dropped for pair in result.arm_pairs):
                raise CannotMeasure(f"process {number}: heat or the hardware slowed the GPU down; try again later")
            results.append(result)
            say(f"process {number + 1} of {processes}")
    return Noise(
        pairs=tuple(_samples(index, arm_pair, results) for index, arm_pair in enumerate(arm_pairs)),
        candidates=tuple(pair.candidate.variant.name for pair in arm_pairs),
        processes=processes,
        seconds_per_process=(time.monotonic() - start) / processes,
        environment=read_environment(),
        source=read_source(root),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _arm_pair(case: Case, candidate: Variant, baseline: Variant) -> ArmPair:
    return ArmPair(case, Arm(candidate, None), Arm(baseline, None))


def _samples(index: int, arm_pair: ArmPair, results: list[PairedResult]) -> PairSamples:
    processes = [result.arm_pairs[index] for result in results]
    return PairSamples(
        arm_pair.case.shape_id,
        arm_pair.baseline.variant.name,
        tuple(process.blocks for process in processes),
        tuple(process.control for process in processes),
        tuple(process.order for process in processes if process.order),
    )
