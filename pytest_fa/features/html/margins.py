"""How close correct kernels come to the bounds of their tolerance policy."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pytest_fa.records.record import Record


class Margin(msgspec.Struct, frozen=True):
    """The largest error over some checks as a fraction of one bound; 1.0 is the limit."""

    bound: str
    used: float
    shape_id: str


def worst_margins(records: Iterable[Record]) -> tuple[Margin, ...]:
    """The largest used fraction of each enforced bound, in the policy's order; `finite`, which allows 0, is omitted."""
    worst: dict[str, Margin] = {}
    for record in records:
        for bound in record.check.bounds if record.check and record.case else ():
            if not (bound.enforced and bound.allowed and bound.used is not None):
                continue
            if bound.name not in worst or bound.used > worst[bound.name].used:
                assert record.case is not None  # noqa: S101  # checked in the loop above
                worst[bound.name] = Margin(bound.name, bound.used, record.case.shape_id)
    return tuple(worst.values())
