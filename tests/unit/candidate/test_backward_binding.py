"""The binding of gradients, compiled for tensors on the CPU: what reaches a kernel, and errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from pytest_fa.build.keys import PACKAGE
from pytest_fa.candidate.cuda_backward import CudaBackward
from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.discover import discover
from pytest_fa.errors import LaunchError, UnsupportedCase
from pytest_fa.features.sanitize.plain_call import BackwardArgs, ForwardArgs

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

BUILTIN = PACKAGE / "builtin"
Q, K, V, OUT = (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 24), (2, 4, 3, 24)
SHAPES = {"q": Q, "k": K, "v": V, "out": Q, "dk": K, "dv": V, "dout": OUT, "forward_out": OUT}
FIELDS = {"dq": "out", "dk": "dk", "dv": "dv", "dout": "dout"}  # of the struct, each with its word
HEAD_DIM_V = 128  # the bit
K_NEW, V_NEW = torch.zeros(2, 2, 3, 8).half(), torch.zeros(2, 2, 3, 24).half()


class Bound(NamedTuple):
    """The library as a callable, and the arguments that its kernel got last."""

    backward: CudaBackward
    last: Callable[[], BackwardArgs]
    last_forward: Callable[[], ForwardArgs]


@pytest.fixture(scope="module")
def bound(bound_library: str) -> Bound:
    """The binding with a kernel that keeps its arguments."""
    backward = CudaBackward(bound_library, lambda size, _: torch.zeros(size, dtype=torch.uint8))
    plain = ctypes.CDLL(bound_library)
    plain.last_args.restype = ctypes.POINTER(ForwardArgs)
    plain.last_backward_args.restype = ctypes.POINTER(BackwardArgs)
    return Bound(backward, lambda: plain.last_backward_args().contents, lambda: plain.last_args().contents)


def call(dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """A call with 4 heads and 3 queries, 2 heads and 5 keys, a batch of 2, and V with another head_dim."""
    dense = {word: torch.zeros(shape, dtype=dtype) for word, shape in SHAPES.items()}
    return {**dense, "forward_lse": torch.zeros(Q[:3]), "scale": 0.5}


def bshd(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in the layout bshd, which does not begin where its memory does."""
    batch, heads, length, dim = shape
    return torch.zeros(batch, length + 1, heads, dim).half()[:, 1:].transpose(1, 2)


@pytest.mark.parametrize("make", [lambda shape: torch.zeros(shape).half(), bshd], ids=["bhsd", "bshd"])
def test_a_kernel_gets_addresses_and_strides(bound: Bound, make: Callable[[tuple[int, ...]], torch.Tensor]) -> None:
    """Of the gradients, and of what the forward pass has read and written."""
    words = {**call(), **{word: make(shape) for word, shape in SHAPES.items()}, "dlse": torch.zeros(Q[:3])}
    assert bound.backward(**words, causal="bottom_right") is words["out"]
    args, forward = bound.last(), bound.last_forward()
    assert args.struct_size == ctypes.sizeof(BackwardArgs)
    assert args.dlse == words["dlse"].data_ptr()
    for name, word in FIELDS.items():
        assert getattr(args, name) == words[word].data_ptr()
        strides = getattr(args, f"{name}_stride")
        assert (strides.batch, strides.head, strides.seq, strides.dim) == words[word].stride()
    assert [forward.q, forward.k, forward.v] == [words[word].data_ptr() for word in "qkv"]
    assert [forward.out, forward.lse] == [words[word].data_ptr() for word in ("forward_out", "forward_lse")]
    assert (forward.dtype, forward.causal, forward.scale) == (0, 2, 0.5)
    assert (forward.features, forward.head_dim, forward.head_dim_v) == (HEAD_DIM_V, 8, 24)


def test_the_workspace_is_that_of_the_backward_call(bound: Bound) -> None:
    """A kernel is asked for its size, and gets it; nothing is launched before."""
    words = call()
    assert bound.backward.workspace_bytes(**words) == 6
    assert bound.backward.workspace_bytes(**{word: words[word] for word in words.keys() - {"dk", "dv"}}) == 6
    assert bound.backward(**{**words, "out": None}).shape == Q
    assert (bound.last_forward().workspace_bytes, bool(bound.last_forward().workspace)) == (6, True)
    assert bound.last().dlse is None


def test_a_feature_has_its_bit(bound: Bound) -> None:
    """The words of a forward call are those of a backward call."""
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    bound.backward(**call(), window_left=0, softcap=50.0, sink=torch.zeros(4), seqlens_k=lengths)
    forward = bound.last_forward()
    assert (forward.features, forward.window_left, forward.softcap) == (1 | 2 | 8 | HEAD_DIM_V | 512, 0, 50.0)
    assert forward.seqlens_k == lengths.data_ptr()


