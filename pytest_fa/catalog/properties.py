"""The properties that are checked in addition to the cases, and the small cases they use.  Does not import torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.append import PART as APPEND
from pytest_fa.attention.cache_dtype import PART as CACHE_DTYPE
from pytest_fa.attention.pages import PART as PAGES
from pytest_fa.attention.pages import page_size
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.catalog.case import Case, plain_case
from pytest_fa.catalog.claims import FEWER, claims_of, factors_of, least_lengths
from pytest_fa.catalog.variant import Device, Invariance, StrideRule, Variant

# Name to promise.  `judge.properties` has the code; docs/reference/checks.md has them in short.
PROPERTIES: dict[str, str] = {
    "hard_data": "results are correct for large, very negative and equal scores, one-hot rows, values near the ends of "
    "the dtype's range, ones in V, shifted and permuted keys",
    "hard_gradients": "gradients are correct for very low and very high log-sum-exps, one-hot rows, rows of two "
    "scores, large dO, dO orthogonal to the output, an outlying channel, one massive key",
    "zero_scale": "with scale 0, the output is the mean of the rows of V (for scores: zero), or the call is refused",
    "negative_scale": "a negative scale gives the correct result, or is refused",
    "head_independence": "other data in one head changes no bit in the output of the other heads",
    "contained_nan": "a NaN in one head changes no other head's output; a row that sees a NaN is NaN in every output",
    "padded_rows": "rows with padding between them are read and written correctly, or refused",
    "unaligned_rows": "rows that are 8 bytes further apart than their length are read and written correctly",
    "different_strides": "tensors that each have strides of their own are read and written correctly, or refused",
    "expanded_heads": "K and V with a head stride of zero are read correctly, or refused",
    "expanded_batch": "K and V with a batch stride of zero are read correctly, or refused",
    "offset_pointers": "pointers that are offset by one element or 8 bytes are read and written correctly, or refused",
    "new_data": "new data at the same address gives a new result",
    "new_lengths": "other lengths of the sequences at the same address give the result for these, also in a replay",
    "new_shape": "another shape at the same address gives the correct result for that shape",
    "streams": "a call waits for a slow write on its own stream, and calls from two threads do not interfere",
    "graph_capture": "a captured call computes a new result at each replay",
    "first_call_in_capture": "the first call of a process can be captured in a CUDA graph",
    "many_heads": "all of 65,537 heads are computed",
    "many_batches": "all of 65,537 batches are computed",
    "many_queries": "all of 65,537 queries are computed",
    "far_offsets": "rows, heads and batches past 2^31 elements are read and written correctly",
    "other_device": "tensors on a GPU that is not the current device are computed on that GPU",
    "batch_invariance": "a batch alone has the same bits as among others",
    "position_invariance": "batches in another order have the same bits",
    "chunk_invariance": "queries in chunks have the same bits",
    "prefix_invariance": "sequences that share a page have the same bits as with copies of it",
    "split_invariance": "any number of splits of the keys gives the same bits",
    "malformed_arguments": "a malformed call is refused, or is computed correctly where it still has a meaning",
    "split_and_merge": "the outputs of two ranges of keys, merged by their log-sum-exps, are that of all keys",
}
ON_GPU = frozenset(
    (
        "streams",
        "graph_capture",
        "first_call_in_capture",
        "many_heads",
        "many_batches",
        "many_queries",
        "far_offsets",
        "other_device",
    )
)

# Properties of softmax weights and values, which a variant that computes only scores does not have.
ATTENTION_ONLY = frozenset(("hard_data",))

GRADIENTS_ONLY = frozenset(("hard_gradients",))
# Properties about one row of the output: dK and dV are sums over queries.
NOT_OF_GRADIENTS = frozenset(
    ("contained_nan", "chunk_invariance", "prefix_invariance", "split_invariance", "split_and_merge")
)

# Properties that `invariant` in a manifest promises, by its words.
INVARIANCES: dict[Invariance, str] = {
    "batch": "batch_invariance",
    "position": "position_invariance",
    "chunk": "chunk_invariance",
    "prefix": "prefix_invariance",
    "split": "split_invariance",
}
MALFORMED = "malformed_arguments"  # which `checks_arguments` in a manifest promises
PROMISED = frozenset((*INVARIANCES.values(), "split_and_merge", "new_lengths", MALFORMED))  # only by some variants
ON_RAGGED_CASES = ("new_lengths",)
ON_PLAIN_CASES = ("chunk_invariance", "split_and_merge")  # other parts of attention than a mask count keys or queries

# Properties that a kernel may refuse, or that need a layout or a machine that may be missing.  For all others, a
# refusal is a failure.
MAY_REFUSE = frozenset(
    (
        "zero_scale",
        "negative_scale",
        "padded_rows",
        "different_strides",
        "expanded_heads",
        "expanded_batch",
        "offset_pointers",
        "new_shape",
        "many_heads",
        "many_batches",
        "many_queries",
        "far_offsets",
        "other_device",
    )
)

# The strides that a property needs; a variant that declares less is not judged by it.
STRIDES_OF: dict[str, StrideRule] = {
    "padded_rows": "equal",
    "unaligned_rows": "any",
    "different_strides": "aligned16",
    "expanded_heads": "equal",
    "expanded_batch": "equal",
    "offset_pointers": "any",
    "far_offsets": "equal",
}
Numbers = Literal["lengths", "pages", "starts"]  # the tensors of a call whose elements may be malformed
SCALED = frozenset(("zero_scale", "negative_scale"))  # with another scale than 1 / sqrt(D)
ON_OTHER_STREAMS = frozenset(("streams", "graph_capture", "first_call_in_capture"))

# Quantised caches that a property does not fit, as a part of the claim: int8 has no NaN, and heads or
# batches that share a scale depend on each other.
UNFIT_CACHES = {"contained_nan": ("int8",), "head_independence": ("_t",), "batch_invariance": ("_t", "_h")}

# Properties that merge batches with heads, which the layout bshd does not allow.
NEEDS_BHSD = frozenset(("new_shape",))

FEW_ROWS = 32  # of a malformed call
SEQUENCE = 150  # more than two tiles of 64, and not a multiple of a tile


def properties_of(variant: Variant) -> tuple[str, ...]:
    """Return the names of the properties that apply to what the variant computes and promises."""
    left_out = {name for word, name in INVARIANCES.items() if word not in variant.invariant}
    left_out |= set() if variant.checks_arguments else {MALFORMED}
    if variant.computes == "scores":
        left_out |= ATTENTION_ONLY
    left_out |= NOT_OF_GRADIENTS if variant.computes == "gradients" else GRADIENTS_ONLY
    left_out |= {name for name in ON_PLAIN_CASES if name not in left_out and _plain_case(variant, name, ()) is None}
    caches = CACHE_DTYPE.supported(variant.supports)
    left_out |= {name for name in UNFIT_CACHES if not any(fits_cache(name, claim) for claim in caches)}
    if not RAGGED.is_claimed(variant.supports):
        left_out |= {*ON_RAGGED_CASES}
    return tuple(name for name in PROPERTIES if name not in left_out)


def fits_cache(name: str, claim: object) -> bool:
    """Whether a property can be tested with a claimed cache."""
    unfit = UNFIT_CACHES.get(name, ())
    return not (str(claim).startswith(unfit) or str(claim).endswith(unfit))


def _plain_case(variant: Variant, name: str, dtypes: tuple[str, ...]) -> Case | None:
    """The case of a property of `ON_PLAIN_CASES`, or None if the variant has none; with `dtypes`, of one of these."""
    supports, needs_lse = variant.supports, name == "split_and_merge"
    if supports.self_attention_only or variant.own_truth or (needs_lse and "lse" not in variant.returns):
        return None
    masked = "bottom_right" in supports.causal and name == "chunk_invariance"
    seq_q, seq_k = least_lengths(variant, SEQUENCE)
    built = [pair for pair in variant.instantiations if pair[0] in dtypes] or variant.instantiations
    dtype, head_dim = min(built, key=lambda pair: pair[0] != "fp16")  # prefer fp16
    case = plain_case(2, 3, seq_q, head_dim, dtype, seq_k=seq_k).computing(variant.computes)
    changed = case.with_fields(
        {
            "causal": "bottom_right" if masked else "none",
            "layout": supports.layout[0],
            "fp8_out": supports.fp8_out_of(dtype),
        }
    )
    return None if variant.refuses(changed) else changed


def property_case(variant: Variant, sequence: int = SEQUENCE) -> Case:
    """Return a small supported case: 2 batches, 3 heads, several tiles, and a partial last tile if supported."""
    supports = variant.supports
    seq_q, seq_k = least_lengths(variant, sequence)
    dtype, head_dim = min(variant.instantiations, key=lambda pair: pair[0] != "fp16")  # prefer fp16
    case = plain_case(2, 3, seq_q, head_dim, dtype, seq_k=seq_k).computing(variant.computes)
    claim = factors_of(variant).first_with()
    case = claim.applied_to(case) if claim else case
    return case.with_fields({"fp8_out": supports.fp8_out_of(case.dtype)})


def case_of_property(variant: Variant, name: str, dtypes: tuple[str, ...] = ()) -> Case:
    """Return the case on which a property of a variant is tested; with `dtypes`, of one of these dtypes.

    The properties of a candidate take turns at what its manifest supports: the first has the case of `property_case`,
    and any dtype, head_dim, mask, layout and grouping is that of at least one property.
    """
    if name in ON_PLAIN_CASES and (plain := _plain_case(variant, name, dtypes)):
        return plain
    if name == MALFORMED:
        return _with_dtype(property_case(variant, FEW_ROWS), variant, dtypes)
    if name == INVARIANCES["prefix"] and PAGES.is_claimed(variant.supports):
        return _paged_case(variant, dtypes)
    case, supports = property_case(variant), variant.supports
    if name in ON_RAGGED_CASES:
        lengths = "keys" if APPEND.is_claimed(supports) else RAGGED.supported(supports)[-1]
        changed = _with_dtype(case, variant, dtypes).with_fields(RAGGED.fields_with(lengths, case.heads))
        for part in (PAGES, APPEND):
            further = changed.with_fields(part.fields_with(part.supported(supports)[-1], case.heads))
            changed = changed if part.impossible(further) or variant.refuses(further) else further
        return changed
    claims = claims_of(variant, dtypes) if variant.role == "candidate" and not variant.cases else []
    if not claims:
        return case
    claims = [claim for claim in claims if dict(claim.by_part)[RAGGED] == RAGGED.claims[0]] or claims
    claims = [claim for claim in claims if fits_cache(name, dict(claim.by_part)[CACHE_DTYPE])] or claims
    claim = claims[tuple(PROPERTIES).index(name) % len(claims)]
    ends = least_lengths(variant, FEWER if claim.needs_two_lengths else SEQUENCE, SEQUENCE)
    seq_q, seq_k = claim.lengths(*ends)
    sized = msgspec.structs.replace(case, seq_q=seq_q, seq_k=seq_k)
    changed = claim.applied_to(sized).with_fields({"fp8_out": supports.fp8_out_of(claim.dtype)})
    needs_bhsd = name in NEEDS_BHSD and "bhsd" in supports.layout
    return changed.with_fields({"layout": "bhsd"}) if needs_bhsd else changed


def _paged_case(variant: Variant, dtypes: tuple[str, ...]) -> Case:
    """A case whose keys fill two pages, with lengths; if possible, of one of these dtypes."""
    supports = variant.supports
    pages = [claim for claim in PAGES.supported(supports) if claim != PAGES.claims[0]][-1]
    case = property_case(variant, max(SEQUENCE, 2 * page_size(pages)))
    lengths = "keys" if "keys" in RAGGED.supported(supports) else "both"
    fields = {**RAGGED.fields_in_turn(lengths, case.heads)[-1], **PAGES.fields_with(pages, case.heads)}
    changed = _with_dtype(case, variant, dtypes).with_fields(fields)
    return case.with_fields(fields) if PAGES.impossible(changed) or variant.refuses(changed) else changed


def case_with_numbers(variant: Variant, case: Case, numbers: Numbers) -> Case | None:
    """The case with lengths of keys, with pages, or with starts of sequences; None if the variant supports none."""
    supports, heads = variant.supports, case.heads
    patterns = [RAGGED.fields_with(claim, heads) for claim in ("keys", "both") if claim in RAGGED.supported(supports)]
    if numbers == "pages":
        further = [PAGES.fields_with(claim, heads) for claim in PAGES.supported(supports) if claim != PAGES.claims[0]]
    else:
        layouts = ["thd"] if numbers == "starts" else [layout for layout in supports.layout if layout != "thd"]
        further = [{"layout": layout} for layout in layouts if layout in supports.layout]
    changed = [case.with_fields({**lengths, **more}) for more in further for lengths in patterns]
    possible = (each for each in changed if not any(part.impossible(each) for part in parts.PARTS))
    return next((each for each in possible if not variant.refuses(each)), None)


def _with_dtype(case: Case, variant: Variant, dtypes: tuple[str, ...]) -> Case:
    """The case in the first of these dtypes that the variant has; unchanged without any."""
    found = ((dtype, head_dim) for dtype, head_dim in variant.instantiations if dtype in dtypes)
    dtype, head_dim = next(found, (case.dtype, case.head_dim))
    return case.with_dtype(dtype).with_fields({"head_dim": head_dim, "fp8_out": variant.supports.fp8_out_of(dtype)})


def applies(name: str, variant: Variant, device: Device) -> bool:
    """Return whether a property applies to this kind of variant on this device."""
    if name not in properties_of(variant):
        return False
    if name == "first_call_in_capture" and variant.entry.kind != "cuda":
        return False
    return device == "cuda" or name not in ON_GPU


def declared_against(name: str, variant: Variant) -> str | None:
    """Return what the manifest declares because of which a property is not judged: `supports.fixed_scale: true`."""
    supports, call = variant.supports, variant.entry.call
    if name in STRIDES_OF and not supports.allows_strides(STRIDES_OF[name]):
        return f"supports.strides: {supports.strides}"
    if name in STRIDES_OF and name != "offset_pointers" and call is not None and call.contiguous:
        return "entry.call.contiguous: true"
    if name in STRIDES_OF and variant.packs_inputs:
        return "supports.layout: [packed]"
    if supports.fixed_scale and name in SCALED:
        return "supports.fixed_scale: true"
    if supports.default_stream_only and name in ON_OTHER_STREAMS:
        return "supports.default_stream_only: true"
    return None
