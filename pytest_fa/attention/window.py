"""The sliding window: a query sees the keys from `left` before its own position to `right` after it.

The last query stands at the last key, as under a bottom-right mask: query i has the position i + seq_k - seq_q.  The
query's own key is not counted, so that the window (0, 0) has one key.  A side may be open, or negative: with a `left`
of -8 the window begins eight keys after the query.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fa.attention.mistake import LOOK_AT_MASK, Hide, Mistake, Positions, empty_row_mistakes
from pytest_fa.attention.part import CallInputs, Convention, Part, Shape, shown

if TYPE_CHECKING:
    import torch

OPEN = -1  # what libraries pass for an open side
MAX_SIDE = 2**31 - 1
MAX_RANDOM_SIDE = 200  # keys on one side of a query, in random cases: some tiles
AS_WINDOW = "a window and a causal mask are one thing; write the window with 0 after a query, such as -win127_0"
AS_MASK = "a window that is open before a query and has 0 after it is the bottom-right mask: write -causal_br"
WORDS = ("window_left", "window_right")


class Window(NamedTuple):
    """How many keys a query sees before and after its own; None for all."""

    left: int | None
    right: int | None

    def keys_of(self, position: int, seq_k: int) -> range:
        """The keys that a query at a position sees."""
        start = 0 if self.left is None else position - self.left
        stop = seq_k if self.right is None else position + self.right + 1
        return range(max(0, start), max(0, start, min(seq_k, stop)))


PLAIN = Window(None, None)


class Sides:
    """The texts of a window: `win127_0`, `wino_5` with an open side, `winm8_127` with a negative one."""

    field = "window"
    pattern = r"win(?:o|m?\d+)_(?:o|m?\d+)"
    grammar = "[-win<left>_<right>]"

    def read(self, text: str) -> Window:
        """The window of a text."""
        return Window(*(_side(side) for side in text.removeprefix("win").split("_")))

    def plain(self, case: Any) -> Window:  # noqa: ARG002  # the same in each case
        """Without a text, no key is hidden."""
        return PLAIN

    def write(self, value: Window) -> str:
        """The text of a window."""
        return f"win{'_'.join('o' if side is None else str(side).replace('-', 'm') for side in value)}"


def _side(text: str) -> int | None:
    return None if text == "o" else int(text.replace("m", "-"))


class SlidingWindow(Part):
    """Hides keys before and after a query, each by its distance."""

    name = "window"
    summary = "a query sees only keys near its own position"
    tokens = (Sides(),)
    rows = (
        ("`-win127_0`", "a window: 127 keys before a query, and none after it"),
        ("`-wino_5`, `-winm8_57`", "`o`: no limit on that side; `m`: minus"),
    )
    supports = "window"
    claims = ("none", "left", "both", "negative")
    words = {"window_left": ("window_left", "window_size_left"), "window_right": ("window_right", "window_size_right")}
    made_words = {"window_size": ("window_size", "window")}
    conventions = {
        "window": Convention(
            {"left": "the window does not count the query itself", "total": "the window counts the query itself"},
            is_seen_in=("window_left",),
        ),
        "window_open": Convention(
            {
                "-1": "a side of -1 is open",
                "none": "an open side must be None, -1 is taken for a position",
            },
            is_seen_in=WORDS,
        ),
        "window_align": Convention(
            {
                "bottom_right": "the window is aligned to the last key",
                "top_left": "the window is aligned to the first key, not to the last",
            },
            is_seen_in=WORDS,
            is_other_function=True,
        ),
    }

    faults = {
        **dict.fromkeys(
            (
                "cuda_window_left_too_long",
                "cuda_window_counts_own_key",
                "cuda_window_right_too_long",
                "cuda_window_right_too_short",
                "cuda_window_exchanged",
                "cuda_window_top_left",
                "cuda_window_chunks",
                "cuda_window_ignored",
                "cuda_window_zero_is_open",
                "cuda_window_open_is_zero",
                "cuda_window_negative_is_open",
                "cuda_window_skips_tile",
                "cuda_window_whole_tile",
            ),
            ("max", False),
        ),
        "cuda_window_empty_row": ("finite", False),
        **dict.fromkeys(
            ("window_top_left", "window_right_top_left", "window_empty_row_mean", "window_lost_with_mask"),
            ("max", False),
        ),
    }
    selftest_shapes = (
        "b1h2s113d64-fp16-win37_0-sk150",
        "b1h2s113d64-fp16-win9_21-sk150",
        "b1h2s113d64-fp16-win20_o-sk150",
        "b1h2s113d64-fp16-winm8_57-sk150",  # the last queries see no key
        "b1h2s113d64-fp16-win37_0-sk150-maskq",
    )

    def impossible(self, case: Shape) -> str | None:
        """A window has its own way to write a causal mask, and sees something."""
        window, causal = case.value_of("window"), case.value_of("causal")
        if window == PLAIN:
            return None
        is_empty = None not in window and window.right < -window.left
        problems = (
            (causal != "none", AS_WINDOW),
            (any(abs(side or 0) > MAX_SIDE for side in window), f"a side of a window has at most {MAX_SIDE} keys"),
            (window == (None, 0), AS_MASK),
            (case.computes == "scores", "scores alone have no window; drop -win"),
            (
                is_empty,
                f"the window ({window.left}, {window.right}) has no key; the sum of both sides must be 0 or more",
            ),
        )
        return next((text for applies, text in problems if applies), None)

    def visible_pairs(self, case: Shape) -> int | None:
        """The pairs in the window."""
        window = case.value_of("window")
        return None if window == PLAIN else _pairs(window, case.seq_q, case.seq_k)

    def visible_keys(self, case: Shape, query: int) -> range:
        """The keys near the query."""
        window: Window = case.value_of("window")
        return window.keys_of(query + case.seq_k - case.seq_q, case.seq_k)

    def lengths_touched(self, case: Shape) -> tuple[int, int] | None:
        """The queries that see a key, and the keys that a query sees: each kind is a range."""
        if case.value_of("window") == PLAIN:
            return None
        ranges = [seen for query in range(case.seq_q) if (seen := self.visible_keys(case, query))]
        keys = max((seen.stop for seen in ranges), default=0) - min((seen.start for seen in ranges), default=0)
        return len(ranges), keys

    def in_words(self, case: Shape) -> str:
        """The window, for the title of a picture."""
        window = case.value_of("window")
        return "" if window == PLAIN else f", window {_words(window)}"

    # -- the manifest -----------------------------------------------------------------------------------------------

    def read_claim(self, claim: object) -> tuple[Any, ...]:
        """True stands for windows whose sides are open or at least 0."""
        return self.claims[:3] if claim is True else super().read_claim(claim)

    def claimed_by(self, case: Shape) -> str:
        """The kind of the window."""
        left, right = case.value_of("window")
        if (left, right) == PLAIN:
            return "none"
        if (left or 0) < 0 or (right or 0) < 0:
            return "negative"
        return "left" if right == 0 else "both"

    def fields_with(self, claim: Any, heads: int) -> Mapping[str, Any]:
        """A window of each kind that cuts tiles."""
        return self.fields_in_turn(claim, heads)[0]

    def fields_in_turn(self, claim: Any, heads: int) -> tuple[Mapping[str, Any], ...]:  # noqa: ARG002
        """Windows that are shorter and longer than a tile, down to one key, and with an open side."""
        windows = {
            "none": (PLAIN,),
            "left": (Window(37, 0), Window(127, 0), Window(0, 0)),
            "both": (Window(37, 21), Window(63, 64), Window(None, 5), Window(20, None)),
            "negative": (Window(-8, 57), Window(70, -3)),
        }[claim]
        return tuple({"window": window} for window in windows)

    def random_fields(self, claim: Any, heads: int, whole: Callable[[int, int], int]) -> Mapping[str, Any]:  # noqa: ARG002
        """Sides of up to several tiles, of which one may be open or negative."""
        if claim == "none":
            return {"window": PLAIN}
        left = whole(0, MAX_RANDOM_SIDE)
        if claim == "left":
            return {"window": Window(left, 0)}
        right = whole(1, MAX_RANDOM_SIDE)
        if claim == "negative":  # that many keys less on one side, and at least one key is left
            least = whole(1, max(1, right - 1))
            return {"window": (Window(-least, right), Window(right, -least))[whole(0, 1)]}
        return {"window": (Window(left, right), Window(None, right), Window(left, None))[whole(0, 2)]}

    def sized_in_turn(self, claim: Any) -> tuple[tuple[int, int, Mapping[str, Any]], ...]:  # one of `claims`
        """One query; many keys, of which whole tiles are hidden; windows of several tiles; a negative right side."""
        return {
            "none": (),
            "left": ((1, 1055, {"window": Window(127, 0)}), (300, 1055, {"window": Window(200, 0)})),
            "both": ((1, 1055, {"window": Window(300, 5)}), (300, 700, {"window": Window(130, 190)})),
            "negative": ((150, 150, {"window": Window(70, -3)}),),
        }[claim]

    def needs_two_lengths(self, claim: Any) -> bool:  # one of `claims`
        """With equal lengths, a window that is aligned to the first key would be right, too."""
        return bool(claim != "none")

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The window that was not judged."""
        sides = {"none": "", "left": " before the query", "both": " on both sides", "negative": " with a negative side"}
        return "no window" if claim == "none" else f"a window{sides[claim]}"

    def call_problem(self, call: Any, supports: Any) -> str | None:  # `catalog.variant.Call`, `Supports`
        """A call passes both sides, as two words or as one; libraries have no negative side."""
        supported = self.supported(supports)
        if len(supported) == 1 and supported[0] == "none":
            return None
        claimed = ", ".join(map(shown, supported))
        if not call.passes("window_size") and not all(map(call.passes, WORDS)):
            return f"entry.call does not pass 'window_size', but supports.window is {claimed}; pass it, or both sides"
        return None

    def manifest_problem(self, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """With -1 for an open side, no side is negative."""
        supported = self.supported(variant.supports)
        if variant.entry.call and "negative" in supported and "window_open" not in variant.conventions:
            claimed = ", ".join(map(shown, supported))
            return (
                f"entry.call passes {OPEN} for an open side, so supports.window is not {claimed}; drop negative, or "
                f"declare `conventions: {{window_open: none}}` if the function takes None"
            )
        return None

    def convention_problem(self, key: str, variant: Any) -> str | None:  # `catalog.variant.Variant`
        """Without `entry.call`, a function gets no word for an open side."""
        if key == "window_open" and not variant.entry.call:
            return f"there is no entry.call, and a function without it gets no word for an open side; drop {key}"
        return super().convention_problem(key, variant)

    def refusal_in(self, case: Shape, conventions: Mapping[str, str]) -> str | None:
        """With other lengths, a window at the first key has other keys, and often fewer."""
        if conventions.get("window_align") is None or case.value_of("window") == PLAIN or case.seq_q == case.seq_k:
            return None
        return (
            f"seq_q is {case.seq_q} and seq_k {case.seq_k}; with `conventions: {{window_align: top_left}}`, a window "
            f"is that of the case with equal lengths only"
        )

    def given(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """One key more if the query itself counts."""
        return value + 1 if word == "window_left" and conventions.get("window") == "total" else value

    def meant(self, word: str, value: Any, conventions: Mapping[str, str]) -> Any:  # of the word's type
        """One key less."""
        return value - 1 if word == "window_left" and conventions.get("window") == "total" else value

    def call_misread(self, inputs: Any, key: str, value: str) -> Any:  # `gpu.inputs.Inputs`
        """A kernel that takes None for an open side gets -1."""
        if (key, value) == ("window_open", "none"):
            inputs = inputs._replace(more={**dict.fromkeys(WORDS, OPEN), **inputs.more})
        return super().call_misread(inputs, key, value)

    # -- the call ---------------------------------------------------------------------------------------------------

    def arguments(self, case: Shape) -> Mapping[str, Any]:
        """The sides that are not open."""
        sides = zip(WORDS, case.value_of("window"), strict=True)
        return {word: side for word, side in sides if side is not None}

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # one of both
        """An open side."""
        return

    def passed(self, word: str, value: Any, conventions: Mapping[str, str]) -> int | None:  # noqa: ARG002  # one of both
        """Most functions of libraries take -1 for an open side."""
        if value is None:
            return None if conventions.get("window_open") == "none" else OPEN
        return int(value)

    def made(self, word: str, words: Mapping[str, Any], conventions: Mapping[str, str]) -> tuple[int | None, ...]:
        """Both sides as a pair."""
        return tuple(self.passed(word, words.get(side), conventions) for side in WORDS)

    # -- the judge --------------------------------------------------------------------------------------------------

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """The keys out of the window."""
        return hidden_by(_window_of(inputs), positions, _shift(inputs))

    def order_matters(self, inputs: CallInputs) -> bool:
        """A window hides keys by their position."""
        return _window_of(inputs) != PLAIN

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """A side that is off by one or ignored, sides that are exchanged, another alignment, and chunks."""
        window = _window_of(inputs)
        if window == PLAIN:
            return
        yield Mistake(f"the window is ignored: {LOOK_AT_MASK}", hide=lambda positions: positions.nothing_hidden)
        known = {window}
        for words, other in _others(window):
            if other not in known:
                known.add(other)
                yield Mistake(f"{words}: {LOOK_AT_MASK}", hide=_hide(other, _shift(inputs)))
        if None not in window and (to_first := inputs.q.shape[2] - inputs.k.shape[2]) and not _shift(inputs):
            words = f"of the window, the {{}} is aligned to the first key, not to the last: {LOOK_AT_MASK}"
            yield Mistake(words.format("left side"), hide=_hide_each(window, to_first, 0))
            yield Mistake(words.format("right side"), hide=_hide_each(window, 0, to_first))
        if window.left is not None and window.right == 0 and window.left > 0:
            length = window.left + 1
            words = f"queries see chunks of {length} keys, not a sliding window: {LOOK_AT_MASK}"
            yield Mistake(words, hide=lambda positions: _hidden_by_chunks(length, positions))
        if inputs.word("seqlens_k") is not None:
            words = f"the window is aligned to the last key of the longest sequence: {LOOK_AT_MASK}"
            yield Mistake(words, hide=lambda positions: _hide(window)(positions._replace(shift=None)))
        yield from empty_row_mistakes()


def _shift(inputs: CallInputs) -> int:
    """The number of keys between the position of a query and that under a bottom-right mask."""
    return inputs.q.shape[2] - inputs.k.shape[2] if inputs.convention("window_align") == "top_left" else 0


def _window_of(inputs: CallInputs) -> Window:
    return Window(*(inputs.word(word) for word in WORDS))


def hidden_by(window: Window, positions: Positions, shift: int = 0) -> torch.Tensor | None:
    """True where a window hides a key, [rows, keys]; queries are `shift` keys behind their position."""
    if window == PLAIN:
        return None
    own = positions.own_keys() + shift
    hidden = positions.nothing_hidden
    if window.left is not None:
        hidden = hidden | (positions.keys < own - window.left)
    if window.right is not None:
        hidden = hidden | (positions.keys > own + window.right)
    return hidden


def _hide(window: Window, shift: int = 0) -> Hide:
    def hidden(positions: Positions) -> torch.Tensor:
        mask = hidden_by(window, positions, shift)
        return positions.nothing_hidden if mask is None else mask

    return hidden


def _hide_each(window: Window, left_shift: int, right_shift: int) -> Hide:
    """Each side with a shift of its own."""
    left, right = _hide(Window(window.left, None), left_shift), _hide(Window(None, window.right), right_shift)
    return lambda positions: left(positions) | right(positions)


def _others(window: Window) -> Iterator[tuple[str, Window]]:
    """Windows that kernels confuse with one, each with a sentence."""
    left, right = window
    if left is not None:
        yield "the window is one key too long before the query", Window(left + 1, right)
        yield "the window is one key too short before the query", Window(left - 1, right)
        yield "the window has no end before the query", Window(None, right)
    if right is not None:
        yield "the window is one key too long after the query", Window(left, right + 1)
        yield "the window is one key too short after the query", Window(left, right - 1)
        yield "the window has no end after the query", Window(left, None)
    yield "the two sides of the window are exchanged", Window(right, left)


def _hidden_by_chunks(length: int, positions: Positions) -> torch.Tensor:
    own = positions.own_keys()
    return (positions.keys > own) | (positions.keys < own // length * length)


@functools.lru_cache(maxsize=4096)
def _pairs(window: Window, seq_q: int, seq_k: int) -> int:
    """The number of pairs in a window."""
    return sum(len(window.keys_of(query + seq_k - seq_q, seq_k)) for query in range(seq_q))


def _words(window: Window) -> str:
    left, right = ("open" if side is None else str(side) for side in window)
    return f"{left}, {right}"


PART = SlidingWindow()