@pytest.mark.parametrize("own", [(2, 4, 3, 5), (1, 4, 1, 5), (1, 1, 1, 5)], ids=["whole", "of heads", "of keys"])
def test_gradients_of_a_bias_and_a_sink(bound: Bound, own: tuple[int, ...]) -> None:
    """That of the bias has a stride of 0 along each axis along which the bias is the same; without buffers, none."""
    words = {"attn_bias": torch.zeros(own).half().expand(2, 4, 3, 5), "sink": torch.zeros(4)}
    bound.backward(**call(), **words)
    assert (bound.last().dbias, bound.last().dsink) == (None, None)
    dbias, dsink = torch.zeros(own).half(), torch.zeros(4)
    bound.backward(**call(), **words, dbias=dbias, dsink=dsink)
    args, of_bias = bound.last(), bound.last_forward().bias_stride
    strides = (args.dbias_stride.batch, args.dbias_stride.head, args.dbias_stride.seq, args.dbias_stride.dim)
    assert (args.dbias, args.dsink) == (dbias.data_ptr(), dsink.data_ptr())
    assert strides == tuple(0 if size == 1 else step for size, step in zip(own, dbias.stride(), strict=True))
    assert strides == (of_bias.batch, of_bias.head, of_bias.seq, of_bias.dim)


def test_sequences_behind_one_another_have_no_stride_of_a_batch(bound: Bound) -> None:
    """Neither have their gradients."""
    words = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in call().items()}
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 3]).int(), "cu_seqlens_k": torch.tensor([0, 2, 5]).int()}
    bound.backward(**words, **starts, max_seqlen_q=2, max_seqlen_k=3)
    args = bound.last()
    assert [getattr(args, f"{name}_stride").batch for name in FIELDS] == [0, 0, 0, 0]
    assert (bound.last_forward().batch, bound.last_forward().rows_q) == (2, 3)


def test_an_empty_kernel_stands_beside_backward_kernels(bound: Bound, bound_library: str) -> None:
    """A kernel of a forward pass gets what its interface has, and the tensor that a backward kernel would write."""
    noop = discover((BUILTIN,)).variants["noop"]
    launched = load_forward(noop, bound_library, lambda size, _: torch.zeros(size, dtype=torch.uint8), "gradients")
    words = {**call(), "dlse": torch.zeros(Q[:3]), "sink": torch.zeros(4)}
    assert launched(**words) is words["out"]
    assert (bound.last_forward().out, bound.last_forward().lse) == (words["forward_out"].data_ptr(), None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a gradient of another shape": ({"dk": torch.zeros(2, 4, 5, 8).half()}, r"dk is \[2, 4, 5, 8\]: axis 1 must be 2"),
    "a dq like out": ({"out": torch.zeros(OUT).half()}, r"dq is \[2, 4, 3, 24\]: axis 3 must be 8"),
    "a dout like q": ({"dout": torch.zeros(Q).half()}, r"dout is \[2, 4, 3, 8\]: axis 3 must be 24"),
    "gradients in fp32": ({"dv": torch.zeros(V)}, "q is fp16 and dv is fp32; gradients have the dtype of q"),
    "no dout": ({"dout": None}, "dout must be a tensor, got None"),
    "an lse of another type": ({"forward_lse": torch.zeros(Q[:3]).half()}, "lse must be float32, got 16 bits"),
    "a dbias without a bias": ({"dbias": torch.zeros(2, 4, 3, 5).half()}, "dbias is passed, but no attn_bias"),
    "a dbias with axes that the bias lacks": (
        {"attn_bias": torch.zeros(5).half().expand(2, 4, 3, 5), "dbias": torch.zeros(2, 4, 3, 5).half()},
        r"dbias is \[2, 4, 3, 5\]: axis 0 must be 1, as attn_bias has one element there",
    ),
    "a dbias in fp32": (
        {"attn_bias": torch.zeros(2, 4, 3, 5).half(), "dbias": torch.zeros(2, 4, 3, 5)},
        "q is fp16 and dbias is fp32; gradients have the dtype of q",
    ),
    "a dsink without a sink": ({"dsink": torch.zeros(4)}, "dsink is passed, but no sink"),
    "a dsink of another type": ({"sink": torch.zeros(4), "dsink": torch.zeros(4).half()}, "dsink must be float32"),
    "a dlse with gaps": ({"dlse": torch.zeros(2, 4, 6)[..., ::2]}, "dlse must be contiguous"),
    "no such mask": ({"causal": "diagonal"}, "causal is -1, allowed are 0"),
    "a word of no field": ({"page_table": torch.zeros(4)}, "the C interface has no page_table"),
    "new keys": (
        {
            "seqlens_k": torch.zeros(2).int(),
            "k_new": torch.zeros(2, 2, 3, 8).half(),
            "v_new": torch.zeros(2, 2, 3, 24).half(),
        },
        "a backward call has no cache: leave out block_table",
    ),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_python_errors(bound: Bound, changed: dict[str, Any], message: str) -> None:
    """The error names the argument, its value and what is allowed."""
    with pytest.raises((TypeError, ValueError), match=message):
        bound.backward(**{**call(), **changed})


def test_numbers_of_8_bits_have_no_gradients(bound: Bound) -> None:
    """The binding names the dtypes that have."""
    words = call(torch.float8_e4m3fn) | {"forward_out": torch.zeros(OUT).half()}
    with pytest.raises(TypeError, match="q is e4m3; gradients are of tensors in fp16, bf16 or fp32"):
        bound.backward(**words)


def test_a_status_is_an_exception(bound: Bound) -> None:
    """A refusal has the kernel's reason, and a failed launch the name of CUDA's error."""
    with pytest.raises(UnsupportedCase, match=r"^scale is -2$"):
        bound.backward(**{**call(), "scale": -2.0})
    with pytest.raises(LaunchError, match="launch failed: cudaErrorOfTheTest: the test asked for it"):
        bound.backward(**{**call(), "scale": 101.0})
