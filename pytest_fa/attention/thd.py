"""The layout `thd`: the sequences of a batch behind one another, without padding between them.

The judge's own tensors are padded, [batch, heads, seq, dim], as in each ragged batch.  A call gets
[1, heads, rows, dim], which lie in memory as [rows, heads, dim], and where each sequence begins: `cu_seqlens_q` and
`cu_seqlens_k`.  The output lies as q does.  A cache in pages stays as it is, and has `seqlens_k`.

The rows of padding follow the last sequence.  The numbers of rows that a call is told as the longest ones may be larger
than each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.backward import OF_KEYS, OF_PARTS, OF_QUERIES, ROWS_OF_QUERIES, rows_as_kernels_have
from pytest_fa.attention.mistake import Mistake
from pytest_fa.attention.part import CallInputs, Part, PartTensor, Shape
from pytest_fa.attention.ragged import OF_QUERIES as RAGGED_QUERIES
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.attention.ragged import sequences_with_nan
from pytest_fa.attention.rows import Padding

if TYPE_CHECKING:
    import torch

LAYOUT = "thd"
STARTS_Q, STARTS_K = "cu_seqlens_q", "cu_seqlens_k"
LONGEST_Q, LONGEST_K = "max_seqlen_q", "max_seqlen_k"
LENGTHS_Q, LENGTHS_K = "seqlens_q", "seqlens_k"
SPARE = 64  # by which the longest numbers of rows are too large for data of odd seeds
START_BYTES = 4
# Of the suite `ragged`: edges of tiles on both sides, prompts, and new tokens beside caches in pages.
SHAPES = (
    "b9h4s257d128-bf16-causal_br-kv2-var2-thd",
    "b9h8s1024d128-fp16-causal_br-kv2-var3-thd",
    "b9h32s8d128-fp16-causal_br-kv8-sk4096-var2-page16-thd",
)
LOOK = "look at cu_seqlens_q and cu_seqlens_k"


class Thd(Part):
    """int32 numbers of the first row of each sequence, and of the row behind the last one, [batch + 1]."""

    name = "thd"
    summary = "sequences behind one another"
    words = {
        STARTS_Q: ("cu_seqlens_q", "cu_seqlens_query", "cu_seq_q", "cu_seq_lens_q", "qo_indptr", "query_start_loc"),
        STARTS_K: ("cu_seqlens_k", "cu_seqlens_kv", "cu_seqlens_key", "cu_seq_k", "cu_seq_lens_k", "kv_indptr"),
        LONGEST_Q: ("max_seqlen_q", "max_q", "max_seq_len_q", "max_query_len"),
        LONGEST_K: ("max_seqlen_k", "max_seqlen_kv", "max_k", "max_seq_len_k", "max_kv_len"),
    }
    tensors = {word: PartTensor("int32", "starts", is_random=False) for word in (STARTS_Q, STARTS_K)}
    hints = (LONGEST_Q, LONGEST_K)
    shapes = {"ragged": SHAPES}
    faults = {
        **dict.fromkeys(
            ("thd_keys_of_next", "thd_keys_of_longest", "thd_keys_of_queries", "thd_keys_go_on"), ("finite", False)
        ),
        "thd_last_sequence_lost": ("finite", False),
        "thd_tile_written_whole": ("max", False),
        "thd_writes_past": ("rows past", True),
        "thd_lse_of_longest": ("lse", True),
        "thd_kept_starts": ("new_lengths", True),
    }
    selftest_shapes = ("b9h4s129d64-fp16-causal_br-kv2-var2-thd", "b9h4s65d64-fp16-kv2-var3-page16-thd")

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """Only sequences with lengths of their own lie behind one another."""
        return next(_problems(case), None) if case.value_of("layout") == LAYOUT else None

    def size_bytes(self, case: Shape) -> int:
        """One start more than there are lengths."""
        return START_BYTES * sum(self.is_passed(word, case) for word in self.tensors)

    # -- the manifest -----------------------------------------------------------------------------------------------

    def passed_by(self, variant: Any) -> tuple[str, ...]:  # `catalog.variant.Variant`
        """The words of calls on sequences behind one another."""
        return self._words_for(variant.supports)

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A function has all of q, k, v and the output as one row of sequences, or none."""
        if LAYOUT in supports.layout:
            needed = (word for word in self._words_for(supports) if word not in self.hints)
            if missing := next((word for word in needed if not call.passes(word)), None):
                return f"entry.call does not pass {missing!r}, but supports.layout has {LAYOUT}; pass it"
            if len(supports.layout) > 1:
                return f"entry.call passes starts of sequences in each call; write `layout: [{LAYOUT}]`"
            return None
        passed = next((word for word in self.tensors if call.passes(word)), None)
        if passed or call.layout == LAYOUT:
            what = f"passes {passed!r}" if passed else f"has `layout: {LAYOUT}`"
            layouts = ", ".join(supports.layout)
            return f"entry.call {what}, but supports.layout is {layouts}; write `layout: [{LAYOUT}], ragged: [both]`"
        return None

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Each sequence has its own number of queries."""
        supports = variant.supports
        if LAYOUT in supports.layout and "both" not in supports.values_of("ragged", ("none",)):
            return f"supports.layout has {LAYOUT}, but supports.ragged does not list both; add `ragged: [both]`"
        return None

    def _words_for(self, supports: Any) -> tuple[str, ...]:  # `catalog.variant.Supports`
        if LAYOUT not in supports.layout:
            return ()
        return (STARTS_Q, LONGEST_Q, LONGEST_K, *((STARTS_K,) if may_lack_pages(supports) else ()))

    # -- the call ---------------------------------------------------------------------------------------------------

    def arguments(self, case: Shape) -> Mapping[str, Any]:
        """The longest numbers of rows, or larger ones."""
        if case.value_of("layout") != LAYOUT:
            return {}
        spare = SPARE * (case.value_of("seed") % 2)
        return {LONGEST_Q: case.seq_q + spare, LONGEST_K: case.seq_k + spare}

    def is_passed(self, word: str, case: Shape) -> bool:
        """Whether q, or k and v, are sequences behind one another."""
        return case.value_of("layout") == LAYOUT and (word == STARTS_Q or not has_pages(case))

    def made_shape(self, word: str, case: Shape) -> tuple[int, ...]:  # noqa: ARG002  # one of both
        """[batch + 1]."""
        return (case.batch + 1,)

    def fixed(self, word: str, case: Shape) -> list[int]:
        """The starts."""
        return [0, *accumulate(each.seq_q if word == STARTS_Q else each.seq_k for each in case.sequences)]

    def plain_argument(self, word: str) -> None:  # noqa: ARG002
        """No starts and no longest number."""
        return

    def call_fitted(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """No sequence is longer than the longest number of rows."""
        needed = {LONGEST_Q: inputs.q.shape[2], LONGEST_K: inputs.k.shape[2]}
        fitted = {word: max(inputs.more[word], rows) for word, rows in needed.items() if word in inputs.more}
        return inputs._replace(more={**inputs.more, **fitted}) if fitted else inputs

    def call_placed(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with the sequences of q, k and v behind one another; of q alone beside a cache."""
        if inputs.word(LONGEST_Q) is None or STARTS_Q in inputs.extra:
            return inputs
        extra = dict(inputs.extra)
        of_queries = extra.pop(LENGTHS_Q)
        changed = {"q": _packed(inputs.q, of_queries)}
        extra |= _of_queries(extra, lambda tensor: _packed(tensor, of_queries), inputs.conventions)
        extra[STARTS_Q] = _starts(of_queries)
        if inputs.cache is None:
            of_keys = extra.pop(LENGTHS_K)
            changed |= {name: _packed(getattr(inputs, name), of_keys) for name in ("k", "v")}
            extra[STARTS_K] = _starts(of_keys)
        return inputs._replace(**changed, extra=extra)

    def call_dense(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with padded sequences."""
        if STARTS_Q not in inputs.extra:
            return inputs
        extra = dict(inputs.extra)
        of_queries = _lengths(extra.pop(STARTS_Q))
        changed = {"q": _padded(inputs.q, of_queries)}
        extra |= _of_queries(extra, lambda tensor: _padded(tensor, of_queries), inputs.conventions)
        extra[LENGTHS_Q] = of_queries
        if STARTS_K in extra:
            of_keys = _lengths(extra.pop(STARTS_K))
            changed |= {name: _padded(getattr(inputs, name), of_keys) for name in ("k", "v")}
            extra[LENGTHS_K] = of_keys
        return inputs._replace(**changed, extra=extra)

    def of_head(self, word: str, tensor: torch.Tensor, batch: int, kv_head: int, cache: Any) -> torch.Tensor:  # noqa: ARG002
        """All starts."""
        return tensor

    def output_dense(self, inputs: Any, name: str, output: torch.Tensor) -> torch.Tensor:  # `gpu.inputs.Inputs`
        """The output with padded sequences; the gradient of a sink has none."""
        if STARTS_Q not in inputs.extra or name in OF_PARTS:
            return output
        return _padded(output, _lengths(inputs.extra[STARTS_K if name in OF_KEYS else STARTS_Q]))

    # -- the judge --------------------------------------------------------------------------------------------------

    def padding(self, inputs: CallInputs) -> Padding | None:
        """The rows of the output behind the last sequence."""
        return _padding(inputs, STARTS_Q, inputs.q.shape[2])

    def key_padding(self, inputs: CallInputs) -> Padding | None:
        """Those of the gradients of K and V."""
        return _padding(inputs, STARTS_K, inputs.k.shape[2])

    def nonfinite_cause(self, inputs: CallInputs, bad_rows: torch.Tensor, *, others_are_right: bool) -> str:  # noqa: ARG002
        """A mistake that reads NaN in exactly the sequences whose outputs are not finite."""
        if not has_rows_of_keys(inputs):
            return ""
        bad, of_queries = bad_rows.flatten(1).any(1).tolist(), inputs.word(LENGTHS_Q).flatten().tolist()
        given = RAGGED.call_given(inputs)

        def shows(with_nan: list[bool]) -> bool:
            return [nan and count > 0 for nan, count in zip(with_nan, of_queries, strict=True)] == bad

        found = [words for words, change in _MISREADINGS.items() if shows(sequences_with_nan(change(given)))]
        cause = f"{found[0]}, and then" if len(found) == 1 else "keys of a sequence are looked for elsewhere, where"
        words = f"{cause} NaN of rows behind the last sequence is read: {LOOK}"
        return f"{words}, or declare `conventions: {{padding: finite}}`" if found else ""

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Sequences that are looked for where padded ones begin, or where those of the other side do."""
        if has_rows_of_keys(inputs):
            for words, change in _MISREADINGS.items():
                yield Mistake(f"{words}: {LOOK}", change=change)


def _padding(inputs: CallInputs, word: str, longest: int) -> Padding | None:
    """The rows behind the last sequence, of so many rows in all; None if sequences do not lie behind one another."""
    if (starts := inputs.word(word)) is None:
        return None
    rows = starts.new_tensor(range(longest))[None, None]  # [1, 1, rows]
    return Padding(rows >= starts[-1], inputs.convention("rows_past") or "untouched")


def _of_queries(
    extra: Mapping[str, torch.Tensor], placed: Callable[[torch.Tensor], torch.Tensor], conventions: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """What a backward call has for each query, placed elsewhere, with the axes in memory as its kernel has them."""
    moved = {name: placed(extra[name]) for name in OF_QUERIES if name in extra}
    return {
        name: rows_as_kernels_have(tensor, conventions) if name in ROWS_OF_QUERIES else tensor
        for name, tensor in moved.items()
    }


def _problems(case: Shape) -> Iterator[str]:
    """Why the sequences of a case cannot lie behind one another."""
    if case.value_of("ragged") not in RAGGED_QUERIES:
        yield "sequences behind one another have lengths of their own on both sides; add -var2 or -var3, or drop -thd"
    if case.dtype == "e4m3":
        yield "sequences of e4m3 behind one another are not judged; drop -thd"
    if case.value_of("cache_dtype") != "none" and not has_pages(case):
        yield "sequences behind one another are no cache; add -page16, or drop -kv_ or -thd"
    if pairs := next((name for name in ("bias", "mask") if case.value_of(name) is not None), ""):
        yield f"a {pairs} is padded, [batch, heads, seq_q, seq_k]; drop it or -thd"


def has_pages(case: Shape) -> bool:
    """Whether keys and values lie in a cache."""
    return bool(case.value_of("pages") != "none")


def has_rows_of_keys(inputs: Any) -> bool:  # `gpu.inputs.Inputs`
    """Whether the sequences of k and v of a call lie behind one another."""
    return inputs.word(LONGEST_Q) is not None and inputs.cache is None


def may_lack_pages(supports: Any) -> bool:  # `catalog.variant.Supports`
    """Whether a variant takes keys and values that lie in no cache."""
    return "none" in supports.values_of("pages", ("none",))


def _order(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """The rows of [batch, longest], flat, in the order in which they lie behind one another; padding comes last."""
    of_row = lengths.new_tensor(range(longest))
    return (of_row >= lengths.flatten()[:, None]).flatten().int().argsort(stable=True)


def _packed(tensor: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[1, heads, batch * seq, dim] in memory as [rows, heads, dim], from [batch, heads, seq, dim]."""
    rows = tensor.transpose(1, 2).flatten(0, 1)
    return rows[_order(lengths, tensor.shape[2])].transpose(0, 1)[None]


def _padded(tensor: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The inverse of `_packed`, also for [1, heads, batch * seq]."""
    batch, longest = len(lengths), tensor.shape[2] // len(lengths)
    places = _order(lengths, longest).argsort()
    padded: torch.Tensor = tensor[0][:, places].view(tensor.shape[1], batch, longest, *tensor.shape[3:])
    return padded.transpose(0, 1)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """[batch + 1], from [batch, 1, 1, 1]."""
    starts: torch.Tensor = lengths.new_zeros(len(lengths) + 1)
    starts[1:] = lengths.flatten().cumsum(0)
    return starts


def _lengths(starts: torch.Tensor) -> torch.Tensor:
    """[batch, 1, 1, 1], from [batch + 1]."""
    return starts.diff().view(-1, 1, 1, 1)


def _with_keys_from(starts: Any, *, goes_on: bool = False) -> Any:  # as `call_meant`
    """What a call means to a kernel whose keys begin elsewhere, or which go on as far as the longest sequence."""

    def changed(inputs: Any) -> Any:
        of_queries, of_keys = (_starts(inputs.extra[word]) for word in (LENGTHS_Q, LENGTHS_K))
        longest = inputs.word(LONGEST_K)
        rows = starts(of_keys, of_queries, longest)[:-1, None] + of_keys.new_tensor(range(inputs.k.shape[2]))
        placed = PART.call_placed(inputs)
        k, v = (_rows_of(tensor, rows) for tensor in (placed.k, placed.v))
        lengths = inputs.extra[LENGTHS_K]
        extra = {**inputs.extra, LENGTHS_K: lengths.clamp_min(inputs.k.shape[2]) if goes_on else lengths}
        return inputs._replace(k=k, v=v, extra=extra)

    return changed


def _rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of each sequence, [batch, seq], in the place of its own; behind the end of the tensor the last one."""
    return tensor[0].transpose(0, 1)[rows.clamp_max(tensor.shape[2] - 1)].transpose(1, 2)


_MISREADINGS = {
    "keys of a sequence are looked for at its number times the longest number of keys": _with_keys_from(
        lambda of_keys, _, longest: of_keys.new_tensor(range(len(of_keys))) * longest
    ),
    "keys of a sequence are looked for where cu_seqlens_q says": _with_keys_from(lambda _, of_queries, __: of_queries),
    "keys of a sequence are looked for where those of the next one begin": _with_keys_from(
        lambda of_keys, *_: of_keys.roll(-1)
    ),
    "each sequence has max_seqlen_k keys, and reads on in the next ones": _with_keys_from(
        lambda of_keys, *_: of_keys, goes_on=True
    ),
}

PART = Thd()
