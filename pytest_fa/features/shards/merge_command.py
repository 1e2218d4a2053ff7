"""`python -m pytest_fa records merge`: joins the shards of one run."""

from __future__ import annotations

import argparse
import sys

from pytest_fa.features.shards.merge import MergedRun, merge_shards, read_shards, write_merged


def run(options: argparse.Namespace) -> int:
    """Exit with the status of the whole run, or with 1 and no file if anything is missing, doubled or mixed."""
    merged = merge_shards(read_shards(options.folders))
    for problem in merged.problems:
        sys.stderr.write(f"{problem}\n")
    if not merged.is_complete:
        sys.stderr.write(f"not merged: {len(merged.problems)} problems\n")
        return 1
    write_merged(options.output, merged)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(merged.outcomes.items()))
    sys.stdout.write(
        f"{options.output}: {len(merged.records)} records of {merged.shards} shards{_on(merged)}; tests: {outcomes}\n"
    )
    return merged.exit_status


def _on(merged: MergedRun) -> str:
    """The numbers of GPUs and machines, if the records have them."""
    machines = [record.machine for record in merged.records if record.machine]
    gpus, hosts = ({getattr(each, name) for each in machines} - {None} for name in ("gpu_hash", "host_hash"))
    return f" from {len(gpus)} GPUs of {len(hosts)} machines" if gpus else ""
