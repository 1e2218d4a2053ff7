"""`OwnTruth`: the user's functions with which outputs are compared in place of this package's attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_fa.attention import parts
from pytest_fa.catalog.feature_keys import values_of

if TYPE_CHECKING:
    from pytest_fa.catalog.case import Case
    from pytest_fa.catalog.variant import Variant

SECONDS = 120.0  # within which the functions return
SCALED = ("negative_scale", "zero_scale")  # the properties that call the kernel with another scale


class OwnTruth(msgspec.Struct, frozen=True):
    """Functions of one Python file: the truth, and the same formula with the kernel's roundings.

    The allowed error comes from `reference`, or is `max_error`.  `takes` are the keyword arguments of the truth; None
    if only a call can tell.  `sha256` is that of the file.  Both functions together return within `seconds`.
    """

    path: str
    shown_path: str
    function: str
    sha256: str
    reference: str | None = None
    takes: tuple[str, ...] | None = None
    max_error: float | None = None
    seconds: float = SECONDS

    @property
    def title(self) -> str:
        """The functions as the user names them: `window.py:truth,reference`."""
        names = [self.function, *([self.reference] if self.reference else [])]
        return f"{self.shown_path}:{','.join(names)}"

    @property
    def against(self) -> str:
        """What stands behind a verdict."""
        return f"against your reference {self.title}"

    @property
    def has_allowed_error(self) -> bool:
        """Whether anything says how large an error may be."""
        return self.reference is not None or self.max_error is not None

    def refuses(self, case: Case, property_name: str | None) -> str | None:
        """Why the functions cannot judge a case or a property; None if they can, or if only a call can tell."""
        if case.computes != "attention":
            return (
                f"{case.shape_id} is not judged: {self.title} is asked for attention, and this case has {case.computes}"
            )
        if self.takes is None:
            return None
        for part in parts.PARTS:
            missing = [word for word in part.always if word not in self.takes]
            if missing and part.claimed_by(case) != part.claims[0]:
                return f"{case.shape_id} is not judged: {self._function} takes no keyword argument `{missing[0]}`"
        if property_name in SCALED and "scale" not in self.takes:
            return f"{property_name} is not judged: {self._function} takes no keyword argument `scale`"
        return None

    @property
    def _function(self) -> str:
        return f"{self.shown_path}:{self.function}"


def with_own_truth(
    variant: Variant,
    of_options: Iterable[Callable[[Variant], OwnTruth | None]],
    max_error: float | None,
    seconds: float | None,
) -> Variant:
    """The variant with the functions that the options name, else those of its manifest.

    `max_error` and `seconds` are those of the options; None leaves the defaults.
    """
    own = next(filter(None, (read(variant) for read in of_options)), None) or of_manifest(variant)
    if own is None or not variant.is_judged:
        return variant
    limits: dict[str, Any] = {"max_error": max_error, "seconds": seconds or SECONDS}
    return msgspec.structs.replace(variant, own_truth=msgspec.structs.replace(own, **limits))


def of_manifest(variant: Variant) -> OwnTruth | None:
    """The functions that the manifest names, if it does.  Raises `UsageProblem`."""
    return next((own for value in values_of(variant) if (own := value.own_truth(variant)) is not None), None)
