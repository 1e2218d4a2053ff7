"""What `--fa-truth` adds to a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pytest_fa.feature import Feature, FeatureOptions, OptionRow, Reader

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
    """The functions as they were typed, and the folder from which their path is relative."""

    text: str
    folder: Path

    def own_truth(self, variant: Any) -> Any:  # noqa: ANN401  # a `Variant`; an `OwnTruth` or None
        """The functions, for every variant but baselines, which compute attention.  Raises `UsageProblem`."""
        from pytest_fa.features.truth.functions import functions_of  # noqa: PLC0415  # only runs with variants

        return None if variant.role in ("baseline", "overhead") else functions_of("--fa-truth", self.text, self.folder)


def read(reader: Reader) -> TruthOptions | None:
    """The functions; None without `--fa-truth`.  A typed path is relative to the working folder."""
    text = reader.text("fa_truth")
    if not text and not reader.is_typed("fa_truth"):
        return None
    return TruthOptions(text, Path.cwd() if reader.is_typed("fa_truth") else reader.rootdir)


FEATURE = Feature(
    "truth",
    title="a truth of your own",
    options=OPTIONS,
    read=read,
    has_hooks=False,
    manifest_key="manifest_key:TruthKey",
    truth_source="judge_side.asked_truth:AskedTruth",
    truth_process="judge_side.own_functions:serve_functions",
)
