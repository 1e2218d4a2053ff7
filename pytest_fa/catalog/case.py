"""A case: the shape, dtype, mask, layout and data seed of one attention problem, and its id."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

import msgspec

from pytest_fa.errors import UsageProblem

Dtype = Literal["fp16", "bf16", "fp32", "e4m3"]
OutDtype = Literal["fp16", "bf16"]
Data = Literal["normal", "zero_head", "outlier", "tiny"]
Causal = Literal["none", "top_left", "bottom_right"]
Layout = Literal["bhsd", "bshd"]
Computes = Literal["attention", "scores"]

DTYPES: tuple[str, ...] = ("fp16", "bf16", "fp32", "e4m3")
ELEMENT_BYTES: dict[str, int] = {"fp16": 2, "bf16": 2, "fp32": 4, "e4m3": 1}
LARGEST = 2**31 - 1
FEW_QUERIES = 16  # the least number of rows of a matrix instruction
Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
GRAMMAR = (
    "b<B>h<H>s<S>d<D>-<dtype>[-causal|-causal_br][-kv<heads>][-sk<keys>][-bshd][-scores]"
    "[-out_bf16][-zero_head|-outlier|-tiny]-seed<N>"
)
# The names of the four axes of an output.
AXES: dict[Computes, tuple[str, str, str, str]] = {
    "attention": ("batch", "head", "query", "dim"),
    "scores": ("batch", "head", "query", "key"),
}

_ID = re.compile(
    r"b(?P<batch>\d+)h(?P<heads>\d+)s(?P<seq_q>\d+)d(?P<head_dim>\d+)"
    r"-(?P<dtype>[a-z0-9]+)"
    r"(?P<causal>-causal_br|-causal)?"
    r"(?:-kv(?P<kv_heads>\d+))?"
    r"(?:-sk(?P<seq_k>\d+))?"
    r"(?P<layout>-bshd)?"
    r"(?P<scores>-scores)?"
    r"(?P<out>-out_bf16)?"
    r"(?:-(?P<data>zero_head|outlier|tiny))?"
    r"-seed(?P<seed>\d+)"
)
_CAUSAL_PART = {"none": "", "top_left": "-causal", "bottom_right": "-causal_br"}
_CAUSAL_OF: dict[str | None, Causal] = {None: "none", "-causal": "top_left", "-causal_br": "bottom_right"}


class Case(msgspec.Struct, frozen=True, order=True):
    """One attention forward problem, or the computation of its scores only.

    q and out have the shape [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim].  `layout` is
    the order of the axes in memory: `bhsd`, or `bshd` with the heads after the sequence.  The causal mask is aligned to
    the top-left corner of the score matrix, as in SDPA, or to the bottom-right corner.  With `computes` = `scores`, out
    is scale * q k^T, dense, of shape [batch, heads, seq_q, seq_k]; v is passed but not read.

    With the dtype `e4m3`, q, k and v are quantised, with a factor for each head, and the output has the dtype
    `fp8_out`.  `data` says what is special in some of the heads (`run.quantised`).
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

    def __str__(self) -> str:
        return self.id

    @property
    def shape_id(self) -> str:
        """The id without the seed.  Times are measured per shape id."""
        return (
            f"b{self.batch}h{self.heads}s{self.seq_q}d{self.head_dim}-{self.dtype}"
            + _CAUSAL_PART[self.causal]
            + (f"-kv{self.kv_heads}" if self.kv_heads != self.heads else "")
            + (f"-sk{self.seq_k}" if self.seq_k != self.seq_q else "")
            + ("-bshd" if self.layout == "bshd" else "")
            + ("-scores" if self.computes == "scores" else "")
            + ("-out_bf16" if self.fp8_out == "bf16" else "")
            + (f"-{self.data}" if self.data != "normal" else "")
        )

    @property
    def id(self) -> str:
        """The id, as used in test ids, record keys and file names."""
        return f"{self.shape_id}-seed{self.seed}"

    @property
    def out_dtype(self) -> Dtype:
        """The dtype of the output: that of the inputs, or of `fp8_out` for e4m3."""
        return self.fp8_out if self.dtype == "e4m3" else self.dtype

    @property
    def scale(self) -> float:
        """The softmax scale 1/sqrt(head_dim), which is SDPA's default."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def has_few_queries(self) -> bool:
        """Whether there are so few queries that a kernel for long sequences would mostly compute padding."""
        return self.seq_q <= FEW_QUERIES

    @property
    def visible_pairs(self) -> int:
        """The number of query-key pairs per head that the mask does not hide."""
        if self.causal == "none":
            return self.seq_q * self.seq_k
        shift = 0 if self.causal == "top_left" else self.seq_k - self.seq_q
        return self._pairs_above(self.seq_q + shift) - self._pairs_above(shift)

    def _pairs_above(self, row: int) -> int:
        """The number of pairs in the first `row` rows of a triangle that is cut off after `seq_k` columns."""
        length = min(max(row, 0), self.seq_k)
        return length * (length + 1) // 2 + max(row - self.seq_k, 0) * self.seq_k

    @property
    def flops_per_call(self) -> int:
        """The floating-point operations of the matrix products, counted for visible pairs only.

        A product has 2 * batch * heads * visible_pairs * head_dim operations.  Attention has two products, scores one.
        """
        products = 1 if self.computes == "scores" else 2
        return 2 * products * self.batch * self.heads * self.visible_pairs * self.head_dim

    @property
    def bytes_per_call(self) -> int:
        """The bytes of q, k, v and out, each read or written once; scores do not read v."""
        q_size = self.batch * self.heads * self.seq_q * self.head_dim
        k_size = self.batch * self.kv_heads * self.seq_k * self.head_dim
        v_size = 0 if self.computes == "scores" else k_size
        inputs = ELEMENT_BYTES[self.dtype] * (q_size + k_size + v_size)
        return inputs + ELEMENT_BYTES[self.out_dtype] * math.prod(self.out_shape)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """The output's shape: for each query, a row of head_dim elements, or of seq_k elements for scores."""
        columns = self.seq_k if self.computes == "scores" else self.head_dim
        return (self.batch, self.heads, self.seq_q, columns)

    def with_seed(self, seed: int) -> Case:
        """Return this case with another data seed."""
        return msgspec.structs.replace(self, seed=seed)

    def with_dtype(self, dtype: Dtype) -> Case:
        """Return this case with another dtype; only e4m3 keeps what applies to e4m3 alone."""
        if dtype == "e4m3":
            return msgspec.structs.replace(self, dtype=dtype)
        return msgspec.structs.replace(self, dtype=dtype, fp8_out="fp16", data="normal")

    def computing(self, computes: Computes) -> Case:
        """Return this case with `computes` set to attention or scores."""
        return msgspec.structs.replace(self, computes=computes)


