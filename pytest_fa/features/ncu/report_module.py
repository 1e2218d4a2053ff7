"""Reads a report with Nsight's Python module `ncu_report`, in a separate process because that module is native code.

    python -m pytest_fa.features.ncu.report_module REPORT FOLDER    print the report's kernels as JSON

FOLDER contains `ncu_report`; it is empty if the module is installed as a package.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from pytest_fa.features.ncu.nsight_report import CountedKernel, SourceLine
from pytest_fa.features.ncu.phases import BARRIERS
from pytest_fa.features.ncu.presets import STALL_SAMPLES


def main(arguments: list[str]) -> int:
    """Print the kernels as JSON.  Returns 1 if the module or the report cannot be read."""
    report, folder = arguments
    if folder:
        sys.path.insert(0, folder)
    try:
        context = importlib.import_module("ncu_report").load_report(report)
        kernels = [_kernel(action) for action in _actions(context)]
    except Exception as problem:  # noqa: BLE001  # the exceptions of `ncu_report` are not documented
        sys.stderr.write(f"{type(problem).__name__}: {problem}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(kernels).decode())
    return 0


def _actions(context: Any) -> Iterator[Any]:  # noqa: ANN401  # the module has no types
    for range_index in range(context.num_ranges()):
        nvtx_range = context.range_by_idx(range_index)
        for index in range(nvtx_range.num_actions()):
            yield nvtx_range.action_by_idx(index)


def _kernel(action: Any) -> CountedKernel:  # noqa: ANN401
    counters: dict[str, float] = {}
    for name in action.metric_names():
        value = action[name].value() if "__" in name else None
        if isinstance(value, int | float) and math.isfinite(value):
            counters[name] = float(value)
    return CountedKernel(action.name(action.NameBase_DEMANGLED), counters, lines=_lines(action))


def _lines(action: Any) -> tuple[SourceLine, ...]:  # noqa: ANN401
    """The stall samples of each instruction with its source line, in the order of the code.

    Samples at a barrier are separate from the others.  Code without line information has no lines.
    """
    samples: Counter[tuple[int, str]] = Counter()
    for name in action.metric_names():
        if name.startswith(STALL_SAMPLES) and not name.endswith("_not_issued"):
            phase = BARRIERS if name.endswith(("_barrier", "_membar")) else ""
            samples.update({(address, phase): count for address, count in _samples(action[name])})
    lines = []
    for address, phase in sorted(samples):
        source = action.source_info(address)
        if source is not None and source.line():
            lines.append(SourceLine(source.file_name(), source.line(), samples[(address, phase)], phase))
    return tuple(lines)


def _samples(metric: Any) -> Iterator[tuple[int, int]]:  # noqa: ANN401
    """The address of each instruction, with its number of samples."""
    if metric.has_correlation_ids():
        addresses = metric.correlation_ids()
        for index in range(metric.num_instances()):
            yield addresses.as_uint64(index), metric.as_uint64(index)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
