"""A kernel reads what the judge lends as fast as memory of its own, also gigabytes in pages of a random order."""

from __future__ import annotations

import subprocess
import sys

import torch

from pytest_fa.gpu.graphs import event_us
from pytest_fa.gpu.shared_memory import map_on_gpu
from pytest_fa.judge.lending import OtherProcess
from pytest_fa.wire.commands import Attach, Detach

SIZE_BYTES = 2**30 + 12345
CACHE_PAGE_BYTES = 4096  # 16 keys of one head at D = 128
ROUNDS = 5
GPU = torch.device("cuda", 0)


def microseconds_of(data: torch.Tensor) -> float:
    """The shortest time of a copy of all pages, in a random order."""
    pages = data[: len(data) // CACHE_PAGE_BYTES * CACHE_PAGE_BYTES].view(torch.float32).view(-1, CACHE_PAGE_BYTES // 4)
    order = torch.randperm(len(pages), device=GPU)
    copied = torch.empty_like(pages)
    return min(event_us(lambda: torch.index_select(pages, 0, order, out=copied), 3) / 3 for _ in range(ROUNDS))


def test_lent_memory_is_as_fast_as_own() -> None:
    """A process copies the pages of a piece that it maps in at most 1.2 times as long as those of its own memory."""
    sent: list[Attach] = []

    def send(command: Attach | Detach, descriptor: int | None) -> None:  # noqa: ARG001  # only the CPU has one
        if isinstance(command, Attach):
            sent.append(command)

    lending = OtherProcess(send, GPU)
    try:
        lending.allocate(SIZE_BYTES).zero_()
        torch.cuda.synchronize()
        command = [sys.executable, "-m", __name__, sent[0].handle, str(sent[0].size_bytes)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    finally:
        lending.close()
    lent_us, own_us = map(float, printed.split())
    assert lent_us < 1.2 * own_us, printed


if __name__ == "__main__":
    lent = map_on_gpu(sys.argv[1], int(sys.argv[2]), GPU)
    own = torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=GPU)
    print(microseconds_of(lent), microseconds_of(own))  # noqa: T201
