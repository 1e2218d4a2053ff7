"""The smallest backward kernel behind its binding, emulated on the CPU, with each part of attention that it claims."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_fa.attention.lse import PART as LSE
from pytest_fa.attention.softcap import LARGE_CAP, LARGE_SCALE
from pytest_fa.candidate.cuda_backward import CudaBackward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.errors import UnsupportedCase
from pytest_fa.features.sanitize import plain_call
from pytest_fa.features.sanitize.plain_call import PlainResult
from pytest_fa.gpu.inputs import Inputs, clone, is_poison, make_inputs, poison
from pytest_fa.judge.changed_inputs import require_only_written
from pytest_fa.judge.gradients import Upstream, check_gradients, make_gradients
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth import make_truth
from pytest_fa.records.outcome import Outcome
from tests.emulator.conftest import KERNELS
from tests.emulator.emulated import NAN_BYTE, Emulator

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

SHAPES = (
    "b2h4s70d64-fp16-kv2",
    "b1h2s70d64-bf16-causal-sk100",
    "b1h2s1d64-fp16",
    "b1h2s70d64-fp16-causal_br-sk30",  # the first queries see no key
    "b1h2s70d64-fp16-win0_0",  # a side of 0 is not an open one
    "b2h4s70d64-bf16-win9_21-kv2-sk100-bshd",
    "b1h2s70d64-fp16-winm8_57-sk100",  # the last queries see no key
    "b1h2s70d64-fp16-wino_5-sk100",
    "b1h2s5d64-fp16-sk0",
    "b1h2s70d64-fp16-cap2",
    f"b1h2s70d64-fp16-causal-scale{LARGE_SCALE:g}-cap{LARGE_CAP:g}",
    "b2h4s70d64-fp16-win37_0-kv2-scalem0p7-cap2p5",
    "b2h4s70d64-fp16-causal_br-kv2-sk30-sink",  # the first queries see nothing but the sink, which one head lacks
    "b1h3s40d64-bf16-sk50-alibi",
    "b2h2s33d64-fp16-sk50-bias",
    "b2h2s33d64-fp16-sk50-cap2-biashq-bshd",
    "b2h2s70d64-fp16-sk100-dv200-mask-bshd",  # the last two blocks of columns overlap
    "b4h4s70d64-fp16-causal_br-kv2-sk77-var2",
    "b4h2s70d64-bf16-win37_0-var3-alibi",
    "b9h2s40d64-fp16-var1",
    "b2h6s77d64-fp16-win37_9-kv2-sk150-cap2-biashq-sink",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> str:
    """The library of the kernel and its binding."""
    emulator = Emulator(tmp_path_factory.mktemp("emulator"), shared_cache)
    variant = discover((KERNELS,)).variants["backward_minimal"]
    library = str(emulator.bound(variant, tmp_path_factory.mktemp("backward")))
    ctypes.CDLL(library).emulator_set(ctypes.c_uint64(0), 2, 8, ctypes.c_double(0.5))
    return library


@pytest.fixture(scope="module")
def kernel(library: str) -> CudaBackward:
    """The kernel as Python calls it; its workspace is full of NaN."""
    return CudaBackward(library, lambda size, _: torch.full((size,), NAN_BYTE, dtype=torch.uint8))


def upstream_of(inputs: Inputs, *, has_dlse: bool) -> Upstream:
    """The output, rounded, and random gradients of it and of the log-sum-exp, in the layout of q."""
    generator = torch.Generator().manual_seed(17)
    exact = make_truth(inputs).out
    out = like(inputs.q, exact.shape).copy_(exact)
    dout = like(inputs.q, exact.shape).copy_(torch.randn(exact.shape, generator=generator))
    return Upstream(out, dout, torch.randn(out.shape[:3], generator=generator) if has_dlse else None)


def like(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of poison in the dtype and the layout of another one."""
    batch, heads, length, dim = shape
    if tensor.is_contiguous():
        return poison(tensor.new_empty(shape))
    return poison(tensor.new_empty(batch, length, heads, dim)).transpose(1, 2)


def gradients_of(kernel: CudaBackward, inputs: Inputs, upstream: Upstream) -> dict[str, torch.Tensor]:
    """The gradients that a call writes into poisoned buffers."""
    lse = make_row_truth(LSE, inputs).exact.float()
    found = {f"d{name}": like(inputs.q, getattr(inputs, name).shape) for name in "qkv"}
    before = clone(inputs)
    words: dict[str, Any] = {**inputs.keywords, "dout": upstream.dout, "forward_out": upstream.out, "forward_lse": lse}
    written = {"out": found["dq"], "dk": found["dk"], "dv": found["dv"]}
    assert kernel(inputs.q, inputs.k, inputs.v, **words, **written, dlse=upstream.dlse) is found["dq"]
    require_only_written(before, inputs)
    return found


