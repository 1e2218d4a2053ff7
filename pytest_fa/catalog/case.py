"""A case: the shape, dtype, mask, layout and data seed of one attention problem, and its id."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.causal import Causal
from pytest_fa.attention.dtypes import DTYPES, ELEMENT_BYTES, Dtype
from pytest_fa.attention.e4m3 import Data, OutDtype, out_dtype_of
from pytest_fa.attention.layout import Layout
from pytest_fa.attention.scores import Computes
from pytest_fa.attention.token import Token
from pytest_fa.errors import UsageProblem

LARGEST = 2**31 - 1
FEW_QUERIES = 16  # the least number of rows of a matrix instruction
SIZES = ("batch", "heads", "seq_q", "head_dim")  # in the order of their problems
GRAMMAR = parts.grammar()
Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


@functools.total_ordering
class Case(msgspec.Struct, frozen=True):
    """One attention forward problem, or the computation of its scores only.

    q has the shape [batch, heads, seq_q, head_dim], k [batch, kv_heads, seq_k, head_dim], v [batch, kv_heads, seq_k,
    head_dim_v] and out [batch, heads, seq_q, head_dim_v].  `layout` is the order of the axes in memory: `bhsd`, or
    `bshd` with the heads after the sequence.  The causal mask is aligned to the top-left corner of the score matrix, as
    in SDPA, or to the bottom-right corner.  With `computes` = `scores`, out is scale * q k^T, dense, of shape [batch,
    heads, seq_q, seq_k]; v is passed but not read.

    With the dtype `e4m3`, q, k and v are quantised, with a factor for each head, and the output has the dtype
    `fp8_out`.  `data` says what is special in some of the heads (`gpu.quantised`).

    `modifiers` are the texts in the id of those parts of attention that have no field here (`value_of` reads them).
    """

    batch: Size
    heads: Size
    seq_q: Size
    head_dim: Size
    dtype: Dtype
    causal: Causal
    kv_heads: Size
    seq_k: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
    layout: Layout
    seed: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
    computes: Computes = "attention"
    fp8_out: OutDtype = "fp16"
    data: Data = "normal"
    modifiers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    def __str__(self) -> str:
        return self.id

    def __lt__(self, other: Case) -> bool:
        """Compare by all fields in their order."""
        return self._values < other._values

    @property
    def _values(self) -> tuple[Any, ...]:
        *values, modifiers = msgspec.structs.astuple(self)
        return (*values, modifiers or ())

    @property
    def shape_id(self) -> str:
        """The id without the seed.  Times are measured per shape id."""
        return _shape_id(self)

    @property
    def id(self) -> str:
        """The id, as used in test ids, record keys and file names."""
        return f"{self.shape_id}-seed{self.seed}"

    def value_of(self, field: str) -> Any:  # noqa: ANN401  # of the field's type
        """The value of a field of any part of attention, whether it is a field of this struct or a modifier."""
        if field in self.__struct_fields__:
            return getattr(self, field)
        token = _token_of_field(field)
        text = self.text_of(token)
        return _value_of_text(field, text) if text else token.plain(self)

    def text_of(self, token: Token) -> str:
        """What the id has of a token; empty for nothing."""
        if token.field in self.__struct_fields__:
            value, plain = getattr(self, token.field), token.plain(self)
            return "" if value == plain else token.write(value)
        return _texts_by_field(self.modifiers or ()).get(token.field, "")

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the output: that of the inputs, or of `fp8_out` for e4m3."""
        return out_dtype_of(self.dtype, self.fp8_out)  # type: ignore[return-value]  # one of both

    @property
    def scale(self) -> float:
        """The factor of the scores: 1/sqrt(head_dim), which is SDPA's default, unless the id has another one."""
        scale: float = self.value_of("scale")
        return scale

    @property
    def head_dim_v(self) -> int:
        """The head_dim of v and of the output, which is that of q and k unless the id has another one."""
        size: int = self.value_of("head_dim_v")
        return size

    @property
    def has_few_queries(self) -> bool:
        """Whether there are so few queries that a kernel for long sequences would mostly compute padding."""
        return self.seq_q <= FEW_QUERIES

    @property
    def visible_pairs(self) -> int:
        """The number of query-key pairs per head that no part of attention hides."""
        counts = [count for part in parts.PARTS if (count := part.visible_pairs(self)) is not None]
        if len(counts) > 1:
            return _pairs_of_all(self)
        return counts[0] if counts else self.seq_q * self.seq_k

    @property
    def sequences(self) -> tuple[Case, ...]:
        """Each batch as a case of its own; in a ragged batch, with its own numbers of queries and keys."""
        for part in parts.PARTS:
            if (lengths := part.sequence_lengths(self)) is not None:
                one = self.with_fields({"batch": 1, **{token.field: None for token in part.tokens}})
                return tuple(msgspec.structs.replace(one, seq_q=queries, seq_k=keys) for queries, keys in lengths)
        return (msgspec.structs.replace(self, batch=1),) * self.batch

    @property
    def _sequence_lengths(self) -> tuple[tuple[int, int], ...] | None:
        """The numbers of queries and keys of each batch; None if they are those of the case."""
        found = (part.sequence_lengths(self) for part in parts.PARTS)
        return next((lengths for lengths in found if lengths is not None), None)

    @property
    def all_pairs(self) -> int:
        """The number of query-key pairs per head that no part of attention hides, of all batches."""
        if self._sequence_lengths is None:
            return self.batch * self.visible_pairs
        return sum(each.visible_pairs for each in self.sequences)

    def visible_keys(self, query: int) -> int:
        """The number of keys that a query sees."""
        ranges = [part.visible_keys(self, query) for part in parts.PARTS]
        return max(0, min(each.stop for each in ranges) - max(each.start for each in ranges))

    @property
    def touched(self) -> Case:
        """This case with the queries and keys alone that a call must read, if its batches have the same lengths."""
        for part in parts.PARTS:
            if lengths := part.lengths_touched(self):
                return msgspec.structs.replace(self, seq_q=lengths[0], seq_k=lengths[1])
        return self

    @property
    def flops_per_call(self) -> int:
        """The floating-point operations of the matrix products, counted for visible pairs only.

        A product has 2 * heads * all_pairs * head_dim operations, with that of v in some of them.  Scores have one
        product and attention two.  Gradients have five: Q K^T, dS K and dS^T Q with head_dim, dO V^T and P^T dO with
        that of v.
        """
        of_q, of_v = {"scores": (1, 0), "attention": (1, 1), "gradients": (3, 2)}[self.computes]
        dims = of_q * self.head_dim + of_v * self.head_dim_v
        of_products = 2 * self.heads * self.all_pairs * dims
        return of_products + sum(part.flops(self) for part in parts.PARTS)

    @property
    def bytes_per_call(self) -> int:
        """The bytes of all tensors, each read or written once, without padding; scores do not read v."""
        return self._bytes_of_tensors + sum(part.size_bytes(self) for part in parts.PARTS)

    @property
    def touched_bytes(self) -> int:
        """The least bytes of a call, without keys that no query sees; in a ragged batch, those of its sequences."""
        if self._sequence_lengths is None:
            return self.touched.bytes_per_call
        further = sum(part.further_touched_bytes(self) for part in parts.PARTS)
        return further + sum(each.touched._bytes_of_tensors for each in self.sequences)  # noqa: SLF001  # of another case

    @property
    def _bytes_of_tensors(self) -> int:
        """The bytes of q, k, v and out; for gradients twice, as these have four more, and those of the log-sum-exp."""
        if self.computes != "gradients":
            return self._bytes_of_four
        queries = sum(each.seq_q for each in self.sequences)
        rows_of_lse = (1 + bool(self.value_of("dlse"))) * self.heads * queries
        return 2 * self._bytes_of_four + ELEMENT_BYTES["fp32"] * rows_of_lse

    @property
    def _bytes_of_four(self) -> int:
        """The bytes of q, k, v and out."""
        lengths = self._sequence_lengths or ((self.batch * self.seq_q, self.batch * self.seq_k),)
        queries, keys = (sum(of_side) for of_side in zip(*lengths, strict=True))
        of_key = self.head_dim + (0 if self.computes == "scores" else self.head_dim_v)
        inputs = ELEMENT_BYTES[self.dtype] * (self.heads * queries * self.head_dim + self.kv_heads * keys * of_key)
        total: int = inputs + ELEMENT_BYTES[self.out_dtype] * self.heads * queries * self.out_shape[3]
        return total

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """The output's shape: for each query, a row of head_dim_v elements, or of seq_k elements for scores."""
        columns = self.seq_k if self.computes == "scores" else self.head_dim_v
        return (self.batch, self.heads, self.seq_q, columns)

    def with_seed(self, seed: int) -> Case:
        """Return this case with another data seed."""
        return msgspec.structs.replace(self, seed=seed)

    def with_dtype(self, dtype: Dtype) -> Case:
        """Return this case with another dtype; only e4m3 keeps what applies to e4m3 alone."""
        changes: dict[str, Any] = {"dtype": dtype}
        for part in parts.PARTS:
            changes |= part.fields_for(dtype)
        return self.with_fields(changes)

    def with_fields(self, changes: Mapping[str, Any]) -> Case:
        """Return this case with other values of fields, which may be those of parts of attention without a field.

        There, None stands for the value of a plain case.
        """
        fields = {name: value for name, value in changes.items() if name in self.__struct_fields__}
        case = msgspec.structs.replace(self, **fields)
        others = {name: value for name, value in changes.items() if name not in fields}
        texts = _texts_by_field(self.modifiers or ())
        if "head_dim" in fields:  # on which it may depend whether a value is plain
            others = {name: case.value_of(name) for name in texts} | others
        if not others:
            return case
        for name, value in others.items():
            token = _token_of_field(name)
            texts = texts | {name: "" if value in (None, token.plain(case)) else token.write(value)}
        in_order = (texts.get(token.field, "") for token in parts.tokens())
        return msgspec.structs.replace(case, modifiers=tuple(filter(None, in_order)) or msgspec.UNSET)

    def computing(self, computes: Computes) -> Case:
        """Return this case with another value of `computes`."""
        return msgspec.structs.replace(self, computes=computes)


