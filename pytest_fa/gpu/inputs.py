"""The tensors of a case: zero-mean random inputs from its seed, in its layout, and an output filled with NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.arguments import Arguments
from pytest_fa.attention.dtypes import FORMATS
from pytest_fa.attention.e4m3 import DESCALES
from pytest_fa.attention.layout import stored
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.case import Case
from pytest_fa.gpu.quantised import E4M3, Descales, dequantised, descales_of, quantise, with_special_heads

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each.torch_name) for name, each in FORMATS.items()}
# The input in which the output is linear: negating it negates the output, and a NaN in it reaches the output.
LINEAR_IN: dict[Computes, str] = {"attention": "v", "scores": "k"}

# The bits of the NaN with which an output is filled before a call.  It is a signalling NaN: arithmetic makes every NaN
# quiet, so that no kernel computes these bits, and an element that still has them was never written.
_POISON_BITS = {torch.float16: 0x7D9B, torch.bfloat16: 0x7F9B, torch.float32: 0x7F9B7F9B}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by element size in bytes


NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


class Inputs(Arguments):  # what only some calls have are attributes
    """The arguments of one call.  The order of the dimensions is the same for every layout in memory.

    Only e4m3 tensors have `descales`.  `out_dtype` is the output's dtype where it is not that of q.  `more` are the
    words of the parts of attention that are no argument of every call.  As a tuple, the inputs are those arguments.
    """

    descales: Descales | None
    out_dtype: torch.dtype | None
    more: Mapping[str, Any]

    def __new__(  # noqa: D102
        cls,
        *arguments: Any,  # noqa: ANN401  # those of `Arguments`
        descales: Descales | None = None,
        out_dtype: torch.dtype | None = None,
        more: Mapping[str, Any] | None = None,
        **named: Any,  # noqa: ANN401  # those of `Arguments`
    ) -> Self:
        inputs = super().__new__(cls, *arguments, **named)
        inputs.descales, inputs.out_dtype, inputs.more = descales, out_dtype, more or {}
        return inputs

    @classmethod
    def of_call(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype | None = None,
        **words: Any,  # noqa: ANN401  # values and descales
    ) -> Self:
        """The inputs with these words of parts of attention, descales among them; a word of None is none."""
        descales = descales_of(*(words.pop(name, None) for name in DESCALES))
        always = {name: words.pop(name, parts.words()[name].plain_argument(name)) for name in parts.always_passed()}
        more = {name: value for name, value in words.items() if value is not None}
        return cls(q, k, v, scale, **always, descales=descales, out_dtype=out_dtype, more=more)

    def _replace(self, **changes: Any) -> Inputs:  # noqa: ANN401  # also of the attributes
        fields = {**self._asdict(), "descales": self.descales, "out_dtype": self.out_dtype, "more": self.more}
        return Inputs(**{**fields, **changes})

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.out_dtype or self.q.dtype

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a call, without the output."""
        return {"scale": self.scale, **self.words, **self.tensors}

    @property
    def words(self) -> dict[str, Any]:
        """The words of the parts of attention, each with its value, besides tensors."""
        return {**{name: getattr(self, name) for name in parts.always_passed()}, **self.more}

    def word(self, name: str) -> Any:  # noqa: ANN401  # of the word's type
        """The value of a word of any part of attention; None if the call does not have it."""
        return self.words.get(name)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by name: q, k and v, and the descales if there are some."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.tensors}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors besides q, k and v by name: the descales, if there are some."""
        return descale_keywords(self.descales)

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
    """What one call writes.  `more` has its further outputs by the names of the parts of attention that have one."""

    out: torch.Tensor  # [batch, heads, seq_q, head_dim_v or seq_k]
    more: Mapping[str, torch.Tensor] = NOTHING  # [batch, heads, seq_q] float32 each

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All outputs."""
        return (self.out, *self.more.values())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """`function` of each output."""
        return Output(function(self.out), {name: function(tensor) for name, tensor in self.more.items()})

    def clone(self) -> Output:
        """A private copy."""
        return self.map(torch.clone)

    def of_heads(self, heads: list[int]) -> Output:
        """The part of some heads."""
        return self.map(lambda tensor: tensor[:, heads])

    def poison(self) -> Output:
        """The same tensors, full of NaN."""
        return self.map(poison)

    def differs(self, other: Output) -> int:
        """The number of elements whose bits differ from those of another output."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return sum(int((bits_of(own) != bits_of(theirs)).sum()) for own, theirs in pairs)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """N(0, 1) data from the case's seed.  It is drawn on the CPU, so that every device gets the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)
    query_shape = (case.batch, case.heads, case.seq_q, case.head_dim)
    key_shape, value_shape = ((case.batch, case.kv_heads, case.seq_k, dim) for dim in (case.head_dim, case.head_dim_v))
    q, k, v = (_draw(shape, case, generator) for shape in (query_shape, key_shape, value_shape))
    words = parts.arguments_of(case)
    if case.dtype != "e4m3":
        return Inputs.of_call(q, k, v, case.scale, **words).map(lambda tensor: tensor.to(device))
    q, k, v = with_special_heads(q, k, v, case.data)
    quantised = Inputs.of_call(q, k, v, case.scale, TORCH_DTYPES[case.out_dtype], **words).quantised()
    placed = quantised.map(lambda tensor: stored(tensor, case.layout).to(device))
    return placed._replace(descales=quantised.descales and quantised.descales.map(lambda descale: descale.to(device)))


