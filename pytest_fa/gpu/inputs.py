"""The tensors of a case: zero-mean random inputs from its seed, in its layout, and an output filled with NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.arguments import Arguments
from pytest_fa.attention.backward import LIKE, OF_KEYS, OF_PARTS
from pytest_fa.attention.dtypes import FORMATS
from pytest_fa.attention.e4m3 import DESCALES
from pytest_fa.attention.layout import stored
from pytest_fa.attention.pages import Cache, is_together
from pytest_fa.attention.rows import PLAIN
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.case import Case
from pytest_fa.errors import FaError
from pytest_fa.gpu.packed import map_memories, packed, together
from pytest_fa.gpu.quantised import E4M3, Descales, dequantised, descales_of, quantise, with_special_heads

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, each.torch_name) for name, each in FORMATS.items()}
# The input in which the output is linear: negating it negates the output, and a NaN in it reaches the output.
LINEAR_IN: dict[Computes, str] = {"attention": "v", "scores": "k"}

# The bits of the NaN with which an output is filled before a call.  It is a signalling NaN: arithmetic makes every NaN
# quiet, so that no kernel computes these bits, and an element that still has them was never written.
_POISON_BITS = {torch.float16: 0x7D9B, torch.bfloat16: 0x7F9B, torch.float32: 0x7F9B7F9B}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by element size in bytes


NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})
ATTRIBUTES = (
    "descales",
    "out_dtype",
    "more",
    "extra",
    "conventions",
    "given",
    "rounds",
    "cache",
    "cache_dtype",
    "appends",
)  # of `Inputs`


class Inputs(Arguments):  # what only some calls have are attributes
    """The arguments of one call.  The order of the dimensions is the same for every layout in memory.

    Only e4m3 tensors have `descales`.  `out_dtype` is the output's dtype where it is not that of q.  `more` are the
    words of the parts of attention that are no argument of every call, and `extra` are their tensors, as `PartTensor`
    says.  As a tuple, the inputs are those arguments.

    A kernel gets them in the `conventions` of its manifest.  `meant` says what they mean, and `as_given` is then the
    call itself.  `rounds` are the roundings with which the parts of attention compute; truth has none.
    """

    descales: Descales | None
    out_dtype: torch.dtype | None
    more: Mapping[str, Any]
    extra: Mapping[str, torch.Tensor]  # [batch or 1, heads or 1, seq_q or 1, seq_k or 1]
    conventions: Mapping[str, str]  # those that are not plain
    given: Inputs | None
    rounds: tuple[str, ...]
    cache: Cache | None  # how k and v lie in pages
    cache_dtype: str  # what k and v are quantised to; empty if they are not
    appends: bool  # whether the last seq_q keys of each sequence are new ones, which the call writes

    def __new__(  # noqa: D102, PLR0913  # an argument for each attribute
        cls,
        *arguments: Any,  # noqa: ANN401  # those of `Arguments`
        descales: Descales | None = None,
        out_dtype: torch.dtype | None = None,
        more: Mapping[str, Any] | None = None,
        extra: Mapping[str, torch.Tensor] = NOTHING,
        conventions: Mapping[str, str] = PLAIN,
        given: Inputs | None = None,
        rounds: tuple[str, ...] = (),
        cache: Cache | None = None,
        cache_dtype: str = "",
        appends: bool = False,
        **named: Any,  # noqa: ANN401  # those of `Arguments`
    ) -> Self:
        inputs = super().__new__(cls, *arguments, **named)
        inputs.descales, inputs.out_dtype, inputs.more, inputs.extra = descales, out_dtype, more or {}, extra
        inputs.conventions, inputs.given, inputs.rounds = conventions, given, rounds
        inputs.cache, inputs.cache_dtype, inputs.appends = cache, cache_dtype, appends
        return inputs

    @classmethod
    def of_call(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype | None = None,
        **words: Any,  # noqa: ANN401  # values, tensors of parts and descales
    ) -> Self:
        """The inputs with these words of parts of attention, descales among them; a word of None is none.

        Raises `FaError` for a tensor of a part that has another shape or dtype than calls have.
        """
        descales = descales_of(*(words.pop(name, None) for name in DESCALES))
        always = {name: words.pop(name, parts.words()[name].plain_argument(name)) for name in parts.always_passed()}
        more = {name: value for name, value in words.items() if value is not None}
        extra = {name: kept_form(name, more.pop(name), q, k) for name in parts.tensor_words() if name in more}
        return cls(q, k, v, scale, **always, descales=descales, out_dtype=out_dtype, more=more, extra=extra)

    def _replace(self, **changes: Any) -> Inputs:  # noqa: ANN401  # also of the attributes
        attributes = {name: getattr(self, name) for name in ATTRIBUTES}
        return Inputs(**{**self._asdict(), **attributes, **changes})

    def rounded(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """A value in the precision of the output, if `rounds` has its name."""
        return value.to(self.output_dtype).to(value.dtype) if name in self.rounds else value

    # -- conventions --------------------------------------------------------------------------------------------------

    def convention(self, key: str) -> str | None:
        """The declared value of a convention; None if it is the plain one."""
        return self.conventions.get(key)

    def in_conventions(self, conventions: Mapping[str, str]) -> Inputs:
        """A plain call as a kernel with these conventions gets it."""
        given = self._words_by(parts.given, conventions)
        for part in parts.PARTS:
            given = part.call_given(given)
        return given

    def meant(self) -> Inputs:
        """What the call means, in plain conventions, except for those that only a part of attention can follow."""
        if self.given is not None:
            return self
        if (dense := self.dense()) is not self:
            return dense.meant()._replace(given=self)
        meant = self._words_by(parts.meant, self.conventions) if self.conventions else self
        for part in parts.PARTS:
            meant = part.call_meant(meant)
        return self if meant is self else meant._replace(given=self)

    def placed(self) -> Inputs:
        """The call as its tensors lie in memory; itself if that is where they are."""
        inputs = self
        for part in parts.PARTS:
            inputs = part.call_placed(inputs)
        return together(inputs) if is_together(inputs) else inputs

    def dense(self) -> Inputs:
        """The inverse of `placed`: k and v are [batch, kv_heads, seq_k, dim]."""
        inputs = self
        for part in reversed(parts.PARTS):
            inputs = part.call_dense(inputs)
        return inputs

    def dense_output(self, output: Output) -> Output:
        """The output of this call, [batch, heads, seq_q, ...], from what lies in memory as `placed` says."""
        out, *more = (parts.dense_output(self, name, tensor) for name, tensor in output.named.items())
        return Output(out, dict(zip(output.more, more, strict=True)))

    def e4m3_of(self, values: torch.Tensor) -> torch.Tensor:
        """The e4m3 numbers that are nearest to values; pytest's own process, which reads the parts, has no torch."""
        return values.to(E4M3)

    @property
    def is_quantised(self) -> bool:
        """Whether k and v are numbers of 8 bits with factors, to which other values are rounded."""
        return self.descales is not None or bool(self.cache_dtype)

    @property
    def as_given(self) -> Inputs:
        """The call of which this is the meaning."""
        return self if self.given is None else self.given

    def in_other_convention(self, key: str, value: str) -> Inputs:
        """The same call for a kernel that has another value of a convention."""
        changed = {**self.conventions, key: value}
        plain = {name: convention.plain for name, (_, convention) in parts.conventions().items()}
        return self._replace(conventions={name: each for name, each in changed.items() if each != plain[name]})

    def _words_by(self, change: Callable[[str, Any, Mapping[str, str]], Any], conventions: Mapping[str, str]) -> Inputs:
        """The call with a change of the scale, of each word, and of each tensor of parts."""
        more, extra = (
            {name: change(name, value, conventions) for name, value in values.items()}
            for values in (self.more, self.extra)
        )
        scale = change("scale", self.scale, conventions)
        return self._replace(scale=scale, more=more, extra=extra, conventions=conventions)

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.out_dtype or self.q.dtype

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a call, without the output."""
        return {"scale": self.scale, **self.words, **self.tensors}

    def asked(self, outputs: Iterable[str]) -> tuple[str, ...]:
        """Those of a variant's outputs that a call has: the gradients of tensors that it lacks are none."""
        return tuple(name for name in outputs if name not in OF_PARTS or OF_PARTS[name] in self.extra)

    @property
    def words(self) -> dict[str, Any]:
        """The words of the parts of attention, each with its value, besides tensors."""
        return {**{name: getattr(self, name) for name in parts.always_passed()}, **self.more}

    def word(self, name: str) -> Any:  # noqa: ANN401  # of the word's type
        """The value of a word of any part of attention, or its tensor; None if the call does not have it."""
        return self.extra[name] if name in self.extra else self.words.get(name)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """All tensors by name, as they are kept: q, k and v, the descales and those of parts of attention."""
        return {"q": self.q, "k": self.k, "v": self.v, **descale_keywords(self.descales), **self.extra}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors besides q, k and v by name, as a call gets them: the descales, and those of parts.

        A number for each query has its axes in the order of the log-sum-exp.
        """
        pairs = (
            *self.q.shape[:3],
            self.k.shape[2] if self.cache is None or self.cache.seq_k is None else self.cache.seq_k,
        )
        given = {name: given_form(name, tensor, pairs) for name, tensor in self.extra.items()}
        of_rows = {
            name: as_kernels_have("lse", rows, self.conventions)
            for name, rows in given.items()
            if parts.tensor_form(name).vector == "per_query"
        }
        return {**descale_keywords(self.descales), **given, **of_rows}

    def with_parts(self, tensors: Mapping[str, torch.Tensor]) -> Inputs:
        """The same call with other tensors, named as in `parts`."""
        q, k, v = (tensors[name] for name in "qkv")
        descales = self.descales and Descales(*(tensors[name] for name in DESCALES))
        extra = {name: tensors[name] for name in self.extra}
        return self._replace(q=q, k=k, v=v, descales=descales, extra=extra)

    def map_all(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same call with `function` of each tensor."""
        return self.with_parts({name: function(tensor) for name, tensor in self.parts.items()})

    def extra_at(self, **places: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of parts for some `batches`, `heads`, `queries` and `keys`, as indices; all where none are named.

        A tensor that does not depend on an axis stays as it is there.
        """
        of_rows = {axis: each for axis, each in places.items() if axis != "keys"}
        of_table = {axis: each for axis, each in places.items() if axis == "batches"}

        def places_in(name: str) -> dict[str, torch.Tensor]:
            if parts.is_table(name):
                return of_table
            return of_rows if parts.tensor_form(name).has_columns else places

        return {name: at_places(tensor, **places_in(name)) for name, tensor in self.extra.items()}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same call with `function` of q, k and v; the other tensors stay."""
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
    """What one call writes: its output and further ones by name, or dq and the other gradients.

    A further output has [batch, heads, seq_q] in float32.  A gradient has the shape of its tensor, of which those of
    parts are as in `Inputs.extra`: 1 along each axis that they lack.
    """

    out: torch.Tensor  # [batch, heads, seq_q, head_dim_v, head_dim or seq_k]
    more: Mapping[str, torch.Tensor] = NOTHING

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All outputs."""
        return (self.out, *self.more.values())

    @property
    def of_batches(self) -> Output:
        """Without the gradients of a bias and a sink that are sums over all batches."""
        batch = len(self.out)
        more = {name: tensor for name, tensor in self.more.items() if name not in OF_PARTS or len(tensor) == batch}
        return Output(self.out, more)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """`function` of each output."""
        return Output(function(self.out), {name: function(tensor) for name, tensor in self.more.items()})

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """All outputs by name; the first one is `out`, which may be dq."""
        return {"out": self.out, **self.more}

    @property
    def nbytes(self) -> int:
        """The bytes of all outputs."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clone(self) -> Output:
        """A private copy."""
        return self.map(torch.clone)

    def of_heads(self, heads: list[int], kv_heads: list[int]) -> Output:
        """The part of some heads of Q, and in gradients of K and V of some of their heads.

        The sum over all heads, as in the gradient of a bias that has none, is left out.
        """
        kept = {name: tensor for name, tensor in self.more.items() if name not in OF_PARTS or tensor.shape[1] > 1}
        more = {name: tensor[:, kv_heads if name in OF_KEYS else heads] for name, tensor in kept.items()}
        return Output(self.out[:, heads], more)

    def fill_from(self, other: Output) -> None:
        """Copy the values of another output into these tensors."""
        for own, theirs in zip(self.tensors, other.tensors, strict=True):
            own.copy_(theirs)

    def poison(self) -> Output:
        """The same tensors, full of NaN."""
        return self.map(poison)

    def differs(self, other: Output) -> int:
        """The number of elements whose bits differ from those of another output."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return sum(int((bits_of(own) != bits_of(theirs)).sum()) for own, theirs in pairs)


def make_inputs(case: Case, device: torch.device, conventions: Mapping[str, str] = PLAIN) -> Inputs:
    """N(0, 1) data from the case's seed.  It is drawn on the CPU, so that every device gets the same numbers."""
    inputs = _drawn(case, device).in_conventions(conventions)
    return packed(inputs) if case.layout == "packed" else inputs


def _drawn(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    query_shape = (case.batch, case.heads, case.seq_q, case.head_dim)
    key_shape, value_shape = ((case.batch, case.kv_heads, case.seq_k, dim) for dim in (case.head_dim, case.head_dim_v))
    q, k, v = (_draw(shape, case, generator) for shape in (query_shape, key_shape, value_shape))
    words, extra = parts.arguments_of(case), _draw_extra(case, generator)
    if case.dtype != "e4m3":
        plain = Inputs.of_call(q, k, v, case.scale, **words)._replace(extra=extra)
        for part in parts.PARTS:
            plain = part.call_of(plain, case)
        return plain.map_all(lambda tensor: tensor.to(device))
    q, k, v = with_special_heads(q, k, v, case.data)
    quantised = Inputs.of_call(q, k, v, case.scale, TORCH_DTYPES[case.out_dtype], **words).quantised()
    placed = quantised.map(lambda tensor: stored(tensor, case.layout))._replace(extra=extra)
    return placed.map_all(lambda tensor: tensor.to(device))


def _draw_extra(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of the parts of attention, drawn after q, k and v."""
    drawn = {}
    sizes = (case.batch, case.heads, case.seq_q, case.seq_k)
    for word, part in parts.tensor_words().items():
        if axes := part.axes(word, case):
            form = parts.tensor_form(word)
            sizes_of = (*sizes[:3], part.columns(word, case)) if form.has_columns else sizes
            numbers = torch.empty([size if depends else 1 for size, depends in zip(sizes_of, axes, strict=True)])
            if form.is_random:
                part.fill(word, numbers, generator)
                part.arrange(word, numbers)
            else:
                numbers = torch.tensor(part.fixed(word, case)).view(numbers.shape)
            numbers = numbers.to(extra_dtype(word, TORCH_DTYPES[case.dtype]))
            drawn[word] = stored(numbers, case.layout) if form.vector == "like_out" else numbers
    return drawn


def extra_dtype(word: str, of_q: torch.dtype) -> torch.dtype:
    """The dtype of a part's tensor in a call whose q has a dtype."""
    name = parts.tensor_form(word).dtype
    if name != "q":
        return getattr(torch, name)  # type: ignore[no-any-return]  # a dtype of torch
    return torch.float32 if of_q == E4M3 else of_q


def given_form(word: str, tensor: torch.Tensor, pairs: tuple[int, ...]) -> torch.Tensor:
    """A part's tensor as a call gets it; `pairs` are batch, heads, seq_q and seq_k.

    That is [batch], [heads], [batch, columns], or [batch, heads, seq_q, seq_k] with strides of 0.
    """
    if parts.is_table(word):
        return tensor.flatten(1)
    form = parts.tensor_form(word)
    if form.is_made or form.vector == "like_out":
        return tensor
    if form.vector == "per_query":
        return tensor[..., 0]
    axis = form.vector_axis
    return tensor.expand(pairs) if axis is None else tensor.flatten()


def kept_form(word: str, tensor: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The inverse of `given_form`.  Raises `FaError` for another shape or dtype."""
    dtype, form = extra_dtype(word, q.dtype), parts.tensor_form(word)
    if form.vector == "table" and tensor.dtype == dtype and tensor.dim() == 2 and len(tensor) == len(q):  # noqa: PLR2004
        return tensor[:, None, None]
    if form.vector in ("starts", "like_out"):
        return tensor
    if form.vector == "per_query":
        return tensor[..., None]
    axis, sizes = form.vector_axis, (*q.shape[:3], k.shape[2])
    wanted = sizes if axis is None else sizes[axis : axis + 1]
    fits = tensor.dim() == len(wanted) and all(
        size == whole or (size == 1 and axis is None) for size, whole in zip(tensor.shape, wanted, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        shown = f"{list(wanted)}, {'each of these or 1' if axis is None else f'[{form.vector}]'}"
        raise FaError(f"{word} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {shown}")
    if axis is not None:
        return tensor.view([len(tensor) if place == axis else 1 for place in range(len(sizes))])
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def at_places(
    tensor: torch.Tensor,
    batches: torch.Tensor | None = None,
    heads: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Some batches, heads, queries and keys of a part's tensor, as indices: a copy, but an axis of length 1 stays."""
    for axis, places in enumerate((batches, heads, queries, keys)):
        if places is not None and tensor.shape[axis] > 1:
            tensor = tensor.index_select(axis, places)
    return tensor


def clone(inputs: Inputs) -> Inputs:
    """The same data at other addresses, with the same strides."""
    return map_memories(inputs, lambda tensor: tensor.clone(memory_format=torch.preserve_format))


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

    For scores, it is dense [batch, heads, seq_q, seq_k], and for gradients dq, as q.  Without `dtype`, it has q's, or
    fp16 for e4m3.
    """
    dtype = dtype or (torch.float16 if q.dtype == E4M3 else q.dtype)
    if computes == "scores":
        return q.new_empty((*q.shape[:3], k.shape[2]), dtype=dtype)
    if v.shape[3] == q.shape[3] or computes == "gradients":
        return torch.empty_like(q, dtype=dtype)
    shape = (*q.shape[:3], v.shape[3])
    order = sorted(range(len(shape)), key=lambda axis: q.stride()[axis], reverse=True)
    dense = q.new_empty([shape[axis] for axis in order], dtype=dtype)
    return dense.permute([order.index(axis) for axis in range(len(shape))])


def poisoned_output(inputs: Inputs, computes: Computes = "attention") -> torch.Tensor:
    """An output filled with NaN, so that an element that a kernel does not write is found."""
    return poison(empty_output(*inputs[:3], computes, inputs.output_dtype))


def poisoned_outputs(inputs: Inputs, computes: Computes, more: Iterable[str] = ()) -> Output:
    """The outputs of a call, filled with NaN: one and those in `more` that it has."""
    further = {name: poisoned_more(name, inputs) for name in inputs.asked(more)}
    return Output(poisoned_output(inputs, computes), further)


def poisoned_more(name: str, inputs: Inputs) -> torch.Tensor:
    """A further output, [batch, heads, seq_q] float32, or a gradient besides dq, filled with NaN."""
    return poison(as_kernels_have(name, empty_more(name, inputs), inputs.conventions))


def empty_more(name: str, inputs: Inputs) -> torch.Tensor:
    """The same, uninitialized, with the axes that a kernel has."""
    if name in LIKE:
        lies_as = torch.contiguous_format if name in OF_PARTS else torch.preserve_format
        return torch.empty_like(inputs.parts[LIKE[name]], memory_format=lies_as)
    return empty_rows(name, inputs.q, inputs.conventions)


def empty_rows(name: str, q: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:
    """An uninitialized further output for q, [batch, heads, seq_q, head_dim], with the axes that a kernel has."""
    axes = parts.outputs()[name].row_axes(conventions)
    return q.new_empty([q.shape[axis] for axis in axes], dtype=torch.float32)


def as_kernels_have(name: str, rows: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:
    """A view of a further output with the axes that a kernel has, or the inverse of it."""
    return rows if name in LIKE else rows.permute(parts.outputs()[name].row_axes(conventions))


def as_called(name: str, tensor: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:
    """A view of a further output as a call gets it: the gradient of a vector is one."""
    if name in OF_PARTS and parts.tensor_form(OF_PARTS[name]).vector_axis is not None:
        return tensor.flatten()
    return as_kernels_have(name, tensor, conventions)


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
