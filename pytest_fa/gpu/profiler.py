"""torch's profiler: the durations that it reports for the kernels, memsets and copies of a graph.

A profiler that was attached once slows down launches for the rest of its process.  Nothing is timed in such a process.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import torch
from torch.autograd.profiler import profile

from pytest_fa.catalog.variant import Device
from pytest_fa.gpu.device import synchronize


def load_profiler(device: Device = "cuda") -> None:
    """Profile one small call: the first use of the profiler in a process takes seconds.

    Runs profile on a GPU only.  On the CPU, tests see what the profiler loads.
    """
    with _profiler(device):
        torch.ones(1, device=device)
        synchronize(torch.device(device))


def durations_us(graph: torch.cuda.CUDAGraph, replays: int = 1) -> dict[str, list[float]]:
    """Microseconds of everything that ran on the device during replays of a graph, by short name, in order."""
    with _profiler() as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    results: Any = profiler.kineto_results
    events = (event for event in results.events() if event.device_type() == torch.autograd.DeviceType.CUDA)  # type: ignore[attr-defined]
    for event in sorted(events, key=lambda event: event.start_ns()):
        by_name[_short(event.name())].append(event.duration_ns() / 1000)
    return dict(by_name)


def _profiler(device: Device = "cuda") -> profile:
    """A profiler of what runs on the device.

    `torch.profiler.profile` is built on it, but imports the compiler of torch.compile first, to ask for one of its
    settings.  That setting, TORCHINDUCTOR_CUDAGRAPHS, matters by default only before CUDA 12.6.
    """
    on_gpu = device == "cuda"
    return profile(use_cpu=not on_gpu, use_device="cuda" if on_gpu else None, use_kineto=True)


def _short(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    plain = re.sub(r"\(anonymous namespace\)", "anonymous", name).removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0]
