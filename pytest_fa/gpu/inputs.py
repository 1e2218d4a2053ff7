"""The tensors of a case: zero-mean random inputs from its seed, in its layout, and an output filled with NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch

from pytest_fa.catalog.case import Case, Computes
from pytest_fa.gpu.quantised import E4M3, Descales, dequantised, quantise, with_special_heads

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e4m3": E4M3,
}
# The input in which the output is linear: negating it negates the output, and a NaN in it reaches the output.
LINEAR_IN: dict[Computes, str] = {"attention": "v", "scores": "k"}

# The bits of the NaN with which an output is filled before a call.  It is a signalling NaN: arithmetic makes every NaN
# quiet, so that no kernel computes these bits, and an element that still has them was never written.
_POISON_BITS = {torch.float16: 0x7D9B, torch.bfloat16: 0x7F9B, torch.float32: 0x7F9B7F9B}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by element size in bytes


class Arguments(NamedTuple):
    """The five arguments that every call has."""

    q: torch.Tensor  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor  # [batch, kv_heads, seq_k, head_dim]
    scale: float
    causal: str  # none | top_left | bottom_right


class Inputs(Arguments):  # what only e4m3 has are attributes
    """The arguments of one call.  The order of the dimensions is the same for every layout in memory.

    Only e4m3 tensors have `descales`.  `out_dtype` is the output's dtype where it is not that of q.  As a tuple, the
    inputs are `q, k, v, scale, causal`.
    """

    descales: Descales | None
    out_dtype: torch.dtype | None

    def __new__(  # noqa: D102
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        causal: str,
        descales: Descales | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Self:
        inputs = super().__new__(cls, q, k, v, scale, causal)
        inputs.descales, inputs.out_dtype = descales, out_dtype
        return inputs

    def _replace(self, **changes: Any) -> Inputs:  # noqa: ANN401  # also of the attributes
        fields = {**self._asdict(), "descales": self.descales, "out_dtype": self.out_dtype}
        return Inputs(**{**fields, **changes})

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.out_dtype or self.q.dtype

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a call, without the output."""
        keywords: dict[str, Any] = {"scale": self.scale, "causal": self.causal}
        return keywords | descale_keywords(self.descales)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by name: q, k and v, and the descales if there are some."""
        return {"q": self.q, "k": self.k, "v": self.v, **descale_keywords(self.descales)}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same call with `function` of q, k and v; the descales stay."""
        return self._replace(q=function(self.q), k=function(self.k), v=function(self.v))

    def exact(self) -> Inputs:
        """The call with the values that q, k and v stand for: e4m3 tensors times their descales, in float64."""
        if self.descales is None or self.q.dtype != E4M3:
            return self
        q, k, v = (dequantised(tensor, descale) for tensor, descale in zip(self[:3], self.descales, strict=True))
        return self._replace(q=q, k=k, v=v)

    def quantised(self) -> Inputs:
        """The call with these values rounded to e4m3, with descales of their own."""
        (q, of_q), (k, of_k), (v, of_v) = (quantise(tensor) for tensor in self[:3])
        return self._replace(q=q, k=k, v=v, descales=Descales(of_q, of_k, of_v))


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
    q, k, v = (_draw(shape, case, generator) for shape in (query_shape, key_shape, key_shape))
    if case.dtype != "e4m3":
        return Inputs(q, k, v, case.scale, case.causal).map(lambda tensor: tensor.to(device))
    q, k, v = with_special_heads(q, k, v, case.data)
    quantised = Inputs(q, k, v, case.scale, case.causal, None, TORCH_DTYPES[case.out_dtype]).quantised()
    placed = quantised.map(lambda tensor: _in_layout(tensor, case).to(device))
    return placed._replace(descales=quantised.descales and quantised.descales.map(lambda descale: descale.to(device)))


def clone(inputs: Inputs) -> Inputs:
    """The same data at other addresses, with the same strides."""
    descales = inputs.descales and inputs.descales.map(torch.clone)
    cloned = inputs.map(lambda tensor: tensor.clone(memory_format=torch.preserve_format))
    return cloned._replace(descales=descales)


def descale_keywords(descales: Descales | None) -> dict[str, torch.Tensor]:
    """The keyword arguments for descales; none if there are none."""
    return {} if descales is None else dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))


def empty_output(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    computes: Computes,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An uninitialized output: q's shape and strides for attention; dense [batch, heads, seq_q, seq_k] for scores.

    Without `dtype`, it has q's, or fp16 for e4m3.
    """
    dtype = dtype or (torch.float16 if q.dtype == E4M3 else q.dtype)
    if computes == "scores":
        return q.new_empty((*q.shape[:3], k.shape[2]), dtype=dtype)
    return torch.empty_like(q, dtype=dtype)


def poisoned_output(inputs: Inputs, computes: Computes = "attention") -> torch.Tensor:
    """An output filled with NaN, so that an element that a kernel does not write is found."""
    return poison(empty_output(inputs.q, inputs.k, computes, inputs.output_dtype))


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


def _draw(shape: tuple[int, int, int, int], case: Case, generator: torch.Generator) -> torch.Tensor:
    """N(0, 1) in the case's dtype and layout; for e4m3, which the caller quantises, in float32."""
    data = torch.randn(shape, generator=generator, dtype=torch.float32)
    return data if case.dtype == "e4m3" else _in_layout(data.to(TORCH_DTYPES[case.dtype]), case)


def _in_layout(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    """The tensor, [batch, heads, seq, head_dim], stored in the order of the case's layout."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if case.layout == "bshd" else tensor
