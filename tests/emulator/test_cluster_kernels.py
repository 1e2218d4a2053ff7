"""The kernels whose blocks exchange partial results within a cluster, emulated on the CPU.

They are right in any order of copies and threads, and need each of their barriers.
"""

from __future__ import annotations

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from tests.emulator.conftest import ORDERS, Build, bits_of, complaints, is_found, marks_left
from tests.emulator.emulated import Schedule

pytestmark = [pytest.mark.needs_nvcc, pytest.mark.nightly]  # it needs the headers of CUDA

# Shapes, and the number of SMs.
SHAPES = (
    ("b1h2s200d64-fp16", 132),
    ("b1h3s512d64-fp16-causal", 132),
    ("b1h2s130d128-fp16", 4),
    ("b1h2s700d64-fp16-causal_br-kv1-sk300", 4),  # the first queries see no key
    ("b1h2s70d64-fp16-sk0", 132),  # no key
    ("b1h2s100d128-fp16-sk1500", 132),  # several key tiles per block
)
DECODE_SHAPES = (
    ("b1h8s1d64-fp16-kv2-sk1000", 24),
    ("b1h4s1d128-fp16-kv1-sk3001", 48),
    ("b2h4s3d64-fp16-causal_br-kv2-sk777", 4),
    ("b1h8s5d128-fp16-causal_br-kv1-sk1500", 24),  # two row tiles
    ("b1h2s1d64-fp16-sk17", 24),  # fewer keys than warps can share
    ("b1h2s1d64-fp16-sk0", 24),
)
DECODE_RUNGS = (
    "decode_tile",
    "decode_warps",
    "decode_one_cluster",
    "decode_two_steps",
    "decode_cluster",
    "decode_short",
)
# Two clusters of 16 blocks share the keys.
SEVERAL_CLUSTERS, SMS, BLOCKS = "b1h1s1d128-fp16-sk9001", 40, 48
SHORT_SHAPES = (*(each for each in SHAPES if "d64" in each[0]), ("b1h2s100d64-fp16-sk1500", 132))
SHORT_BARRIERS = {
    "cluster_early": ("K_FULL", "V_FULL", "GROUP_PARTIALS_STORED", "PEER_PARTIAL_FULL"),
    "cluster_tiles": ("K_FULL", "V_FULL", "GROUP_PARTIALS_STORED", "PEER_PARTIAL_FULL"),
    "cluster_one_way": ("K_FULL", "V_FULL", "GROUP_PARTIAL_STORED", "PEER_M_AND_L_FULL", "PEER_O_FULL"),
    "cluster_packed": ("K_FULL", "V_FULL", "GROUP_PARTIAL_STORED", "PEER_M_AND_L_FULL", "PEER_O_FULL"),
}
SHORT_RUNGS = ("lazy_rescale", "split_warps", "cluster_split", "cluster_wgmma", "cluster_tma", *SHORT_BARRIERS)
LATENCY_FAULT_SHAPE = "b1h3s512d64-fp16-causal"
LATENCY_FAULTS = ("k", "v", "group_partial", "m_and_l", "o")
DECODE_FAULTS = {
    "race_decode_tile": "b1h8s1d64-fp16-kv2-sk1000",
    "race_decode_k": "b1h8s1d64-fp16-kv2-sk1000",
    "race_decode_v": "b1h8s1d64-fp16-kv2-sk1000",
    "race_decode_warp_partial": "b1h8s1d64-fp16-kv2-sk1000",
    "race_decode_incoming": "b1h8s1d64-fp16-kv2-sk1000",
    "decode_empty_split": "b1h2s1d64-fp16-sk17",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rung", SHORT_RUNGS)
def test_the_rungs_for_short_sequences_are_right_in_any_order(build: Build, rung: str, order: str) -> None:
    """Output and log-sum-exp of the rungs before `cluster_latency` are right on tails, masks and several passes."""
    for seed, (shape, sms) in enumerate(SHORT_SHAPES):
        assert complaints(build(rung, 64), shape, Schedule(seed, sms, ORDERS[order])) == [], shape


@pytest.mark.parametrize(
    ("rung", "barrier"), [(rung, each) for rung in SHORT_BARRIERS for each in SHORT_BARRIERS[rung]]
)
def test_each_barrier_of_these_rungs_is_needed(build: Build, rung: str, barrier: str) -> None:
    """Without a barrier, a result is wrong, or the kernel cannot end, in at least one of four orders."""
    assert is_found(build(rung, 64, OMIT_BARRIER=barrier), LATENCY_FAULT_SHAPE, sms=132)


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernel_for_short_sequences_is_right_in_any_order(build: Build, order: str) -> None:
    """Output and log-sum-exp of `cluster_latency` are right on tails, masks and grouped heads."""
    for seed, (shape, sms) in enumerate(SHAPES):
        assert complaints(build("cluster_latency"), shape, Schedule(seed, sms, ORDERS[order])) == [], shape


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rung", DECODE_RUNGS)
def test_the_kernels_for_decode_are_right_in_any_order(build: Build, rung: str, order: str) -> None:
    """Output and log-sum-exp are right with one block, with a cluster, with masked and with no keys."""
    for seed, (shape, sms) in enumerate(DECODE_SHAPES):
        assert complaints(build(rung), shape, Schedule(seed, sms, ORDERS[order])) == [], shape


@pytest.mark.parametrize("order", ORDERS)
def test_several_clusters_share_the_keys_of_a_tile(build: Build, order: str) -> None:
    """They merge through the workspace, in the first call and in later ones with the same workspace."""
    kernel = build("decode_cluster")
    assert kernel.workspace_bytes(parse_case(f"{SEVERAL_CLUSTERS}-seed0"), SMS) > 0
    assert complaints(kernel, SEVERAL_CLUSTERS, Schedule(2, SMS, ORDERS[order], BLOCKS), calls=2) == []
    assert marks_left(kernel) == 0  # the next call would merge the results of this one


def test_several_clusters_always_have_the_same_bits(build: Build) -> None:
    """It does not matter which cluster is the last one, nor whether the clusters run at the same time."""
    kernel, case = build("decode_cluster"), parse_case(f"{SEVERAL_CLUSTERS}-seed0")
    schedules = [Schedule(blocks, SMS, 0.5, blocks) for blocks in (48, 16, 32)]
    (first_out, first_lse), *others = [bits_of(kernel, case, schedule) for schedule in schedules]
    assert all(torch.equal(out, first_out) and torch.equal(lse, first_lse) for out, lse in others)


@pytest.mark.parametrize("fault", LATENCY_FAULTS)
def test_each_barrier_for_short_sequences_is_needed(build: Build, fault: str) -> None:
    """Without a barrier, a result is wrong, or the kernel cannot end, in at least one of four orders."""
    assert is_found(build(f"race_latency_{fault}", 64), LATENCY_FAULT_SHAPE, sms=132)


def test_with_all_barriers_nothing_is_found(build: Build) -> None:
    """Where the faults are looked for, the kernels without one are right."""
    assert not is_found(build("cluster_latency", 64), LATENCY_FAULT_SHAPE, sms=132)
    for shape in sorted({*DECODE_FAULTS.values()}):
        assert not is_found(build("decode_cluster", 64), shape, sms=24)
    assert not is_found(build("decode_tile", 64), DECODE_FAULTS["race_decode_tile"], sms=24)


@pytest.mark.parametrize("fault", DECODE_FAULTS)
def test_each_barrier_for_decode_is_needed(build: Build, fault: str) -> None:
    """The same for the kernels for few queries, and for a warp without keys that stores no partial result."""
    assert is_found(build(fault, 64), DECODE_FAULTS[fault], sms=24)


@pytest.mark.parametrize("fault", ["decode_lost_tag", "decode_other_count"])
def test_several_clusters_need_all_tags_and_the_right_count(build: Build, fault: str) -> None:
    """A lost tag leaves the output unwritten; a count of another call gives a wrong result in the first call."""
    assert complaints(build(fault, 128), SEVERAL_CLUSTERS, Schedule(0, SMS, 0.5, BLOCKS)) != []
