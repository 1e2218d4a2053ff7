"""Calling a build: arguments, streams, capture, the exported C symbol, errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import LaunchError, UnsupportedCase
from pytest_fa.features.sanitize.plain_call import PLAIN_SIZE, ForwardArgs, Strides
from pytest_fa.gpu.inputs import Inputs, make_inputs, poisoned_output
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import make_truth
from tests.device.conftest import BuildSource, Built

SHAPE = "b1h2s113d64-fp16-causal-sk203"
CASE = parse_case(f"{SHAPE}-seed0")
CAUSAL = ("none", "top_left", "bottom_right")  # in the order of the header's FA_CAUSAL_*

# The code paths of cluster_latency: one warpgroup of one block with one tile or two; one pass with and without a mask;
# rows that see no key; several passes.
CLUSTER_SHAPES = (
    "b1h2s64d64-fp16",
    "b1h2s100d64-fp16",
    "b1h2s128d64-fp16",
    "b1h2s200d64-fp16-causal_br-sk130",
    "b1h2s512d64-fp16",
    "b1h2s700d64-fp16-causal_br-sk512",
    "b1h2s600d64-fp16-causal_br-sk1100",
    "b1h2s64d64-fp16-sk0",
    "b1h2s64d64-fp16-sk256",
    "b1h2s64d128-fp16",
    "b1h2s1d128-fp16-sk60",
    "b1h4s77d128-fp16-kv2",
    "b1h2s100d128-fp16-causal",
    "b1h2s128d128-fp16",
    "b1h2s200d128-fp16-causal_br-sk250",
    "b1h2s512d128-fp16",
    "b1h2s600d128-fp16-causal_br-sk1100",
)


CALLS = [
    *((name, SHAPE) for name in ("minimal", "stage2", "ws_p1", "ws_p2")),
    *(("cluster_latency", shape) for shape in CLUSTER_SHAPES),
]


@pytest.mark.parametrize(("name", "shape"), CALLS)
def test_c_symbol_is_exported(build_rung: Callable[[str], Built], name: str, shape: str) -> None:
    """`fa_forward` can be called with ctypes only, without this package's loader, and its log-sum-exp is right."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cuda"))
    status, out, lse = _call_by_symbol(build_rung(name), inputs)
    assert (status, check_output(out, make_truth(inputs), "same_precision").passed) == (0, True)
    torch.testing.assert_close(lse.double(), _scores(inputs).logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "shape", ["b1h2s64d64-fp16", "b1h2s200d64-fp16", "b1h2s512d64-fp16", "b1h2s700d128-fp16-causal"]
)
def test_a_row_of_nan_has_a_log_sum_exp_of_nan(build_rung: Callable[[str], Built], shape: str) -> None:
    """For a query of NaN, log-sum-exp is NaN, not -inf as for a query without keys; other rows do not change."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cuda"))
    rung = build_rung("cluster_latency")
    _, *expected = _call_by_symbol(rung, inputs, 1.0)
    inputs.q[:, :, 5] = float("nan")
    for tensor in expected:
        tensor[:, :, 5] = float("nan")
    status, *out_and_lse = _call_by_symbol(rung, inputs, 1.0)
    assert status == 0
    torch.testing.assert_close(out_and_lse, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "blind"), [("b1h2s700d64-fp16-causal_br-sk512", 128), ("b1h2s300d128-fp16-causal_br-sk100", 192)]
)
def test_blocks_that_see_no_key_read_no_value(build_rung: Callable[[str], Built], shape: str, blind: int) -> None:
    """Blocks of queries that see no key give zero and -inf, even if V has a NaN."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cuda"))
    inputs.v[:, :, 0] = float("nan")
    status, out, lse = _call_by_symbol(build_rung("cluster_latency"), inputs, 1.0)
    assert (status, bool((out[:, :, :blind] == 0).all()), bool(lse[:, :, :blind].isneginf().all())) == (0, True, True)


