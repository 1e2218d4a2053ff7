"""What a kernel's own manifest says about how it is judged: it must stand beside the kernel's verdict."""

from __future__ import annotations

from pytest_fa.attention.parts import conventions
from pytest_fa.catalog.variant import Variant, tolerance_for

DEFAULT = "same_precision"


def own_tolerance(variant: Variant, dtype: str = "", policy: str | None = None) -> str:
    """Return how the manifest of a variant makes the checks less strict or other ones, such as `tolerance: absolute`.

    With a `dtype`, only what applies to it counts.  `policy` is that of the run, which replaces the manifest's.
    """
    tolerance = tolerance_for(variant.tolerance, dtype) if dtype else variant.tolerance
    parts = [f"tolerance: {tolerance}"] if tolerance != DEFAULT and not policy else []
    if variant.rounds:
        parts.append(f"rounds: {', '.join(variant.rounds)}")
    changed = (key for key in variant.conventions if conventions()[key][1].is_other_function)
    parts += [f"conventions: {key}: {variant.conventions[key]}" for key in changed]
    return "; ".join(parts)
