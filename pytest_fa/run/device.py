"""The device a job runs on: waiting for it, asking whether it still lives."""

from __future__ import annotations

import torch

from pytest_fa.catalog.variant import Device
from pytest_fa.errors import DeviceLost


def open_device(name: Device) -> torch.device:
    """The torch device, with its context made.  Raises `DeviceLost` where CUDA does not start."""
    device = torch.device(name)
    if device.type == "cuda":
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as problem:
            raise DeviceLost(f"CUDA does not start: {problem}") from problem
    return device


def synchronize(device: torch.device) -> None:
    """Wait for all work on `device`.

    Raises `DeviceLost` with the driver's words for an error that came while it ran, such as an illegal address: the
    context does not recover from those.
    """
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as problem:
            raise DeviceLost(str(problem).splitlines()[0]) from problem


def is_alive(device: torch.device) -> bool:
    """Whether the context still takes work."""
    try:
        synchronize(device)
    except DeviceLost:
        return False
    return True
