"""Calls whose q, k and v are views of one tensor, as the layout `packed` has them.

Whoever copies such a call copies that tensor: `memories_of` has it in the place of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from pytest_fa.attention.layout import is_packed, views_of_whole, whole_of

if TYPE_CHECKING:
    from pytest_fa.gpu.inputs import Inputs

WHOLE = "qkv"


def packed(inputs: Inputs) -> Inputs:
    """The call with q, k and v as views of one new tensor; the call itself if they are views of one."""
    if is_packed(*inputs[:3]):
        return inputs
    whole = torch.cat([tensor.transpose(1, 2) for tensor in inputs[:3]], 2)
    return with_memories(inputs, {**inputs.parts, WHOLE: whole})


def memories_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors of a call as they lie in memory, by name: `Inputs.parts`, or one for q, k and v."""
    if not is_packed(*inputs[:3]):
        return inputs.parts
    rest = {name: tensor for name, tensor in inputs.parts.items() if name not in tuple("qkv")}
    return {WHOLE: whole_of(*inputs[:3]), **rest}


def with_memories(inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> Inputs:
    """The same call with other tensors, named as in `memories_of`."""
    if WHOLE not in tensors:
        return inputs.with_parts(tensors)
    views = views_of_whole(tensors[WHOLE], inputs.k.shape[1])
    return inputs.with_parts({**tensors, **dict(zip("qkv", views, strict=True))})


def map_memories(inputs: Inputs, function: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """The same call with `function` of each tensor, as it lies in memory."""
    return with_memories(inputs, {name: function(tensor) for name, tensor in memories_of(inputs).items()})
