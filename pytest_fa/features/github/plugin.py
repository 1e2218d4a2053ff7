"""What GitHub Actions shows of a run: its job summary and annotations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pytest_fa.feature import Feature, FeatureOptions, Reader


@dataclasses.dataclass(frozen=True)
class GithubOptions(FeatureOptions):
    """The file of the job summary, if there is one, and whether annotations are printed."""

    summary: Path | None
    annotates: bool
    workspace: Path


def read(reader: Reader) -> GithubOptions | None:
    """What the environment asks for; None outside of GitHub Actions."""
    summary, annotates = reader.environment.get("GITHUB_STEP_SUMMARY"), reader.environment.get("GITHUB_ACTIONS")
    if not summary and annotates != "true":
        return None
    workspace = Path(reader.environment.get("GITHUB_WORKSPACE") or reader.rootdir)
    return GithubOptions(Path(summary) if summary else None, annotates == "true", workspace)


FEATURE = Feature("github", read=read, requires=("gate", "ncu", "export"))
