"""The nodes of a call are read from those of all calls of a graph, here from a simulated driver."""

from __future__ import annotations

import ctypes
from ctypes import c_void_p
from typing import Any, NamedTuple

import pytest

from pytest_fa.gpu.graph_nodes import EdgeData, KernelParams, LaunchAttribute, _read
from pytest_fa.records.timing import LaunchedKernel

KERNEL, MEMSET = 0, 2  # of CUgraphNodeType
INVALID_VALUE = 1


class Node(NamedTuple):
    """A node: its kind, and what it launches if it is a kernel."""

    kind: int = KERNEL
    name: str = "attend"
    blocks: int = 8
    cluster: int = 1
    by_kernel: bool = True  # whether the node refers to a CUkernel


class Driver:
    """The part of the driver that reads a graph.  Node i has the address i + 1, and its kernel the hash of its name."""

    def __init__(self, nodes: list[Node], edges: list[tuple[int, int, int]] | None = None) -> None:
        self.nodes = nodes
        chain = [(number, number + 1, 0) for number in range(1, len(nodes))]
        self.edges = chain if edges is None else edges
        self.names = {100 + index: node.name for index, node in enumerate(nodes)}
        self.kernels = {name: address for address, name in reversed(self.names.items())}

    def node(self, node: c_void_p) -> Node:
        """The node at an address."""
        return self.nodes[(node.value or 0) - 1]

    def cuGraphGetNodes(self, _: c_void_p, nodes: Any, count: Any) -> int:  # noqa: N802  # CUDA's name
        """All nodes, or their number."""
        count._obj.value = len(self.nodes)
        for index in range(len(self.nodes) if nodes is not None else 0):
            nodes[index] = index + 1
        return 0

    def cuGraphGetEdges_v2(self, _: c_void_p, starts: Any, ends: Any, data: Any, count: Any) -> int:  # noqa: N802
        """All edges, or their number."""
        count._obj.value = len(self.edges)
        for index, edge in enumerate(self.edges if starts is not None else []):
            starts[index], ends[index], data[index] = edge[0], edge[1], EdgeData(type=edge[2])
        return 0

    def cuGraphNodeGetType(self, node: c_void_p, kind: Any) -> int:  # noqa: N802
        """The kind of a node."""
        kind._obj.value = self.node(node).kind
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: c_void_p, params: Any) -> int:  # noqa: N802
        """What a node launches; the places of its arguments differ from node to node."""
        each, written = self.node(node), params._obj
        address = self.kernels[each.name]
        written.kernel, written.function = (address, None) if each.by_kernel else (None, address)
        written.grid[:], written.block[:] = (each.blocks, 1, 1), (128, 1, 1)
        written.dynamic_smem_bytes, written.arguments = 1024, node.value
        return 0

    def cuGraphKernelNodeGetAttribute(self, node: c_void_p, _: int, value: Any) -> int:  # noqa: N802
        """The cluster of a node; zeros if it has none."""
        each = self.node(node)
        value._obj.cluster[:] = (each.cluster, 1, 1) if each.cluster > 1 else (0, 0, 0)
        return 0

    def cuKernelGetName(self, name: Any, kernel: c_void_p) -> int:  # noqa: N802
        """The mangled name."""
        name._obj.value = self.names[kernel.value or 0].encode()
        return 0

    cuFuncGetName = cuKernelGetName  # noqa: N815

    def cuKernelGetFunction(self, function: Any, kernel: c_void_p) -> int:  # noqa: N802
        """The function of a kernel."""
        function._obj.value = kernel.value
        return 0

    def cuFuncGetAttribute(self, value: Any, _: int, function: c_void_p) -> int:  # noqa: N802
        """Its static shared memory."""
        value._obj.value = 16
        return 0 if function.value in self.names else INVALID_VALUE


def launched(name: str, count: int, blocks: int = 8, cluster: int = 1) -> LaunchedKernel:
    """A kernel of the simulated driver."""
    return LaunchedKernel(name, (blocks, 1, 1), (128, 1, 1), 1024, count, 16, (cluster, 1, 1))


def test_the_structures_have_the_sizes_of_cuda() -> None:
    """CUDA_KERNEL_NODE_PARAMS_v2, CUlaunchAttributeValue and CUgraphEdgeData of CUDA 12 and 13."""
    assert [ctypes.sizeof(each) for each in (KernelParams, LaunchAttribute, EdgeData)] == [72, 64, 8]
    assert (KernelParams.kernel.offset, KernelParams.function.offset, KernelParams.grid.offset) == (56, 0, 8)


def test_the_nodes_of_one_call_are_those_of_all_calls_divided() -> None:
    """Two kernels, of which one runs twice, and a memset: in each of three calls."""
    call = [Node(), Node(name="merge", by_kernel=False, cluster=4), Node(), Node(MEMSET)]
    read = _read(Driver(call * 3), c_void_p(1), 3)
    assert read.launches == (launched("attend", 2), launched("merge", 1, cluster=4))
    assert (read.other_nodes, read.order, read.missing) == ({"memset": 1}, "chain", None)


@pytest.mark.parametrize(
    "odd", [[Node(), Node(blocks=1)], [Node(), Node(name="other")], [Node(), Node(cluster=2)], [Node(), Node(MEMSET)]]
)
def test_calls_with_other_nodes_are_noticed(odd: list[Node]) -> None:
    """One of 1,000 calls launches a kernel with another name, grid or cluster, or none."""
    read = _read(Driver([Node()] * 998 + odd), c_void_p(1), 1000)
    assert read.launches == ()
    assert (read.missing or "").startswith("1000 calls in a row do not launch the same kernels")


@pytest.mark.parametrize(("kind", "name"), [(4, "graph"), (13, "conditional")])
def test_nodes_that_hide_others_are_not_read(kind: int, name: str) -> None:
    """A child graph, or the body of a conditional node, could hold anything."""
    read = _read(Driver([Node(), Node(kind)] * 2), c_void_p(1), 2)
    assert (read.launches, read.missing) == ((), f"it has a node of the kind {name}, whose own nodes are not read")


@pytest.mark.parametrize(
    ("edges", "order"),
    [
        (None, "chain"),
        ([(1, 2, 0), (1, 3, 0)], "branches"),
        ([(1, 2, 0)], "branches"),
        ([(1, 2, 1), (2, 3, 0)], "programmatic"),
    ],
)
def test_the_order_is_that_of_the_edges(edges: list[tuple[int, int, int]] | None, order: str) -> None:
    """A chain, branches, or a chain with a programmatic edge."""
    assert _read(Driver([Node()] * 3, edges), c_void_p(1), 3).order == order


def test_a_driver_that_refuses_is_a_reason() -> None:
    """A status that is not success ends the reading."""
    driver = Driver([Node()])
    driver.cuGraphNodeGetType = lambda *_: INVALID_VALUE  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="returned 1"):
        _read(driver, c_void_p(1), 1)