def broken_bounds(inputs: Inputs, upstream: Upstream, found: dict[str, torch.Tensor]) -> list[str]:
    """The bounds that gradients do not hold, with the names of the gradients."""
    truths = {name: truth for name, truth in make_gradients(inputs, upstream).items() if name in found}
    checks = check_gradients(found, truths)
    assert checks
    bounds = [(name, bound) for name, check in checks.items() for bound in check.bounds]
    return [f"{name}: {bound.name}" for name, bound in bounds if bound.enforced and not bound.holds]


@pytest.mark.parametrize(
    ("shape", "has_dlse"), [*((shape, True) for shape in SHAPES), *((shape, False) for shape in SHAPES[:4])]
)
def test_it_is_right(kernel: CudaBackward, shape: str, *, has_dlse: bool) -> None:
    """Each gradient is, also of rows that see nothing, with a gradient of the log-sum-exp and without."""
    inputs = make_inputs(parse_case(f"{shape}-seed0"), torch.device("cpu"))
    upstream = upstream_of(inputs, has_dlse=has_dlse)
    assert broken_bounds(inputs, upstream, gradients_of(kernel, inputs, upstream)) == []


def test_padding_is_neither_read_nor_written(kernel: CudaBackward) -> None:
    """Rows behind the lengths of a sequence hold NaN, and keep it; all others are written."""
    inputs = make_inputs(parse_case("b4h4s70d64-fp16-kv2-sk77-var2-seed0"), torch.device("cpu"))
    behind_q, behind_k = (
        torch.arange(length)[:, None] >= inputs.word(word).reshape(-1, 1, 1, 1)
        for word, length in (("seqlens_q", 70), ("seqlens_k", 77))
    )
    assert behind_q.any()
    assert behind_k.any()
    out, dout, dlse = upstream_of(inputs, has_dlse=True)
    assert dlse is not None
    dlse = dlse.masked_fill(behind_q[..., 0], math.nan)
    upstream = Upstream(out.masked_fill(behind_q, math.nan), dout.masked_fill(behind_q, math.nan), dlse)
    found = gradients_of(kernel, inputs, upstream)
    assert broken_bounds(inputs, upstream, found) == []
    for name, behind in (("dq", behind_q), ("dk", behind_k), ("dv", behind_k)):
        assert torch.equal(is_poison(found[name]), behind.expand(found[name].shape))


def test_a_row_that_sees_nothing_has_no_gradient(kernel: CudaBackward) -> None:
    """Its log-sum-exp is -inf, and dq is zero whatever comes back."""
    inputs = make_inputs(parse_case("b1h2s70d64-fp16-causal_br-sk30-seed0"), torch.device("cpu"))
    assert make_row_truth(LSE, inputs).exact[0, 0, 0] == -math.inf
    found = gradients_of(kernel, inputs, upstream_of(inputs, has_dlse=True))
    assert not found["dq"][:, :, :40].any()


class Host:
    """Memory of the host in the place of `CudaDriver`'s."""

    def __init__(self) -> None:
        self._memory: list[ctypes.Array[ctypes.c_char]] = []

    def allocate(self, size_bytes: int) -> int:
        """The address of so many bytes of NaN."""
        return self.upload(bytes([NAN_BYTE]) * size_bytes)

    def upload(self, content: bytes) -> int:
        """The address of a copy."""
        self._memory.append(ctypes.create_string_buffer(content, len(content)))
        return ctypes.addressof(self._memory[-1])

    def download(self, address: int, size_bytes: int) -> bytes:
        """What lies at an address."""
        return ctypes.string_at(address, size_bytes)

    def synchronize(self) -> None:
        """An emulated kernel has ended when its launch returns."""


@pytest.mark.parametrize("shape", ["b2h4s33d64-fp16-causal-kv2-sk50-dv72-sink", "b1h2s33d64-bf16-cap2-biashq-bshd"])
def test_a_call_without_torch_has_all_arguments(library: str, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """As for compute-sanitizer: the kernel reads nothing but numbers, and writes every element of each gradient."""
    monkeypatch.setattr(plain_call, "CudaDriver", Host)
    result = plain_call.call(parse_case(f"{shape}-seed0").computing("gradients"), library)
    assert result == PlainResult(Outcome.OK, "", 0)


def test_other_calls_are_refused(kernel: CudaBackward) -> None:
    """The reason names what the kernel lacks."""
    inputs = make_inputs(parse_case("b1h2s7d128-fp16-seed0"), torch.device("cpu"))
    with pytest.raises(UnsupportedCase, match="no instantiation for dtype 0 with head_dim 128"):
        gradients_of(kernel, inputs, upstream_of(inputs, has_dlse=False))
