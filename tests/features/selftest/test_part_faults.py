"""The self-test's wrong Python kernels in parts of attention: the check that rejects each one, and its diagnosis."""

from __future__ import annotations

import pytest

from pytest_fa.attention import parts
from pytest_fa.catalog.discover import discover
from pytest_fa.features.selftest.faults import FAULTS, Fault, cases_of
from pytest_fa.features.selftest.plugin import FOLDER
from tests.features.selftest.wrong_results import variants_in, wrong_results
from tests.tiers import nightly_but

TWIN = "twin_right_parts"
# A part of the sentence that names each mistake.
CAUSES = {
    "window_top_left": "the window is aligned to the first key, not to the last",
    "window_right_top_left": "the right side is aligned to the first key",
    "window_empty_row_mean": "queries that see no key get the mean of V",
    "window_lost_with_mask": "the window is ignored",
    "cap_before_scale": "the soft cap is applied before the scale",
    "cap_not_in_last_tile": "the soft cap is not applied in the last tile of 64 keys",
    "cap_not_in_lse": "the soft cap is left out of the log-sum-exp",
    "window_before_cap": "keys are hidden before the soft cap",
    "sink_missing": "the sink is missing",
    "sink_twice": "the sink is counted 2 times",
    "sink_scaled": "the sink is multiplied by the softmax scale",
    "sink_in_base_2": "the sink is in base 2",
    "sink_of_next_head": "each head has the sink of the next head",
    "sink_of_kv_head": "the sink is read at the index of the head of K and V",
    "sink_in_every_split": "the sink is counted 3 times, as if each tile of 64 keys had it",
    "sink_capped": "the sink is capped, too",
    "sink_has_value": "the weight of the sink goes to V of key 0",
    "sink_hidden_by_window": "the window hides the sink",
    "sink_without_maximum": "exp(sink) is added to the row sum, not exp(sink - max)",
    "sink_not_in_maximum": "the row maximum leaves out the sink",
    "sink_not_in_lse": "the sink is left out of the log-sum-exp",
    "sink_not_in_empty_rows": "the log-sum-exp of rows that see no key leaves out the sink",
    "sink_inf_is_nan": "the kernel computed NaN or Inf in head 1 of 6, query 0 to 72",
    "bias_ignored": "the bias is ignored",
    "bias_scaled": "as if it were added before the scale",
    "bias_before_cap": "the bias or ALiBi is added before the soft cap",
    "bias_twice_in_last_tile": "the bias is added twice in the last tile of 16, 32 or 64 keys",
    "bias_of_kv_head": "the bias of another place is added: each head reads that at the index of the head of K and V",
    "bias_of_next_batch": "the bias of another place is added: each batch reads that of the next batch",
    "bias_taken_for_dense": "the bias of another place is added: it is read as if it were dense",
    "bias_read_as_bshd": "it is read as [batch, query, head, key], not as [batch, head, query, key]",
    "bias_inf_is_finite": "queries that see no key get all keys, not zero",
    "bias_times_mask": "the kernel computed NaN or Inf in every batch",
    "bias_not_in_lse": "the bias is left out of the log-sum-exp",
    "alibi_ignored": "ALiBi is not applied",
    "alibi_added": "slope * distance is added, it must be subtracted",
    "alibi_signed": "without its absolute value",
    "alibi_first_key": "distances are those of the first key and query",
    "alibi_scaled": "slope * distance is multiplied by the softmax scale",
    "alibi_usual_slopes": "the slopes are those of the usual formula",
    "alibi_of_next_head": "each head has the slope of the next head",
    "alibi_of_kv_head": "the slope is read at the index of the head of K and V",
    "alibi_before_cap": "the bias or ALiBi is added before the soft cap",
    "mask_ignored": "the mask is ignored",
    "mask_inverted": "the mask is inverted",
    "mask_added": "the mask is added to the scores as 0 and 1",
    "mask_of_next_batch": "the mask of another place is used: each batch reads that of the next batch",
    "mask_of_kv_head": "the mask of another place is used: each head reads that at the index of the head of K and V",
    "mask_taken_for_dense": "the mask of another place is used: it is read as if it were dense",
    "mask_in_pv_only": "hidden keys are left out of P V, but not of the row sum",
    "mask_empty_row_mean": "a row that sees no key is the mean of V",
    "mask_empty_row_divides": "NaN exactly in the queries that see no key: 0/0 at the end",
    "mask_before_cap": "the mask is applied before the soft cap",
    "mask_replaces_causal": "the causal mask is none where it should be top left",
    "mask_lost_with_bias": "the mask is ignored",
    "v_first_64": "only the first 64 of the 128 dims of V are computed",
    "v_divided_first_64": "only the first 64 of the 128 dims of the output are divided by the row sum",
    "v_rows_of_k": "rows of V are read as if they had 64 elements, as those of K, not 128",
    "scale_of_v": "1/sqrt(128), the head_dim of V",
    "scale_default": "the scale of the call is not used",
    "scale_of_padded": "the softmax scale is that of D = 128, not 64",
    "scale_twice": "the softmax scale is 0.04, not 0.2",
    **dict.fromkeys(
        (
            "ragged_ignored",
            "ragged_masks_scores_only",
            "ragged_one_key_too_many",
            "ragged_last_tile_whole",
            "ragged_of_first",
            "ragged_of_next",
        ),
        "NaN of the padding of K or V, at or behind seqlens_k",
    ),
    "ragged_last_key_lost": "of seqlens_k, the last one of each sequence is left out",
    "ragged_whole_tiles": "of seqlens_k, they are rounded down to tiles of 64",
    "ragged_queries_of_next": "the kernel never wrote",
    "ragged_swapped": "the kernel never wrote",
    "ragged_skips_empty": "the kernel never wrote batch 2 of 4",
    "ragged_aligned_to_longest": "the mask is aligned to the last key of the longest sequence",
    "ragged_window_of_longest": "the window is aligned to the last key of the longest sequence",
    "ragged_alibi_of_longest": "distances end at the last key of the longest sequence",
    "ragged_merges_as_first": "as many splits of 64 keys are merged as the first sequence has",
    "ragged_zeroes_rows": "declare `conventions: {rows_past: zero}`",
    "ragged_writes_rows": "rows that belong to no query are written",
    "ragged_padding_in_lse": "no known mistake gives this log-sum-exp",
    "ragged_kept_lengths": "keys are read that no sequence has",
    "pages_of_next": "look at the block table",
    "pages_of_first": "all sequences have the pages of the first one",
    "pages_ignored": "the table is ignored, and pages are taken in order",
    "pages_next_page": "each page is the one behind the right one",
    "pages_one_too_far": "look at the block table",
    "pages_first_only": "the first page of a sequence stands for all its pages",
    "pages_transposed": "look at the block table",
    "pages_heads_for_keys": "look at the block table",
    "pages_last_whole": "the last page of each sequence is counted whole",
    "pages_of_64_keys": "look at the block table",
    "pages_v_in_order": "look at the block table",
    "pages_partial_lost": "the last page of a sequence is left out unless it is full",
    "pages_aligned_to_capacity": "the mask is aligned to the last slot of a sequence's pages",
    "pages_owned_by_one": "a shared page is read for the last of its sequences only",
    "pages_sink_in_every_page": "the sink is counted 4 times",
    "cache_k_scale_ignored": "k_scale is ignored",
    "cache_v_scale_ignored": "v_scale is ignored",
    "cache_scale_twice": "k_scale is applied twice",
    "cache_scales_exchanged": "k and v have each other's scales",
    "cache_scale_of_next_head": "is that of the next one: look at the scales of the cache",
    "cache_scale_of_next_key": "is that of the next one: look at the scales of the cache",
    "thd_keys_of_next": "keys of a sequence are looked for elsewhere",
    "thd_keys_of_longest": "keys of a sequence are looked for at its number times the longest number of keys",
    "thd_keys_of_queries": "keys of a sequence are looked for",
    "thd_keys_go_on": "each sequence has max_seqlen_k keys, and reads on in the next ones",
    "thd_last_sequence_lost": "the kernel never wrote batch 8 of 9",
    "thd_tile_written_whole": "wrong in every 2nd batch from 3, query 0 to 62 of 129",
    "thd_writes_past": "declare `conventions: {rows_past: zero}`",
    "thd_lse_of_longest": "the log-sum-exp of 1040 of 4644 rows is not written",
    "thd_kept_starts": "keys of a sequence are looked for elsewhere",
    "append_not_written": "the kernel did not write k_new into k",
    "append_next_slot": "in k, the kernel wrote k_new 1 slot too far: look at the slots",
    "append_other_sequence": "in k, the kernel wrote k_new into the slots of the next sequence",
    "append_keys_only": "the kernel did not write v_new into v",
    "append_values_for_keys": "the kernel wrote v_new into k",
    "append_lengths_exchanged": "3 slots too far: seqlens_k does not count the new keys: if that is meant, declare",
    "append_ignored": "the new keys take no part",
    "append_values_lost": "v_new counts as zero",
    "append_reads_slots": "each row is NaN, as the slots of the new keys are until they are written",
    "pages_kept": "each row is NaN, as the slots of the new keys are until they are written",
    "pages_bits_by_sharing": "prefix_invariance",
}
VARIANTS = variants_in("python_part_faults")


