"""Measure one variant on one shape: device time, call time, cold time, launch overhead, launches and clocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.measure.attached import require_no_tool
from pytest_fa.measure.call_time import call_time
from pytest_fa.measure.cold_time import cold_time
from pytest_fa.measure.cpu_time import fixed_cpu_threads
from pytest_fa.measure.device_time import CannotCapture, device_time
from pytest_fa.measure.launch_overhead import launch_overhead_us
from pytest_fa.measure.launches import Captured, read_launches
from pytest_fa.measure.profiler_time import read_profiler_time
from pytest_fa.measure.rotation import Rotation
from pytest_fa.records.environment import ClockWatch, clock_watch
from pytest_fa.records.timing import ON_CPU, Clocks, ProfilerTime, Speed, Timing
from pytest_fa.run.device import synchronize
from pytest_fa.run.device_tools import NoDeviceTools, device_tools
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import Inputs
from pytest_fa.run.nvtx_range import nvtx_range

QUEUED_US = 5000.0  # of calls that are queued when the clocks are read
MOST_QUEUED = 500  # calls


def measure(
    forward: Forward, case: Case, inputs: Inputs, name: str, before_launch: Callable[[], object] = lambda: None
) -> tuple[Speed, list[torch.Tensor]]:
    """Measure the speed of `forward` on `case`; also return the outputs of timed calls, for the caller to judge.

    `name` is part of the NVTX ranges' names.  `before_launch` is called before work that may hang.  The caller must
    hold the GPU's `timing_lock`.  Raises `WrongResult` if a call changed its inputs, and `ToolAttached` if a profiler
    or another tool is attached to the process.  On the CPU, torch uses `CPU_THREADS` threads meanwhile.
    """
    require_no_tool()
    with fixed_cpu_threads(inputs.q.device):
        return _measure(forward, case, inputs, name, before_launch)


def _measure(
    forward: Forward, case: Case, inputs: Inputs, name: str, before_launch: Callable[[], object]
) -> tuple[Speed, list[torch.Tensor]]:
    device = inputs.q.device
    rotation = Rotation(case, inputs, l2_bytes(device))
    before_launch()
    captured = read_launches(forward, rotation, device)
    with clock_watch("cuda" if device.type == "cuda" else "cpu") as clocks:
        before = clocks.now()
        with nvtx_range(f"device_us-{name}"):
            on_device = device_time(forward, rotation, device, before_launch, clocks)
        outputs = rotation.outputs
        during = _clocks_during(forward, rotation, on_device.median_us, clocks)
        after = clocks.now()
    rotation.poison()
    with nvtx_range(f"call_us-{name}"):
        per_call = call_time(forward, rotation, device, before_launch)
    outputs += rotation.written(per_call.calls_per_sample)
    cold, cold_missing, overhead_us = _cold_and_overhead(
        forward, rotation, on_device.median_us, captured, before_launch
    )
    rotation.require_untouched()
    speed = Speed(
        device=on_device,
        call=per_call,
        buffers=len(rotation),
        exceeds_l2=rotation.exceeds_l2,
        launches=captured.launches,
        launches_missing=captured.missing,
        clocks_before=before,
        clocks_after=after,
        clocks_during=during,
        cold=cold,
        cold_missing=cold_missing,
        launch_overhead_us=overhead_us,
        order=captured.order,
        other_nodes=captured.other_nodes,
        cpu_threads=torch.get_num_threads() if device.type == "cpu" else None,
        l2_bytes=l2_bytes(device),
    )
    return speed, outputs


def time_with_profiler(
    forward: Forward, case: Case, inputs: Inputs, before_launch: Callable[[], object] = lambda: None
) -> tuple[ProfilerTime | None, str | None]:
    """Measure one call with the profiler, in a process that measures no other time.

    Returns the times and None, or None and the reason why there are none.
    """
    device = inputs.q.device
    rotation = Rotation(case, inputs, l2_bytes(device))
    captured = read_launches(forward, rotation, device)
    if captured.missing:
        return None, captured.missing
    if not captured.launches:
        return None, "it launches no kernel"
    try:
        tools = device_tools(device.index or 0)
        return read_profiler_time(lambda: rotation.call(forward), rotation.begin, captured, tools, before_launch), None
    except (NoDeviceTools, CannotCapture) as problem:
        return None, str(problem)


def _cold_and_overhead(
    forward: Forward, rotation: Rotation, device_us: float, captured: Captured, before_launch: Callable[[], object]
) -> tuple[Timing | None, str | None, float | None]:
    """Measure the cold time and the launch overhead.

    Returns the cold time or None, the reason why it is missing or None, and the launch overhead in microseconds or
    None.
    """
    device = rotation.inputs[0].q.device
    if device.type == "cpu":
        return None, ON_CPU, None
    try:
        tools = device_tools(device.index or 0)
    except NoDeviceTools as problem:
        return None, str(problem), None
    overhead_us = launch_overhead_us(tools, captured.launches, before_launch) if captured.launches else None
    try:
        return (
            cold_time(lambda: rotation.call(forward), rotation.begin, tools, device_us, before_launch),
            None,
            overhead_us,
        )
    except (CannotCapture, RuntimeError) as problem:
        return None, str(problem).splitlines()[0], overhead_us


def _clocks_during(forward: Forward, rotation: Rotation, device_us: float, clocks: ClockWatch) -> Clocks | None:
    """Read NVML's clocks under load: a few milliseconds of calls are queued before; None on the CPU."""
    device = rotation.inputs[0].q.device
    if device.type == "cpu":
        return None
    for _ in range(max(1, min(MOST_QUEUED, int(QUEUED_US / device_us)))):
        rotation.call(forward)
    during = clocks.now()
    synchronize(device)
    return during


def l2_bytes(device: torch.device) -> int | None:
    """The size of a GPU's L2 cache in bytes; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else None
