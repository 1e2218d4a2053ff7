"""What `--fa-truth` adds to a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_fa.feature import Feature, FeatureOptions, OptionRow, Reader
from pytest_fa.options.values import max_error

OPTIONS = (
    OptionRow(
        "--fa-truth",
        "judge candidates against this float64 function f(q, k, v, *, scale, causal) instead of attention; a second "
        "one, the same formula with the kernel's roundings, gives the allowed error",
        "FILE.py:TRUTH[,REFERENCE]",
        in_rerun=True,
        why_once="it judges against attention",
        configures=True,
        not_with=(("--fa-selftest", "the kernels of the self-test compute attention"),),
    ),
)


@dataclasses.dataclass(frozen=True)
class TruthOptions(FeatureOptions):
    """The functions as they were typed, and the folder from which their path is relative; None for those of manifests.

    `max_error` is the number of `--fa-tolerance=absolute:MAX`.
    """

    text: str | None
    folder: Path
    max_error: float | None

    def own_truth(self, variant: Any) -> Any:  # noqa: ANN401  # a `Variant`; an `OwnTruth` or None
        """The functions: those that were typed, for every variant but baselines; else those of the manifest.

        Raises `UsageProblem`.
        """
        from pytest_fa.features.truth.own_truths import own_truth_of  # noqa: PLC0415  # only runs with variants

        return own_truth_of(self, variant)

    def refusal(self, variants: Sequence[Any], policy: str | None) -> str | None:
        """Why nothing could be judged: no allowed error, a policy that needs P, or a number without a truth."""
        from pytest_fa.features.truth.own_truths import refusal_of  # noqa: PLC0415  # as above

        return refusal_of(self, variants, policy)


def read(reader: Reader) -> TruthOptions:
    """The functions, and the largest error.  A typed path is relative to the working folder."""
    text = reader.text("fa_truth")
    folder = reader.base_of("fa_truth") if text else reader.rootdir
    is_used = bool(text) or reader.is_typed("fa_truth")
    return TruthOptions(text if is_used else None, folder, max_error(reader.text("fa_tolerance")))


FEATURE = Feature(
    "truth",
    title="a truth of your own",
    options=OPTIONS,
    read=read,
    has_hooks=False,
    manifest_key="manifest_key:TruthKey",
    truth_source="judge_side.asked_truth:AskedTruth",
    truth_process="judge_side.own_functions:serve_functions",
    judges_functions="with --fa-truth against a truth of your own",
)