def test_every_kernel_is_listed() -> None:
    """Each wrong kernel has a cause here, and each part that changes the result has planted faults and their cases."""
    assert {*VARIANTS} - {TWIN} == {*CAUSES}
    names = (
        "causal",
        "window",
        "ragged",
        "pages",
        "cache_dtype",
        "append",
        "head_dim_v",
        "scale",
        "softcap",
        "bias",
        "alibi",
        "mask",
        "sink",
        "layout",
        "thd",
        "backward",
    )
    assert [*names] == [part.name for part in parts.PARTS if part.faults and part.selftest_shapes]


def test_the_twin_is_right() -> None:
    """The source has no mistake but those that are planted."""
    assert [result.message for result in wrong_results(VARIANTS[TWIN])] == []


@pytest.mark.parametrize(
    "name",
    nightly_but(
        CAUSES,
        "window_right_top_left",
        "window_empty_row_mean",
        "cap_not_in_lse",
        "sink_in_every_split",
        "sink_hidden_by_window",
        "bias_inf_is_finite",
        "alibi_before_cap",
        "mask_replaces_causal",
        "v_divided_first_64",
        "scale_twice",
        "ragged_whole_tiles",
        "ragged_zeroes_rows",
        "ragged_padding_in_lse",
        "ragged_kept_lengths",
        "pages_ignored",
        "pages_last_whole",
        "pages_kept",
        "pages_bits_by_sharing",
        "ragged_window_of_longest",
        "ragged_merges_as_first",
        "pages_aligned_to_capacity",
        "pages_owned_by_one",
        "thd_keys_of_longest",
        "thd_keys_go_on",
        "thd_writes_past",
        "thd_lse_of_longest",
        "thd_kept_starts",
    ),
)
def test_each_mistake_is_caught_and_gets_no_other_name(name: str) -> None:
    """The check that must reject a kernel does, alone if no other may, and the diagnosis names its mistake."""
    wrong = next(wrong_results(VARIANTS[name]))
    assert FAULTS[name].caught_by in wrong.caught_by
    assert not FAULTS[name].only or wrong.caught_by == (FAULTS[name].caught_by,)
    assert CAUSES[name] in (wrong.diagnosis.cause if wrong.diagnosis else wrong.message)


