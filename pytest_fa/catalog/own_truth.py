"""`OwnTruth`: the user's functions with which outputs are compared in place of this package's attention."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

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

    The allowed error comes from `reference`, or is `max_error`.  `takes` has the keyword arguments of each function;
    None if only a call can tell.  `imports` are the files beside it that it imports, and `sha256` is that of all files
    together.  Both functions return within `seconds`.
    """

    path: str
    shown_path: str
    function: str
    sha256: str
    imports: tuple[str, ...] = ()
    reference: str | None = None
    takes: tuple[tuple[str, ...] | None, ...] = ()
    max_error: float | None = None
    seconds: float = SECONDS

    @property
    def files(self) -> tuple[str, ...]:
        """Every file whose change changes what is true."""
        return (self.path, *self.imports)

    @property
    def functions(self) -> tuple[str, ...]:
        """The truth, and the reference if there is one."""
        return (self.function, *([self.reference] if self.reference else []))

    @property
    def title(self) -> str:
        """The functions as the user names them: `window.py:truth,reference`."""
        return f"{self.shown_path}:{','.join(self.functions)}"

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
        for function, takes in zip(self.functions, self.takes, strict=False):
            if takes is not None and (missing := _missing(case, property_name, takes)):
                what = property_name if missing == "scale" else case.shape_id
                return f"{what} is not judged: {self.shown_path}:{function} takes no keyword argument `{missing}`"
        return None


def _missing(case: Case, property_name: str | None, takes: tuple[str, ...]) -> str | None:
    """The keyword argument without which a function would compute something else than the call."""
    for part in parts.PARTS:
        missing = [word for word in part.always if word not in takes]
        if missing and part.claimed_by(case) != part.claims[0]:
            return missing[0]
    return "scale" if property_name in SCALED and "scale" not in takes else None


def digest_of(files: Iterable[str]) -> str:
    """The SHA-256 of a file's content; of several files, that of their digests.  Raises `OSError`."""
    digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def of_manifest(variant: Variant) -> OwnTruth | None:
    """The functions that the manifest names, if it does.  Raises `UsageProblem`."""
    return next((own for value in values_of(variant) if (own := value.own_truth(variant)) is not None), None)
