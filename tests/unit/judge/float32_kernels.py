"""Simulated fp32 kernels, right and wrong, and data on which float32 arithmetic shows its errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.float32_error import FAST_EXP, TF32_LOST_BITS, to_tf32

Change = Callable[[torch.Tensor], torch.Tensor]
LOWEST = torch.finfo(torch.float32).min  # replaces a row maximum of -inf


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """No rounding."""
    return tensor


def nearest(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to tf32 to nearest, as cvt.rna does."""
    return to_tf32(tensor).float()


def cut_off(tensor: torch.Tensor) -> torch.Tensor:
    """Cut off to tf32, as mma does with the registers of float32 values."""
    return (tensor.contiguous().view(torch.int32) >> TF32_LOST_BITS << TF32_LOST_BITS).view(torch.float32)


def to_fp16(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to fp16."""
    return tensor.half().float()


def to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16."""
    return tensor.bfloat16().float()


def in_two_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A value as the sum of two tf32 numbers, as a product in three tf32 products (3xTF32) reads it."""
    high = nearest(tensor)
    return high + nearest(tensor - high)


class Float32Kernel(NamedTuple):
    """A simulated fp32 kernel: how it adds and rounds; the default is a tiled online softmax."""

    tile: int = 64  # keys per tile; 1: the plainest kernel, which adds one product after the other
    backwards: bool = False  # whether it goes through the keys and dimensions from last to first
    fast_exp: bool = False  # exp with an error of up to 2^-22, as ex2.approx
    fold_scale: bool = True  # whether scale * log2 e is multiplied into Q
    splits: int = 1  # parts of the keys, merged at the end
    qk: Change = unchanged  # rounding of Q and K
    p: Change = unchanged  # rounding of P
    v: Change = unchanged  # rounding of V
    keys_lost: int = 0
    scale_factor: float = 1.0
    rescales: bool = True


RIGHT = {
    "one key at a time": Float32Kernel(tile=1),
    "one key at a time, fast exp": Float32Kernel(tile=1, fast_exp=True),
    "one key at a time, backwards": Float32Kernel(tile=1, backwards=True, fold_scale=False),
    "tiles of 64": Float32Kernel(fold_scale=False),
    "tiles of 16, fast exp": Float32Kernel(tile=16, fast_exp=True),
    "all keys at once": Float32Kernel(tile=10**6),
    "four splits": Float32Kernel(splits=4, fast_exp=True),
    "3xTF32": Float32Kernel(qk=in_two_parts, p=in_two_parts, v=in_two_parts),
}
RIGHT_TF32 = {
    "to nearest": Float32Kernel(qk=nearest, p=nearest, v=nearest),
    "cut off": Float32Kernel(qk=cut_off, p=cut_off, v=cut_off, fast_exp=True),
    "inputs to nearest, P cut off": Float32Kernel(tile=32, qk=nearest, p=cut_off, v=nearest),
    "no tf32": Float32Kernel(),
}
# Roundings that are wrong where none is declared.
UNDECLARED = {
    "P to tf32": Float32Kernel(p=nearest),
    "P cut off to tf32": Float32Kernel(p=cut_off),
    "P to fp16": Float32Kernel(p=to_fp16),
    "P to bf16": Float32Kernel(p=to_bf16),
    "V to tf32": Float32Kernel(v=nearest),
    "Q and K to tf32": Float32Kernel(qk=nearest),
    "all to tf32": RIGHT_TF32["to nearest"],
    "all cut off to tf32": RIGHT_TF32["cut off"],
    "all to fp16": Float32Kernel(qk=to_fp16, p=to_fp16, v=to_fp16),
}
MISTAKES = {
    "last key dropped": Float32Kernel(keys_lost=1),
    "scale 0.01 % off": Float32Kernel(scale_factor=1.0001),
    "rescale forgotten": Float32Kernel(rescales=False),
}


def compute(inputs: Inputs, kernel: Float32Kernel) -> torch.Tensor:
    """Compute the output of a simulated kernel, [batch, heads, seq_q, head_dim] float32."""
    s = _scores(inputs, kernel)  # [b, h, sq, sk], for exp2
    end = s.shape[3] - kernel.keys_lost
    keys = list(range(end))[:: -1 if kernel.backwards else 1]
    per_split = math.ceil(max(1, end) / kernel.splits)
    parts = [_attend(s, inputs, kernel, keys[i : i + per_split]) for i in range(0, max(1, end), per_split)]
    m = torch.stack([part[1] for part in parts]).amax(0).clamp_min(LOWEST)
    o, l = torch.zeros_like(inputs.q), torch.zeros_like(m)  # noqa: E741  # the papers' names
    for part_o, part_m, part_l in parts:
        weight = torch.exp2(part_m - m)
        o, l = o + part_o * weight, l + part_l * weight  # noqa: E741
    return torch.where(l > 0, o * (1 / l), 0.0)


def _scores(inputs: Inputs, kernel: Float32Kernel) -> torch.Tensor:
    """S in base 2 with its mask, added dimension by dimension for a tile of one key."""
    q, k = kernel.qk(inputs.q), kernel.qk(inputs.k)
    scale_log2 = torch.tensor(inputs.scale * kernel.scale_factor * math.log2(math.e), dtype=torch.float32)
    q = q * scale_log2 if kernel.fold_scale else q
    if kernel.tile == 1:
        s = torch.zeros(*q.shape[:3], k.shape[2])
        for d in list(range(q.shape[3]))[:: -1 if kernel.backwards else 1]:
            s = s + q[..., d : d + 1] * k[..., d][:, :, None, :]
    else:
        s = q @ k.transpose(2, 3)
    s = s if kernel.fold_scale else s * scale_log2
    if inputs.causal == "none":
        return s
    shift = 0 if inputs.causal == "top_left" else s.shape[3] - s.shape[2]
    return s.masked_fill(torch.arange(s.shape[3])[None] > torch.arange(s.shape[2])[:, None] + shift, -math.inf)


def _attend(
    s: torch.Tensor, inputs: Inputs, kernel: Float32Kernel, keys: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Online softmax over some keys: O, m and l."""
    generator = torch.Generator().manual_seed(7)
    o = torch.zeros_like(inputs.q)
    m, l = torch.full_like(o[..., :1], -math.inf), torch.zeros_like(o[..., :1])  # noqa: E741
    v = kernel.v(inputs.v)

    def exp2(x: torch.Tensor) -> torch.Tensor:
        if not kernel.fast_exp:
            return torch.exp2(x)
        error = (2 * torch.rand(x.shape, generator=generator) - 1) * FAST_EXP
        return torch.exp2(x) * (1 + error * (x != 0))  # ex2.approx(0) is exactly 1

    for start in range(0, len(keys), kernel.tile):
        tile = keys[start : start + kernel.tile]
        m_new = torch.maximum(m, s[..., tile].amax(-1, keepdim=True))
        rescale, p = exp2(m - m_new.clamp_min(LOWEST)), exp2(s[..., tile] - m_new.clamp_min(LOWEST))
        l = l * rescale + p.sum(-1, keepdim=True)  # noqa: E741
        o = (o * rescale if kernel.rescales else o) + kernel.p(p) @ v[:, :, tile]
        m = m_new
    return o, m, l


def _large(inputs: Inputs) -> Inputs:
    return inputs._replace(q=inputs.q * 30)


def _one_hot(inputs: Inputs) -> Inputs:
    k, q = inputs.k / 8, torch.zeros_like(inputs.q)
    picked = range(0, k.shape[2], 37)
    for index, key in enumerate(picked):
        k[:, :, key] = 0
        k[:, :, key, index % q.shape[3]] = 60
        q[:, :, index :: len(picked), index % q.shape[3]] = 30
    return inputs._replace(q=q, k=k)


def _halves(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with 4 added in the first half of `dim` and subtracted in the second: sums rise, and fall again."""
    first, second = tensor.tensor_split(2, dim)
    return torch.cat([first + 4, second - 4], dim)


DATA: dict[str, Callable[[Inputs], Inputs]] = {
    "N(0, 1)": lambda inputs: inputs,
    "scores x 30": _large,
    "scores x -30": lambda inputs: _large(inputs._replace(q=-inputs.q)),
    "K shifted by 4": lambda inputs: inputs._replace(k=inputs.k + 4),
    "Q and K positive": lambda inputs: inputs._replace(q=inputs.q.abs(), k=inputs.k.abs()),
    "dimensions that cancel": lambda inputs: inputs._replace(q=inputs.q.abs(), k=_halves(inputs.k, 3)),
    "V shifted by 4": lambda inputs: inputs._replace(v=inputs.v + 4),
    "V that cancels": lambda inputs: inputs._replace(v=_halves(inputs.v, 2)),
    "V alike": lambda inputs: inputs._replace(v=inputs.v[..., :1].expand_as(inputs.v).contiguous()),
    "V of ones": lambda inputs: inputs._replace(v=torch.ones_like(inputs.v)),
    "V is K": lambda inputs: inputs._replace(v=inputs.k.clone()),
    "scores that rise": lambda inputs: inputs._replace(
        q=inputs.q.abs(), k=inputs.k.abs() * torch.linspace(0, 3, inputs.k.shape[2])[:, None]
    ),
    "one-hot": _one_hot,
    "scale 0": lambda inputs: inputs._replace(scale=0.0),
}