def test_a_fault_of_a_part_is_tried_on_its_cases_only() -> None:
    """A fault whose part has no cases, or whose check is a property, needs all cases; so does a correct twin."""
    shape = "b1h1s64d64-fp16-sink"
    assert Fault("max", shapes=(shape,)).shows_in_shapes
    assert not Fault("new_data", shapes=(shape,)).shows_in_shapes
    assert not Fault("max").shows_in_shapes
    assert {case.id.removesuffix("-seed0") for case in cases_of("sink_missing")} == {*FAULTS["sink_missing"].shapes}
    assert {*cases_of("sink_missing")} < {*cases_of(TWIN)} == {*cases_of("gain_only")}


def test_a_fault_in_plain_attention_needs_no_cases_of_other_parts() -> None:
    """Kernels that claim no sink, bias or the like are tried on few cases, so that the self-test stays fast."""
    variant = discover((FOLDER,)).variants["gain_only"]
    assert [case.id for case in cases_of("gain_only") if not variant.refuses(case)] == [
        "b1h2s113d64-fp16-seed0",
        "b2h4s77d64-fp16-causal-kv2-seed0",
        "b1h2s65d64-bf16-bshd-seed0",
        "b1h1s520d64-fp16-seed0",
    ]


def test_a_fault_is_settled_by_its_check_unless_no_other_may_reject_it() -> None:
    """After the check that must reject a kernel, further cases are tried only to see that no other check rejects it."""
    shapes = ("b1h1s64d64-fp16-sink",)
    assert Fault("max", shapes=shapes).is_settled_by(["rms", "max"])
    assert not Fault("max", shapes=shapes).is_settled_by(["rms"])
    assert not Fault("lse", only=True, shapes=shapes).is_settled_by(["lse"])
    assert not Fault("max").is_settled_by(["max"])
