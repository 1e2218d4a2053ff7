"""What one call launches, read from a captured graph: kernels with their geometry, other nodes, and their order."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
import torch

from pytest_fa.measure.device_time import CannotCapture, capture
from pytest_fa.measure.rotation import Rotation
from pytest_fa.records.timing import ON_CPU, LaunchedKernel, Order
from pytest_fa.run.forward import Forward

CALLS = 2


class Captured(NamedTuple):
    """The nodes of one call: its kernels, how many memsets and copies, how they hang together, or why nobody knows."""

    launches: tuple[LaunchedKernel, ...] = ()
    other_nodes: dict[str, int] = {}  # noqa: RUF012  # a tuple's default, never written to
    order: Order | None = None
    missing: str | None = None


def read_launches(forward: Forward, rotation: Rotation, device: torch.device) -> Captured:
    """The nodes of one captured call.  Two calls are captured: each must have the same."""
    if device.type == "cpu":
        return Captured(missing=ON_CPU)
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # comes with torch's CUDA builds only
    except ImportError as problem:
        return Captured(missing=f"cuda.bindings is not installed: {problem}")
    try:
        graph = capture(lambda: rotation.call(forward), CALLS, rotation.begin, keep_graph=True)
        return _read(driver, driver.CUgraph(graph.raw_cuda_graph()))
    except (RuntimeError, CannotCapture) as problem:
        return Captured(missing=str(problem))


def _read(driver: Any, graph: Any) -> Captured:  # noqa: ANN401  # cuda.bindings has no types
    _, count = _ok(driver, driver.cuGraphGetNodes(graph))
    nodes, _ = _ok(driver, driver.cuGraphGetNodes(graph, count))
    kernels: Counter[LaunchedKernel] = Counter()
    others: Counter[str] = Counter()
    for node in nodes:
        (kind,) = _ok(driver, driver.cuGraphNodeGetType(node))
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            kernels[_kernel(driver, node)] += 1
        else:
            others[kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()] += 1
    if any(number % CALLS for number in (*kernels.values(), *others.values())):
        return Captured(missing=f"{CALLS} calls in a row do not launch the same")
    launches = tuple(msgspec.structs.replace(each, count=number // CALLS) for each, number in kernels.items())
    return Captured(launches, {name: number // CALLS for name, number in others.items()}, _order(driver, graph, count))


def _order(driver: Any, graph: Any, node_count: int) -> Order:  # noqa: ANN401
    """One after the other, or not; a programmatic edge lets a kernel begin before its predecessor ends."""
    *_, edge_count = _ok(driver, driver.cuGraphGetEdges(graph))
    if edge_count != node_count - 1:
        return "branches"
    if not edge_count:
        return "chain"
    starts, ends, *data, _ = _ok(driver, driver.cuGraphGetEdges(graph, edge_count))
    if any(len({int(each) for each in side}) != edge_count for side in (starts, ends)):
        return "branches"
    return "programmatic" if data and any(int(each.type) != 0 for each in data[0]) else "chain"


def _kernel(driver: Any, node: Any) -> LaunchedKernel:  # noqa: ANN401
    (found,) = _ok(driver, driver.cuGraphKernelNodeGetParams(node))
    by_kernel = int(found.kern) != 0
    (name,) = _ok(driver, driver.cuKernelGetName(found.kern) if by_kernel else driver.cuFuncGetName(found.func))
    function = _ok(driver, driver.cuKernelGetFunction(found.kern))[0] if by_kernel else found.func
    static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    (static_bytes,) = _ok(driver, driver.cuFuncGetAttribute(static, function))
    cluster_of = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    (value,) = _ok(driver, driver.cuGraphKernelNodeGetAttribute(node, cluster_of))
    cluster = value.clusterDim
    return LaunchedKernel(
        mangled=name.decode(),
        grid=(found.gridDimX, found.gridDimY, found.gridDimZ),
        block=(found.blockDimX, found.blockDimY, found.blockDimZ),
        dynamic_smem_bytes=found.sharedMemBytes,
        static_smem_bytes=static_bytes,
        cluster=(max(1, cluster.x), max(1, cluster.y), max(1, cluster.z)),
    )


def _ok(driver: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
    """The values of a driver call.  Raises `RuntimeError` with its status."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {status!r}")
    return tuple(values)