def parse_case(text: str) -> Case:
    """Parse a case id.

    Raises `UsageProblem`, with the id and the grammar, if the id is malformed or its values are not possible.
    """
    match = _ID.fullmatch(text)
    if match is None:
        raise UsageProblem(f"case {text!r} is malformed; the form is {GRAMMAR}, as in b1h8s512d64-fp16-seed0")
    parts = match.groupdict()
    if parts["dtype"] not in DTYPES:
        raise UsageProblem(f"case {text!r}: no dtype {parts['dtype']!r}; allowed: {', '.join(DTYPES)}")
    for name in ("batch", "seq_q", "head_dim", "heads", "kv_heads", "seq_k", "seed"):
        if parts[name] and int(parts[name]) > LARGEST:
            raise UsageProblem(f"case {text!r}: {name} is {parts[name]}; it must be at most {LARGEST}")
    heads, kv_heads = int(parts["heads"]), int(parts["kv_heads"] or parts["heads"])
    case = Case(
        batch=int(parts["batch"]),
        heads=heads,
        seq_q=int(parts["seq_q"]),
        head_dim=int(parts["head_dim"]),
        dtype=parts["dtype"],  # type: ignore[arg-type]  # checked against DTYPES above
        causal=_CAUSAL_OF[parts["causal"]],
        kv_heads=kv_heads,
        seq_k=int(parts["seq_k"] or parts["seq_q"]),
        layout="bshd" if parts["layout"] else "bhsd",
        seed=int(parts["seed"]),
        computes="scores" if parts["scores"] else "attention",
        fp8_out="bf16" if parts["out"] else "fp16",
        data=parts["data"] or "normal",  # type: ignore[arg-type]  # the pattern allows only these
    )
    if impossible := _impossible(case):
        raise UsageProblem(f"case {text!r}: {impossible}")
    if case.id != text:
        raise UsageProblem(f"case {text!r} is not in its shortest form; write {case.id!r}")
    return case


def _impossible(case: Case) -> str | None:
    """Return why a case whose id has the right form is not possible, or None."""
    for name in ("batch", "heads", "seq_q", "head_dim", "kv_heads"):
        if getattr(case, name) < 1:
            return f"{name} is {getattr(case, name)}; it must be at least 1"
    if case.heads % case.kv_heads:
        return f"{case.heads} heads cannot share {case.kv_heads} key/value heads evenly"
    if case.computes == "scores" and case.causal != "none":
        return f"scores have no mask; drop {_CAUSAL_PART[case.causal]}"
    if case.dtype == "e4m3" and case.computes == "scores":
        return "scores are not computed in e4m3; write fp16, bf16 or fp32"
    if case != case.with_dtype(case.dtype):
        return "-out_bf16, -zero_head, -outlier and -tiny need the dtype e4m3"
    return None
