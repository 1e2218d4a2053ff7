"""New keys and values that a call appends to its caches, as in decoding: the kernel writes them, and they take part.

The judge's own k and v have all keys.  A call gets `k_new` and `v_new`, [batch, kv_heads, seq_q, dim], the last seq_q
keys of each sequence, and caches in which the slots of these keys hold NaN, as unused slots do.  Afterwards the caches
must be what they were, with the new keys in their slots, bit by bit.  Each sequence has at least as many keys as new
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fa.attention.dtypes import ELEMENT_BYTES
from pytest_fa.attention.layout import AxisOrder, stored
from pytest_fa.attention.mistake import Mistake
from pytest_fa.attention.part import CallInputs, Convention, Part, PartTensor, Shape
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

NEW = {"k": "k_new", "v": "v_new"}
LENGTHS, TABLE = "seqlens_k", "block_table"
COUNTED = "appended_lengths"
QUERIES = (3, 1, 8)  # new keys of a sequence
LOOK = "look at the slots of the new keys"


class Append(Part):
    """`k_new` and `v_new`, which the call writes into the last seq_q keys of each sequence in k and v."""

    name = "append"
    summary = "new keys and values, which the call appends to its caches"
    tokens = (Choice("append", (("append", True),), without=False),)
    rows = (("`-append`", "the last S keys of each sequence are new: a call gets them apart, and appends them"),)
    supports = "append"
    claims = (False, True)
    words = {
        "k_new": ("k_new", "new_k", "new_keys", "knew", "append_key"),
        "v_new": ("v_new", "new_v", "new_values", "vnew", "append_value"),
    }
    tensors = {word: PartTensor("q", "rows") for word in words}
    written = tuple(NEW)
    conventions = {
        COUNTED: Convention(
            {
                "with": "seqlens_k counts the new keys",
                "without": "seqlens_k does not count the new keys",
            },
            is_seen_in=(LENGTHS,),
        )
    }
    faults = {
        **dict.fromkeys(
            (
                "append_not_written",
                "append_next_slot",
                "append_other_sequence",
                "append_keys_only",
                "append_values_for_keys",
            ),
            ("inputs", True),
        ),
        "append_lengths_exchanged": ("inputs", False),
        "append_ignored": ("max", False),
        "append_values_lost": ("max", False),
        "append_reads_slots": ("finite", False),
    }
    selftest_shapes = (
        "b4h4s3d64-fp16-kv2-sk150-var1-append",
        "b4h4s5d64-fp16-causal_br-kv2-sk150-var4-page16-append",
    )

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """A cache has lengths of keys alone, 16 or 32 bits, and room for the new keys of each sequence."""
        if not case.value_of("append"):
            return None
        if case.dtype == "e4m3" or case.value_of("cache_dtype") != "none":
            return "appending to a quantised cache is not judged; drop -append"
        if case.value_of("layout") == "packed":
            return "one tensor of q, k and v is no cache; drop -append"
        if RAGGED.claimed_by(case) != "keys":
            return "a call that appends has lengths of keys alone; add -var4, or -var5 for equal ones"
        shortest = min(keys for _, keys in RAGGED.sequence_lengths(case) or ())
        if shortest < case.seq_q:
            return f"a sequence has {shortest} keys, of which {case.seq_q} are new; write a larger -sk"
        return None

    def fields_for(self, dtype: str) -> Mapping[str, Any]:
        """Caches of e4m3 get all keys."""
        return {"append": False} if dtype == "e4m3" else {}

    def size_bytes(self, case: Shape) -> int:
        """The new keys, which are read, beside the keys of the cache, of which these are written."""
        if not case.value_of("append"):
            return 0
        keys: int = case.batch * case.value_of("kv_heads") * case.seq_q
        return ELEMENT_BYTES[case.dtype] * keys * (case.head_dim + int(case.value_of("head_dim_v")))

    def further_touched_bytes(self, case: Shape) -> int:
        """The same."""
        return self.size_bytes(case)

    def in_words(self, case: Shape) -> str:
        """How many keys are new, for the title of a picture."""
        return f", {case.seq_q} of the keys appended" if case.value_of("append") else ""

    # -- the manifest -----------------------------------------------------------------------------------------------

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:
        """A few new keys."""
        return self.fields_in_turn(claim, heads)[0]

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG002
        """Each of `QUERIES`."""
        return tuple({"append": True, "seq_q": count} for count in QUERIES) if claim else ({"append": False},)

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # `catalog.variant.Supports`
        """Also a case that other parts have made impossible."""
        return super().refusal(case, supports, remedy) or self.impossible(case)

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The call that was not judged."""
        return "new keys that a call appends" if claim else "a call that appends no keys"

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """A cache has lengths."""
        supports = variant.supports
        if self.is_claimed(supports) and "keys" not in supports.values_of("ragged", ("none",)):
            return "supports.append is claimed, but supports.ragged has no lengths of keys alone; add `ragged: [keys]`"
        return None

    # -- the call ---------------------------------------------------------------------------------------------------

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # one of both
        """No tensor."""
        return

    def is_passed(self, word: str, case: Shape) -> bool:  # noqa: ARG002  # one of both
        """Whether a call on a case has a tensor that `call_placed` makes."""
        return bool(case.value_of("append"))

    def made_shape(self, word: str, case: Shape) -> tuple[int, int, int, int]:
        """[batch, kv_heads, seq_q, head_dim or head_dim_v]."""
        dim = case.head_dim if word == "k_new" else case.value_of("head_dim_v")
        return case.batch, case.value_of("kv_heads"), case.seq_q, dim

    def fill(self, word: str, numbers: torch.Tensor, generator: torch.Generator) -> None:  # noqa: ARG002  # one of both
        """N(0, 1), as k and v."""
        numbers.normal_(generator=generator)

    def call_of(self, inputs: Any, case: Shape) -> Any:  # `gpu.inputs.Inputs`
        """The call, which says that it appends."""
        return inputs._replace(appends=True) if case.value_of("append") else inputs

    def call_fitted(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """No sequence is shorter than its new keys."""
        if not inputs.appends:
            return inputs
        return _with_lengths(inputs, inputs.extra[LENGTHS].clamp_min(min(inputs.q.shape[2], inputs.k.shape[2])))

    def call_placed(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with its new keys apart, NaN in their slots, and lengths as they are counted."""
        if not inputs.appends or _is_placed(inputs):
            return inputs
        slots = _slots(inputs)
        order: AxisOrder = "bshd" if inputs.q.stride(1) < inputs.q.stride(2) else "bhsd"
        new = {NEW[name]: stored(slots.read(getattr(inputs, name)), order) for name in NEW}
        placed = inputs._replace(k=_copied(inputs.k), v=_copied(inputs.v), extra={**inputs.extra, **new})
        self.renew(placed, slots)
        return _with_lengths(placed, placed.extra[LENGTHS] - _uncounted(placed))

    def call_dense(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with all keys in k and v."""
        if not _is_placed(inputs):
            return inputs
        after = self.call_after(inputs)
        whole = after._replace(extra={name: each for name, each in after.extra.items() if name not in self.words})
        return _with_lengths(whole, whole.extra[LENGTHS] + _uncounted(inputs))

    def call_after(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with its new keys in their slots, too."""
        if not _is_placed(inputs):
            return inputs
        slots = _slots(inputs)
        return inputs._replace(
            **{name: slots.written(getattr(inputs, name), inputs.extra[word]) for name, word in NEW.items()}
        )

    def renew(self, inputs: Any, slots: Slots | None = None) -> None:  # `gpu.inputs.Inputs`
        """NaN in the slots of the new keys."""
        if _is_placed(inputs):
            for name in NEW:
                (slots or _slots(inputs)).fill(getattr(inputs, name), float("nan"))

    def of_head(self, word: str, tensor: torch.Tensor, batch: int, kv_head: int, cache: Any) -> torch.Tensor:  # noqa: ARG002
        """The new keys of one head of one batch."""
        return tensor[batch : batch + 1, kv_head : kv_head + 1]

    def call_misread(self, inputs: Any, key: str, value: str) -> Any:  # noqa: ARG002  # `gpu.inputs.Inputs`; its only key
        """The new keys in other slots, and another length."""
        placed = self.call_placed(inputs).in_other_convention(COUNTED, value)
        return self.call_dense(placed).meant()

    # -- the judge --------------------------------------------------------------------------------------------------

    def wrong_change(self, name: str, before: Any, found: torch.Tensor) -> str:  # `gpu.inputs.Inputs`
        """Which new keys are in which slots of k or v."""
        if name not in NEW or not _is_placed(before):
            return ""
        own, slots, new, of_new = getattr(before, name), _slots(before), before.extra[NEW[name]], NEW[name]
        if _is_same(found, own):
            return f"the kernel did not write {of_new} into {name}: {LOOK}"
        for words, places, values in (
            *_moved_slots(before, new),
            (f"into the slots of the next sequence: {LOOK}", slots, new.roll(1, 0)),
            (f"into the slots of the sequence before: {LOOK}", slots, new.roll(-1, 0)),
        ):
            if places.hold(found, values):
                return f"in {name}, the kernel wrote {of_new} {words}"
        if not _is_same(slots.written(found, slots.read(own)), own):
            return f"the kernel changed its input {name} outside the slots of the new keys"
        written = slots.read(found)
        for other in (before.extra[word] for word in self.words if word != of_new):
            if other.shape == new.shape and _is_same(written, other):
                return f"the kernel wrote {NEW['v' if name == 'k' else 'k']} into {name}: {LOOK}"
        count = int((~_same(written, new)).sum())
        return f"{count} elements that the kernel wrote into {name} are not those of {of_new}"

    def nonfinite_cause(self, inputs: CallInputs, bad_rows: torch.Tensor, *, others_are_right: bool) -> str:  # noqa: ARG002
        """NaN of the slots, which each row sees."""
        if not getattr(inputs, "appends", False) or not bool(bad_rows.all()):
            return ""
        words = "each row is NaN, as the slots of the new keys are until they are written: read k_new and v_new there"
        return f"{words}, or wait for the write"

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """New keys that take no part, that are those of other sequences, or whose values are lost."""
        if not getattr(inputs, "appends", False):
            return
        count, lengths = inputs.q.shape[2], inputs.word(LENGTHS)
        fewer = (lengths - count).clamp_min(0)
        words = "the new keys take no part"
        yield Mistake(f"{words}: {LOOK}", change=lambda inputs: _with_lengths(inputs, fewer))
        words = "the new keys are hidden, although the mask counts them"
        yield Mistake(f"{words}: {LOOK}", hide=lambda positions: positions.keys >= positions.part_of(fewer))
        yield Mistake(f"v_new counts as zero: {LOOK}", change=_misread(("v_new",), lambda new: new * 0))
        yield Mistake(f"k_new counts as zero: {LOOK}", change=_misread(("k_new",), lambda new: new * 0))
        words = "each sequence has the new keys of the {}"
        for which, step in (("next one", -1), ("one before it", 1)):
            roll = _misread(tuple(self.words), lambda new, step=step: new.roll(step, 0))  # type: ignore[misc]
            yield Mistake(f"{words.format(which)}: {LOOK}", change=roll)


class Slots(NamedTuple):
    """Where the new keys of each sequence lie in k and v, [block, :, row]; all are [batch, seq_q].

    A block is a batch, or in a cache a page.  Where `are_there` is false, there is no such slot.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    are_there: torch.Tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What k or v has there, [batch, kv_heads, seq_q, dim]."""
        return tensor[self.blocks, :, self.rows].transpose(1, 2)

    def hold(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether k or v has values, [batch, kv_heads, seq_q, dim], in those that are there."""
        are_there = self.are_there[:, None, :, None]
        return bool((_same(self.read(tensor), values) | ~are_there).all() and are_there.any())

    def fill(self, tensor: torch.Tensor, values: torch.Tensor | float) -> None:
        """Write a number, or [slots, kv_heads, dim] of those that are there, into k or v."""
        tensor[self.blocks[self.are_there], :, self.rows[self.are_there]] = values

    def written(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A copy of k or v with values, [batch, kv_heads, seq_q, dim], there."""
        copy = _copied(tensor)
        self.fill(copy, values.transpose(1, 2)[self.are_there])
        return copy


def _is_placed(inputs: Any) -> bool:  # of `gpu.inputs.Inputs`
    """Whether a call has its new keys apart."""
    return bool(inputs.appends) and NEW["k"] in inputs.extra


def _uncounted(inputs: Any) -> int:  # of `gpu.inputs.Inputs`
    """How many keys of each sequence the lengths of a call do not count."""
    return int(inputs.q.shape[2]) if inputs.convention(COUNTED) == "without" else 0


def _slots(inputs: Any, step: int = 0) -> Slots:  # of `gpu.inputs.Inputs`
    """The slots of the new keys, or those that lie `step` keys behind them."""
    lengths, count = inputs.extra[LENGTHS][:, 0, 0].long(), inputs.q.shape[2]  # [batch, 1]
    counted = lengths + (_uncounted(inputs) if _is_placed(inputs) else 0)
    positions = counted - count + step + lengths.new_tensor(range(count))  # [batch, seq_q]
    blocks, _, size, _ = inputs.k.shape
    if inputs.cache is None or inputs.cache.seq_k is None:
        block, room = lengths.new_tensor(range(blocks))[:, None].expand_as(positions), size
    else:
        table = inputs.extra[TABLE][:, 0, 0].long()  # [batch, columns]
        block, room = table.gather(1, (positions // size).clamp(0, table.shape[1] - 1)), table.shape[1] * size
    are_there = (positions >= 0) & (positions < room) & (block >= 0) & (block < blocks)
    return Slots(block.clamp(0, blocks - 1), positions.clamp_min(0) % size, are_there)


def _moved_slots(inputs: Any, new: torch.Tensor) -> Iterator[tuple[str, Slots, torch.Tensor]]:  # `gpu.inputs.Inputs`
    """The slots of kernels that count otherwise, with words for them."""
    count, declared = inputs.q.shape[2], inputs.convention(COUNTED)
    convention = PART.conventions[COUNTED]
    for step in dict.fromkeys((count, -count, 1, -1)):
        other = "without" if step > 0 else "with"
        is_counted = abs(step) == count and other != (declared or convention.plain)
        reason = convention.advice(COUNTED, declared, other) if is_counted else LOOK
        words = f"{abs(step)} slot{'s' if abs(step) > 1 else ''} too {'far' if step > 0 else 'early'}"
        yield f"{words}: {reason}", _slots(inputs, step), new


def _with_lengths(inputs: Any, lengths: torch.Tensor) -> Any:  # `gpu.inputs.Inputs`
    return inputs._replace(extra={**inputs.extra, LENGTHS: lengths})


def _misread(words: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # of `gpu.inputs.Inputs`
    """What a call means to a kernel that has other new keys."""

    def changed(inputs: Any) -> Any:
        placed = PART.call_placed(inputs)
        other = {word: change(placed.extra[word]) for word in words}
        return PART.call_dense(placed._replace(extra={**placed.extra, **other}))

    return changed


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and offset, and with what lies between; dense if elements share memory."""
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    if any(step == 0 and size > 1 for size, step in steps):
        return tensor.clone()
    end = tensor.storage_offset() + 1 + sum((size - 1) * step for size, step in steps)
    whole = tensor.as_strided((end,), (1,), 0).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where elements are equal, or both NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(_same(one, other).all())


PART = Append()
