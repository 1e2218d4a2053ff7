"""Time the rungs on this GPU, for `auto`: `python -m kernels.auto.measure [--seconds 240] [--unseen]`.

It writes `profiles/<gpu>/rungs.json`, from which `python -m kernels.auto.costs` fits the costs.  The problems are those
that users have most, and random ones.  With `--unseen` it times other random problems, also with SDPA, and writes
`unseen.json`, which shows how good the choices are where nothing was fitted.

The rungs of a problem take turns, so that a clock that changes under load changes for all of them.  Their outputs must
agree; whether they are correct, the suite judges.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.module import load
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, UnsupportedCase
from pytest_fa.records.environment import read_environment
from pytest_fa.records.source import read_source

from .entry import FOLDER, loaded_variant, variants
from .problem import L2_MEGABYTES, Problem
from .rung_times import SDPA, UNSEEN, RungTimes, write_rung_times
from .work import FEW_QUERIES, RUNGS

PASSES = 5  # in which the rungs take turns
MAX_FLOPS, MAX_BYTES = 4e11, 6e8  # a call takes less than a millisecond
MAX_ROWS = 1024  # of a key/value head, for the rungs for few queries
TOLERANCE = 2e-2  # between the outputs of two rungs
SEED, RANDOM_PROBLEMS = 1, 800
UNSEEN_SEED, UNSEEN_PROBLEMS = 2, 120

Call = Callable[[], torch.Tensor]


class Buffers(NamedTuple):
    """The tensors of one call."""

    q: torch.Tensor  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    out: torch.Tensor  # [batch, heads, seq_q, head_dim]


def main() -> int:
    """Measure until all problems or the seconds are done, and write the times.

    Returns 2 after one line without a GPU, or where a rung fails; the times before that are written.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="the time after which no problem is begun")
    parser.add_argument("--profiles", type=Path, default=FOLDER.parents[1] / "profiles")
    parser.add_argument("--unseen", action="store_true", help="time problems that no cost is fitted to, and SDPA")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: the rungs are timed on the GPU that `auto` is to choose for\n")
        return 2
    end, us, status = time.monotonic() + arguments.seconds, {}, 0
    todo, names = (unseen_problems(), (*RUNGS, *SDPA)) if arguments.unseen else (problems(), tuple(RUNGS))
    for problem in todo:
        if time.monotonic() > end:
            break
        try:
            us[_case(problem).shape_id] = times_of(problem, names)
        except FaError as failure:
            sys.stderr.write(f"{failure}\n")
            status = 2
            break
    environment, source = read_environment(), read_source(FOLDER.parents[1])
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    times = RungTimes(us, environment, source, measured_at, sms)
    path = write_rung_times(times, arguments.profiles, *((UNSEEN,) if arguments.unseen else ()))
    sys.stdout.write(f"{path}: {len(us)} problems\n")
    return status


def problems() -> list[Problem]:
    """The problems that users have most, then random ones; the same on each GPU."""
    generator = random.Random(SEED)  # noqa: S311  # no secret
    found = list(dict.fromkeys((*_common(), *itertools.islice(_random(generator), RANDOM_PROBLEMS))))
    generator.shuffle(found)  # so that fewer seconds leave out problems of every kind
    return found


def unseen_problems() -> list[Problem]:
    """Random problems that are none of `problems()`; the same on each GPU."""
    seen = set(problems())
    drawn = _random(random.Random(UNSEEN_SEED))  # noqa: S311  # no secret
    return list(itertools.islice((problem for problem in drawn if problem not in seen), UNSEEN_PROBLEMS))


def _common() -> Iterator[Problem]:
    prefill = [(1, 8, 8), (1, 32, 8), (4, 16, 16), (2, 64, 8), (1, 2, 2)]
    for (batch, heads, kv_heads), keys, head_dim, causal in itertools.product(
        prefill, (64, 128, 256, 512, 1024, 2048, 4096, 8192), (64, 128), ("none", "top_left")
    ):
        yield from _small((Problem(batch, heads, kv_heads, keys, keys, head_dim, causal),))
    chunks = [(1, 32, 8), (8, 32, 8), (1, 64, 8), (1, 8, 8)]
    for (batch, heads, kv_heads), queries, keys, head_dim in itertools.product(
        chunks, (1, 4, 16, 32, 128, 512), (1024, 8192), (64, 128)
    ):
        causal = "bottom_right" if queries > 1 and head_dim == 64 else "none"  # noqa: PLR2004  # half of them
        yield from _small((Problem(batch, heads, kv_heads, queries, keys, head_dim, causal),))


