"""Properties about rows in other company, and about keys that are stored or divided otherwise.

All but the last are promised by `invariant` in a manifest, and hold bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.pages import shared_and_apart, shares_page
from pytest_fa.attention.splits import WORD as NUM_SPLITS
from pytest_fa.errors import FaError, WrongResult
from pytest_fa.gpu.inputs import Inputs, Output
from pytest_fa.judge.properties.cut import stored_like
from pytest_fa.judge.subject import PropertySubject

SPLITS = (1, 2, 3)
CHUNKS = (1, 64)  # queries of the first chunks, as far as the variant's multiples allow; the last has all others


def batch_invariance(subject: PropertySubject) -> None:
    """Each batch alone has the same bits as among the others."""
    inputs = subject.inputs()
    whole = subject.call(inputs).clone().of_batches
    for batch in range(inputs.q.shape[0]):
        alone = subject.call(_batches(inputs, [batch]))
        _require_same("batch_invariance", whole.map(_at([batch])), alone, f"batch {batch} alone")


def position_invariance(subject: PropertySubject) -> None:
    """The batches in reverse order have the same bits, each at its new place."""
    inputs = subject.inputs()
    order = [*reversed(range(inputs.q.shape[0]))]
    whole = subject.call(inputs).clone().of_batches
    moved = subject.call(_batches(inputs, order))
    _require_same("position_invariance", whole.map(_at(order)), moved, "the batches in reverse order")


def chunk_invariance(subject: PropertySubject) -> None:
    """The queries in chunks have the same bits; under the bottom-right mask, a chunk ends at its last query's key."""
    inputs = subject.inputs()
    whole, start = subject.call(inputs).clone(), 0
    for end in _ends(subject, inputs.q.shape[2]):
        hidden = inputs.q.shape[2] - end if inputs.causal == "bottom_right" else 0
        chunk = _rows(inputs, slice(start, end), slice(0, inputs.k.shape[2] - hidden))
        rows = whole.map(_queries(start, end))
        _require_same("chunk_invariance", rows, subject.call(chunk), f"queries {start} to {end - 1} alone")
        start = end


def prefix_invariance(subject: PropertySubject) -> None:
    """Two sequences that share their first page have the same bits as with a copy each."""
    shared, apart = shared_and_apart(subject.inputs())
    if not shares_page(shared) or shares_page(apart):
        raise FaError("prefix_invariance: the sequences of its case share no page, so that it shows nothing")
    whole = subject.call(apart).clone()
    _require_same("prefix_invariance", whole, subject.call(shared), "two sequences share a page")


def split_invariance(subject: PropertySubject) -> None:
    """The keys in any number of splits give the same bits as in as many as the kernel chooses."""
    inputs = subject.inputs()
    whole = subject.call(_in_splits(inputs, 0)).clone()
    for number in SPLITS:
        _require_same("split_invariance", whole, subject.call(_in_splits(inputs, number)), f"num_splits = {number}")


def split_and_merge(subject: PropertySubject) -> None:
    """The outputs of two ranges of keys, weighted by their log-sum-exps, are the output of all keys."""
    inputs = subject.inputs()
    keys, multiple = inputs.k.shape[2], subject.variant.supports.seq_k_multiple_of
    middle = max(subject.variant.supports.seq_k_min, keys // 3)
    middle = -(-middle // multiple) * multiple
    weights, outputs = [], []
    for part in (slice(0, middle), slice(middle, keys)):
        of_range = _rows(inputs, slice(0, inputs.q.shape[2]), part)
        output, exact = subject.call(of_range), subject.exact_rows(of_range)["lse"]
        written = parts.outputs()["lse"].rows_meant(output.more["lse"], exact, of_range.conventions)
        weights.append(written.double())
        outputs.append(output.out.double())
    share = torch.softmax(torch.stack(weights), 0)[..., None]  # [2, b, h, seq_q, 1]
    merged = (share * torch.stack(outputs)).sum(0).to(inputs.output_dtype)
    subject.require_right("split_and_merge", Output(merged), inputs, f" (keys before and from {middle}, merged)")


def _ends(subject: PropertySubject, queries: int) -> list[int]:
    """Where the chunks end; the numbers of their queries and keys are those that the variant supports."""
    supports = subject.variant.supports
    multiple, ends = math.lcm(supports.seq_q_multiple_of, supports.seq_k_multiple_of), [0]
    for count in CHUNKS:
        end = ends[-1] + -(-count // multiple) * multiple
        if end < queries:
            ends.append(end)
    return [*ends[1:], queries]


def _at(batches: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[batches]


def _queries(start: int, end: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[:, :, start:end]


def _batches(inputs: Inputs, batches: list[int]) -> Inputs:
    q, k, v = (stored_like(tensor[batches], tensor) for tensor in inputs[:3])
    descales = inputs.descales and inputs.descales.map(_at(batches))
    places = torch.tensor(batches, device=q.device)
    return inputs._replace(q=q, k=k, v=v, descales=descales, extra=inputs.extra_at(batches=places))


def _rows(inputs: Inputs, queries: slice, keys: slice) -> Inputs:
    q, k, v = (
        stored_like(tensor[:, :, rows], tensor) for tensor, rows in zip(inputs[:3], (queries, keys, keys), strict=True)
    )
    of_q, of_k = (torch.arange(rows.start, rows.stop, device=q.device) for rows in (queries, keys))
    return inputs._replace(q=q, k=k, v=v, extra=inputs.extra_at(queries=of_q, keys=of_k))


def _in_splits(inputs: Inputs, number: int) -> Inputs:
    return inputs._replace(more={**inputs.more, NUM_SPLITS: number})


def _require_same(name: str, expected: Output, output: Output, what: str) -> None:
    """Compare the outputs that `expected` has."""
    output = Output(output.out, {more: output.more[more] for more in expected.more})
    if count := expected.differs(output):
        total = sum(tensor.numel() for tensor in output.tensors)
        raise WrongResult(name, f"{name}: {count} of {total} elements have other bits: {what}")
