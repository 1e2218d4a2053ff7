"""The saved records of this repository by the rules of a bundle: they say which of them have no judge's clock."""

from __future__ import annotations

import functools
from pathlib import Path

from pytest_fa.features.bundle.plausible import implausible
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.noise import Noise, read_noise
from pytest_fa.records.agreement import WITHOUT_JUDGE
from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.record import Record

PROFILES = Path(__file__).parents[3] / "profiles"
EARLIER = Path(__file__).parents[2] / "recorded" / "profiles"  # has the noise that was known to gates before today's
GPU = "NVIDIA H200"
# Measured when the profiler could be 5 or 10 % longer under a power cap; 15 % are allowed now.  They stay unconfirmed.
BY_A_NARROWER_LIMIT = {
    "long_causal-b2h16s4096d128-bf16-causal-seed0",
    "sdpa_flash-b32h32s1d128-fp16-kv8-sk4096-seed0",
}


def process_sd(record: Record, noise: Noise, earlier: Noise) -> float:
    """The standard deviation of process means that was known when the record was made."""
    return (noise if record.measured_at > noise.measured_at else earlier).process_sd


@functools.cache
def saved() -> dict[str, tuple[Record, list[str]]]:
    """Every saved record, and what contradicts its raw numbers, by kind, id and command."""
    noise, earlier, ceilings = read_noise(PROFILES, GPU), read_noise(EARLIER, GPU), read_ceilings(PROFILES, GPU)
    assert noise is not None
    assert earlier is not None
    assert ceilings is not None
    records = [record for path in sorted(PROFILES.glob("*/*.jsonl")) for record in read_records(path)]
    return {
        f"{record.kind} {record.id} {record.rerun_command}": (
            record,
            [
                *contradictions(record, ceilings, process_sd(record, noise, earlier)),
                *implausible(record),
            ],
        )
        for record in records
    }


def test_every_verdict_follows_from_the_saved_figures() -> None:
    """No record contradicts itself, except for what it was measured without, or by a narrower limit."""
    explained = (WITHOUT_JUDGE, "has no times by the judge's clock")
    others = {
        record.id: problems
        for record, problems in saved().values()
        if not all(problem.endswith(explained) for problem in problems)
    }
    assert others.keys() == BY_A_NARROWER_LIMIT
    assert {problem[:54] for problems in others.values() for problem in problems} == {
        "the agreement says valid = False, the times give True:"
    }


def test_a_time_without_the_judges_clock_says_so() -> None:
    """A saved time or gate of the GPU without a figure by the judge's clock could not be in a bundle."""
    for record, problems in saved().values():
        if record.speed:
            lacks = record.speed.outside is None
            assert [WITHOUT_JUDGE in problem for problem in problems] == [True] * lacks + [False] * (
                record.id in BY_A_NARROWER_LIMIT
            )
        if gate := Gate.of(record):
            without = sum(not pair.samples.outside for pair in gate.pairs)
            assert sum("no times by the judge's clock" in problem for problem in problems) == without
    assert sum(bool(record.speed and record.speed.outside is None) for record, _ in saved().values()) > 0