def clone(inputs: Inputs) -> Inputs:
    """The same data at other addresses, with the same strides."""
    descales = inputs.descales and inputs.descales.map(torch.clone)
    cloned = inputs.map(lambda tensor: tensor.clone(memory_format=torch.preserve_format))
    return cloned._replace(descales=descales)


def descale_keywords(descales: Descales | None) -> dict[str, torch.Tensor]:
    """The keyword arguments for descales; none if there are none."""
    return {} if descales is None else dict(zip(DESCALES, descales, strict=True))


def empty_output(
    q: torch.Tensor,  # [batch, heads, seq_q, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim]
    v: torch.Tensor,  # [batch, kv_heads, seq_k, head_dim_v]
    computes: Computes,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An uninitialized output: for attention [batch, heads, seq_q, head_dim_v] with the axes in the order of q's.

    For scores, it is dense [batch, heads, seq_q, seq_k].  Without `dtype`, it has q's, or fp16 for e4m3.
    """
    dtype = dtype or (torch.float16 if q.dtype == E4M3 else q.dtype)
    if computes == "scores":
        return q.new_empty((*q.shape[:3], k.shape[2]), dtype=dtype)
    if v.shape[3] == q.shape[3]:
        return torch.empty_like(q, dtype=dtype)
    shape = (*q.shape[:3], v.shape[3])
    order = sorted(range(len(shape)), key=lambda axis: q.stride()[axis], reverse=True)
    dense = q.new_empty([shape[axis] for axis in order], dtype=dtype)
    return dense.permute([order.index(axis) for axis in range(len(shape))])


def poisoned_output(inputs: Inputs, computes: Computes = "attention") -> torch.Tensor:
    """An output filled with NaN, so that an element that a kernel does not write is found."""
    return poison(empty_output(*inputs[:3], computes, inputs.output_dtype))


def poisoned_rows(inputs: Inputs) -> torch.Tensor:
    """A further output, [batch, heads, seq_q] float32, filled with NaN."""
    return poison(empty_rows(inputs.q))


def empty_rows(q: torch.Tensor) -> torch.Tensor:
    """An uninitialized further output for q, [batch, heads, seq_q, head_dim]: a number for each row."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


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
    return data if case.dtype == "e4m3" else stored(data.to(TORCH_DTYPES[case.dtype]), case.layout)
