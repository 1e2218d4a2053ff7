"""What pytest-fa does not judge is recognised in a manifest, and answered by one sentence and what works."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.attention import not_judged
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import ManifestError
from tests.factories import WriteVariant


def entry(call: str) -> str:
    """A manifest with this call."""
    return f'entry: {{target: "library:attention", call: {{{call}}}}}'


def problem_of(write_variant: WriteVariant, text: str) -> str:
    """The message for a manifest, without its path."""
    folder = write_variant("mine", manifest=text, **{"kernel.cu": ""})
    with pytest.raises(ManifestError) as problem:
        read_manifest(folder / "variant.yaml", folder.parent)
    return str(problem.value).removeprefix(f"{folder / 'variant.yaml'}: ")


# A manifest for each thing, in each place where a user may declare it.
MANIFESTS = {
    "supports: {dropout: true}": "dropout",
    "supports: {score_mod: true}": "score_mod",
    entry("keywords: {score_mod: bias, scale: scale}"): "score_mod",
    "supports: {block_mask: true}": "block_mask",
    entry("arguments: [q, k, v, mask_mod, scale]"): "block_mask",
    "supports: {causal: [prefix_lm]}": "block_mask",
    entry("keywords: {key_padding_mask: VALUE}"): "block_mask",
    entry("keywords: {dropout_p: VALUE}"): "dropout",
    "variants: {a: {supports: {varlen: true}}}": "packed_varlen",
    entry("keywords: {cu_seqlens: VALUE}"): "packed_varlen",
    "supports: {dtype: [int8]}": "int8",
    "supports: {dtype: int8}": "int8",
    "supports: {kv_dtype: int8}": "int8",
}


@pytest.mark.parametrize("text", MANIFESTS)
def test_what_is_not_judged_is_answered(write_variant: WriteVariant, text: str, snapshot: SnapshotAssertion) -> None:
    """The message names the place, says in one sentence what is not judged, and what works."""
    message = problem_of(write_variant, text)
    assert str(not_judged.rows()[MANIFESTS[text]]) in message
    assert "did you mean" not in message
    assert snapshot == message


def test_every_row_is_recognised_in_a_manifest() -> None:
    """Each thing that is not judged has a manifest above."""
    assert set(MANIFESTS.values()) == set(not_judged.rows())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{dtype: float16}", "supports.dtype is 'float16'; write `dtype: [fp16]`"),
        ("{dtype: 'torch.half, bfloat16'}", "supports.dtype is 'torch.half, bfloat16'; write `dtype: [fp16, bf16]`"),
        (
            "{dtype: [fp16, float32]}",
            "supports.dtype[1] is 'float32'; write fp32; allowed: fp16, bf16, fp32, e4m3",
        ),
        ("{dtype: float8_e4m3fn}", "supports.dtype is 'float8_e4m3fn'; write `dtype: [e4m3]`"),
        ("{dtype: fp61}", "supports.dtype is 'fp61'; write `dtype: [fp61]`"),
    ],
)
def test_a_dtype_by_another_name_gets_the_name_to_write(write_variant: WriteVariant, text: str, message: str) -> None:
    """Torch's names of dtypes, and usual ones, are answered with the names of a manifest."""
    assert message == problem_of(write_variant, f"supports: {text}")


def test_a_wrong_value_of_a_keyword_is_named_with_it(write_variant: WriteVariant) -> None:
    """The name of the keyword is in the message, and VALUE is to be replaced."""
    messages = [problem_of(write_variant, entry(f"keywords: {{block: {value}}}")) for value in ("VALUE", "skale")]
    assert messages[0].startswith("entry.call.keywords.block is 'VALUE'; replace VALUE; allowed: q, k, v, ")
    assert messages[1].startswith("entry.call.keywords.block is 'skale'; allowed: q, k, v, ")


WORDS = ("q", "k", "v", "out", "lse", "scale", "causal", "layout", "head_dim", "query", "key", "value", "softmax_scale")


@pytest.mark.parametrize("name", [*WORDS, "fp16", "e4m3", "top_left", "bshd", "block_m", "num_splits", "device", "o"])
def test_what_is_judged_is_not_taken_for_it(name: str) -> None:
    """Words, values and names that a kernel that can be judged may have are not recognised."""
    assert not_judged.recognised(name) is None
