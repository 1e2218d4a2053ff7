"""What `--fa-sanitize` adds to a run."""

from __future__ import annotations

import dataclasses

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import ONLY_COMPILES, Feature, FeatureOptions, OptionRow, Reader, SuiteTest
from pytest_fa.options.values import each_of

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

OPTIONS = (
    OptionRow(
        "--fa-sanitize",
        "run compute-sanitizer (memcheck, racecheck, synccheck, initcheck) on a small case or those of --fa-case",
        "TOOL[,TOOL...]",
        why_once="it builds, checks and times, and runs no sanitizer",
        not_with=(ONLY_COMPILES,),
    ),
)


@dataclasses.dataclass(frozen=True)
class SanitizeOptions(FeatureOptions):
    """The tools of compute-sanitizer that run."""

    tools: tuple[str, ...]

    def rerun_words(self, kind: str, tool: str | None) -> list[str]:
        """The option without which the suite has no test of a tool."""
        tools = [name for name in self.tools if name == tool] or self.tools
        return [f"--fa-sanitize={','.join(tools)}"] if kind == "sanitize" else []


def read(reader: Reader) -> SanitizeOptions | None:
    """The tools; None without `--fa-sanitize`.  Raises `UsageProblem`."""
    text = reader.text("fa_sanitize")
    tools = tuple(dict.fromkeys(each_of("--fa-sanitize", text, TOOLS)))
    if reader.is_typed("fa_sanitize") and not tools:
        raise UsageProblem(f"--fa-sanitize: {text!r} names no tool (allowed: {', '.join(TOOLS)})")
    return SanitizeOptions(tools) if tools else None


FEATURE = Feature(
    "sanitize",
    title="compute-sanitizer",
    options=OPTIONS,
    read=read,
    tests=(SuiteTest("test_sanitize", "sanitize", is_pair=True),),
    run_methods=("sanitize",),
    added="sanitized:Sanitized",
    fixtures=("fa_sanitizer",),
)
