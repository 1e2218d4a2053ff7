"""The work that each rung gives to the busiest SM, as terms of its time.

A rung's time is the sum of these terms, each times a number of microseconds that is fitted from records (`costs.py`).
The first term of each rung is 1, for the fixed time of a call.  The plans are those of the kernels' own launchers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .problem import Problem

Terms = list[float]


class _Shape(NamedTuple):
    """What a launcher expects of the work tiles of a shape."""

    groups: int  # computing warpgroups
    keys: int  # of a key tile
    tflops: float
    work_tile_us: float = 1.5  # to start and to finish one


_Shapes = dict[int, tuple[_Shape, ...]]  # by head_dim
LONG_SHAPES: _Shapes = {
    64: (_Shape(2, 128, 508), _Shape(3, 128, 575), _Shape(4, 64, 540), _Shape(1, 128, 450)),
    128: (_Shape(2, 128, 661), _Shape(3, 80, 765), _Shape(1, 64, 560)),
}
# `long_from_end`, without and with a causal mask.
FITTED_SHAPES: _Shapes = {
    64: LONG_SHAPES[64],
    128: (_Shape(2, 128, 720, 3.0), _Shape(3, 80, 795, 3.5), _Shape(1, 64, 640, 1.75)),
}
CAUSAL_SHAPES: _Shapes = {
    64: (_Shape(2, 128, 531, 1.7), _Shape(3, 128, 638, 1.7), _Shape(4, 64, 649, 1.7), _Shape(1, 128, 584)),
    128: (_Shape(2, 128, 720, 2.0), _Shape(3, 80, 795, 2.0), _Shape(1, 64, 640, 1.75)),
}
LONG_RUNNING = (1, 2, 3, 4)
MERGE_US, MAX_PARTS, GROUP_QUERIES = 6.0, 8, 64
SPLIT_HEAD_DIM = 128  # the one at which `long_from_end` divides work tiles
# `decode_cluster`: kB per us that an SM and the whole GPU read, and the cost of clusters, as its launcher expects.
MMA_ROWS = 16
SM_KB, GPC_KB, GPU_KB = 65.0, 690.0, 4500.0
CLUSTER_US, CLUSTERS_US, EACH_CLUSTER_US, MAX_CLUSTERS = 0.7, 2.5, 0.1, 16
CLUSTERS_AT_ONCE = (1.0, 1 / 2, 30 / 132, 14 / 132, 7 / 132)  # of 1 to 16 blocks, for each SM


class _Latency(NamedTuple):
    """How `cluster_latency` works up to a number of keys."""

    keys: int  # of a step
    blocks: int  # of a tile
    per_sm: dict[int, int]  # blocks of an SM, by head_dim


def latency_terms(problem: Problem, sms: int) -> Terms:
    """`cluster_latency`: 64 queries a block, or a cluster of two blocks that share the keys."""
    plan = next((plan for plan in LATENCY if problem.seq_k <= plan.keys), LATENCY[-1])
    steps = [math.ceil(length / plan.keys) for length in problem.tile_lengths(64)]
    copies = problem.batch * problem.heads
    busiest, tiles = _busiest(steps, copies, sms * plan.per_sm[problem.head_dim] // plan.blocks, in_order=True)
    mean_steps = sum(steps) * copies / sms * plan.keys / LATENCY[-1].keys * 2
    of_plan = [tiles if each == plan else 0 for each in LATENCY]
    steps_of_long = busiest if plan == LATENCY[-1] else 0
    shares_sm = len(steps) * copies * plan.blocks > sms
    alone, shared = (0, steps_of_long) if shares_sm else (steps_of_long, 0)
    return [1, plan.blocks > 1, *of_plan, alone, shared, mean_steps, *problem.memory()]


LATENCY = (
    _Latency(64, 1, {64: 8, 128: 8}),
    _Latency(128, 1, {64: 4, 128: 4}),
    _Latency(256, 2, {64: 2, 128: 1}),
    _Latency(512, 2, {64: 2, 128: 1}),
)


def long_shapes_terms(problem: Problem, sms: int) -> Terms:
    """`long_shapes`, which chooses a shape."""
    return _long_terms(_chosen(problem, sms, LONG_SHAPES), problem)


def long_from_end_terms(problem: Problem, sms: int) -> Terms:
    """`long_from_end`, which has other times with a causal mask; without one, it divides the last round."""
    shapes = CAUSAL_SHAPES if problem.is_masked else FITTED_SHAPES
    return _long_terms(_chosen(problem, sms, shapes, from_end=True), problem)


def _long_terms(plan: _LongPlan, problem: Problem) -> Terms:
    products = [plan.products if plan.running == each else 0 for each in LONG_RUNNING]
    return [1, *products, plan.tiles, plan.is_split, plan.longest / 1000, *problem.memory(), plan.pairs / 1e6]


class _LongPlan(NamedTuple):
    expected_us: float
    products: float  # the products of the busiest SM, in expected microseconds
    tiles: float  # the work tiles of the busiest SM
    is_split: bool  # whether the tiles of the last round are divided by their keys
    longest: float  # the keys of the longest work tile
    pairs: int  # of a row and a key in all work tiles
    running: int  # computing warpgroups of an SM at a time


def _chosen(problem: Problem, sms: int, shapes: _Shapes, *, from_end: bool = False) -> _LongPlan:
    """The plan of the shape that a launcher expects to be the fastest."""
    return min(_long_plan(problem, sms, shape, from_end=from_end) for shape in shapes[problem.head_dim])


def _long_plan(problem: Problem, sms: int, shape: _Shape, *, from_end: bool) -> _LongPlan:
    rows, per_sm = GROUP_QUERIES * shape.groups, 2 if shape.groups == 1 else 1
    key_tile_us = 4 * rows * shape.keys * problem.head_dim * sms / shape.tflops * 1e-6
    missing = -problem.seq_q % rows // GROUP_QUERIES * GROUP_QUERIES  # rows of warpgroups without queries
    firsts = range(-missing if from_end else 0, problem.seq_q, rows)
    visible = [problem.visible(min(problem.seq_q, first + rows) - 1) for first in firsts]
    lengths = [math.ceil(keys / shape.keys) for keys in visible]
    copies, most_blocks = problem.batch * problem.heads, sms * per_sm
    tiles = len(lengths) * copies
    rest = tiles % most_blocks
    longest, pairs = max(lengths) * shape.keys, sum(visible) * rows * copies
    divides = from_end and problem.head_dim == SPLIT_HEAD_DIM and not problem.is_masked
    parts = _parts(lengths[0], rest, most_blocks, key_tile_us, shape.work_tile_us) if divides else 1
    if parts > 1:
        rounds = (tiles - rest) // most_blocks
        products = (rounds + 1 / parts) * per_sm * lengths[0] * key_tile_us
        number = (rounds + 1.0) * per_sm
        expected_us = products + number * shape.work_tile_us + MERGE_US * per_sm
        return _LongPlan(expected_us, products, number, True, longest, pairs, shape.groups * per_sm)
    at_once = per_sm if tiles >= most_blocks else min(per_sm, math.ceil(tiles / sms))
    if per_sm > 1:
        products, number = _busiest_sm([length * key_tile_us for length in lengths], copies, sms, per_sm)
        expected_us = products + number * shape.work_tile_us
        return _LongPlan(expected_us, products, number, False, longest, pairs, shape.groups * at_once)
    expected_us, _ = _busiest([length * key_tile_us + shape.work_tile_us for length in lengths], copies, most_blocks)
    products, number = _busiest([length * key_tile_us for length in lengths], copies, most_blocks)
    return _LongPlan(expected_us, products, number, False, longest, pairs, shape.groups * at_once)


def _parts(key_tiles: int, rest: int, most_blocks: int, key_tile_us: float, work_tile_us: float) -> int:
    """Into how many parts `long_from_end` divides each work tile of the last round; 1 for none."""
    parts = min(MAX_PARTS, most_blocks // rest, key_tiles) if rest else 1
    gained_us = (key_tiles - key_tiles // max(1, parts)) * key_tile_us
    return parts if parts > 1 and gained_us > work_tile_us + MERGE_US else 1


def decode_terms(problem: Problem, sms: int, *, most_clusters: int) -> Terms:
    """The rungs of `decode_cluster`: a tile has the queries of all heads that share a key/value head."""
    rows = problem.rows()
    row_tiles = 2 if rows > MMA_ROWS else 1
    tiles = problem.batch * problem.kv_heads * math.ceil(rows / (MMA_ROWS * row_tiles))
    tile_kb = problem.seq_k * problem.head_dim * 4 / 1e3
    log2, clusters = _clusters(tiles, math.ceil(problem.seq_k / 16), tile_kb, sms, most_clusters)
    blocks = clusters << log2
    read_us = tile_kb / blocks / SM_KB
    rounds = math.ceil(tiles / (2 * sms)) if tiles > sms else 0
    read_us *= max(1, 2 * rounds)
    vectors = min(rows, row_tiles * MMA_ROWS) * problem.head_dim / 4 / (1 << log2) / 1000  # that a block merges
    of_one, of_two = (read_us, 0.0) if row_tiles == 1 else (0.0, read_us)
    is_merged = clusters > 1
    merged = [log2 > 0, is_merged, clusters * vectors * is_merged, vectors]
    return [1, row_tiles > 1, of_one, of_two, rounds, *problem.memory(), *merged]


def _clusters(tiles: int, steps: int, tile_kb: float, sms: int, most_clusters: int) -> tuple[int, int]:
    """The log2 of a cluster's blocks and the clusters of a tile with the least expected time."""
    plans: list[tuple[float, int, int]] = []
    for log2, share in enumerate(CLUSTERS_AT_ONCE if tiles <= sms else ()):
        at_once = int(sms * share)
        most = 1 if log2 == 0 else min(at_once // tiles, most_clusters)
        for clusters in range(1, most + 1):
            blocks = clusters << log2
            if clusters * tiles > at_once or (blocks > 1 and steps < blocks * 4):
                break
            us = max(tile_kb / blocks / SM_KB, tile_kb * tiles / GPU_KB)
            if log2 > 0:
                us = max(us, tile_kb / clusters / GPC_KB) + CLUSTER_US
            if clusters > 1:
                us += CLUSTERS_US + EACH_CLUSTER_US * clusters
            plans.append((us, log2, clusters))
    _, log2, clusters = min(plans, default=(0.0, 0, 1))
    return log2, clusters


def _busiest(lengths: Sequence[float], copies: int, slots: int, *, in_order: bool = False) -> tuple[float, float]:
    """The work and the number of tiles of the busiest of so many slots, if each length occurs `copies` times.

    Each tile is dealt to the slot with the least work: the longest first, or, with `in_order`, as they come.
    """
    if in_order and len(lengths) * copies <= MAX_DEALT:
        loads = [(0.0, 0)] * slots
        for length in itertools.chain.from_iterable(itertools.repeat(lengths, copies)):
            work, tiles = loads[0]
            heapq.heapreplace(loads, (work + length, tiles + 1))
        return max(loads)
    if len(lengths) * copies > MAX_ROUNDS * slots:
        return sum(lengths) * copies / slots, len(lengths) * copies / slots
    slots_with: dict[tuple[float, int], int] = {(0.0, 0): slots}  # by work and number of tiles
    for length in sorted(lengths, reverse=True):
        left = copies
        while left:
            least = min(slots_with)
            taken = min(left, slots_with[least])
            slots_with[least] -= taken
            if not slots_with[least]:
                del slots_with[least]
            work, tiles = least
            longer = (work + length, tiles + 1)
            slots_with[longer] = slots_with.get(longer, 0) + taken
            left -= taken
    return max(slots_with)


def _busiest_sm(lengths: Sequence[float], copies: int, sms: int, per_sm: int) -> tuple[float, float]:
    """The work and the number of tiles of the busiest SM, if tiles are dealt to the blocks of all SMs like cards.

    They are dealt in alternating directions, the last length first.
    """
    tiles = len(lengths) * copies
    blocks = min(tiles, sms * per_sm)
    if tiles > MAX_DEALT_ROUNDS * blocks:
        return sum(lengths) * copies / sms, tiles / sms
    loads = []
    for sm in range(min(sms, blocks)):
        numbers = [
            number
            for block in range(sm, blocks, sms)
            for first in range(0, tiles, blocks)
            if (number := first + (blocks - 1 - block if first // blocks % 2 else block)) < tiles
        ]
        loads.append((sum(lengths[-1 - number // copies] for number in numbers), len(numbers)))
    return max(loads)


MAX_DEALT_ROUNDS = 16  # with more, the launchers take a mean
MAX_ROUNDS = 64  # with more, all slots have nearly the same work
MAX_DEALT = 4000  # tiles that are dealt one by one; with more, the order matters little
RUNGS: dict[str, Callable[[Problem, int], Terms]] = {
    "cluster_latency": latency_terms,
    "long_shapes": long_shapes_terms,
    "long_from_end": long_from_end_terms,
    "decode_cluster": lambda problem, sms: decode_terms(problem, sms, most_clusters=MAX_CLUSTERS),
    "decode_one_cluster": lambda problem, sms: decode_terms(problem, sms, most_clusters=1),
}
FEW_QUERIES = ("decode_cluster", "decode_one_cluster")  # a mask hides next to nothing from few queries
