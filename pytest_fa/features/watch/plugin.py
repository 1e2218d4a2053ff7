"""What `--fa-watch` adds to a run."""

from __future__ import annotations

import dataclasses

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Feature, FeatureOptions, OptionRow, Reader

OPTIONS = (
    OptionRow(
        "--fa-watch",
        "keep running: build, check and time a variant again whenever one of its files is saved",
        everyday=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class WatchOptions(FeatureOptions):
    """The run stays and answers saves."""

    keeps_servers = True


def read(reader: Reader) -> WatchOptions | None:
    """Whether the run stays.  Raises `UsageProblem` for an option that a run which stays cannot have."""
    if not reader.is_on("fa_watch"):
        return None
    others = {"numprocesses": ("-n", "one process at a time builds, checks and times")}
    refused = {row.dest: (row.flag, row.why_once) for row in reader.rows if row.why_once}
    for dest, (flag, reason) in {**others, **refused}.items():
        if reader.is_used(dest):
            raise UsageProblem(f"--fa-watch: {reason}; drop {flag}")
    if words := reader.benchmark_words:
        raise UsageProblem(f"--fa-watch: its times are not those of one pytest-benchmark run; drop {words[0]}")
    return WatchOptions()


FEATURE = Feature("watch", title="a verdict after each save", options=OPTIONS, read=read, requires=("compare",))
