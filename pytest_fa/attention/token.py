"""`Token`: what a part writes into the id of a case, and what an id without it means."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Protocol


class Token(Protocol):
    """The texts of one field of a case.  An id has at most one of them, after a dash.

    `pattern` is the regular expression of these texts, without groups, and `grammar` their form in words.  `field` is
    the field of `Case` that has the value.  If there is none, the case keeps the text itself in `modifiers`.
    """

    @property
    def field(self) -> str:
        """The field that has the value."""

    @property
    def pattern(self) -> str:
        """The regular expression of the texts."""

    @property
    def grammar(self) -> str:
        """The form of the texts, such as `[-kv<heads>]`."""

    def read(self, text: str) -> Any:  # of the field's type
        """The value of a text."""

    def plain(self, case: Any) -> Any:  # a `catalog.case.Case`; of the field's type
        """The value in an id without a text."""

    def write(self, value: Any) -> str:  # of the field's type
        """The text of a value that is not plain."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One of a few texts, each with its value."""

    field: str
    values: tuple[tuple[str, Any], ...]
    without: Any

    @property
    def pattern(self) -> str:
        """The texts, the longest first: one may be the beginning of another one."""
        return "|".join(sorted(dict(self.values), key=len, reverse=True))

    @property
    def grammar(self) -> str:
        """All texts."""
        return f"[{'|'.join(f'-{text}' for text, _ in self.values)}]"

    def read(self, text: str) -> Any:  # of the field's type
        """The value of one of the texts."""
        return dict(self.values)[text]

    def plain(self, case: Any) -> Any:  # noqa: ARG002  # the same in each case
        """The value in an id that has none of the texts."""
        return self.without

    def write(self, value: Any) -> str:  # of the field's type
        """The first text of a value."""
        return next(text for text, each in self.values if each == value)


@dataclasses.dataclass(frozen=True, eq=False)
class Number:
    """A prefix and a natural number.  Without it, the number is that of the field `like`."""

    field: str
    prefix: str
    unit: str
    like: str

    @property
    def pattern(self) -> str:
        """The prefix and digits."""
        return rf"{self.prefix}\d+"

    @property
    def grammar(self) -> str:
        """The prefix and the unit."""
        return f"[-{self.prefix}<{self.unit}>]"

    def read(self, text: str) -> int:
        """The number after the prefix."""
        return int(text.removeprefix(self.prefix))

    def plain(self, case: Any) -> int:  # a `catalog.case.Case`
        """The number of the other field."""
        number: int = getattr(case, self.like)
        return number

    def write(self, value: int) -> str:
        """The prefix and the number."""
        return f"{self.prefix}{value}"


@dataclasses.dataclass(frozen=True, eq=False)
class Float32:
    """A prefix and a float32: `cap50`, `scale0p125`; `m` stands for a minus sign and `p` for the decimal point.

    Without it, the number is that of `without`, which gets the case.  An id has the fewest digits that give the same
    float32, because a kernel gets no more of it.
    """

    field: str
    prefix: str
    unit: str
    without: Callable[[Any], float]

    @property
    def pattern(self) -> str:
        """The prefix and a decimal number."""
        return rf"{self.prefix}m?\d+(?:p\d+)?"

    @property
    def grammar(self) -> str:
        """The prefix and the unit."""
        return f"[-{self.prefix}<{self.unit}>]"

    def read(self, text: str) -> float:
        """The number after the prefix."""
        return float(text.removeprefix(self.prefix).replace("m", "-").replace("p", "."))

    def plain(self, case: Any) -> float:  # a `catalog.case.Case`
        """The number of a case whose id has none."""
        return self.without(case)

    def write(self, value: float) -> str:
        """The prefix and the shortest number."""
        return f"{self.prefix}{shortest(value).replace('-', 'm').replace('.', 'p')}"


def shortest(value: float) -> str:
    """The decimal number with the fewest digits that is the same float32, without an exponent."""
    if as_float32(value) == 0:
        return "0"
    texts = (format(Decimal(f"{value:.{digits}g}"), "f") for digits in range(1, 10))
    return next(text for text in texts if as_float32(float(text)) == as_float32(value))


def as_float32(value: float) -> float:
    """The value rounded to float32; infinite if it is too large."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf")
    return rounded
