"""The order in which the arms of a paired timing are allocated, captured and sampled.  No torch.

The time of a sample may depend on the samples before it: on whose buffers are in the cache, and on how warm the GPU is.
The orders are therefore symmetric in the arms.  Each arm follows each arm, also itself, equally often, and over the
blocks of one process each arm takes each place equally often.  Two identical kernels then have the same mean.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from pytest_fa.records.paired import ArmOrder

# One block for each number of arms: read in a circle, every ordered pair of letters, also of equal ones, occurs once
# (a circuit of Euler in the complete graph with loops).  With 2, 4 and 5 arms, the mean position of all letters is the
# same as well, which three arms do not permit; there, the six blocks of a process cancel a linear drift together.
CIRCUITS = {2: "ABBA", 3: "ABBCCAACB", 4: "DACBBDCCABAADDBC", 5: "EDDABECCBBACEAADBCDCAEEBD"}
LETTERS = "ABCDE"  # names of the arms in records


def setup_order(arms: int, seed: int) -> tuple[int, ...]:
    """Return the order in which a process allocates the buffers of its arms and captures their graphs.

    The processes of one question have consecutive seeds.  In `arms!` consecutive processes (6 for three arms), every
    order occurs once: the address of a buffer changes a time, but not the mean over the processes.
    """
    orders = tuple(itertools.permutations(range(arms)))
    return orders[seed % len(orders)]


def block_orders(arms: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return the `2 * arms` blocks of one process: the indices of the arms, in the order of their samples.

    The first sample of a block only gives the second one its predecessor and is not used.  After it, each arm follows
    each arm once.  Every block is the same circuit with other arms in the places of its letters: rotated, and rotated
    backwards.  So each arm takes each place twice.  `seed` draws the first assignment and the order of the blocks.
    """
    draw = random.Random(seed)  # noqa: S311  # not for cryptography
    circuit = [LETTERS.index(letter) for letter in CIRCUITS[arms]]
    first = draw.sample(range(arms), arms)
    blocks = []
    for turn, direction in itertools.product(range(arms), (1, -1)):
        order = [first[(turn + direction * place) % arms] for place in circuit]
        blocks.append((order[-1], *order))
    draw.shuffle(blocks)
    return tuple(blocks)


def mean_difference(order: Sequence[int], values: Sequence[float], arm: int, other: int) -> float:
    """Return the mean value of one arm minus that of another in a block, without the block's first sample."""
    used = list(zip(order, values, strict=True))[1:]
    first, second = ([value for index, value in used if index == each] for each in (arm, other))
    return sum(first) / len(first) - sum(second) / len(second)


def recorded_order(arms: int, seed: int) -> ArmOrder:
    """Return both orders as records show them: A is the candidate, B the baseline, C the baseline once more."""
    setup, *blocks = (
        "".join(LETTERS[index] for index in order) for order in (setup_order(arms, seed), *block_orders(arms, seed))
    )
    return ArmOrder(setup, tuple(blocks))
