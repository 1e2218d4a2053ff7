"""What a call leaves of its inputs: they stay as they were, bit by bit, except for what the call must write."""

from __future__ import annotations

import torch

from pytest_fa.attention import parts
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import Inputs, bits_of


def require_only_written(before: Inputs, found: Inputs, where: str = "") -> None:
    """Raise `WrongResult` unless the tensors `found` are what a call leaves of those before it.

    Both are as they lie in memory.  `where` is added to the message.
    """
    for name, expected in parts.after(before).parts.items():
        if not torch.equal(bits_of(found.parts[name]), bits_of(expected)):
            reason = parts.wrong_change(name, before, found.parts[name])
            raise WrongResult("inputs", f"{reason or f'the kernel changed its input {name}'}{where}")
