"""Which kernels one call launches, read from a captured graph: names, grids, blocks, dynamic shared memory."""

from __future__ import annotations

import collections
from typing import Any

import msgspec
import torch

from pytest_fa.measure.device_time import CannotCapture, capture
from pytest_fa.measure.rotation import Rotation
from pytest_fa.report.record import ON_CPU, LaunchedKernel
from pytest_fa.run.module import Forward


def read_launches(
    forward: Forward, rotation: Rotation, device: torch.device
) -> tuple[tuple[LaunchedKernel, ...], str | None]:
    """The kernel nodes of one captured call, and why they could not be read."""
    if device.type == "cpu":
        return (), ON_CPU
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # comes with torch's CUDA builds only
    except ImportError as problem:
        return (), f"cuda.bindings is not installed: {problem}"
    try:
        graph = capture(forward, rotation, 1, keep_graph=True)
        return _kernel_nodes(driver, driver.CUgraph(graph.raw_cuda_graph())), None
    except (RuntimeError, CannotCapture) as problem:
        return (), str(problem)


def _kernel_nodes(driver: Any, graph: Any) -> tuple[LaunchedKernel, ...]:  # noqa: ANN401  # cuda.bindings has no types
    _, count = _ok(driver, driver.cuGraphGetNodes(graph))
    nodes, _ = _ok(driver, driver.cuGraphGetNodes(graph, count))
    launches = []
    for node in nodes:
        (kind,) = _ok(driver, driver.cuGraphNodeGetType(node))
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            continue
        (found,) = _ok(driver, driver.cuGraphKernelNodeGetParams(node))
        by_kernel = int(found.kern) != 0
        (name,) = _ok(driver, driver.cuKernelGetName(found.kern) if by_kernel else driver.cuFuncGetName(found.func))
        launches.append(
            LaunchedKernel(
                mangled=name.decode(),
                grid=(found.gridDimX, found.gridDimY, found.gridDimZ),
                block=(found.blockDimX, found.blockDimY, found.blockDimZ),
                dynamic_smem_bytes=found.sharedMemBytes,
            )
        )
    counts = collections.Counter(launches)
    return tuple(msgspec.structs.replace(launch, count=count) for launch, count in counts.items())


def _ok(driver: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
    """The values of a driver call.  Raises `RuntimeError` with its status."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {status!r}")
    return tuple(values)
