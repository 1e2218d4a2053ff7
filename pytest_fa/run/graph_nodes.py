"""Read what one call launches from a captured graph: kernels with their geometry, other nodes, and their order."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
import torch

from pytest_fa.records.timing import LaunchedKernel, Order

CALLS = 2  # in a graph whose nodes are read: two calls must have the same nodes


class Captured(NamedTuple):
    """The nodes of one call: its kernels, the number of memsets and copies, and their order.

    `missing` is the reason if they could not be read.
    """

    launches: tuple[LaunchedKernel, ...] = ()
    other_nodes: dict[str, int] = {}  # noqa: RUF012  # never modified
    order: Order | None = None
    missing: str | None = None


def read_nodes(graph: torch.cuda.CUDAGraph) -> Captured:
    """Read the nodes of one call from a graph of `CALLS` calls, which was captured with `keep_graph`."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # comes with torch's CUDA builds only
    except ImportError as problem:
        return Captured(missing=f"cuda.bindings is not installed: {problem}")
    try:
        return _read(driver, driver.CUgraph(graph.raw_cuda_graph()))
    except RuntimeError as problem:
        return Captured(missing=str(problem))


def _read(driver: Any, graph: Any) -> Captured:  # noqa: ANN401  # cuda.bindings has no types
    """Count the nodes of a graph of `CALLS` calls and divide by `CALLS`."""
    _, count = _ok(driver, driver.cuGraphGetNodes(graph))
    nodes, _ = _ok(driver, driver.cuGraphGetNodes(graph, count))
    kernels: Counter[LaunchedKernel] = Counter()
    other_nodes: Counter[str] = Counter()
    for node in nodes:
        (kind,) = _ok(driver, driver.cuGraphNodeGetType(node))
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            kernels[_kernel(driver, node)] += 1
        else:
            other_nodes[kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()] += 1
    if any(number % CALLS for number in (*kernels.values(), *other_nodes.values())):
        return Captured(missing=f"{CALLS} calls in a row do not launch the same kernels")
    launches = tuple(msgspec.structs.replace(kernel, count=number // CALLS) for kernel, number in kernels.items())
    return Captured(
        launches, {name: number // CALLS for name, number in other_nodes.items()}, _order(driver, graph, count)
    )


def _order(driver: Any, graph: Any, node_count: int) -> Order:  # noqa: ANN401
    """Whether the nodes are one chain, have programmatic edges, or run side by side in branches.

    A programmatic edge lets a kernel begin before its predecessor ends.
    """
    *_, edge_count = _ok(driver, driver.cuGraphGetEdges(graph))
    if edge_count != node_count - 1:
        return "branches"
    if not edge_count:
        return "chain"
    starts, ends, *data, _ = _ok(driver, driver.cuGraphGetEdges(graph, edge_count))
    if any(len({int(node) for node in nodes}) != edge_count for nodes in (starts, ends)):
        return "branches"
    return "programmatic" if data and any(int(edge.type) != 0 for edge in data[0]) else "chain"


def _kernel(driver: Any, node: Any) -> LaunchedKernel:  # noqa: ANN401
    """Read a kernel node.  It refers to its kernel by a CUkernel or by a CUfunction."""
    (params,) = _ok(driver, driver.cuGraphKernelNodeGetParams(node))
    has_kernel = int(params.kern) != 0
    (name,) = _ok(driver, driver.cuKernelGetName(params.kern) if has_kernel else driver.cuFuncGetName(params.func))
    function = _ok(driver, driver.cuKernelGetFunction(params.kern))[0] if has_kernel else params.func
    static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    (static_bytes,) = _ok(driver, driver.cuFuncGetAttribute(static, function))
    cluster_of = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    (value,) = _ok(driver, driver.cuGraphKernelNodeGetAttribute(node, cluster_of))
    cluster = value.clusterDim
    return LaunchedKernel(
        mangled=name.decode(),
        grid=(params.gridDimX, params.gridDimY, params.gridDimZ),
        block=(params.blockDimX, params.blockDimY, params.blockDimZ),
        dynamic_smem_bytes=params.sharedMemBytes,
        static_smem_bytes=static_bytes,
        cluster=(max(1, cluster.x), max(1, cluster.y), max(1, cluster.z)),
    )


def _ok(driver: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ANN401
    """The values that a driver call returned.  Raises `RuntimeError` if its status is not success."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a driver call returned {status!r}")
    return tuple(values)
