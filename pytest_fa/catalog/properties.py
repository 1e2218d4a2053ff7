"""The properties that every variant is held to beside its cases, and the small cases that it is tried on.  No torch."""

from __future__ import annotations

import math

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Device, Variant

# Name to what it promises; `judge.properties` has the code.
PROPERTIES: dict[str, str] = {
    "hard_data": "large scores, one-hot rows, values of one, shifted keys and keys in another order come out right",
    "zero_scale": "a scale of zero is a scale, or is refused: attention gives the mean of the values, scores are zero",
    "negative_scale": "a negative scale is a scale, or is refused",
    "head_independence": "what happens in one head changes no bit in another",
    "contained_nan": "a NaN in one head stays there",
    "padded_rows": "rows that lie farther apart than they are long are read and written right, or refused",
    "expanded_heads": "a stride of zero is read right, or refused",
    "offset_pointers": "base pointers off by 2 and 8 bytes are read and written right, or refused",
    "new_data": "other data at the same address give another result",
    "new_shape": "another shape at the same address gives its own result",
    "streams": "a call waits for its own stream's slow writer, and two threads do not disturb one another",
    "graph_capture": "a captured call computes anew at each replay",
    "first_call_in_capture": "the first call of a process may be captured",
    "many_heads": "65,537 heads are all computed",
    "far_offsets": "elements past 2^31 are found",
    "other_device": "a tensor on another GPU than the current one is computed there",
}
ON_GPU = frozenset(("streams", "graph_capture", "first_call_in_capture", "many_heads", "far_offsets", "other_device"))

# What is said of weights and values, of which scores alone have none.
OF_ATTENTION = frozenset(("hard_data",))

# Where a kernel may refuse, or the layout or the machine lack what is needed; elsewhere a refusal is a failure.
MAY_REFUSE = frozenset(
    (
        "zero_scale",
        "negative_scale",
        "padded_rows",
        "expanded_heads",
        "offset_pointers",
        "new_shape",
        "many_heads",
        "far_offsets",
        "other_device",
    )
)

SEQUENCE = 150  # more than two tiles of 64, and no multiple of anything
TILE = 64  # of a case for sanitizers, where the manifest does not define one
LEAST_TILES = 3  # each way, of the same


def properties_of(variant: Variant) -> tuple[str, ...]:
    """The properties that mean something for what the variant computes."""
    return tuple(name for name in PROPERTIES if variant.computes == "attention" or name not in OF_ATTENTION)


def property_case(variant: Variant, sequence: int = SEQUENCE) -> Case:
    """A small case that the variant takes: several batches, heads and tiles, with a tail where it takes tails."""
    supports = variant.supports
    seq_q, seq_k = least_lengths(variant, sequence)
    dtype, head_dim = min(variant.instantiations, key=lambda each: each[0] != "fp16")  # fp16 where there is one
    return Case(
        batch=2,
        heads=3,
        seq_q=seq_q,
        head_dim=head_dim,
        dtype=dtype,
        causal="none" if "none" in supports.causal else supports.causal[0],
        kv_heads=3,
        seq_k=seq_k,
        layout="bhsd" if "bhsd" in supports.layout else supports.layout[0],
        seed=0,
        computes=variant.computes,
    )


def sanitizer_case(variant: Variant) -> Case:
    """The smallest case with at least three tiles each way and a tail, where the variant takes tails."""
    tiles = [variant.defines.get(name) for name in ("BLOCK_M", "BLOCK_N")]
    tile = max((each for each in tiles if isinstance(each, int)), default=TILE)
    return msgspec.structs.replace(property_case(variant, LEAST_TILES * tile + 1), batch=1, heads=2, kv_heads=2)


def least_lengths(variant: Variant, sequence: int) -> tuple[int, int]:
    """Queries and keys, the fewest from `sequence` on that the variant takes."""
    supports = variant.supports
    keys = max(sequence, supports.seq_k_min)
    return _round_up(sequence, supports.seq_q_multiple_of), _round_up(keys, supports.seq_k_multiple_of)


def applies(name: str, variant: Variant, device: Device) -> bool:
    """Whether a property means anything for this kind of variant on this device."""
    if name not in properties_of(variant):
        return False
    if name == "first_call_in_capture" and variant.entry.kind != "cuda":
        return False
    return device == "cuda" or name not in ON_GPU


def _round_up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple
