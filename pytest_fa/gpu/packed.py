"""Calls whose q, k and v are views of one tensor, as the layout `packed` has them, or k and v of one cache in pages.

Whoever copies such a call copies that tensor: `memories_of` has it in the place of its views.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING

import torch

from pytest_fa.attention.layout import is_packed, views_of_whole, whole_of
from pytest_fa.attention.pages import KV_CACHE, has_heads_last, one_cache

if TYPE_CHECKING:
    from pytest_fa.gpu.inputs import Inputs

WHOLE = "qkv"
WHOLES = {WHOLE: "qkv", KV_CACHE: "kv"}  # with their views


def packed(inputs: Inputs) -> Inputs:
    """The call with q, k and v as views of one new tensor; the call itself if they are views of one."""
    if is_packed(*inputs[:3]):
        return inputs
    whole = torch.cat([tensor.transpose(1, 2) for tensor in inputs[:3]], 2)
    return with_memories(inputs, {**inputs.parts, WHOLE: whole})


def together(inputs: Inputs) -> Inputs:
    """The call with k and v as views of one new cache; the call itself if they are views of one."""
    if one_cache(inputs.k, inputs.v) is not None:
        return inputs
    is_swapped = has_heads_last(inputs.k)
    cache = torch.stack([tensor.transpose(1, 2) if is_swapped else tensor for tensor in (inputs.k, inputs.v)], 1)
    return with_memories(inputs, {**inputs.parts, KV_CACHE: cache.transpose(2, 3) if is_swapped else cache})


def memories_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors of a call as they lie in memory, by name: `Inputs.parts`, or one of `WHOLES` for its views."""
    q, k, v = inputs[:3]
    if is_packed(q, k, v):
        name, whole = WHOLE, whole_of(q, k, v)
    elif (cache := one_cache(k, v)) is not None:
        name, whole = KV_CACHE, cache
    else:
        return inputs.parts
    return {name: whole, **{each: tensor for each, tensor in inputs.parts.items() if each not in tuple(WHOLES[name])}}


def memory_of(name: str, names: Container[str]) -> str:
    """Which of the names of `memories_of` a tensor is in."""
    return next(each for each in (name, *WHOLES) if each in names)


def with_memories(inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> Inputs:
    """The same call with other tensors, named as in `memories_of`."""
    views: dict[str, torch.Tensor] = {}
    if WHOLE in tensors:
        views = dict(zip("qkv", views_of_whole(tensors[WHOLE], inputs.k.shape[1]), strict=True))
    elif KV_CACHE in tensors:
        views = dict(zip("kv", tensors[KV_CACHE].unbind(1), strict=True))
    return inputs.with_parts({**tensors, **views})


def map_memories(inputs: Inputs, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """The same call with `function` of each tensor, as it lies in memory."""
    return with_memories(inputs, {name: function(tensor) for name, tensor in memories_of(inputs).items()})
