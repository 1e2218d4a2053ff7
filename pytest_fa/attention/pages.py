"""Pages: keys and values lie in pages of a cache, and a table says which pages a sequence has.

The judge's own k and v are [batch, kv_heads, seq_k, head_dim], as without pages.  A call gets a cache,
[pages, kv_heads, page_size, head_dim], with the heads before or after the keys of a page in memory, and `block_table`.
Pages are in random order.  Two sequences share their first page.  What no sequence has, whole pages and the keys of a
last page at or behind the length, is NaN, or finite in the convention `padding: finite`.  Entries of the table behind a
sequence's last page are -1, 0 or a number that is no page's.  In the convention `kv_cache: together`, the caches are
views of one, [pages, 2, ...].
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fa.attention.dtypes import ELEMENT_BYTES
from pytest_fa.attention.mistake import Mistake, Positions
from pytest_fa.attention.part import CacheShape, CallInputs, Convention, Part, PartTensor, Shape
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.attention.ragged import padding_of, sequences_with_nan, with_lengths
from pytest_fa.attention.token import Choice
from pytest_fa.errors import UnsupportedCase

if TYPE_CHECKING:
    import torch

SIZES = (1, 16, 64, 128, 256)  # keys of a page
HEADS_FIRST = "hnd"
TABLE = "block_table"
KV_CACHE = "kv_cache"
LENGTHS = "seqlens_k"
LARGE = 128
SPARE = 3  # pages that no sequence has
TAILS = (-1, 0, 2**30)  # behind the last page of a sequence, in turn
ENTRY_BYTES = 4
LOOK = "look at the block table"
TEXTS = tuple(f"{size}{order}" for size in SIZES for order in ("", HEADS_FIRST))


class Cache(NamedTuple):
    """How the cache of a call lies in memory, for which `Inputs.cache` stands."""

    page_size: int
    heads_first: bool
    seq_k: int | None = None  # of the judge's own k and v; None for a call that has these, and no cache


class _Choice(Choice):
    @property
    def grammar(self) -> str:
        """The form, in place of all sizes."""
        return f"[-page<size>[{HEADS_FIRST}]]"


class Pages(Part):
    """int32 numbers of pages, [batch, pages of the longest sequence]."""

    name = "pages"
    summary = "keys and values in pages of a cache"
    tokens = (_Choice("pages", tuple((f"page{size}", size) for size in TEXTS), "none"),)
    rows = (
        ("`-page16`", "a paged cache with 16 keys in a page, [pages, 16, kv_heads, head_dim] in memory"),
        ("`-page64hnd`", "a paged cache with 64 keys in a page, [pages, kv_heads, 64, head_dim] in memory"),
    )
    supports = "pages"
    claims = ("none", *TEXTS)
    words = {TABLE: ("block_table", "page_table", "block_tables", "page_tables")}
    made_words = {
        "page_size": ("page_size", "block_size"),
        KV_CACHE: (KV_CACHE, "paged_kv_cache", "kv_data", "paged_kv_data"),
    }
    tensors = {TABLE: PartTensor("int32", "table", is_random=False)}
    conventions = {
        "table_tail": Convention(
            {
                "unread": "entries of the table behind the last page of a sequence are not read",
                "valid": "entries of the table behind the last page of a sequence must be numbers of pages",
            },
            is_seen_in=(TABLE,),
        ),
        KV_CACHE: Convention(
            {
                "apart": "k and v are caches of their own",
                "together": "k and v of a page lie behind each other in one cache, [pages, 2, ...]",
            },
            is_seen_in=(TABLE,),
        ),
    }

    faults = {
        **dict.fromkeys(
            (
                "pages_of_next",
                "pages_ignored",
                "pages_next_page",
                "pages_one_too_far",
                "pages_transposed",
                "pages_last_whole",
                "pages_heads_for_keys",
                "pages_of_64_keys",
                "pages_v_in_order",
            ),
            ("finite", False),
        ),
        **dict.fromkeys(
            (
                "pages_of_first",
                "pages_first_only",
                "pages_partial_lost",
                "pages_aligned_to_capacity",
                "pages_owned_by_one",
                "pages_sink_in_every_page",
            ),
            ("max", False),
        ),
        "pages_kept": ("new_lengths", True),
        "pages_bits_by_sharing": ("prefix_invariance", True),
    }
    selftest_shapes = (
        "b9h4s3d64-fp16-causal_br-kv2-sk150-var1-page16",
        "b4h4s5d64-fp16-kv2-sk256-var5-page64hnd-sink",
    )

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """A call with pages has lengths of keys."""
        if case.value_of("pages") == "none":
            return None
        if case.dtype == "e4m3":
            return "pages of e4m3 are not judged; drop -page"
        if not case.value_of("ragged"):
            return "a call with pages has the lengths of its sequences; add -var5 for equal ones, or another -var"
        return None

    def size_bytes(self, case: Shape) -> int:
        """The entries of the table that a call must read."""
        size = _page_size(case)
        return ENTRY_BYTES * sum(-(-each.seq_k // size) for each in case.sequences) if size else 0

    def further_touched_bytes(self, case: Shape) -> int:
        """The table, without the keys of a page that two sequences share."""
        if not _is_shared(case):
            return self.size_bytes(case)
        of_keys = case.value_of("kv_heads") * (case.head_dim + case.value_of("head_dim_v"))
        shared_bytes: int = ELEMENT_BYTES[case.dtype] * _page_size(case) * of_keys
        return self.size_bytes(case) - shared_bytes

    def in_words(self, case: Shape) -> str:
        """The size of a page, for the title of a picture."""
        size = _page_size(case)
        return f", pages of {size} keys" if size else ""

    # -- the manifest -----------------------------------------------------------------------------------------------

    def read_claim(self, claim: object) -> tuple[Any, ...]:
        """Sizes with or without `hnd`, of which YAML reads some as numbers; true means all."""
        if isinstance(claim, list):
            claim = [str(value) if type(value) is int else value for value in claim]
        return super().read_claim(claim)

    @property
    def varied(self) -> tuple[Any, ...]:
        """No pages, and one size for each order in memory."""
        return ("none", "16", f"64{HEADS_FIRST}")

    def further_claims(self, supports: Any) -> tuple[Any, ...]:  # `catalog.variant.Supports`
        """All sizes of a page but one of each order in memory."""
        claimed = [claim for claim in self.supported(supports) if claim != "none"]
        orders = ([claim for claim in claimed if claim.endswith(HEADS_FIRST) == is_first] for is_first in (True, False))
        varied = {preferred for of_order in orders if (preferred := _varied(of_order))}
        return tuple(claim for claim in claimed if claim not in varied)

    def sized_in_turn(self, claim: Any) -> tuple[tuple[int, int, Mapping[str, Any]], ...]:  # one of `claims`
        """Several pages and a part of one, for sizes of which other cases have one page."""
        size = page_size(claim)
        return ((1, 2 * size + 37, {}),) if size >= LARGE else ()

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The pages that were not judged."""
        return "no pages" if claim == "none" else f"pages of {claim}"

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Sequences in pages have lengths, and only pages can be shared."""
        supports = variant.supports
        if "prefix" in variant.invariant and not self.is_claimed(supports):
            return "invariant has 'prefix', but supports.pages is not claimed; claim it, or drop 'prefix'"
        if self.is_claimed(supports) and not {"keys", "both"} & {*supports.values_of("ragged", ("none",))}:
            return "supports.pages is claimed, but supports.ragged has no lengths of keys; add `ragged: [keys]`"
        call = variant.entry.call
        return self._problem_of_one_cache(variant) if call is not None and call.passes(KV_CACHE) else None

    def _problem_of_one_cache(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """A function of one cache gets no call without pages."""
        if "none" in self.supported(variant.supports):
            claimed = self.shown_claims(variant.supports)
            return f"entry.call passes 'kv_cache', but supports.pages is {claimed}; list sizes of a page alone"
        if variant.conventions.get(KV_CACHE) is None:
            return "entry.call passes 'kv_cache', but k and v are apart; add `conventions: {kv_cache: together}`"
        return None

    def refusal_in(self, case: Shape, conventions: Mapping[str, str]) -> str | None:
        """One cache has one head_dim."""
        is_one = _page_size(case) and conventions.get(KV_CACHE) is not None
        if not is_one or case.head_dim == case.value_of("head_dim_v"):
            return None
        return "with `conventions: {kv_cache: together}`, k and v have one head_dim"

    def cache_of(self, case: Shape) -> CacheShape | None:
        """The cache of a case."""
        if not (size := _page_size(case)):
            return None
        pages = case.batch * self.columns(TABLE, case) + SPARE
        return CacheShape(pages, size, heads_first=case.value_of("pages").endswith(HEADS_FIRST))

    # -- the call ---------------------------------------------------------------------------------------------------

    def axes(self, word: str, case: Shape) -> tuple[bool, bool, bool, bool] | None:  # noqa: ARG002  # its only word
        """A row for each sequence."""
        return (True, False, False, True) if _page_size(case) else None

    def columns(self, word: str, case: Shape) -> int:  # noqa: ARG002  # its only word
        """The pages of the longest sequence."""
        return -(-case.seq_k // _page_size(case))

    def fixed(self, word: str, case: Shape) -> list[int]:  # its only word
        """Pages in random order, of which sequences of more than one page share the first."""
        size, columns = _page_size(case), self.columns(word, case)
        counts = [-(-each.seq_k // size) for each in case.sequences]
        return _table(counts, columns, is_shared=_is_shared(case), seed=case.value_of("seed"))

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # its only word
        """No table."""
        return

    def made(self, word: str, words: Mapping[str, Any], conventions: Mapping[str, str]) -> int | torch.Tensor:  # noqa: ARG002
        """The keys of a page, or the one cache with its axes as they lie in memory."""
        k, v = words["k"], words["v"]
        if word == "page_size":
            return int(k.shape[2])
        if (cache := one_cache(k, v)) is None:
            raise UnsupportedCase(f"{word} is passed, but k and v are no views of one cache")
        return cache.transpose(2, 3) if has_heads_last(k) else cache

    def call_of(self, inputs: Any, case: Shape) -> Any:  # `gpu.inputs.Inputs`
        """The call with its cache; the keys of a page that two sequences share are equal."""
        text = case.value_of("pages")
        if text == "none":
            return inputs
        size = _page_size(case)
        if _is_shared(case):
            inputs = inputs._replace(k=inputs.k.clone(), v=inputs.v.clone())
            for tensor in (inputs.k, inputs.v):
                tensor[1, :, :size] = tensor[0, :, :size]
        return inputs._replace(cache=Cache(size, text.endswith(HEADS_FIRST)))

    def call_placed(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with its cache, by a table of its own if that of the call cannot hold k and v."""
        cache = inputs.cache
        if cache is None or cache.seq_k is not None:
            return inputs
        placed = _placed(inputs, inputs.extra[TABLE])
        return placed if placed is not None else _placed(inputs, _own_table(inputs, is_shared=False))

    def call_dense(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with k and v as the judge has them."""
        if inputs.cache is None or inputs.cache.seq_k is None:
            return inputs
        k, v = (_gathered(tensor, inputs.extra[TABLE], inputs.cache.seq_k) for tensor in (inputs.k, inputs.v))
        return inputs._replace(k=k, v=v, cache=inputs.cache._replace(seq_k=None))

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # its only word
        """Entries that are no page's become 0 for a kernel that reads them."""
        if word != TABLE or conventions.get("table_tail") != "valid":
            return value
        return value.where((value >= 0) & (value < _pages_of(value)), 0)

    def passed_cache(self, tensor: torch.Tensor, words: Mapping[str, Any]) -> torch.Tensor | None:
        """The axes of a cache as they lie in memory, for `entry.call`."""
        if words.get(TABLE) is None:
            return None
        return tensor.transpose(1, 2) if has_heads_last(tensor) else tensor

    # -- the judge --------------------------------------------------------------------------------------------------

    def nonfinite_cause(self, inputs: CallInputs, bad_rows: torch.Tensor, *, others_are_right: bool) -> str:
        """The only mistake that reads NaN in exactly the sequences whose outputs are not finite."""
        bad = bad_rows.flatten(1).any(1).tolist()
        if (table := inputs.word(TABLE)) is None or all(bad):
            return ""
        size = PART.call_placed(inputs).k.shape[2]
        lengths = inputs.word(LENGTHS).flatten().tolist()
        read = {words: sequences_with_nan(change(inputs)) for words, change in _MISREADINGS.items()}
        if others_are_right:
            read["the last page of each sequence is counted whole"] = [length % size > 0 for length in lengths]
            read["slots at or behind seqlens_k are read"] = [length < size * table.shape[3] for length in lengths]
        found = [words for words, with_nan in read.items() if with_nan == bad]
        cause = found[0] if len(found) == 1 else "keys are read that no sequence has"
        words = f"{cause}, so that NaN of pages or slots without a key reaches the output: {LOOK} and the lengths"
        return f"{words}, or declare `conventions: {{padding: finite}}`" if others_are_right else words

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Other pages than those of the table, a cache with its axes in the other order, and last or shared pages."""
        if inputs.word(TABLE) is None:
            return
        for words, change in _MISREADINGS.items():
            yield Mistake(f"{words}: {LOOK}", change=change)
        lengths, size = inputs.word(LENGTHS), PART.call_placed(inputs).k.shape[2]
        words = f"the last page of a sequence is left out unless it is full: {LOOK} and the lengths"
        yield Mistake(words, hide=lambda positions: positions.keys >= positions.part_of(lengths // size * size))
        words = (
            f"the mask is aligned to the last slot of a sequence's pages, not to its last key: {LOOK} and the lengths"
        )
        yield Mistake(words, shift=RAGGED.shift(inputs) + -lengths % size)
        for owner in ("first", "last"):
            lost = _keys_of_other_owners(inputs.word(TABLE), lengths, size, owner)
            words = f"a shared page is read for the {owner} of its sequences only: {LOOK}"
            yield Mistake(words, hide=partial(Positions.part_of, tensor=lost))


def page_size(text: str) -> int:
    """The keys of a page of a claim; 0 without pages."""
    return 0 if text == "none" else int(text.removesuffix(HEADS_FIRST))


def one_cache(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """The cache of which k and v are views, [pages, 2, kv_heads, page_size, dim]; None if they are not of one."""
    of_page = k[:1].numel()
    is_one = (
        (k.shape, k.stride(), k.untyped_storage().data_ptr()) == (v.shape, v.stride(), v.untyped_storage().data_ptr())
        and v.storage_offset() - k.storage_offset() == of_page
        and k.stride(0) == 2 * of_page > 0
    )
    strides = (k.stride(0), of_page, *k.stride()[1:])
    return k.as_strided((len(k), 2, *k.shape[1:]), strides) if is_one else None


def is_together(inputs: Any) -> bool:  # `gpu.inputs.Inputs`
    """Whether k and v of a call are caches that must be views of one."""
    return inputs.convention(KV_CACHE) is not None and inputs.cache is not None and inputs.cache.seq_k is not None


def has_heads_last(cache: torch.Tensor) -> bool:
    """Whether a cache, [pages, kv_heads, page_size, dim], has the heads after the keys in memory."""
    heads, size = cache.shape[1:3]
    of_head, of_key = cache.stride()[1:3]
    return of_head < of_key or (of_head == of_key and heads == 1 < size)


def shared_and_apart(inputs: Any) -> tuple[Any, Any]:  # `gpu.inputs.Inputs`
    """A call on sequences of all keys, whose first two are equal in their first page: once shared, once with copies.

    A call without a cache is returned as it is.
    """
    if inputs.cache is None:
        return inputs, inputs
    size, longest = inputs.cache.page_size, inputs.k.shape[2]
    inputs = with_lengths(inputs, {LENGTHS: inputs.extra[LENGTHS].clamp_min(longest)})
    for tensor in (inputs.k, inputs.v):
        tensor[1, :, :size] = tensor[0, :, :size]
    tables = (_own_table(inputs, is_shared=is_shared) for is_shared in (True, False))
    shared, apart = (inputs._replace(extra={**inputs.extra, TABLE: table}) for table in tables)
    return shared, apart


def shares_page(inputs: Any) -> bool:  # `gpu.inputs.Inputs`
    """Whether the first two sequences of a call share their first page, which both fill."""
    if inputs.cache is None:
        return False
    first, second = inputs.placed().extra[TABLE][:2, 0, 0, 0].tolist()
    return bool(first == second and inputs.extra[LENGTHS][:2].min() >= inputs.cache.page_size)


def _varied(claims: list[str]) -> str:
    """The claim of one order in memory that is judged beside every other part: of 16 keys, or else the first."""
    of_16 = [claim for claim in claims if claim.removesuffix(HEADS_FIRST) == "16"]
    return next(iter(of_16 or claims), "")


def _page_size(case: Shape) -> int:
    """The keys of a page; 0 without pages."""
    return page_size(str(case.value_of("pages")))


def _is_shared(case: Shape) -> bool:
    """Whether the first two sequences share their first page, in which there are no new keys."""
    size, new = _page_size(case), case.seq_q if case.value_of("append") else 0
    return bool(size) and case.batch > 1 and all(each.seq_k - new >= size for each in case.sequences[:2])


def _table(counts: list[int], columns: int, *, is_shared: bool, seed: int) -> list[int]:
    """The entries for sequences with these numbers of pages, row by row."""
    numbers = list(range(len(counts) * columns + SPARE))
    random.Random(seed).shuffle(numbers)  # noqa: S311  # not for cryptography
    entries: list[int] = []
    for row, count in enumerate(counts):
        entries += [numbers.pop() for _ in range(count)]
        entries += [TAILS[row % len(TAILS)]] * (columns - count)
    if is_shared:
        entries[columns] = entries[0]
    return entries


def _own_table(inputs: Any, *, is_shared: bool) -> torch.Tensor:  # of `gpu.inputs.Inputs`
    """A table for the shapes and lengths of a call, in which the first two sequences share their first page or none."""
    size = inputs.cache.page_size
    columns = -(-inputs.k.shape[2] // size)
    counts = [-(-length // size) for length in inputs.extra[LENGTHS].flatten().tolist()]
    table: torch.Tensor = inputs.extra[LENGTHS].new_tensor(_table(counts, columns, is_shared=is_shared, seed=0))
    given: torch.Tensor = PART.given(TABLE, table.view(len(counts), 1, 1, columns), inputs.conventions)
    return given


def _pages_of(table: torch.Tensor) -> int:
    """The pages of a cache whose table is [batch, 1, 1, columns]."""
    return table.numel() + SPARE


def _placed(inputs: Any, table: torch.Tensor) -> Any:  # `gpu.inputs.Inputs`
    """The call with its cache by a table, [batch, 1, 1, columns]; None if the table cannot hold k and v."""
    cache, seq_k, lengths = inputs.cache, inputs.k.shape[2], inputs.extra[LENGTHS]
    columns = -(-seq_k // cache.page_size)
    if table.shape != (lengths.shape[0], 1, 1, columns):
        return None
    pages = _pages_of(table)
    entries = table[:, 0, 0]  # [batch, columns]
    is_used = entries.new_tensor(range(columns)) * cache.page_size < lengths[:, 0, 0]
    used = entries[is_used]
    if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < pages):
        return None
    k, v = (_scattered(each, entries, is_used, pages, cache, padding_of(inputs, each)) for each in (inputs.k, inputs.v))
    is_key = lengths.new_tensor(range(seq_k)) < lengths[:, 0, 0]  # [batch, seq_k]
    for own, whole in ((inputs.k, k), (inputs.v, v)):
        held = _gathered(whole, table, seq_k)
        is_same = (held == own) | (held.isnan() & own.isnan())
        if not bool((is_same | ~is_key[:, None, :, None]).all()):
            return None
    return inputs._replace(k=k, v=v, extra={**inputs.extra, TABLE: table}, cache=cache._replace(seq_k=seq_k))


def _scattered(
    tensor: torch.Tensor,  # [batch, kv_heads, seq_k, dim]
    entries: torch.Tensor,  # [batch, columns]
    is_used: torch.Tensor,
    pages: int,
    cache: Cache,
    padding: float | torch.Tensor,
) -> torch.Tensor:
    """The cache, [pages, kv_heads, page_size, dim], with `padding` where no key is."""
    batch, heads, seq_k, dim = tensor.shape
    size, columns = cache.page_size, entries.shape[1]
    order = (pages, heads, size, dim) if cache.heads_first else (pages, size, heads, dim)
    whole = tensor.new_empty(order)
    whole = whole if cache.heads_first else whole.transpose(1, 2)
    padded = tensor.new_empty((batch, heads, columns * size, dim))
    whole[:], padded[:] = padding, padding
    padded[:, :, :seq_k] = tensor
    by_page = padded.view(batch, heads, columns, size, dim).transpose(1, 2)
    whole[entries[is_used].long()] = by_page[is_used]
    return whole


def _gathered(cache: torch.Tensor, table: torch.Tensor, seq_k: int) -> torch.Tensor:
    """The keys of all sequences, [batch, kv_heads, seq_k, dim]; entries that are no page's are taken as the nearest."""
    entries = table[:, 0, 0].clamp(0, cache.shape[0] - 1).long()
    found: torch.Tensor = cache[entries].transpose(1, 2).flatten(2, 3)
    return found[:, :, :seq_k]


def _misread(change: Any) -> Any:  # a function of a table, and one of `gpu.inputs.Inputs`
    """What a call means to a kernel that has another table."""

    def changed(inputs: Any) -> Any:
        placed = PART.call_placed(inputs)
        table = change(placed.extra[TABLE])
        return PART.call_dense(placed._replace(extra={**placed.extra, TABLE: table}))._replace(extra=inputs.extra)

    return changed


def _keys_of_other_owners(table: torch.Tensor, lengths: torch.Tensor, size: int, owner: str) -> torch.Tensor:
    """The keys of pages that belong to one of their sequences, and not to this one, [batch, 1, 1, columns * size]."""
    is_used = table.new_tensor(range(table.shape[3])) * size < lengths  # [batch, 1, 1, columns]
    used = [(int(table[place[0], 0, 0, place[3]]), place[0]) for place in is_used.nonzero().tolist()]
    owners = dict(used if owner == "last" else reversed(used))
    lost = [[owners.get(page, row) != row for page in entries] for row, entries in enumerate(table[:, 0, 0].tolist())]
    found: torch.Tensor = (is_used & is_used.new_tensor(lost)[:, None, None]).repeat_interleave(size, 3)
    return found


def _in_order(table: torch.Tensor) -> torch.Tensor:
    """The table of a cache whose pages are those of the sequences, one behind the other."""
    return table.new_tensor(range(table.numel())).view(table.shape)


def _in_other_order(inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """What a call means to a kernel that takes keys for heads in the cache, and heads for keys."""
    placed = PART.call_placed(inputs)
    k, v = (_axes_taken_otherwise(tensor) for tensor in (placed.k, placed.v))
    return PART.call_dense(placed._replace(k=k, v=v))._replace(extra=inputs.extra)


def _axes_taken_otherwise(cache: torch.Tensor) -> torch.Tensor:
    """The same memory, [pages, kv_heads, page_size, dim], with the axes of heads and keys in the other order."""
    _, heads, size, dim = cache.shape
    of_head, of_key = (size * dim, dim) if cache.stride(1) < cache.stride(2) else (dim, heads * dim)
    return cache.as_strided(cache.shape, (heads * size * dim, of_head, of_key, 1), cache.storage_offset())


_MISREADINGS = {
    "each sequence has the pages of the next one": _misread(lambda table: table.roll(-1, 0)),
    "all sequences have the pages of the first one": _misread(lambda table: table[:1].expand_as(table)),
    "the table is ignored, and pages are taken in order": _misread(_in_order),
    "each page is the one behind the right one": _misread(lambda table: table + 1),
    "each page is the one before the right one": _misread(lambda table: table - 1),
    "the entries of a sequence are read one too far": _misread(lambda table: table.roll(-1, 3)),
    "the first page of a sequence stands for all its pages": _misread(lambda table: table[..., :1].expand_as(table)),
    "the cache is read with heads and keys of a page exchanged": _in_other_order,
}

PART = Pages()
