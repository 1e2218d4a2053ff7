"""`Part`: everything that the rest of the package asks about one part of attention.

A part is a class in a module of its own, and one line in `parts.PARTS`.  Each attribute and method below has a default
that changes nothing, so a part consists of what it is about.  `tests/unit/attention/even_bias.py` is a complete one.

A part that changes the result must have `supports`: without it, each kernel is taken to know the part.

The order of the computation is fixed: scale, then `scores` of each part in the order of `PARTS`, then `hidden`, then
the softmax over the visible keys and `sinks`.  A key is visible if no part hides it.

A part may bring tensors of its own (`tensors`), which the judge makes, hands over, guards and checks as q, k and v.

A part has the conventions in which kernels differ (`conventions`).  A manifest declares those of its kernel.  The judge
then makes calls `given` in them, and computes truth from what such a call has `meant`.

Pytest's own process reads these modules, so they do not import torch: they call the methods of the tensors that they
get.  What a part adds to the C interface stands in `abi.py`, because the order of a struct's fields is one list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from pytest_fa.attention.mistake import Mistake, Positions
    from pytest_fa.attention.rows import Padding, RowTruth, ScoreBlock
    from pytest_fa.attention.token import Token


class Shape(Protocol):
    """What a part reads of a case (`catalog.case.Case`)."""

    @property
    def batch(self) -> int:
        """The number of batches."""

    @property
    def heads(self) -> int:
        """The number of heads of q and of the output."""

    @property
    def seq_q(self) -> int:
        """The number of queries."""

    @property
    def seq_k(self) -> int:
        """The number of keys."""

    @property
    def head_dim(self) -> int:
        """The number of elements of a query or key."""

    @property
    def dtype(self) -> str:
        """The dtype of q, k and v."""

    @property
    def computes(self) -> str:
        """`attention` or `scores`."""

    @property
    def visible_pairs(self) -> int:
        """The number of pairs of query and key, per head, that no part hides from the longest sequence."""

    @property
    def all_pairs(self) -> int:
        """The same of all batches, each with its own lengths."""

    @property
    def sequences(self) -> Sequence[Shape]:
        """Each batch as a case of its own."""

    def value_of(self, field: str) -> Any:  # of the field's type
        """The value of a field of any part."""


class CallInputs(Protocol):
    """What a part reads of the arguments of a call (`gpu.inputs.Inputs`)."""

    @property
    def q(self) -> torch.Tensor:
        """[batch, heads, seq_q, head_dim]."""

    @property
    def k(self) -> torch.Tensor:
        """[batch, kv_heads, seq_k, head_dim]."""

    @property
    def v(self) -> torch.Tensor:
        """[batch, kv_heads, seq_k, head_dim_v]."""

    @property
    def scale(self) -> float:
        """The factor of the scores."""

    def word(self, name: str) -> Any:  # of the word's type
        """The value of a word of any part, or its tensor (`PartTensor`); None if the call does not have it."""

    def convention(self, key: str) -> str | None:
        """The declared value of a convention; None if it is the plain one."""

    def rounded(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """A value, in the precision of the output if the manifest declares this rounding and the reference computes."""


class PartTensor(NamedTuple):
    """A tensor that a part brings to a call.

    The judge keeps it as [batch or 1, heads or 1, seq_q or 1, seq_k or 1], dense; it is 1 long along the axes on which
    it does not depend.  A call gets it with all four axes, with a stride of 0 where it does not depend on one; or as a
    vector along one axis.  A `table` is kept as [batch, 1, 1, columns], and a call gets [batch, columns].
    A `scale` or `starts` is made by `call_placed`, as the call gets it; so are `rows`, [batch, kv_heads, seq_q, dim].
    One `like_out` is as the output.  One `per_query` is kept as [batch, heads, seq_q, 1], and a call gets [batch,
    heads, seq_q].
    """

    dtype: str  # float32, int32, bool, or `q`: the dtype of q, and float32 if that is e4m3
    vector: Literal["", "batch", "heads", "table", "scale", "starts", "rows", "like_out", "per_query"] = (
        ""  # the axis of a vector, or see above
    )
    is_random: bool = True  # whether `fill` draws it; else `fixed` says what a case has

    @property
    def vector_axis(self) -> int | None:
        """The number of the axis of a vector."""
        return {"batch": 0, "heads": 1}.get(self.vector)

    @property
    def is_made(self) -> bool:
        """Whether `call_placed` makes it."""
        return self.vector in ("scale", "starts", "rows")

    @property
    def has_columns(self) -> bool:
        """Whether its last axis has the columns of the part, not the keys."""
        return self.vector in ("table", "like_out", "per_query")


class CacheShape(NamedTuple):
    """A cache of keys in pages, [pages, kv_heads, page_size, head_dim], with the heads first in memory or the keys."""

    pages: int
    page_size: int
    heads_first: bool


class Convention(NamedTuple):
    """One of the ways in which kernels count: its values, the plain one first, each with what a kernel does then.

    `is_seen_in` has the words of which a call needs one to show it; without any, each call does.  With
    `is_other_function`, no change of a call or of its outputs makes it plain: what is true is another.
    """

    values: Mapping[str, str]
    is_seen_in: tuple[str, ...] = ()
    is_other_function: bool = False

    @property
    def plain(self) -> str:
        """The value of a kernel that declares none."""
        return next(iter(self.values))

    def advice(self, key: str, declared: str | None, value: str) -> str:
        """What a kernel does that has a value where another one is declared, or none, and what to write."""
        if declared is None:
            return f"{self.values[value]}: if that is meant, declare `conventions: {{{key}: {value}}}`"
        write = f"drop `{key}`" if value == self.plain else f"write `{key}: {value}`"
        return f"{self.values[value]}, but the manifest declares `conventions: {{{key}: {declared}}}`: {write}"


class Part:
    """One part of attention; the defaults are those of a part that changes nothing."""

    name: ClassVar[str]
    summary: ClassVar[str]  # for the documentation

    # -- the case ---------------------------------------------------------------------------------------------------

    tokens: ClassVar[tuple[Token, ...]] = ()  # what it writes into an id, in this order
    rows: ClassVar[tuple[tuple[str, str], ...]] = ()  # the same for the documentation: text and meaning

    shapes: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # what it adds to suites, by their names: ids without a seed

    def impossible(self, case: Shape) -> str | None:  # noqa: ARG002
        """Why a case is not possible because of this part, or None.

        What it reads of the case tells which other parts are to blame, so it must ask nothing else.
        """
        return None

    def fields_for(self, dtype: str) -> Mapping[str, Any]:  # noqa: ARG002
        """The fields that a case gets if its dtype becomes this one, because they do not apply to it."""
        return {}

    def visible_pairs(self, case: Shape) -> int | None:  # noqa: ARG002
        """The number of pairs of query and key, per head, that this part leaves visible; None if it hides none."""
        return None

    def visible_keys(self, case: Shape, query: int) -> range:  # noqa: ARG002
        """The keys that this part leaves visible to a query, for cases in which other parts hide keys, too."""
        return range(case.seq_k)

    def sequence_lengths(self, case: Shape) -> tuple[tuple[int, int], ...] | None:  # noqa: ARG002
        """The numbers of queries and keys of each batch; None if they are those of the case."""
        return None

    def lengths_touched(self, case: Shape) -> tuple[int, int] | None:  # noqa: ARG002
        """The numbers of queries and keys that a call must read; None if this part leaves out none."""
        return None

    def flops(self, case: Shape) -> int:  # noqa: ARG002
        """The operations per call besides those of the two matrix products."""
        return 0

    def size_bytes(self, case: Shape) -> int:  # noqa: ARG002
        """The bytes per call besides those of q, k, v and the output."""
        return 0

    def further_touched_bytes(self, case: Shape) -> int:  # noqa: ARG002
        """The bytes that a call of a ragged batch must read besides q, k, v and the output; negative for fewer."""
        return 0

    def in_words(self, case: Shape) -> str:  # noqa: ARG002
        """What a picture's title says about a case, with a comma before it; empty for nothing."""
        return ""

    # -- the manifest -----------------------------------------------------------------------------------------------

    supports: ClassVar[str] = ""  # its key there; empty if no manifest need claim it
    # The values that can be claimed; the first is that of a plain case.  A part without `supports` may have some, too:
    # the suite `modifiers` combines those of all parts (`varied`).
    claims: ClassVar[tuple[Any, ...]] = ()
    documented_claims: ClassVar[str] = ""  # for the documentation, if `claims` are not all
    # Claims are combined in the order of `PARTS`, those with a higher number after the others.  A refusal because of
    # a number above 0 is named only if dtype and head_dim are supported.
    claim_order: ClassVar[int] = 0

    is_in_c_interface: ClassVar[bool] = True  # whether `include/fa_forward.h` has a field for it
    is_after_scores: ClassVar[bool] = True  # whether a probe that computes scores alone can have nothing of it

    def supported(self, supports: Any) -> tuple[Any, ...]:  # `catalog.variant.Supports`
        """The values that a manifest claims, in its order."""
        values: tuple[Any, ...] = supports.values_of(self.supports, self.claims[:1])
        return values

    def is_claimed(self, supports: Any) -> bool:  # `catalog.variant.Supports`
        """Whether a manifest claims more than that cases have nothing of this part."""
        return self.supported(supports) != self.claims[:1]

    def shown_claims(self, supports: Any) -> str:  # `catalog.variant.Supports`
        """The same in a message."""
        return ", ".join(map(shown, self.supported(supports)))

    @property
    def varied(self) -> tuple[Any, ...]:
        """The values that the suite `modifiers` combines."""
        return self.claims

    def judged_claims(self, supports: Any, head_dims: Collection[int]) -> tuple[Any, ...]:  # noqa: ARG002  # `Supports`
        """The claimed values that a default run judges beside some head_dims, in the order of `claims`."""
        supported = self.supported(supports)
        return tuple(claim for claim in self.claims if claim in supported)

    def further_claims(self, supports: Any) -> tuple[Any, ...]:  # noqa: ARG002  # `catalog.variant.Supports`
        """Those of `judged_claims` of which one case is enough; any two of the others are judged together."""
        return ()

    def read_claim(self, claim: object) -> tuple[Any, ...]:
        """The values of a claim in a manifest, for a key that is no field of `Supports`: true, false or a list.

        Raises `ValueError` with what is allowed.
        """
        if isinstance(claim, bool):
            return self.claims if claim else self.claims[:1]
        if isinstance(claim, list) and claim and all(value in self.claims for value in claim):
            return tuple(claim)
        allowed = ", ".join(map(shown, self.claims))
        raise ValueError(f"supports.{self.supports} is {claim!r}; allowed are true, false, or a list of {allowed}")

    def claimed_by(self, case: Shape) -> Any:  # one of `claims`
        """Which of `claims` a case needs; the first one if its id says nothing."""
        token = self.tokens[0]
        value = case.value_of(token.field)
        return self.claims[0] if value == token.plain(case) else value

    def claim_for(self, case: Shape) -> Any:  # of a field of `Supports`
        """What `Supports` has for a variant that computes this case and others like it."""
        return (self.claimed_by(case),)

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:  # noqa: ARG002  # one of `claims`
        """The fields of a case that needs a claim; `heads` is the number of its heads."""
        return {self.tokens[0].field: claim}

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # one of `claims`
        """Fields of cases that need a claim, of which several are judged because mistakes depend on them."""
        return (self.fields_with(claim, heads),)

    def sized_in_turn(self, claim: Any) -> tuple[tuple[int, int, Mapping[str, Any]], ...]:  # noqa: ARG002  # one of `claims`
        """Numbers of queries and keys, with fields, at which mistakes in a claim show that others do not have."""
        return ()

    def hunted_claims(self, supports: Any) -> tuple[Any, ...]:  # `catalog.variant.Supports`
        """The values that random cases may have, the plainest first; without one, they vary nothing of this part."""
        if not self.supports:
            return self.claims
        return tuple(sorted(self.supported(supports), key=lambda claim: claim not in self.claims[:1]))

    def random_fields(self, claim: Any, heads: int, whole: Callable[[int, int], int]) -> Mapping[str, Any]:
        """Fields of a random case that needs a claim; `whole` draws a number from the first one to the last one."""
        in_turn = self.fields_in_turn(claim, heads)
        return in_turn[whole(0, len(in_turn) - 1)]

    def needs_two_lengths(self, claim: Any) -> bool:  # noqa: ARG002  # one of `claims`
        """Whether a claim shows only in cases whose numbers of queries and keys differ."""
        return False

    def needs_one_length(self, claim: Any) -> bool:  # noqa: ARG002  # one of `claims`
        """Whether there are as many queries as keys in each case with a claim."""
        return False

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """A claim that was not judged, in words."""
        return f"{self.supports}: {shown(claim)}"

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # `catalog.variant.Supports`
        """Why a variant does not support a case because of this part, and what to do, or None."""
        if not self.supports:
            return None
        value = self.claimed_by(case)
        if value in self.supported(supports):
            return None
        return f"{self.supports} is {shown(value)}, supports {self.shown_claims(supports)}{remedy}"

    # -- the call ---------------------------------------------------------------------------------------------------

    # The words of `entry.call`, which are also the keywords of a Python function, each with the names that functions of
    # attention libraries give to such a parameter.
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Words that each call passes, also of a plain case.  Others are passed only if a case has the part.
    always: ClassVar[tuple[str, ...]] = ()
    # Words that a function may leave out.
    hints: ClassVar[tuple[str, ...]] = ()

    def arguments(self, case: Shape) -> Mapping[str, Any]:
        """The words of a call, each with its value, besides tensors; without those of a plain case."""
        values = {
            token: case.value_of(token.field)
            for token in self.tokens
            if token.field in self.words and token.field not in self.tensors
        }
        return {token.field: value for token, value in values.items() if value != token.plain(case)}

    # The tensors among `words`.
    tensors: ClassVar[Mapping[str, PartTensor]] = {}

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:  # noqa: ARG002
        """On which of batch, head, query and key a tensor depends in a case; None if the case does not have it."""
        return None

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:
        """Fill float32 numbers of any shape with random ones of a tensor, which then get its dtype."""
        raise NotImplementedError

    def arrange(self, word: str, numbers: torch.Tensor) -> None:
        """Change what a checked call gets after `fill`, [batch or 1, heads or 1, seq_q or 1, seq_k or 1] float32."""

    def fixed(self, word: str, case: Shape) -> Sequence[int]:
        """The elements of a vector or table that is not random."""
        raise NotImplementedError

    def columns(self, word: str, case: Shape) -> int:
        """The length of the last axis of a tensor that `has_columns`."""
        raise NotImplementedError

    def plain_argument(self, word: str) -> Any:  # noqa: ARG002  # of the word's type
        """The value of a word in a call that does not have it."""
        return self.claims[0] if self.claims else None

    def passed(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # noqa: ARG002  # of the word's type
        """The value as `entry.call` passes it."""
        return value

    # Words of `entry.call` alone, which are made of others, with names as in `words`.
    made_words: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def made(self, word: str, words: Mapping[str, Any], conventions: Mapping[str, str]) -> Any:  # of the word's type
        """The value of one of `made_words`, from the words of a call and its q, k and v."""
        raise NotImplementedError

    def passed_by(self, variant: Any) -> tuple[str, ...]:  # `catalog.variant.Variant`
        """The keywords, besides `always`, that the function of a variant without `entry.call` must take."""
        is_claimed = bool(self.supports) and self.is_claimed(variant.supports)
        return tuple(word for word in self.words if word not in self.always) if is_claimed else ()

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """What is wrong with an `entry.call` because of this part, or None."""
        if not self.supports or not self.is_claimed(supports):
            return None
        for word in self.words:
            if not call.passes(word):
                claimed = self.shown_claims(supports)
                return f"entry.call does not pass {word!r}, but supports.{self.supports} is {claimed}; pass it"
        return None

    # The name of a further output, [batch, heads, seq_q] float32, which a call writes if `returns` lists it.
    output: ClassVar[str] = ""
    output_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # as `words`
    output_title: ClassVar[str] = ""  # in words

    # -- conventions ------------------------------------------------------------------------------------------------

    conventions: ClassVar[Mapping[str, Convention]] = {}  # by the keys of a manifest's `conventions`

    def convention_problem(self, key: str, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Why a variant cannot declare another value than the plain one, after the key and the value; or None."""
        is_claimed = not self.supports or self.is_claimed(variant.supports)
        return None if is_claimed else f"supports.{self.supports} is not claimed; claim it, or drop {key}"

    def refusal_in(self, case: Shape, conventions: Mapping[str, str]) -> str | None:  # noqa: ARG002
        """Why a case cannot be given to a kernel with these conventions, or None."""
        return None

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # noqa: ARG002  # of the word's type
        """What a call in these conventions has for a word, a tensor or `scale`; the value is not None."""
        return value

    def meant(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # noqa: ARG002  # as above
        """The inverse of `given`."""
        return value

    # A call may have tensors that lie in memory in another way than the judge's own k and v.

    def is_passed(self, word: str, case: Shape) -> bool:
        """Whether a call on a case has a tensor."""
        return self.axes(word, case) is not None

    def made_shape(self, word: str, case: Shape) -> tuple[int, ...]:
        """The shape of a tensor that `call_placed` makes."""
        raise NotImplementedError

    def call_represented(self, inputs: Any) -> Any:
        """The call with the values that its tensors have where they lie in memory."""
        return inputs

    def of_head(self, word: str, tensor: torch.Tensor, batch: int, kv_head: int, cache: Any) -> torch.Tensor:
        """What one head of a call reads of a tensor that `call_placed` made."""
        raise NotImplementedError

    def cache_of(self, case: Shape) -> CacheShape | None:  # noqa: ARG002
        """The cache in which a case has k and v; None if it has none."""
        return None

    def call_of(self, inputs: Any, case: Shape) -> Any:  # `gpu.inputs.Inputs`  # noqa: ARG002
        """The call of a case, with what only this part knows of it."""
        return inputs

    def call_placed(self, inputs: Any) -> Any:
        """The call as its tensors lie in memory."""
        return inputs

    def call_dense(self, inputs: Any) -> Any:
        """The inverse of `call_placed`."""
        return inputs

    def output_dense(self, inputs: Any, name: str, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """An output of a placed call, [batch, heads, seq_q] or with a further axis, or a gradient as its tensor."""
        return output

    # A call may write some of its inputs.

    written: ClassVar[tuple[str, ...]] = ()  # those that a call with its tensors writes

    def call_after(self, inputs: Any) -> Any:
        """What a call, as its tensors lie in memory, leaves of them."""
        return inputs

    def renew(self, inputs: Any) -> None:
        """Undo in place, as far as that is cheap, what a call wrote into its inputs."""

    def wrong_change(self, name: str, before: Any, found: torch.Tensor) -> str:  # noqa: ARG002
        """Why an input that a call left otherwise than `call_after` is wrong, in a sentence; empty if not known."""
        return ""

    def call_fitted(self, inputs: Any) -> Any:
        """A call that was given other numbers of queries and keys, with tensors of this part that fit them."""
        return inputs

    def passed_cache(self, tensor: torch.Tensor, words: Mapping[str, Any]) -> torch.Tensor | None:  # noqa: ARG002
        """What `entry.call` passes for k or v; None if that is no cache."""
        return None

    def call_given(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call that a kernel gets, with what its meaning does not have, such as NaN where nothing may be read."""
        return inputs

    def call_meant(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """What a call means, besides its words."""
        return inputs

    def call_misread(self, inputs: Any, key: str, value: str) -> Any:  # as above
        """What a call means to a kernel that has another value of a convention."""
        return inputs.in_other_convention(key, value).meant()

    # A further output may have its axes in another order, and other values for the same rows.

    def row_axes(self, conventions: Mapping[str, str]) -> tuple[int, int, int]:  # noqa: ARG002
        """The axes of [batch, heads, seq_q] in the order of a kernel, which is its own inverse."""
        return (0, 1, 2)

    def rows_meant(self, rows: torch.Tensor, exact: torch.Tensor, conventions: Mapping[str, str]) -> torch.Tensor:  # noqa: ARG002
        """Rows as they are judged, float64, from what a kernel wrote; `exact` is true."""
        return rows.double()

    def manifest_problem(self, variant: Any) -> str | None:  # noqa: ARG002  # `catalog.variant.Variant`
        """What else is wrong with a manifest because of this part, or None."""
        return None

    # -- the judge --------------------------------------------------------------------------------------------------

    in_scores: ClassVar[str] = ""  # what changes the scores, in a sentence; empty if it changes none

    def scores(self, inputs: CallInputs, scores: torch.Tensor, positions: Positions) -> torch.Tensor:  # noqa: ARG002
        """The scores of some queries after this part, [batch, heads, rows, keys]; they are scaled before it."""
        return scores

    def is_last(self, inputs: CallInputs) -> bool:  # noqa: ARG002
        """Whether it changes the scores of a call after the other parts."""
        return False

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:  # noqa: ARG002
        """True for each key that this part hides, [rows, keys] or with batch and heads; None if it hides none."""
        return None

    def sinks(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:  # noqa: ARG002
        """Scores that take part in the softmax and have no value, [batch or 1, heads or 1, rows or 1, n], or None."""
        return None

    def shift(self, inputs: CallInputs) -> torch.Tensor | None:  # noqa: ARG002
        """`Positions.shift`, [batch, 1, 1, 1]; None if each sequence has the lengths of the tensors."""
        return None

    def padding(self, inputs: CallInputs) -> Padding | None:  # noqa: ARG002
        """The rows of the output that are not judged, or None."""
        return None

    def key_padding(self, inputs: CallInputs) -> Padding | None:  # noqa: ARG002
        """The same of the gradients of K and V."""
        return None

    def level_matters(self, inputs: CallInputs) -> bool:  # noqa: ARG002
        """Whether the result of a call changes if one number is added to all scores of a row."""
        return False

    def adds_to_scores(self, inputs: CallInputs) -> bool:  # noqa: ARG002
        """Whether it adds numbers to the scores, which float32 loses beside scores that are far from 0."""
        return False

    def order_matters(self, inputs: CallInputs) -> bool:  # noqa: ARG002
        """Whether the result of a call changes if its keys and values come in another order."""
        return False

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:  # noqa: ARG002
        """The mistakes of kernels in this part that change the output of a call."""
        yield from ()

    def nonfinite_cause(self, inputs: CallInputs, bad_rows: torch.Tensor, *, others_are_right: bool) -> str:  # noqa: ARG002
        """Why exactly these rows, [batch, heads, seq_q], are NaN or Inf, if it is because of this part; else empty."""
        return ""

    # A further output is judged by figures of its rows.  The judge computes them in blocks of queries and joins them.

    def row_figures(self, block: ScoreBlock) -> Sequence[torch.Tensor]:
        """The figures of a block of queries, [batch, heads, rows] float64 each."""
        raise NotImplementedError

    def row_truth(self, figures: Sequence[torch.Tensor], rounds: tuple[str, ...], policy: str) -> RowTruth:
        """The true values and the allowed errors, from the figures of all rows."""
        raise NotImplementedError

    def row_mistakes(self, block: ScoreBlock, exact: torch.Tensor) -> Iterator[tuple[torch.Tensor, str]]:  # noqa: ARG002
        """The values that mistakes of kernels give in a block, [batch, heads, rows] float64, each with its sentence."""
        yield from ()

    # -- the self-test ----------------------------------------------------------------------------------------------

    # Its planted faults: the name of each wrong kernel, the check that must detect it, and whether no other one may.
    # `features/selftest/python_part_faults` and `cuda_part_faults` have the kernels.
    faults: ClassVar[Mapping[str, tuple[str, bool]]] = {}
    twins: ClassVar[tuple[str, ...]] = ()  # right kernels that are written alike
    selftest_shapes: ClassVar[tuple[str, ...]] = ()  # cases of its planted faults, and of all right kernels
    fault_shapes: ClassVar[tuple[str, ...]] = ()  # in their place, cases of its planted faults and its own twins alone


def shown(value: object) -> str:
    """A value as a manifest writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
