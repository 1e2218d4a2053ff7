"""The tensors of a case: zero-mean random inputs from its seed, in its layout, and an output filled with NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pytest_fa.catalog.case import Case, Computes

TORCH_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# The input in which the output is linear: negating it negates the output, and a NaN in it reaches the output.
LINEAR_IN: dict[Computes, str] = {"attention": "v", "scores": "k"}

# The bits of the NaN with which an output is filled before a call.  It is a signalling NaN: arithmetic makes every NaN
# quiet, so that no kernel computes these bits, and an element that still has them was never written.
_POISON_BITS = {torch.float16: 0x7D9B, torch.bfloat16: 0x7F9B, torch.float32: 0x7F9B7F9B}
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by element size in bytes


class Inputs(NamedTuple):
    """The arguments of one call.  The order of the dimensions is the same for every layout in memory."""

    q: torch.Tensor  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    scale: float
    causal: str  # none | top_left | bottom_right


class Output(NamedTuple):
    """What one call writes.  `lse` is None for a variant that returns no log-sum-exp."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim or seq_k]
    lse: torch.Tensor | None = None  # [batch, heads, seq_q] float32

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that there are."""
        return (self.out,) if self.lse is None else (self.out, self.lse)

    def clone(self) -> Output:
        """A private copy."""
        return Output(*(tensor.clone() for tensor in self.tensors))

    def of_heads(self, heads: list[int]) -> Output:
        """The part of some heads."""
        return Output(*(tensor[:, heads] for tensor in self.tensors))

    def poison(self) -> Output:
        """The same tensors, full of NaN."""
        return Output(*(poison(tensor) for tensor in self.tensors))

    def differs(self, other: Output) -> int:
        """The number of elements whose bits differ from those of another output."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return sum(int((bits_of(own) != bits_of(theirs)).sum()) for own, theirs in pairs)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """N(0, 1) data from the case's seed.  It is drawn on the CPU, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)
    query_shape = (case.batch, case.heads, case.seq_q, case.head_dim)
    key_shape = (case.batch, case.kv_heads, case.seq_k, case.head_dim)
    q, k, v = (_draw(shape, case, generator, device) for shape in (query_shape, key_shape, key_shape))
    return Inputs(q, k, v, case.scale, case.causal)


def clone(inputs: Inputs) -> Inputs:
    """The same data at other addresses, with the same strides."""
    q, k, v = (tensor.clone(memory_format=torch.preserve_format) for tensor in inputs[:3])
    return Inputs(q, k, v, inputs.scale, inputs.causal)


def empty_output(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    computes: Computes,
) -> torch.Tensor:
    """An uninitialized output: q's shape and strides for attention; dense [batch, heads, seq_q, seq_k] for scores."""
    return q.new_empty((*q.shape[:3], k.shape[2])) if computes == "scores" else torch.empty_like(q)


def poisoned_output(inputs: Inputs, computes: Computes = "attention") -> torch.Tensor:
    """An output filled with NaN, so that an element that a kernel does not write is found."""
    return poison(empty_output(inputs.q, inputs.k, computes))


def poisoned_lse(inputs: Inputs) -> torch.Tensor:
    """A log-sum-exp, [batch, heads, seq_q] float32, filled with NaN."""
    return poison(inputs.q.new_empty(inputs.q.shape[:3], dtype=torch.float32))


def poison(out: torch.Tensor) -> torch.Tensor:
    """Fill an output with a NaN that no arithmetic gives, and return it."""
    if out.dtype not in _POISON_BITS:  # a result that is refused for its dtype
        return out.fill_(float("nan"))
    bits_of(out).fill_(_POISON_BITS[out.dtype])
    return out


def is_poison(out: torch.Tensor) -> torch.Tensor:
    """Where an output still has the bits of `poison`, so that the kernel never wrote there."""
    if out.dtype not in _POISON_BITS:
        return out.isnan()
    return bits_of(out) == _POISON_BITS[out.dtype]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer of its size: a view of the same shape, in which NaN equals itself."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _draw(
    shape: tuple[int, int, int, int], case: Case, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    data = torch.randn(shape, generator=generator, dtype=torch.float32).to(TORCH_DTYPES[case.dtype])
    if case.layout == "bshd":
        data = data.transpose(1, 2).contiguous().transpose(1, 2)  # [b, h, s, d], stored as [b, s, h, d]
    return data.to(device)
