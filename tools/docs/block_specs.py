"""What the comment of a table in a Markdown file says: one type for each kind of table."""

from __future__ import annotations

import msgspec


class MarginSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest used fraction of each bound: one row for each variant and dtype, over all its records."""

    profiles: str
    variants: str


class ClockSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All times, and whether the profiler confirms them: one row for each variant and shape."""

    profiles: str
    cases: str
    variants: str


class NoiseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the means of fresh processes vary: one row for each pair of `noise.json`."""

    profiles: str


class BottleneckSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What bounds each kernel of the variants at one shape, with the decisive counters."""

    profiles: str
    case: str
    variants: str


class LadderSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every candidate of a kernels folder below its parent, then the variants of `against`, at the given shapes."""

    profiles: str
    kernels: str
    cases: str
    against: str


class ExpectationSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's `expect` of the candidates of a kernels folder, and their times at the given shapes."""

    profiles: str
    kernels: str
    cases: str
    variants: str = ""


class ShapeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates and times of the variants: one row for each shape, with ratios to the time of `against`.

    `kernel` names a variant.  Each row then also shows its kernel and the SM clock.
    """

    profiles: str
    cases: str
    variants: str
    against: str
    kernel: str = ""


class PhaseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time that each phase of a variant takes at the given shapes, measured by its ablations."""

    profiles: str
    kernels: str
    of: str
    cases: str


class BandwidthSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cold and hot times, and the share of the copy rate, of a variant and of others: one row for each shape."""

    profiles: str
    cases: str
    variant: str
    against: str


class PipesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far matrix products and softmax overlap: one row for each loop of `pipes.json`."""

    profiles: str


class ScreenSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table that a terminal of this width shows for the variants at the given shapes, and the answer below it."""

    profiles: str
    cases: str
    variants: str
    width: str


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The records of one shape: one row for each variant, and one ratio for each variant of `against`."""

    profiles: str
    case: str
    variants: str
    against: str = ""