def _random(generator: random.Random) -> Iterator[Problem]:
    while True:
        batch, kv_heads = generator.choice((1, 1, 1, 2, 3, 4, 6, 8)), generator.choice((1, 2, 4, 8, 8, 12, 16, 32))
        heads, head_dim = kv_heads * generator.choice((1, 1, 2, 4, 8)), generator.choice((64, 128))
        if generator.random() < 0.5:  # noqa: PLR2004
            queries = keys = round(2 ** generator.uniform(6, 13))
            causal = generator.choice(("none", "top_left"))
        else:
            queries, keys = round(2 ** generator.uniform(0, 9)), round(2 ** generator.uniform(8, 14))
            causal = generator.choice(("none", "none", "bottom_right"))
        yield from _small((Problem(batch, heads, kv_heads, min(queries, keys), keys, head_dim, causal),))


def _small(found: tuple[Problem, ...]) -> Iterator[Problem]:
    for problem in found:
        flops = 4 * problem.batch * problem.heads * problem.seq_q * problem.seq_k * problem.head_dim
        if problem.heads <= 64 and flops < MAX_FLOPS and problem.megabytes() * 1e6 < MAX_BYTES:  # noqa: PLR2004
            yield problem


def times_of(problem: Problem, names: tuple[str, ...]) -> dict[str, float]:
    """The microseconds per call of each of the variants that takes the problem.

    Raises `FaError` if the outputs of two of them differ.
    """
    sets = [_buffers(problem) for _ in range(2 if problem.megabytes() > L2_MEGABYTES else 4)]
    calls, outputs = {}, {}
    for name in names:
        if not _takes(variants()[name], name, problem):
            continue
        of_sets = _calls(name, problem, sets)
        try:
            outputs[name] = of_sets[0]().float()  # SDPA allocates its own
        except UnsupportedCase:  # a backend of SDPA says so in its first call
            continue
        calls[name] = of_sets
    first, *others = outputs
    for name in others:
        difference = float((outputs[name] - outputs[first]).abs().max())
        if not difference <= TOLERANCE:  # also NaN
            raise FaError(f"{name} and {first} differ by {difference:.2g} at {_case(problem).shape_id}")
    expected_us = max(3.0, 4 * problem.batch * problem.heads * problem.seq_q * problem.seq_k * problem.head_dim / 6e8)
    count = len(sets) * max(1, min(12, math.ceil(500 / expected_us / len(sets))))
    graphs = {name: (_graph(of_sets, count), _graph(of_sets, 3 * count)) for name, of_sets in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(PASSES):
        for name, (short, long) in graphs.items():
            samples[name].append((_replay_us(long) - _replay_us(short)) / (2 * count))
    us = {name: round(statistics.median(values), 3) for name, values in samples.items()}
    return {name: median_us for name, median_us in us.items() if median_us > 0}


def _takes(variant: Variant, name: str, problem: Problem) -> bool:
    """Whether a rung supports the problem; with many queries, those for few take many times as long."""
    return variant.refuses(_case(problem)) is None and (name not in FEW_QUERIES or problem.rows() <= MAX_ROWS)


def _case(problem: Problem) -> Case:
    batch, heads, kv_heads, seq_q, seq_k, head_dim, causal = problem
    return Case(batch, heads, seq_q, head_dim, "fp16", causal, kv_heads, seq_k, "bhsd", 0)  # type: ignore[arg-type]


def _buffers(problem: Problem) -> Buffers:
    of_q = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    of_k = (problem.batch, problem.kv_heads, problem.seq_k, problem.head_dim)
    return Buffers(*(torch.randn(shape, device="cuda").half() for shape in (of_q, of_k, of_k, of_q)))


def _calls(name: str, problem: Problem, sets: list[Buffers]) -> list[Call]:
    forward, scale = _forward(name), problem.head_dim**-0.5

    def call_on(buffers: Buffers) -> Call:
        q, k, v, out = buffers
        return lambda: forward(q, k, v, scale=scale, causal=problem.causal, out=out)

    return [call_on(buffers) for buffers in sets]


@functools.cache
def _forward(name: str) -> Forward:
    """The function of a rung, or of a backend of SDPA, to which each call is pinned."""
    return load(name, kernels=FOLDER.parent) if name in SDPA else loaded_variant(name).forward


def _graph(calls: list[Call], count: int) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


if __name__ == "__main__":
    sys.exit(main())
