"""One variant on one shape, measured: device time, call time, launches, clocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.measure.call_time import call_time
from pytest_fa.measure.device_time import device_time
from pytest_fa.measure.launches import read_launches
from pytest_fa.measure.rotation import Rotation
from pytest_fa.report.environment import find_gpu, read_clocks
from pytest_fa.report.record import Clocks, Speed
from pytest_fa.run.inputs import Inputs
from pytest_fa.run.module import Forward
from pytest_fa.run.nvtx_range import nvtx_range


def measure(
    forward: Forward, case: Case, inputs: Inputs, name: str, watch: Callable[[], object] = lambda: None
) -> tuple[Speed, list[torch.Tensor]]:
    """The speed of `forward` on `case`, and the outputs that its timed calls left, to be judged by the caller.

    `name` goes into the NVTX ranges, `watch` hears before whatever might hang.  The caller holds the GPU's timing lock,
    see `timing_lock`.  Raises `WrongResult` where a call changed its inputs.
    """
    device = inputs.q.device
    rotation = Rotation(case, inputs, l2_bytes(device))
    watch()
    launches, missing = read_launches(forward, rotation, device)
    before = _clocks(device)
    with nvtx_range(f"device_us-{name}"):
        on_device = device_time(forward, rotation, device, watch)
    outputs = rotation.outputs
    after = _clocks(device)
    rotation.poison()
    with nvtx_range(f"call_us-{name}"):
        per_call = call_time(forward, rotation, device, watch)
    outputs += rotation.written(per_call.calls_per_sample)
    rotation.require_untouched()
    speed = Speed(
        device=on_device,
        call=per_call,
        buffers=len(rotation),
        exceeds_l2=rotation.exceeds_l2,
        launches=launches,
        launches_missing=missing,
        clocks_before=before,
        clocks_after=after,
    )
    return speed, outputs


def _clocks(device: torch.device) -> Clocks | None:
    gpu = find_gpu() if device.type == "cuda" else None
    return read_clocks(gpu.uuid) if gpu else None


def l2_bytes(device: torch.device) -> int | None:
    """The size of a GPU's L2; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else None
