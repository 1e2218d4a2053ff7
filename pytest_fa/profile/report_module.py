"""Reads a report with Nsight's own module, in a process of its own: it is native code, and not ours.

    python -m pytest_fa.profile.report_module REPORT FOLDER    print the report's kernels as JSON

FOLDER holds `ncu_report`; empty, where it is installed like any package.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from pytest_fa.profile.phases import BARRIERS
from pytest_fa.profile.presets import STALL_SAMPLES
from pytest_fa.records.tool_results import CountedKernel, SourceLine


def main(arguments: list[str]) -> int:
    """Print the kernels; 1 where the module or the report cannot be read."""
    report, folder = arguments
    if folder:
        sys.path.insert(0, folder)
    try:
        context = importlib.import_module("ncu_report").load_report(report)
        kernels = [_kernel(action) for action in _actions(context)]
    except Exception as problem:  # noqa: BLE001  # a foreign module raises what it likes
        sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(kernels).decode())
    return 0


def _actions(context: Any) -> Iterator[Any]:  # noqa: ANN401  # the module has no types
    for number in range(context.num_ranges()):
        found = context.range_by_idx(number)
        for index in range(found.num_actions()):
            yield found.action_by_idx(index)


def _kernel(action: Any) -> CountedKernel:  # noqa: ANN401
    figures: dict[str, float] = {}
    for name in action.metric_names():
        value = action[name].value() if "__" in name else None
        if isinstance(value, int | float) and math.isfinite(value):
            figures[name] = float(value)
    return CountedKernel(action.name(action.NameBase_DEMANGLED), figures, lines=_lines(action))


def _lines(action: Any) -> tuple[SourceLine, ...]:  # noqa: ANN401
    """Stall samples by instruction, in the code's order, with its source line: for code with line information.

    Warps that wait at a barrier are told apart.
    """
    found: Counter[tuple[int, str]] = Counter()
    for name in action.metric_names():
        if name.startswith(STALL_SAMPLES) and not name.endswith("_not_issued"):
            phase = BARRIERS if name.endswith(("_barrier", "_membar")) else ""
            found.update({(place, phase): count for place, count in _samples(action[name])})
    lines = []
    for place, phase in sorted(found):
        source = action.source_info(place)
        if source is not None and source.line():
            lines.append(SourceLine(source.file_name(), source.line(), found[(place, phase)], phase))
    return tuple(lines)


def _samples(metric: Any) -> Iterator[tuple[int, int]]:  # noqa: ANN401
    """The instructions' addresses with their samples."""
    if metric.has_correlation_ids():
        places = metric.correlation_ids()
        for index in range(metric.num_instances()):
            yield places.as_uint64(index), metric.as_uint64(index)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