@parts.cached
def _token_of_field(field: str) -> Token:
    return next(token for token in parts.tokens() if token.field == field)


@parts.cached
def _value_of_text(field: str, text: str) -> Any:  # noqa: ANN401  # of the field's type
    return _token_of_field(field).read(text)


@parts.cached
def _texts_by_field(modifiers: tuple[str, ...]) -> dict[str, str]:
    """The texts of a case's modifiers by the fields of their tokens, without those of parts that this process lacks."""
    fields = ((_field_of_text(text), text) for text in modifiers)
    return {field: text for field, text in fields if field}


@parts.cached
def _field_of_text(text: str) -> str:
    """The field that a text gives a value; empty for a text of a part that this process lacks."""
    return next((token.field for token in parts.tokens() if re.fullmatch(token.pattern, text)), "")


def plain_case(  # the sizes of a case
    batch: int, heads: int, seq_q: int, head_dim: int, dtype: Dtype, seed: int = 0, *, seq_k: int | None = None
) -> Case:
    """A case without any part of attention that an id can name, but with another number of keys if given."""
    keys = seq_q if seq_k is None else seq_k
    return Case(batch, heads, seq_q, head_dim, dtype, "none", heads, keys, "bhsd", seed)


def parse_case(text: str) -> Case:
    """Parse a case id.

    Raises `UsageProblem`, with the id and the grammar, if the id is malformed or its values are not possible.
    """
    match = re.fullmatch(_pattern(parts.tokens()), text)
    if match is None:
        raise UsageProblem(f"case {text!r} is malformed; the form is {parts.grammar()}, as in b1h8s512d64-fp16-seed0")
    texts = match.groupdict()
    if texts["dtype"] not in DTYPES:
        raise UsageProblem(f"case {text!r}: no dtype {texts['dtype']!r}; allowed: {', '.join(DTYPES)}")
    batch, heads, seq_q, head_dim, seed = (int(texts[name]) for name in (*SIZES, "seed"))
    shape = plain_case(batch, heads, seq_q, head_dim, texts["dtype"], seed)  # type: ignore[arg-type]  # of DTYPES
    changes = {token.field: token.read(read) for token in parts.tokens() if (read := texts[token.field]) is not None}
    case = shape.with_fields(changes)
    for name in (*SIZES, *changes, "seed"):
        if isinstance(value := case.value_of(name), int) and value > LARGEST:
            raise UsageProblem(f"case {text!r}: {name} is {value}; it must be at most {LARGEST}")
    if impossible := problem_of(case):
        raise UsageProblem(f"case {text!r}: {impossible}")
    if case.id != text:
        raise UsageProblem(f"case {text!r} is not in its shortest form; write {case.id!r}")
    return case


