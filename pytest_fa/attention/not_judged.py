"""What attention functions have and no part of attention judges: its names, and the nearest thing that works.

A row is dropped as soon as a part, a dtype or a value of a claim has one of its names: what is judged is not listed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from pytest_fa.attention import parts
from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.feature import features

Off = float | tuple[int, int] | None


class UnjudgedKind(NamedTuple):
    """One thing that is not judged.

    `subject` ends with its verb.  `names` is the pattern of the manifest's keys and values, and of parameters.  `off`
    has the values that switch it off as an argument: those of parameters whose name matches a pattern.
    `is_one_function` says whether one function of q, k and v computes it.
    """

    subject: str
    names: str
    nearest: str
    off: tuple[tuple[str, Off], ...] = ()
    is_one_function: bool = False

    def __str__(self) -> str:
        return f"{self.subject} not judged; {self.instead}"

    @property
    def instead(self) -> str:
        """What works: the nearest thing, and what features offer."""
        offers = [feature.judges_functions for feature in features() if self.is_one_function]
        return ", or ".join(filter(None, (self.nearest, *offers)))

    def matches(self, name: str) -> bool:
        """Whether a name stands for it."""
        return re.fullmatch(self.names, name.lower().replace("-", "_")) is not None

    def advice_for(self, parameter: str, line: str) -> str:
        """The answer to a parameter in `entry.call`: what to write, with `{}` for the value."""
        off = self.value_for(parameter)
        value = written(off[0]) if off else None
        return str(self) if value is None else f"{self}: write {line.format(value)}"

    def value_for(self, parameter: str) -> tuple[Off, ...]:
        """The value that switches it off if a parameter gets it; empty if no value does."""
        return tuple(value for pattern, value in self.off if re.fullmatch(pattern, parameter.lower()))[:1]


_ROWS = {
    "window": UnjudgedKind(
        "a sliding window is",
        r"(sliding_?)?windows?(_?sizes?)?(_(left|right))?|local(_attention|_window)?|swa",
        "judge the kernel with its window off",
        ((r".*(left|right)", -1), (r"window_size", (-1, -1)), (r".*", None)),
        is_one_function=True,
    ),
    "softcap": UnjudgedKind(
        "a soft cap of the scores is",
        r"((attn_|attention_)?logits?_?)?soft_?cap(ping)?|logits?_cap|tanh_cap",
        "judge the kernel with its cap off, usually 0",
        ((r".*", 0.0),),
        is_one_function=True,
    ),
    "sink": UnjudgedKind(
        "an attention sink is",
        r"(attn_|attention_|learnable_|s_)?sinks?(_tokens?|_bias)?",
        "judge the kernel without sinks",
        ((r".*", None),),
        is_one_function=True,
    ),
    "bias": UnjudgedKind(
        "a bias that is added to the scores is",
        r"((attn|attention|score|position|relative|rel_pos)_)?bias|rel_pos|score_mod",
        "judge the kernel without a bias",
        ((r".*", None),),
        is_one_function=True,
    ),
    "mask": UnjudgedKind(
        "a mask other than the causal one is",
        r"((attn|attention|key_padding|padding|custom|block|arbitrary|boolean|prefix)_)?mask(_mod)?|prefix(_lm)?|block_sparse",
        "judge the kernel without a mask, with `causal: [top_left]`",
        ((r".*", None),),
        is_one_function=True,
    ),
    "alibi": UnjudgedKind(
        "ALiBi is",
        r"(use_)?alibi(_slopes|_bias)?|slopes",
        "judge the kernel without slopes",
        ((r".*", None),),
        is_one_function=True,
    ),
    "score_mod": UnjudgedKind(
        "a function of the scores is",
        r"score_mod|rel_pos",
        "hand over a bias",
        ((r".*", None),),
        is_one_function=True,
    ),
    "block_mask": UnjudgedKind(
        "a mask of blocks or padding is",
        r"(key_padding|padding|block|prefix)_mask|mask_mod|prefix(_lm)?|block_sparse",
        "hand over a boolean mask",
        ((r".*", None),),
        is_one_function=True,
    ),
    "dropout": UnjudgedKind(
        "dropout is",
        r"(attn_|attention_)?dropout(_p|_prob|_rate)?|p_dropout",
        "judge the kernel with a probability of 0",
        ((r".*", 0.0),),
    ),
    "head_dim_v": UnjudgedKind(
        "a V with another head_dim than Q and K is",
        r"head_dim_?(v|vo|value)|d_v|v_head_dim|head_size_v|d_vo",
        "judge the kernel with equal ones: `head_dim: [D]`",
    ),
    "packed_varlen": UnjudgedKind(
        "one tensor with Q, K and V of sequences one behind the other is",
        r"cu_?seq_?lens?|max_?seq_?lens?|indptr|jagged|(packed_)?var_?len",
        "hand over q, k and v with `layout: thd`",
    ),
    "int8": UnjudgedKind(
        f"a dtype besides {', '.join(DTYPES[:-1])} and {DTYPES[-1]} is",
        r"u?int(4|8)|fp(4|6)|nvfp4|mxfp\d|(fp8_|float8_)?e5m2(fnuz)?|f(p|loat)64|double|tf32|(kv|q|k|v|qk)_dtype",
        "judge the kernel with one of them for q, k and v together",
    ),
}


def written(value: Off) -> str | None:
    """A value as a manifest writes it; None for one that it cannot write."""
    return None if isinstance(value, tuple) else "null" if value is None else str(value)


@parts.cached
def rows() -> dict[str, UnjudgedKind]:
    """What is not judged: the rows of which no part of attention has a name."""
    known = [*DTYPES, "attention", "scores"]
    for part in parts.PARTS:
        claims = (claim for claim in part.claims if part.supports and isinstance(claim, str))
        known += [part.name, part.supports, part.output, *part.words, *part.made_words, *claims]
    return {key: row for key, row in _ROWS.items() if not any(row.matches(name) for name in known if name)}


def recognised(name: object) -> UnjudgedKind | None:
    """What a name stands for that is not judged, or None."""
    return next((row for row in rows().values() if isinstance(name, str) and row.matches(name)), None)


def remark(key: str) -> str:
    """What the end of a sentence says of something that an output has and its variant does not claim."""
    if row := rows().get(key):
        return f", which is not judged: {row.instead}"
    is_claimed = any(part.supports == key for part in parts.PARTS)
    return f"; if it is meant, declare `{key}` in `supports`" if is_claimed else ""
