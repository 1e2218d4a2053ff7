"""Read what one call launches from a captured graph: kernels with their geometry, other nodes, and their order.

All nodes of a graph are read, of which there may be tens of thousands.  Therefore the driver is called by ctypes.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, NamedTuple

import torch

from pytest_fa.records.timing import LaunchedKernel, Order

CALLS = 2  # in a graph that is captured for its nodes alone: two calls must have the same nodes
SHARED_SIZE_BYTES = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
CONTAINERS = ("graph", "conditional")  # of other nodes
KINDS = (  # CUgraphNodeType, in its order
    "kernel",
    "memcpy",
    "memset",
    "host",
    "graph",
    "empty",
    "wait_event",
    "event_record",
    "ext_semas_signal",
    "ext_semas_wait",
    "mem_alloc",
    "mem_free",
    "batch_mem_op",
    "conditional",
)


class Captured(NamedTuple):
    """The nodes of one call: its kernels, the number of memsets and copies, and their order.

    `missing` is the reason if they could not be read.
    """

    launches: tuple[LaunchedKernel, ...] = ()
    other_nodes: dict[str, int] = {}  # noqa: RUF012  # never modified
    order: Order | None = None
    missing: str | None = None


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2: the kernel is a CUkernel or a CUfunction, whichever the node refers to."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("dynamic_smem_bytes", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttributeValue, which has 64 bytes, as the dimensions of a cluster."""

    _fields_ = (("cluster", c_uint * 3), ("rest", ctypes.c_byte * 52))


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def read_nodes(graph: torch.cuda.CUDAGraph, calls: int) -> Captured:
    """Read the nodes of one call from a graph of `calls` calls, which was captured with `keep_graph`.

    All nodes of the graph are read: there are none if its calls do not have the same nodes.
    """
    try:
        return _read(ctypes.CDLL("libcuda.so.1"), c_void_p(graph.raw_cuda_graph()), calls)
    except (OSError, AttributeError, RuntimeError) as problem:
        return Captured(missing=f"the nodes of a graph cannot be read: {problem}")


def _read(driver: Any, graph: c_void_p, calls: int) -> Captured:  # noqa: ANN401  # a library has no type of its own
    """Count the nodes of a graph of `calls` calls and divide by `calls`."""
    count = c_size_t()
    _check(driver.cuGraphGetNodes(graph, None, byref(count)))
    nodes = (c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(graph, nodes, byref(count)))
    kernels: Counter[_KernelNode] = Counter()
    other_nodes: Counter[str] = Counter()
    read_kind, kind = driver.cuGraphNodeGetType, c_int()
    for address in nodes:
        node = c_void_p(address)
        _check(read_kind(node, byref(kind)))
        name = KINDS[kind.value] if kind.value < len(KINDS) else f"node of type {kind.value}"
        if name == "kernel":
            kernels[_kernel_node(driver, node)] += 1
        else:
            other_nodes[name] += 1
    if hidden := [name for name in CONTAINERS if name in other_nodes]:
        return Captured(missing=f"it has a node of the kind {hidden[0]}, whose own nodes are not read")
    if uneven := [number for number in (*kernels.values(), *other_nodes.values()) if number % calls]:
        return Captured(missing=f"{calls} calls in a row do not launch the same kernels: one of them {uneven[0]} times")
    launches = tuple(_kernel(driver, node, number // calls) for node, number in kernels.items())
    return Captured(
        launches, {name: number // calls for name, number in other_nodes.items()}, _order(driver, graph, count.value)
    )


def _order(driver: Any, graph: c_void_p, node_count: int) -> Order:  # noqa: ANN401
    """Whether the nodes are one chain, have programmatic edges, or run side by side in branches.

    A programmatic edge lets a kernel begin before its predecessor ends.
    """
    count = c_size_t()
    _check(driver.cuGraphGetEdges_v2(graph, None, None, None, byref(count)))
    if count.value != node_count - 1:
        return "branches"
    if not count.value:
        return "chain"
    starts, ends = (c_void_p * count.value)(), (c_void_p * count.value)()
    data = (EdgeData * count.value)()
    _check(driver.cuGraphGetEdges_v2(graph, starts, ends, data, byref(count)))
    if any(len(set(nodes)) != count.value for nodes in (starts, ends)):
        return "branches"
    return "programmatic" if any(edge.type for edge in data) else "chain"


class _KernelNode(NamedTuple):
    """What a kernel node launches, with its geometry."""

    kernel: int | None
    function: int | None
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem_bytes: int
    cluster: tuple[int, int, int]


def _kernel_node(driver: Any, node: c_void_p) -> _KernelNode:  # noqa: ANN401
    params, attribute = KernelParams(), LaunchAttribute()
    _check(driver.cuGraphKernelNodeGetParams_v2(node, byref(params)))
    _check(driver.cuGraphKernelNodeGetAttribute(node, CLUSTER_DIMENSION, byref(attribute)))
    grid, block, cluster = (_three(dimensions) for dimensions in (params.grid, params.block, attribute.cluster))
    return _KernelNode(params.kernel, params.function, grid, block, params.dynamic_smem_bytes, cluster)


def _kernel(driver: Any, node: _KernelNode, count: int) -> LaunchedKernel:  # noqa: ANN401
    """The kernel that `count` nodes of a call launch."""
    name, function, static_bytes = c_char_p(), c_void_p(node.function), c_int()
    if node.kernel:
        _check(driver.cuKernelGetName(byref(name), c_void_p(node.kernel)))
        _check(driver.cuKernelGetFunction(byref(function), c_void_p(node.kernel)))
    else:
        _check(driver.cuFuncGetName(byref(name), function))
    _check(driver.cuFuncGetAttribute(byref(static_bytes), SHARED_SIZE_BYTES, function))
    x, y, z = node.cluster
    return LaunchedKernel(
        mangled=(name.value or b"").decode(),
        grid=node.grid,
        block=node.block,
        dynamic_smem_bytes=node.dynamic_smem_bytes,
        count=count,
        static_smem_bytes=static_bytes.value,
        cluster=(max(1, x), max(1, y), max(1, z)),
    )


def _three(dimensions: Any) -> tuple[int, int, int]:  # noqa: ANN401  # an array of ctypes
    x, y, z = dimensions
    return x, y, z


def _check(status: int) -> None:
    """Raise `RuntimeError` if a driver call did not succeed."""
    if status:
        raise RuntimeError(f"a driver call returned {status}")
