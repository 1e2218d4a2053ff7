"""The inputs of a property with fewer rows."""

from __future__ import annotations

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.layout import stored
from pytest_fa.catalog.claims import least_lengths
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.subject import PropertySubject


def cut(subject: PropertySubject, inputs: Inputs, keys: int) -> Inputs | None:
    """The inputs with their first `keys` keys, or as many as the variant needs; None if there are fewer.

    All queries stay, or as many as keys if the variant needs equal lengths.
    """
    ends = lengths(subject, inputs.q.shape[2], keys)
    if any(end > tensor.shape[2] for end, tensor in zip(ends, inputs[:3], strict=True)):
        return None
    q, k, v = (stored_like(tensor[:, :, :end], tensor) for tensor, end in zip(inputs[:3], ends, strict=True))
    queries, of_keys = (torch.arange(end, device=q.device) for end in ends[:2])
    shorter = inputs._replace(q=q, k=k, v=v, extra=inputs.extra_at(queries=queries, keys=of_keys))
    return parts.fitted(shorter)


def lengths(subject: PropertySubject, queries: int, keys: int) -> tuple[int, int, int]:
    """The smallest supported lengths of q, k and v that are at least these."""
    of_q, of_k = least_lengths(subject.variant, queries, keys)
    return of_q, of_k, of_k


def has_heads_last(tensor: torch.Tensor) -> bool:
    """Whether the heads of a row are side by side in memory."""
    return tensor.stride(1) < tensor.stride(2)


def stored_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A dense copy whose axes are in memory as those of `like`."""
    return stored(tensor, "bshd" if has_heads_last(like) else "bhsd")
