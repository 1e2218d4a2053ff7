"""The shared binding, compiled for tensors on the CPU and called through tvm-ffi: what reaches a kernel, and errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.candidate.cuda_forward import CudaForward
from pytest_fa.errors import LaunchError, UnsupportedCase
from pytest_fa.features.sanitize.plain_call import PLAIN_SIZE, ForwardArgs

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA


class Bound(NamedTuple):
    """The library as a callable, with or without an output for scores, and the arguments that its kernel got last."""

    forward: CudaForward
    scores: CudaForward
    last: Callable[[], ForwardArgs]


@pytest.fixture(scope="module")
def bound(bound_library: str) -> Bound:
    """The binding with a kernel that keeps its arguments."""
    forward = CudaForward(bound_library, lambda size, _: torch.zeros(size, dtype=torch.uint8), "attention")
    scores = CudaForward(bound_library, lambda size, _: torch.zeros(size, dtype=torch.uint8), "scores")
    plain = ctypes.CDLL(bound_library)
    plain.last_args.restype = ctypes.POINTER(ForwardArgs)
    return Bound(forward, scores, lambda: plain.last_args().contents)


def tensors(dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """Q and an output with 4 heads and 3 queries, k and v with 2 heads and 5 keys; a batch of 2, and D = 8."""
    return [torch.zeros(2, heads, length, 8).to(dtype) for heads, length in ((4, 3), (2, 5), (2, 5), (4, 3))]


@pytest.mark.parametrize(("dtype", "code"), [(torch.float16, 0), (torch.bfloat16, 1), (torch.float32, 2)])
def test_a_kernel_gets_addresses_sizes_and_strides(bound: Bound, dtype: torch.dtype, code: int) -> None:
    """Also of views that do not begin where their memory does, and of the layout bshd."""
    q, k, v, out = tensors(dtype=dtype)
    q = torch.zeros(2, 9, 4, 8, dtype=dtype)[:, 2:5].transpose(1, 2)
    lse = torch.zeros(2, 4, 3)
    assert bound.forward(q, k, v, scale=0.5, causal="bottom_right", out=out, lse=lse) is out
    args = bound.last()
    assert (args.abi_version, args.struct_size, args.features) == (1, PLAIN_SIZE, 0)
    assert [args.q, args.k, args.v, args.out, args.lse] == [each.data_ptr() for each in (q, k, v, out, lse)]
    sizes = [args.batch, args.heads, args.kv_heads, args.seq_q, args.seq_k, args.head_dim]
    assert sizes == [2, 4, 2, 3, 5, 8]
    for tensor, name in ((q, "q"), (k, "k"), (v, "v"), (out, "out")):
        strides = getattr(args, f"{name}_stride")
        assert (strides.batch, strides.head, strides.seq, strides.dim) == tensor.stride()
    assert (args.dtype, args.out_dtype, args.causal, args.scale) == (code, code, 2, 0.5)
    assert (args.workspace_bytes, bool(args.workspace)) == (3, True)
    assert (args.q_descale, args.k_descale, args.v_descale) == (None, None, None)


def test_the_stride_of_an_axis_with_one_element_does_not_count(bound: Bound) -> None:
    """Whatever such a stride is, a kernel gets that of a dense axis, so that it refuses no call for it."""
    q = torch.zeros(1, 4, 1, 8).half().as_strided((1, 4, 1, 8), (7, 8, 3, 1))
    k = torch.zeros(1, 1, 5, 8).half().as_strided((1, 1, 5, 8), (1, 0, 8, 1))
    bound.forward(q, k, k, scale=1.0)
    strides = [(each.batch, each.head, each.seq, each.dim) for each in (bound.last().q_stride, bound.last().k_stride)]
    assert strides == [(32, 8, 8, 1), (40, 40, 8, 1)]


def test_an_expanded_axis_keeps_its_stride(bound: Bound) -> None:
    """A stride of 0 over several heads reaches the kernel."""
    q = torch.zeros(2, 4, 3, 8).half()
    k = torch.zeros(2, 1, 5, 8).half().expand(2, 4, 5, 8)
    bound.forward(q, k, k, scale=1.0)
    stride = bound.last().k_stride
    assert (stride.batch, stride.head, stride.seq, stride.dim) == (40, 0, 8, 1)


def test_a_feature_has_its_bit(bound: Bound) -> None:
    """A window side of 0 is not an open side; a call with a feature has the whole struct."""
    q, k, v, out = tensors()
    bound.forward(q, k, v, scale=1.0, out=out, window_left=0, softcap=50.0)
    args = bound.last()
    assert (args.struct_size, args.features) == (ctypes.sizeof(ForwardArgs), 1 | 2)
    assert (args.softcap, args.window_left) == (50.0, 0)
    bound.forward(q, k, v, scale=1.0, out=out, window_right=-3)
    assert (bound.last().features, bound.last().window_right) == (4, -3)


def test_tensors_of_parts_have_their_bits(bound: Bound) -> None:
    """A kernel gets their addresses, and strides of 0 along the axes on which a tensor does not depend."""
    q, k, v, out = tensors()
    vectors: dict[str, Any] = {"sink": torch.zeros(4), "alibi_slopes": torch.zeros(4)}
    bias, mask = torch.zeros(2, 1, 3, 5).half(), torch.ones(1, 1, 1, 5, dtype=torch.bool)
    pairs: dict[str, Any] = {"attn_bias": bias.expand(2, 4, 3, 5), "attn_mask": mask.expand(2, 4, 3, 5)}
    bound.forward(q, k, v, scale=1.0, out=out, **vectors, **pairs)
    args = bound.last()
    assert (args.struct_size, args.features) == (ctypes.sizeof(ForwardArgs), 8 | 16 | 32 | 64)
    addresses = [args.sink, args.alibi_slopes, args.bias, args.mask]
    assert addresses == [tensor.data_ptr() for tensor in (*vectors.values(), bias, mask)]
    strides = [(each.batch, each.head, each.seq, each.dim) for each in (args.bias_stride, args.mask_stride)]
    assert strides == [(15, 0, 5, 1), (0, 0, 0, 1)]
    bound.forward(q[:1], k[:1], v[:1], scale=1.0, attn_mask=torch.ones(1, 4, 3, 5, dtype=torch.bool))
    args = bound.last()
    assert (args.features, args.bias, args.mask_stride.batch, args.mask_stride.head) == (64, None, 0, 15)


def test_lengths_have_their_bits(bound: Bound) -> None:
    """A kernel gets the addresses of int32 lengths; others are refused by name."""
    q, k, v, out = tensors()
    of_queries, of_keys = (torch.tensor(lengths, dtype=torch.int32) for lengths in ([3, 1], [0, 5]))
    bound.forward(q, k, v, scale=1.0, out=out, seqlens_q=of_queries, seqlens_k=of_keys)
    args = bound.last()
    assert args.features == 256 | 512
    assert [args.seqlens_q, args.seqlens_k] == [of_queries.data_ptr(), of_keys.data_ptr()]
    with pytest.raises(TypeError, match="seqlens_k must be int32"):
        bound.forward(q, k, v, scale=1.0, out=out, seqlens_k=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"seqlens_k is \[3\]: axis 0 must be 2"):
        bound.forward(q, k, v, scale=1.0, out=out, seqlens_k=torch.tensor([0, 5, 5], dtype=torch.int32))


def starts(*numbers: int) -> torch.Tensor:
    """Starts of sequences, int32."""
    return torch.tensor(numbers, dtype=torch.int32)


def test_sequences_behind_one_another_have_their_starts(bound: Bound) -> None:
    """A kernel gets them, the number of sequences, the longest ones, the rows, and no stride of a batch."""
    q, k, v, out = (tensor[:1] for tensor in tensors())
    words: dict[str, Any] = {"cu_seqlens_q": starts(0, 1, 3), "cu_seqlens_k": starts(0, 0, 4)}
    bound.forward(q, k, v, scale=1.0, out=out, max_seqlen_q=2, max_seqlen_k=7, **words)
    args = bound.last()
    assert (args.features, args.batch, args.seq_q, args.seq_k) == (4096 | 8192, 2, 2, 7)
    assert (args.rows_q, args.rows_k) == (3, 5)
    assert [args.cu_seqlens_q, args.cu_seqlens_k] == [each.data_ptr() for each in words.values()]
    assert [each.batch for each in (args.q_stride, args.k_stride, args.v_stride, args.out_stride)] == [0] * 4
    cache = [torch.zeros(9, 2, 16, 8).half() for _ in range(2)]
    table = torch.zeros(2, 3, dtype=torch.int32)
    paged: dict[str, Any] = {"cu_seqlens_q": starts(0, 1, 3), "seqlens_k": starts(4, 40), "block_table": table}
    bound.forward(q, *cache, scale=1.0, out=out, max_seqlen_q=2, max_seqlen_k=40, **paged)
    args = bound.last()
    assert (args.features, args.batch, args.seq_k) == (512 | 1024 | 4096, 2, 48)
    assert args.k_stride.batch == 2 * 16 * 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"cu_seqlens_k": starts(0, 3)}, "cu_seqlens_k needs cu_seqlens_q"),
        ({"max_seqlen_q": 3}, "max_seqlen_q and max_seqlen_k need cu_seqlens_q"),
        ({"cu_seqlens_q": starts(0, 3)}, "max_seqlen_q must be an integer"),
        ({"cu_seqlens_q": starts(0), "max_seqlen_q": 3}, r"cu_seqlens_q is \[1\]: it must be \[batch \+ 1\]"),
        ({"cu_seqlens_q": starts(0, 3).long(), "max_seqlen_q": 3}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_q": starts(0, 3), "max_seqlen_q": 0}, "max_seqlen_q is 0, it must be at least 1"),
        (
            {"cu_seqlens_q": starts(0, 3), "max_seqlen_q": 3, "cu_seqlens_k": starts(0, 1, 5), "max_seqlen_k": 5},
            "cu_seqlens_k has 2 sequences, cu_seqlens_q has 1",
        ),
        (
            {"cu_seqlens_q": starts(0, 3), "max_seqlen_q": 3, "seqlens_q": starts(3)},
            "both seqlens_q and cu_seqlens_q are passed; pass one",
        ),
        (
            {"cu_seqlens_q": starts(0, 3), "max_seqlen_q": 3, "attn_mask": torch.ones(1, 4, 3, 5, dtype=torch.bool)},
            "a bias or a mask has batches, but the sequences lie behind one another",
        ),
    ],
)
def test_bad_starts_are_named(bound: Bound, words: dict[str, Any], message: str) -> None:
    """One error each, which names the argument and what is allowed."""
    q, k, v, out = (tensor[:1] for tensor in tensors())
    with pytest.raises((TypeError, ValueError), match=message):
        bound.forward(q, k, v, scale=1.0, out=out, **words)


def test_starts_need_one_batch(bound: Bound) -> None:
    """Tensors with batches have no sequences behind one another."""
    q, k, v, out = tensors()
    with pytest.raises(ValueError, match="with cu_seqlens_q, axis 0 must be 1"):
        bound.forward(q, k, v, scale=1.0, out=out, cu_seqlens_q=starts(0, 3), max_seqlen_q=3)


def int8_cache(pages: int = 2) -> dict[str, Any]:
    """K and v of 2 heads and 5 keys in int8, with scales of each head."""
    k, v = (torch.zeros(pages, 2, 5, 8, dtype=torch.int8) for _ in "kv")
    return {"k": k, "v": v, "k_scale": torch.ones(2), "v_scale": torch.ones(2)}


@pytest.mark.parametrize(("dtype", "code"), [(torch.float8_e4m3fn, 3), (torch.int8, 4)])
@pytest.mark.parametrize(("shape", "strides"), [((1,), (0, 0, 0, 0)), ((2,), (0, 1, 0, 0)), ((7, 2, 5), (10, 5, 1, 0))])
def test_a_quantised_cache_has_its_bit(
    bound: Bound, dtype: torch.dtype, code: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """One formula finds the scale of a page, head and slot, whatever it depends on; k and v differ in that."""
    q, *_, out = tensors()
    cache = int8_cache(7) | {"k_scale": torch.ones(shape)}
    cache |= {name: cache[name].to(dtype) for name in "kv"}
    pages: dict[str, Any] = {
        "seqlens_k": torch.zeros(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
    }
    bound.forward(q, **cache, scale=1.0, out=out, **pages)
    args = bound.last()
    assert (args.features, args.dtype, args.cache_dtype, args.seq_k) == (512 | 1024 | 2048, 0, code, 15)
    assert [args.k_scale, args.v_scale] == [cache["k_scale"].data_ptr(), cache["v_scale"].data_ptr()]
    found = [(each.batch, each.head, each.seq, each.dim) for each in (args.k_scale_stride, args.v_scale_stride)]
    assert found == [strides, (0, 1, 0, 0)]


def test_new_keys_have_their_bit(bound: Bound) -> None:
    """A kernel gets the addresses and strides of new keys and values, beside lengths of keys alone."""
    q, k, v, out = tensors()
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    k_new, v_new = torch.zeros(2, 3, 2, 8).half().transpose(1, 2), torch.zeros(2, 2, 3, 8).half()
    new: dict[str, Any] = {"k_new": k_new, "v_new": v_new}
    bound.forward(q, k, v, scale=1.0, out=out, seqlens_k=lengths, **new)
    args = bound.last()
    assert (args.features, args.k_new, args.v_new) == (512 | 16384, k_new.data_ptr(), v_new.data_ptr())
    strides = [(each.batch, each.head, each.seq, each.dim) for each in (args.k_new_stride, args.v_new_stride)]
    assert strides == [(48, 8, 16, 1), (48, 24, 8, 1)]
    refused: dict[str, dict[str, Any]] = {
        "k_new needs seqlens_k, the numbers of keys, and no seqlens_q": {**new, "seqlens_q": lengths},
        "k_new and v_new come together or not at all": {"k_new": k_new},
        r"v_new is \[2, 2, 2, 8\]: axis 2 must be 3": {**new, "v_new": v_new[:, :, :2]},
        "q is fp16 and k_new is fp32": {**new, "k_new": k_new.float()},
    }
    for message, wrong in refused.items():
        with pytest.raises((TypeError, ValueError), match=message):
            bound.forward(q, k, v, scale=1.0, out=out, seqlens_k=lengths, **wrong)


def test_v_may_have_another_head_dim(bound: Bound) -> None:
    """Then the output has it, too; a V like Q and K has no bit."""
    q, k, v, out = tensors()
    bound.forward(q, k, torch.zeros(2, 2, 5, 24).half(), scale=1.0, out=torch.zeros(2, 4, 3, 24).half())
    args = bound.last()
    assert (args.features, args.head_dim, args.head_dim_v, args.out_stride.seq) == (128, 8, 24, 24)
    bound.forward(q, k, v, scale=1.0, out=out)
    assert (bound.last().features, bound.last().head_dim_v) == (0, 0)


def test_the_bias_of_e4m3_is_float32(bound: Bound) -> None:
    """An e4m3 number is too coarse for a bias."""
    q, k, v, out = tensors(dtype=torch.float8_e4m3fn)
    ones: dict[str, Any] = {"q_descale": torch.ones(2, 4), "k_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 2)}
    bias = torch.zeros(2, 4, 3, 5)
    bound.forward(q, k, v, scale=1.0, out=out.half(), attn_bias=bias, **ones)
    assert (bound.last().bias, bound.last().features) == (bias.data_ptr(), 32)


def test_the_size_of_a_workspace_may_depend_on_tensors(bound: Bound) -> None:
    """The kernel is asked with all features of a call."""
    q, k, v, out = tensors()
    assert bound.forward.workspace_bytes(q, k, v, out, scale=1.0) == 3
    assert bound.forward.workspace_bytes(q, k, v, out, scale=1.0, sink=torch.zeros(4)) == 3 + 8


def test_without_a_log_sum_exp_there_is_no_address(bound: Bound) -> None:
    """An argument that is None is a null pointer; an integer is a number, too."""
    q, k, v, out = tensors()
    bound.forward(q, k, v, scale=1, out=out)
    assert (bound.last().lse, bound.last().scale, bound.last().causal) == (None, 1.0, 0)


def test_e4m3_has_a_descale_for_each_head(bound: Bound, snapshot: SnapshotAssertion) -> None:
    """The output has a type of its own."""
    q, k, v, _ = tensors(dtype=torch.float8_e4m3fn)
    out = torch.zeros(2, 4, 3, 8, dtype=torch.bfloat16)
    descales: dict[str, Any] = {
        "q_descale": torch.ones(2, 4),
        "k_descale": torch.ones(2, 2),
        "v_descale": torch.ones(2, 2),
    }
    bound.forward(q, k, v, scale=1.0, out=out, **descales)
    args = bound.last()
    assert (args.dtype, args.out_dtype) == (3, 1)
    assert [args.q_descale, args.k_descale, args.v_descale] == [each.data_ptr() for each in descales.values()]
    with pytest.raises(ValueError, match="q is e4m3, so v_descale is needed"):
        bound.forward(q, k, v, scale=1.0, out=out, **{**descales, "v_descale": None})
    with pytest.raises(ValueError, match=r"k_descale is \[2, 4\]: axis 1 must be 2"):
        bound.forward(q, k, v, scale=1.0, out=out, **{**descales, "k_descale": torch.ones(2, 4)})
    with pytest.raises(TypeError) as error:
        bound.forward(q, k, v, scale=1.0, out=out.float(), **descales)
    assert snapshot == str(error.value)


def test_scores_have_a_column_for_each_key(bound: Bound) -> None:
    """The output of a kernel for scores is [batch, heads, seq_q, seq_k]."""
    q, k, v, _ = tensors()
    bound.scores(q, k, v, scale=1.0, out=torch.zeros(2, 4, 3, 5, dtype=torch.float16))
    assert (bound.last().out_stride.seq, bound.last().workspace_bytes) == (5, 3)
    with pytest.raises(ValueError, match=r"out is \[2, 4, 3, 8\]: axis 3 must be 5"):
        bound.scores(q, k, v, scale=1.0, out=torch.zeros(2, 4, 3, 8, dtype=torch.float16))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor of another kind": ({"k": None}, "k must be a tensor, got None"),
    "a number for a tensor": ({"v": 1.5}, "v must be a tensor, got float"),
    "a text for a number": ({"scale": "1"}, "scale must be a number, got "),
    "three dimensions": ({"q": torch.zeros(2, 4, 3)}, r"q must have 4 dimensions, got \[2, 4, 3\]"),
    "another shape": ({"v": torch.zeros(2, 2, 6, 8).half()}, r"v is \[2, 2, 6, 8\]: axis 2 must be 5"),
    "another dtype": (
        {"v": torch.zeros(2, 2, 5, 8)},
        "q is fp16 and v is fp32; q, k, v and out must have the same dtype",
    ),
    "no such dtype": (
        {"q": torch.zeros(2, 4, 3, 8).long()},
        "q must be fp16, bf16, fp32 or e4m3, got DLPack type code 0",
    ),
    "no such mask": ({"causal": "diagonal"}, "causal is -1, allowed are 0"),
    "heads that do not divide": (
        {"k": torch.zeros(2, 3, 5, 8).half(), "v": torch.zeros(2, 3, 5, 8).half()},
        "4 heads cannot share 3 key/value heads evenly",
    ),
    "an lse of another type": ({"lse": torch.zeros(2, 4, 3).half()}, "lse must be float32, got 16 bits"),
    "a cap of 0": ({"softcap": 0.0}, "softcap is 0; it must be above 0 and finite, or None for no soft cap"),
    "a negative cap": ({"softcap": -2}, "softcap is -2; it must be above 0"),
    "a cap that is NaN": ({"softcap": float("nan")}, "softcap is -?nan; it must be above 0"),
    "a cap that float32 cannot hold": ({"softcap": 1e39}, "softcap is inf; it must be above 0 and finite"),
    "half a key": ({"window_left": 0.5}, "window_left must be an integer, got float"),
    "a window and a mask": (
        {"window_left": 7, "causal": "bottom_right"},
        "causal is bottom_right beside a window; leave it out: window_right=0 hides the keys after a query",
    ),
    "another V than the output": ({"v": torch.zeros(2, 2, 5, 16).half()}, r"out is \[2, 4, 3, 8\]: axis 3 must be 16"),
    "a sink for each batch": ({"sink": torch.zeros(2, 4)}, r"sink must have 1 dimensions, got \[2, 4\]"),
    "a slope for each head of K": ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes is \[2\]: axis 0 must be 4"),
    "a sink in fp16": ({"sink": torch.zeros(4).half()}, "sink must be float32, got 16 bits"),
    "a bias in fp32": ({"attn_bias": torch.zeros(2, 4, 3, 5)}, "q is fp16 and attn_bias is fp32; it must be fp16"),
    "a bias of some keys": (
        {"attn_bias": torch.zeros(2, 4, 3, 4).half()},
        r"attn_bias is \[2, 4, 3, 4\]: axis 3 must be 5",
    ),
    "a mask of numbers": ({"attn_mask": torch.zeros(2, 4, 3, 5)}, "attn_mask must be bool, got DLPack type code 2"),
    "a mask that is not expanded": (
        {"attn_mask": torch.zeros(2, 1, 3, 5, dtype=torch.bool)},
        r"attn_mask is \[2, 1, 3, 5\]: axis 1 must be 4",
    ),
    "a word of no field": ({"page_table": torch.zeros(4)}, "the C interface has no page_table"),
    "a cache without scales": (int8_cache() | {"k_scale": None, "v_scale": None}, "k must be fp16, bf16, fp32 or e4m3"),
    "a cache without scales of v": (int8_cache() | {"v_scale": None}, "k_scale is given without v_scale"),
    "scales of fp16": ({"k_scale": torch.ones(1), "v_scale": torch.ones(1)}, "k has scales and must be e4m3 or int8"),
    "a cache beside fp32": (
        int8_cache() | dict.fromkeys(("q", "out"), torch.zeros(2, 4, 3, 8)),
        "q is fp32; it must be fp16 or bf16",
    ),
    "a cache of two dtypes": (
        int8_cache() | {"v": torch.zeros(2, 2, 5, 8).to(torch.float8_e4m3fn)},
        "k is int8 and v is e4m3; they must have the same dtype",
    ),
    "queries in int8": ({"q": torch.zeros(2, 4, 3, 8).char()}, "q must be fp16, bf16, fp32 or e4m3"),
    "scales in fp16": (int8_cache() | {"k_scale": torch.ones(2).half()}, "k_scale must be float32, got 16 bits"),
    "scales of query heads": (int8_cache() | {"v_scale": torch.ones(4)}, r"v_scale is \[4\]: axis 0 must be 2"),
    "scales of fewer keys": (int8_cache() | {"v_scale": torch.ones(2, 2, 4)}, r"v_scale is .*: axis 2 must be 5"),
    "scales of batches": (int8_cache() | {"k_scale": torch.ones(2, 2)}, "k_scale must have 3 dimensions, got"),
    "scales with gaps": (int8_cache() | {"k_scale": torch.ones(4)[::2]}, "k_scale must be contiguous"),
    "an lse with gaps": ({"lse": torch.zeros(2, 4, 6)[..., ::2]}, "lse must be contiguous"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_python_errors(bound: Bound, changed: dict[str, Any], message: str) -> None:
    """The error names the argument, its value and what is allowed."""
    q, k, v, out = tensors()
    arguments = {"q": q, "k": k, "v": v, "out": out, "scale": 1.0, **changed}
    with pytest.raises((TypeError, ValueError), match=message):
        bound.forward(**arguments)


def test_a_status_is_an_exception(bound: Bound, snapshot: SnapshotAssertion) -> None:
    """A refusal has the kernel's reason, and a failed launch the name of CUDA's error."""
    q, k, v, out = tensors()
    with pytest.raises(UnsupportedCase, match=r"^scale is -2$"):
        bound.forward(q, k, v, scale=-2.0, out=out)
    with pytest.raises(UnsupportedCase, match="the kernel gave no reason"):
        bound.forward(q, k, v, scale=-1.0, out=out)
    with pytest.raises(LaunchError) as error:
        bound.forward(q, k, v, scale=101.0, out=out)
    assert snapshot == str(error.value)
    bound.forward(q, k, v, scale=1.0, out=out)
