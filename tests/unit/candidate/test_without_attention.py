"""Torch's attention operators can be replaced for a process, however they are called."""

from __future__ import annotations

import subprocess
import sys

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.candidate.without_attention import ATTENTION, attention_operators

CALLS = {
    "function": "F.scaled_dot_product_attention(q, k, v)",
    "function of torch._C": "torch._C._nn.scaled_dot_product_attention(q, k, v)",
    "operator": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]",
    "math": "torch.ops.aten._scaled_dot_product_attention_math(q, k, v)[0]",
    "without gradients": "torch.no_grad()(lambda: F.scaled_dot_product_attention(q, k, v))()",
    "for inference": "torch.inference_mode()(lambda: F.scaled_dot_product_attention(q, k, v))()",
    "with gradients": "F.scaled_dot_product_attention(q.requires_grad_(), k, v).detach()",
    "in a pool": "ThreadPoolExecutor(1).submit(F.scaled_dot_product_attention, q, k, v).result()",
    "with a mask": "F.scaled_dot_product_attention(q, k, v, torch.ones(16, 16, dtype=torch.bool))",
    "after a collection": "(gc.collect(), F.scaled_dot_product_attention(q, k, v))[1]",
}
PROGRAM = """\
import gc
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.nn.functional as F
from pytest_fa.candidate.without_attention import replace_attention

q, k, v = torch.randn(3, 1, 2, 16, 64, generator=torch.Generator().manual_seed(0))
right = torch.softmax(q @ k.transpose(2, 3) / 8, -1) @ v
replace_attention()
assert torch.equal(torch.softmax(q @ k.transpose(2, 3) / 8, -1) @ v, right)
for call in CALLS:
    print(float((eval(call) - right).abs().max()))
try:
    torch.ops.aten._flash_attention_forward(q[0], k[0], v[0], None, None, 16, 16, 0.0, False, False)
except RuntimeError as problem:
    print(str(problem).partition(": ")[0])
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What a process prints in which attention is replaced: the error of each call, and an exception."""
    code = PROGRAM.replace("in CALLS", f"in {list(CALLS.values())}")
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return process.stdout.splitlines()


@pytest.mark.parametrize("name", CALLS)
def test_no_way_of_calling_gives_the_right_result(printed: list[str], name: str) -> None:
    """Whatever way leads to torch's attention, the result is far from right; other operators are as before."""
    assert float(printed[list(CALLS).index(name)]) > 0.05


def test_operators_without_three_tensors_of_a_head_raise(printed: list[str], snapshot: SnapshotAssertion) -> None:
    """An operator whose result cannot be imitated raises."""
    assert snapshot == printed[-1]


def test_each_name_stands_for_an_operator() -> None:
    """Each substring is part of the name of an operator of this torch."""
    assert [part for part in ATTENTION if not any(part in name for name in attention_operators())] == []
