"""What the judge found: bounds, repeats, cross-checks, and where a wrong output is wrong."""

from __future__ import annotations

import msgspec

Index = tuple[int, int, int, int]


class Bound(msgspec.Struct, frozen=True):
    """One bound of a tolerance policy: the value found beside the value allowed.  A value of None is not finite."""

    name: str
    value: float | None
    allowed: float
    holds: bool
    judged: bool = True

    @property
    def used(self) -> float | None:
        """The used fraction of the bound: 1.0 is the edge."""
        if self.value is None:
            return None
        if self.allowed:
            return self.value / self.allowed
        return 0.0 if self.holds else float("inf")


class Check(msgspec.Struct, frozen=True):
    """The verdict on one output.  Indices are (batch, head, query, dim), of scores (batch, head, query, key)."""

    policy: str
    passed: bool
    bounds: tuple[Bound, ...]
    max_abs_error: float | None
    rms_error: float | None
    same_precision_max_error: float
    same_precision_rms_error: float
    nonfinite_count: int
    bad_count: int
    element_count: int
    first_bad: Index | None
    worst: Index | None
    worst_got: float | None
    worst_want: float | None

    @property
    def tightest(self) -> Bound:
        """The bound that broke, else the one that is nearest to breaking."""
        judged = [bound for bound in self.bounds if bound.judged] or list(self.bounds)
        return next((b for b in judged if not b.holds), max(judged, key=lambda b: b.used or 0.0))

    @property
    def complaint(self) -> str:
        """The tightest bound in a few words: what was found, what is allowed."""
        bound = self.tightest
        value = "not finite" if bound.value is None else f"{bound.value:.3g}"
        return f"{bound.name} error is {value}, allowed is {bound.allowed:.3g}"


class Repeats(msgspec.Struct, frozen=True):
    """The same call repeated: how many outputs differed bitwise from the first, in how many elements, where first.

    `smem_poison_missing` says why shared memory was not dirtied before each call; None where it was.
    """

    count: int
    differing: int
    element_count: int
    first: Index | None
    smem_poison_missing: str | None


class CrossCheck(msgspec.Struct, frozen=True):
    """An SDPA backend on the same inputs, judged by the same rule; `absent` says why there is no verdict."""

    name: str
    passed: bool | None
    max_abs_error: float | None
    absent: str | None


class Diagnosis(msgspec.Struct, frozen=True):
    """What a failure says beyond its bounds: where the error is, its likely cause, and who is off."""

    error_map: tuple[str, ...]
    cause: str
    cross_checks: tuple[CrossCheck, ...]
    conclusion: str
