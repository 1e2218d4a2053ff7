"""With which functions a run compares each variant, and whether they say enough to judge it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pytest_fa.catalog.own_truth import OwnTruth, of_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.truth.functions import functions_of
from pytest_fa.features.truth.plugin import TruthOptions


def own_truth_of(options: TruthOptions, variant: Variant) -> OwnTruth | None:
    """The functions for a variant; None if it is compared with attention.  Raises `UsageProblem`."""
    is_typed = options.text is not None and variant.role not in ("baseline", "overhead")
    own = functions_of("--fa-truth", options.text or "", options.folder) if is_typed else of_manifest(variant)
    return msgspec.structs.replace(own, max_error=options.max_error) if own else None


def refusal_of(options: TruthOptions, variants: Sequence[Variant], policy: str | None) -> str | None:
    """Why nothing could be judged by this policy, or those of the manifests; None if each variant can be."""
    truths = [(variant, variant.own_truth) for variant in variants if variant.own_truth]
    if own := next((own for _, own in truths if not own.has_allowed_error), None):
        return (
            f"{own.title} says what is true, not how large an error may be, so nothing is judged; add a second "
            f"function, the same formula with the kernel's roundings ({own.title},reference), or "
            f"--fa-tolerance=absolute:MAX"
        )
    if options.max_error is None:
        reads_p = next((own for variant, own in truths if (policy or variant.tolerance) == "fp8"), None)
        remedy = "add --fa-tolerance=same_precision"
        return f"policy fp8 needs P, which {reads_p.title} does not return; {remedy}" if reads_p else None
    plain = next((variant for variant in variants if not variant.own_truth), None)
    if plain is None:
        return None
    return (
        f"--fa-tolerance=absolute:{options.max_error:g} is for a truth of your own, and {plain.name} has none; "
        f"add --fa-truth=FILE.py:FUNCTION, or use same_precision"
    )
