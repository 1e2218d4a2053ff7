"""Which tests share a worker of pytest-xdist: a candidate and its baselines meet on one GPU."""

from __future__ import annotations

import pytest

from pytest_fa.plugin.xdist_hooks import scope_of

FIRST = {"b1h8s512d64-fp16-seed3", "b1h8s512d64-fp16-causal_br-kv2-seed3"}


@pytest.mark.parametrize(
    ("test", "scope"),
    [
        ("test_speed[mine-b1h8s512d64-fp16]", "b1h8s512d64-fp16"),
        ("test_speed[sdpa_cudnn-b1h8s512d64-fp16]", "b1h8s512d64-fp16"),
        ("test_profile[mine-b1h8s512d64-fp16]", "b1h8s512d64-fp16"),
        ("test_speed[mine@BLOCK_M=64-b1h8s512d64-fp16-causal_br-kv2]", "b1h8s512d64-fp16-causal_br-kv2"),
        ("test_correct[mine-b1h8s512d64-fp16-seed3]", "b1h8s512d64-fp16"),
        ("test_correct[mine-b1h8s512d64-fp16-causal_br-kv2-seed3]", "b1h8s512d64-fp16-causal_br-kv2"),
        ("test_correct[mine-b1h8s512d64-fp16-seed4]", ""),
        ("test_build[mine]", ""),
        ("test_property[mine-streams]", ""),
        ("test_gate[mine]", ""),
        ("tests/test_own.py::test_own", ""),
    ],
)
def test_what_shares_a_worker(test: str, scope: str) -> None:
    """Timed tests of one shape and the check of its first seed stay together; all others go where a worker is free."""
    assert scope_of(test, FIRST) == (scope or test)
