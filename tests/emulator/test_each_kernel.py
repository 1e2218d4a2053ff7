"""One emulated case of each kernel, and one missing barrier: the nightly files have the rest."""

from __future__ import annotations

import pytest

from tests.emulator.conftest import Build, complaints, is_found
from tests.emulator.emulated import Schedule
from tests.tiers import nightly_but

pytestmark = pytest.mark.needs_nvcc  # for the headers of CUDA

# Kernel: head_dim, shape, number of SMs.
CASES = {
    "lazy_rescale": (128, "b1h2s130d128-fp16-causal_br-kv1-sk200", 132),
    "cluster_tma": (64, "b1h2s200d64-fp16-causal", 132),
    "cluster_packed": (64, "b1h2s200d64-fp16-causal", 132),
    "cluster_latency": (64, "b1h2s200d64-fp16-causal", 132),
    "decode_tile": (64, "b1h8s1d64-fp16-kv2-sk1000", 24),
    "decode_warps": (64, "b1h8s1d64-fp16-kv2-sk1000", 24),
    "decode_one_cluster": (64, "b1h8s1d64-fp16-kv2-sk1000", 24),
    "decode_cluster": (64, "b1h8s1d64-fp16-kv2-sk1000", 24),
    "decode_short": (64, "b1h8s1d64-fp16-kv2-sk1000", 24),
    "long_ring": (64, "b1h3s300d64-fp16-causal-sk1100", 2),
    "long_from_end": (128, "b1h2s257d128-fp16-causal", 2),
    "fp8_wgmma": (64, "b1h4s150d64-e4m3-kv2-sk300", 3),
    "fp8_max": (64, "b1h4s150d64-e4m3-kv2-sk300", 3),
    "fp8_keys": (128, "b1h2s150d128-e4m3-causal_br-sk300", 3),
    "fp8_split": (64, "b1h2s150d64-e4m3-causal-sk300", 3),
}


@pytest.mark.parametrize("kernel", nightly_but(CASES, "decode_cluster", "long_ring", "fp8_wgmma"))
def test_a_kernel_is_right(build: Build, kernel: str) -> None:
    """Output and log-sum-exp are right if copies and threads come in a random order."""
    head_dim, shape, sms = CASES[kernel]
    assert complaints(build(kernel, head_dim), shape, Schedule(1, sms)) == []


def test_a_missing_barrier_is_found(build: Build) -> None:
    """Without one of its barriers, a kernel is wrong, or cannot end, in at least one of four orders."""
    assert is_found(build("race_latency_group_partial", 64), "b1h3s512d64-fp16-causal", sms=132)
