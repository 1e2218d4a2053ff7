"""Record types of the correctness checks: bounds, repeats, SDPA cross-checks, and the location of errors."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pytest_fa.attention.backward import ALL_GRADIENTS, GRADIENTS
from pytest_fa.records.ranges import Natural, Real

WITH_POISON = 128  # the first repeats, all of which start from NaN-filled shared memory; later ones do so in part
EXCLUDED_FAULTS = 3.0  # minus the natural logarithm of 0.05: the chance that a sample shows no fault
Index = tuple[Natural, Natural, Natural, Natural]
RowIndex = tuple[Natural, Natural, Natural]  # batch, head, query


class Bound(msgspec.Struct, frozen=True):
    """One bound of a tolerance policy: the measured value and the allowed one.  A value of None was not finite."""

    name: str
    value: Real | None
    allowed: Real
    holds: bool
    enforced: bool = True

    @property
    def kind(self) -> str:
        """The name without that of a gradient."""
        gradient, _, kind = self.name.partition(" ")
        return kind if gradient in ALL_GRADIENTS else self.name

    @property
    def used(self) -> float | None:
        """The measured value as a fraction of the allowed one; None if the value was not finite."""
        if self.value is None:
            return None
        if self.allowed:
            return self.value / self.allowed
        return 0.0 if self.holds else float("inf")


class LseCheck(msgspec.Struct, frozen=True):
    """How many rows have a wrong log-sum-exp, and the row that uses most of its bound.

    `worst_got` and `worst_want` are texts, because a right value may be -inf or NaN.
    """

    bad_count: Natural
    row_count: Natural
    worst: RowIndex
    worst_got: str
    worst_want: str


class Check(msgspec.Struct, frozen=True):
    """The verdict on one output.  Indices are (batch, head, query, dim); for scores, (batch, head, query, key).

    `lse` is None unless the variant returns the log-sum-exp, whose bound is then one of `bounds`.
    `against` names the user's functions if the output was compared with those; it is empty for attention.
    `output` names the gradient to which the figures belong: one that is wrong, or the one nearest to a bound.
    """

    policy: str
    passed: bool
    bounds: Annotated[tuple[Bound, ...], msgspec.Meta(min_length=1)]
    max_abs_error: Real | None
    rms_error: Real | None
    same_precision_max_error: Real
    same_precision_rms_error: Real
    nonfinite_count: Natural
    bad_count: Natural
    element_count: Natural
    first_bad: Index | None
    worst: Index | None
    worst_got: Real | None
    worst_want: Real | None
    lse: LseCheck | None = None
    against: str = ""
    output: str = ""

    def named(self, output: str) -> Check:
        """The verdict as that on a gradient, with its name before those of the bounds."""
        bounds = tuple(msgspec.structs.replace(bound, name=f"{output} {bound.name}") for bound in self.bounds)
        return msgspec.structs.replace(self, bounds=bounds, output=output)

    def with_gradient(self, other: Check) -> Check:
        """The verdict on two gradients, or on several and one more."""
        is_first = not self.passed or (other.passed and (self.tightest.used or 0.0) >= (other.tightest.used or 0.0))
        passed, bounds = self.passed and other.passed, (*self.bounds, *other.bounds)
        return msgspec.structs.replace(self if is_first else other, passed=passed, bounds=bounds)

    @property
    def rows(self) -> dict[str, LseCheck]:
        """The verdicts on further outputs, by name; the bound of each has its name, too."""
        return {} if self.lse is None else {"lse": self.lse}

    def with_rows(self, bound: Bound, rows: LseCheck) -> Check:
        """The verdict with that on a further output, whose name the bound has."""
        verdict: dict[str, LseCheck] = {bound.name: rows}
        passed = self.passed and bound.holds
        return msgspec.structs.replace(self, passed=passed, bounds=(*self.bounds, bound), **verdict)

    @property
    def only_wrong_rows(self) -> str:
        """The further output that is wrong while all else is right; empty if there is none."""
        broken = {bound.name for bound in self.bounds if bound.enforced and not bound.holds}
        return next((name for name in self.rows if broken == {name}), "")

    @property
    def tightest(self) -> Bound:
        """The first bound that does not hold, else the one with the largest used fraction."""
        enforced = [bound for bound in self.bounds if bound.enforced] or list(self.bounds)
        return next(
            (bound for bound in enforced if not bound.holds), max(enforced, key=lambda bound: bound.used or 0.0)
        )

    @property
    def complaint(self) -> str:
        """The tightest bound in words, and against what the output was judged, if that is not attention."""
        return f"{self._broken_bound} {self.against}".rstrip()

    @property
    def _broken_bound(self) -> str:
        """The value found and the value allowed, with as many digits as they differ in."""
        bound = self.tightest
        of_gradient = f" of {self.output}" if self.output else ""
        if bound.kind == "finite":
            return f"{self.nonfinite_count} of {self.element_count} elements{of_gradient} are NaN or Inf"
        if bound.kind == "rows past":
            what = "key" if bound.name.startswith(("dk ", "dv ")) else "query"
            return f"{bound.value:.0f} elements{of_gradient} of rows that belong to no {what} are not as declared"
        if bound.value is None:
            return f"{bound.name} error not finite, allowed {bound.allowed:.1e}"
        digits = next((n for n in (1, 3) if f"{bound.value:.{n}e}" != f"{bound.allowed:.{n}e}"), 6)
        return f"{bound.name} error {bound.value:.{digits}e}, allowed {bound.allowed:.{digits}e}"


class Repeats(msgspec.Struct, frozen=True):
    """The outputs of `count` extra calls, compared bit by bit with the first one.

    `differing` outputs differ, in `element_count` elements; `first` is the index of the first one.  In `lse_differing`
    calls, the log-sum-exp differs, and `gradients_differing` has the number of calls for each gradient besides dq.
    `why_no_smem_poison` says why shared memory was not filled with NaN before calls; it is None if it was: before at
    least the first 128, and every tenth one after them.  With `may_differ`, the manifest says `deterministic: false`.
    With `later_agree`, the calls that differ are all the last ones, and their outputs are equal to one another.
    """

    count: Natural
    differing: Natural
    element_count: Natural
    first: Index | None
    why_no_smem_poison: str | None
    lse_differing: Natural = 0
    may_differ: bool = False
    later_agree: bool = False
    gradients_differing: dict[str, Natural] = {}

    @property
    def equal_first_calls(self) -> int:
        """How many calls, from the first one on, have the first output, if `later_agree`."""
        return 1 + self.count - self.differing  # the first call is none of the repeats

    @property
    def rows_differing(self) -> dict[str, int]:
        """In how many calls further outputs differ, by name."""
        return {"lse": self.lse_differing, **self.gradients_differing}

    def with_rows_differing(self, counts: dict[str, int]) -> Repeats:
        """The same with the number of calls in which each further output differs."""
        of_gradients = {name: count for name, count in counts.items() if name in ALL_GRADIENTS}
        lse = counts.get("lse", self.lse_differing)
        return msgspec.structs.replace(self, lse_differing=lse, gradients_differing=of_gradients)

    @property
    def is_equal(self) -> bool:
        """Whether no call differs from the first one."""
        return not self.differing and not any(self.rows_differing.values())

    @property
    def excluded_rate(self) -> float | None:
        """The share of calls with a fault that these repeats exclude, with 95 % confidence; None if they differ.

        With a fault in this share of all calls, `count` calls would all be equal in less than 5 % of runs: for a share
        p of at most 3 / count, (1 - p) ** count is about exp(-3).
        """
        return self.excluded_by_count if self.is_equal and self.count else None

    @property
    def excluded_by_count(self) -> float:
        """The same for an output that was equal in all calls."""
        return min(1.0, EXCLUDED_FAULTS / max(1, self.count))

    @property
    def of_gradients(self) -> dict[str, int]:
        """In how many calls each gradient differs."""
        return {GRADIENTS[0]: self.differing, **self.gradients_differing}


class Fingerprints(msgspec.Struct, frozen=True):
    """The sha256 of the inputs q, k and v, and of the first output, each as contiguous bytes in logical order."""

    inputs_sha256: str
    output_sha256: str


class CrossCheck(msgspec.Struct, frozen=True):
    """An SDPA backend on the same inputs, judged by the same policy; `absent` says why there is no verdict."""

    name: str
    passed: bool | None
    max_abs_error: Real | None
    absent: str | None


class Diagnosis(msgspec.Struct, frozen=True):
    """Where a wrong output is wrong, the likely cause, and what the SDPA cross-checks say about it."""

    error_map: tuple[str, ...]
    cause: str
    cross_checks: tuple[CrossCheck, ...]
    conclusion: str
