"""The sha256 of a case's inputs and of an output, so that another run can tell whether it has the same bits."""

from __future__ import annotations

import hashlib

import torch

from pytest_fa.gpu.inputs import Inputs
from pytest_fa.records.checks import Fingerprints


def fingerprints(
    inputs: Inputs,
    out: torch.Tensor,  # [batch, heads, seq_q, head_dim or seq_k]
) -> Fingerprints:
    """Return the hashes of all input tensors, and of the output.  The layout in memory does not matter."""
    return Fingerprints(sha256_of(*inputs.parts.values()), sha256_of(out))


def sha256_of(*tensors: torch.Tensor) -> str:
    """The sha256 of the bits of tensors, one after another; the layout in memory does not matter."""
    digest = hashlib.sha256()
    for tensor in tensors:
        bits = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        digest.update(bits.numpy().data)
    return digest.hexdigest()