@functools.lru_cache(maxsize=8)
def _pattern(tokens: tuple[Token, ...]) -> re.Pattern[str]:
    """The regular expression of an id, with a group for each field."""
    of_tokens = "".join(f"(?:-(?P<{token.field}>{token.pattern}))?" for token in tokens)
    size = r"b(?P<batch>\d+)h(?P<heads>\d+)s(?P<seq_q>\d+)d(?P<head_dim>\d+)-(?P<dtype>[a-z0-9]+)"
    return re.compile(rf"{size}{of_tokens}-seed(?P<seed>\d+)")


@functools.lru_cache(maxsize=4096)
def _pairs_of_all(case: Case) -> int:
    """The visible pairs of a case in which several parts hide keys."""
    return sum(case.visible_keys(query) for query in range(case.seq_q))


@functools.lru_cache(maxsize=4096)  # a table of records asks for each id many times
def _shape_id(case: Case) -> str:
    size = f"b{case.batch}h{case.heads}s{case.seq_q}d{case.head_dim}-{case.dtype}"
    texts = [text for text in map(case.text_of, parts.tokens()) if text]
    unknown = [text for text in case.modifiers or () if text not in texts]  # of a part that this process lacks
    return size + "".join(f"-{text}" for text in (*texts, *unknown))


def problem_of(case: Case) -> str | None:
    """Return why a case whose id has the right form is not possible, or None."""
    for name in SIZES:
        if getattr(case, name) < 1:
            return f"{name} is {getattr(case, name)}; it must be at least 1"
    return next(filter(None, (part.impossible(case) for part in parts.PARTS)), None)