def _call_by_symbol(
    rung: Built, inputs: Inputs, unwritten: float = float("nan")
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Call `fa_forward` with ctypes; returns its status, the output and the log-sum-exp, [batch, heads, seq_q].

    Both tensors are filled with `unwritten` before the call.
    """
    out = poisoned_output(inputs).fill_(unwritten)
    lse = torch.full(out.shape[:3], unwritten, device="cuda")
    load_forward(*rung)  # loads tvm-ffi's library, which the build needs
    args = ForwardArgs(abi_version=1, struct_size=ctypes.sizeof(ForwardArgs), scale=inputs.scale, dtype=0)
    args.causal = CAUSAL.index(inputs.causal)
    for field, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("out", out)):
        setattr(args, field, tensor.data_ptr())
        setattr(args, f"{field}_stride", Strides(*tensor.stride()))
    args.lse = lse.data_ptr()
    args.batch, args.heads, args.seq_q, args.head_dim = inputs.q.shape
    args.kv_heads, args.seq_k = inputs.k.shape[1:3]
    status = ctypes.CDLL(rung[1]).fa_forward(ctypes.byref(args), ctypes.c_void_p(0))
    torch.cuda.synchronize()
    return status, out, lse


def _scores(inputs: Inputs) -> torch.Tensor:
    """The scores, [batch, heads, seq_q, seq_k] float64, with -inf where a query does not see a key."""
    k = inputs.k.double().repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], dim=1)
    scores = inputs.q.double() @ k.transpose(2, 3) * inputs.scale
    if inputs.causal == "none":
        return scores
    diagonal = 1 + (inputs.k.shape[2] - inputs.q.shape[2] if inputs.causal == "bottom_right" else 0)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(diagonal), float("-inf"))


def test_other_abi_is_refused(minimal: Built) -> None:
    """A caller whose struct has another version or size is refused before any other field is read."""
    load_forward(*minimal)
    message = ctypes.create_string_buffer(200)
    args = ForwardArgs(abi_version=99, struct_size=8, message=ctypes.addressof(message), message_bytes=200)
    status = ctypes.CDLL(minimal[1]).fa_forward(ctypes.byref(args), ctypes.c_void_p(0))
    assert (status, message.value.decode()) == (
        -1,
        f"the caller's ABI is version 99 with 8 bytes, this kernel's is 1 with {PLAIN_SIZE} or more",
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a: {**a, "k": a["k"].cpu()}, ValueError, "k must be a CUDA tensor"),
        (
            lambda a: {**a, "k": a["k"].bfloat16()},
            TypeError,
            "q is fp16 and k is bf16; q, k, v and out must",
        ),
        (
            lambda a: {**a, "q": a["q"].float()},
            TypeError,
            "q is fp32 and k is fp16; q, k, v and out must",
        ),
        (
            lambda a: {**a, "out": a["out"].double()},
            TypeError,
            "out must be fp16, bf16, fp32 or e4m3, got DLPack type",
        ),
        (lambda a: {**a, "v": a["v"][:, :, :-1]}, ValueError, "axis 2 must be 203"),
        (lambda a: {**a, "q": a["q"][0]}, ValueError, "q must have 4 dimensions, got [2, 113, 64]"),
        (lambda a: {**a, "out": a["out"][:, :, :, :32]}, ValueError, "axis 3 must be 64"),
        (lambda a: {name: tensor[:0] for name, tensor in a.items()}, ValueError, "every axis must be at least 1"),
    ],
    ids=["device", "other_dtype", "float32", "float64", "keys", "dimensions", "head_dim", "empty"],
)
def test_wrong_arguments_are_named(minimal: Built, change, error: type[Exception], words: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """For a tensor of the wrong device, dtype or shape, the exception names the tensor, and nothing is launched."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    forward = load_forward(*minimal)
    tensors = change({"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": poisoned_output(inputs)})
    with pytest.raises(error) as raised:
        forward(**tensors, scale=0.125, causal="none")
    assert words in str(raised.value)


def test_current_stream_is_used(minimal: Built) -> None:
    """A call on a side stream runs on that stream, after its earlier work."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    forward, side = load_forward(*minimal), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    q, out = torch.zeros_like(inputs.q), poisoned_output(inputs)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        q.copy_(inputs.q)
        forward(q, inputs.k, inputs.v, scale=inputs.scale, causal=inputs.causal, out=out)
    side.synchronize()
    assert check_output(out, make_truth(inputs), "same_precision").passed


def test_out_is_optional(minimal: Built) -> None:
    """Without `out`, the call allocates an output and returns it."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    out = load_forward(*minimal)(inputs.q, inputs.k, inputs.v, scale=inputs.scale, causal=inputs.causal)
    assert check_output(out, make_truth(inputs), "same_precision").passed


REFUSES = """
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t) { return fa_refuse(args, "not on a %s", "Friday"); }
"""

BIG_BLOCK = """
__global__ void kernel() {}
FA_EXPORT int fa_forward(const FaForwardArgs*, cudaStream_t stream) {
  kernel<<<1, 2048, 0, stream>>>();
  return static_cast<int>(cudaGetLastError());
}
"""

BIG_SMEM = """
__global__ void kernel() {}
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  if (int status = fa_allow_dynamic_smem(args, reinterpret_cast<const void*>(&kernel), 300 * 1024)) return status;
  kernel<<<1, 32, 300 * 1024, stream>>>();
  return static_cast<int>(cudaPeekAtLastError());
}
"""


@pytest.mark.parametrize(
    ("name", "source", "error", "words"),
    [
        ("refuses", REFUSES, UnsupportedCase, "not on a Friday"),
        ("big_block", BIG_BLOCK, LaunchError, "launch failed: cudaErrorInvalidValue"),
        ("big_smem", BIG_SMEM, UnsupportedCase, "needs 307200 bytes of shared memory per block, this GPU allows"),
    ],
    ids=["refuses", "big_block", "big_smem"],
)
def test_status_becomes_an_exception(
    build_source: BuildSource, name: str, source: str, error: type[Exception], words: str
) -> None:
    """A refusal, a rejected launch and too much shared memory each raise their exception with the figures."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    forward = load_forward(*build_source(name, source))
    with pytest.raises(error) as raised:
        forward(inputs.q, inputs.k, inputs.v, scale=inputs.scale)
    assert words in str(raised.value)


SOMETIMES = """
__global__ void kernel(unsigned short* out) { out[threadIdx.x] = 0x3C00; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  kernel<<<1, args->scale < 0 ? 2048 : 32, 0, stream>>>(static_cast<unsigned short*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""


def test_failed_launch_does_not_fail_the_next(build_source: BuildSource) -> None:
    """After a launch that the driver rejected, a valid launch of the same build in the same process succeeds."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    forward = load_forward(*build_source("sometimes", SOMETIMES))
    with pytest.raises(LaunchError):
        forward(inputs.q, inputs.k, inputs.v, scale=-1.0)
    assert float(forward(inputs.q, inputs.k, inputs.v, scale=1.0).flatten()[0]) == 1.0


WORKSPACE = """
__global__ void kernel(char* workspace, uint64_t bytes, unsigned short* out) {
  workspace[bytes - 1] = 1;
  if (threadIdx.x == 0) out[0] = bytes == 12345 ? 0x3C00 : 0;
}
FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) { return args->seq_q == 113 ? 12345 : 1; }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  kernel<<<1, 32, 0, stream>>>(static_cast<char*>(args->workspace), args->workspace_bytes,
                               static_cast<unsigned short*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""


def test_workspace_has_the_requested_size(build_source: BuildSource) -> None:
    """A kernel gets a workspace of the size that `fa_workspace_bytes` returns for the call's arguments."""
    inputs = make_inputs(CASE, torch.device("cuda"))
    out = load_forward(*build_source("workspace", WORKSPACE))(inputs.q, inputs.k, inputs.v, scale=1.0)
    assert float(out.flatten()[0]) == 1.0
