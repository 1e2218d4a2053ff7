"""What `--fa-shard` adds to a run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import Feature, FeatureOptions, OptionRow, Reader, Subcommand
from pytest_fa.options.values import is_whole_number

MAX_SHARDS = 10_000

OPTIONS = (
    OptionRow(
        "--fa-shard",
        "run part I of N, split by shape; `python -m pytest_fa records merge` joins the parts",
        "I/N",
        why_once="the parts of a run on several machines must end",
    ),
)


@dataclasses.dataclass(frozen=True)
class ShardOptions(FeatureOptions):
    """The part of the run, from 1 on, and the number of parts."""

    number: int
    count: int

    needs_all_times = True  # the machines of the other parts may have other records

    @property
    def header(self) -> str:  # type: ignore[override]  # a value there
        """The part, for pytest's header."""
        return f"; shard {self.number} of {self.count}"


def read(reader: Reader) -> ShardOptions | None:
    """The part of --fa-shard; None without it.  Raises `UsageProblem`."""
    if not (text := reader.text("fa_shard")):
        return None
    part, _, count = text.partition("/")
    if not (is_whole_number(part) and is_whole_number(count) and 1 <= int(part) <= int(count) <= MAX_SHARDS):
        raise UsageProblem(
            f"--fa-shard: {text!r} is not a part; give I/N with 1 <= I <= N <= {MAX_SHARDS}, such as 2/7"
        )
    return ShardOptions(int(part), int(count))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m pytest_fa records`."""
    merge = parser.add_subparsers(required=True).add_parser("merge", help="join the shards of one run into one file")
    merge.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="the artifacts of the shards")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the record file to write")


FEATURE = Feature(
    "shards",
    title="one run on several machines",
    options=OPTIONS,
    read=read,
    commands=(
        Subcommand(
            "records", "join the records of a run that was split with --fa-shard", "merge_command", add_arguments
        ),
    ),
)
