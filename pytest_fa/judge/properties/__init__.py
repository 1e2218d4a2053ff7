"""The code of the properties: each calls a variant in a way that reveals a certain kind of mistake.

A property function returns None if the property holds, or what was tried, in words.  It raises `WrongResult` with the
property's name if it does not, and `UnsupportedCase` if the kernel refuses the call.
"""

from __future__ import annotations

from collections.abc import Callable

from pytest_fa.judge.properties.arguments import malformed_arguments
from pytest_fa.judge.properties.calls import (
    first_call_in_capture,
    graph_capture,
    new_data,
    new_lengths,
    new_shape,
    other_device,
    streams,
)
from pytest_fa.judge.properties.data import (
    contained_nan,
    hard_data,
    head_independence,
    negative_scale,
    zero_scale,
)
from pytest_fa.judge.properties.gradients import hard_gradients
from pytest_fa.judge.properties.invariance import (
    batch_invariance,
    chunk_invariance,
    position_invariance,
    prefix_invariance,
    split_and_merge,
    split_invariance,
)
from pytest_fa.judge.properties.memory import (
    different_strides,
    expanded_batch,
    expanded_heads,
    far_offsets,
    many_batches,
    many_heads,
    many_queries,
    offset_pointers,
    padded_rows,
    unaligned_rows,
)
from pytest_fa.judge.subject import PropertySubject

PROPERTIES: dict[str, Callable[[PropertySubject], str | None]] = {
    each.__name__: each
    for each in (
        hard_data,
        hard_gradients,
        zero_scale,
        negative_scale,
        head_independence,
        contained_nan,
        padded_rows,
        unaligned_rows,
        different_strides,
        expanded_heads,
        expanded_batch,
        offset_pointers,
        new_data,
        new_lengths,
        new_shape,
        streams,
        graph_capture,
        first_call_in_capture,
        many_heads,
        many_batches,
        many_queries,
        far_offsets,
        other_device,
        batch_invariance,
        position_invariance,
        chunk_invariance,
        prefix_invariance,
        split_invariance,
        malformed_arguments,
        split_and_merge,
    )
}
