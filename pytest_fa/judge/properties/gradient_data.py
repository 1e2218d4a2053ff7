"""Hard data for a backward pass: changes of q, k, v and dO that reveal numerical shortcuts.

Each profile is a function of the inputs of a call and of dO, [batch, heads, seq_q, head_dim_v], and returns both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from pytest_fa.attention import data, parts
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.judge.padding import cleared
from pytest_fa.judge.truth import make_truth

HardProfile = Callable[[Inputs, torch.Tensor], tuple[Inputs, torch.Tensor]]
LARGE = 100.0
V_LEVEL = 8.0


def far_rows(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """A log-sum-exp near 100 in every second row, and near -100 in the others: exp(S) alone overflows or underflows."""
    far = data.far_from_zero(inputs, data.LEVEL)
    far.q[:, :, 1::2, 0] *= -1
    return far, dout


def one_hot_rows(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """One key has all the weight of a row, so that dP - delta is 0 there."""
    return data.one_hot(inputs), dout


def two_scores(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """Two keys in turn, so that the scores of a row have two values."""
    return data.equal_scores(inputs), dout


def large_dout(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """Large dP and delta, of which dS is the difference times P."""
    return inputs, dout * LARGE


def orthogonal_dout(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """Each row of dO is orthogonal to that of the output: delta is 0, but for rounding."""
    padding, out = parts.padding(inputs), make_truth(inputs).out
    along = (cleared(padding, dout).double() * out).sum(-1, keepdim=True)
    along = along / out.square().sum(-1, keepdim=True).clamp_min(torch.finfo(out.dtype).tiny)
    return inputs, (dout.double() - along * out).to(dout.dtype)


def outlying_channel(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """One dim of q and k is far larger than the others."""
    return data.outlier_channels(inputs), dout


def massive_key(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """One key is 100 times as large as the others: it has all the weight of a row, or none."""
    return data.massive_key(inputs, inputs.k.shape[2] // 2), dout


def distant_values(inputs: Inputs, dout: torch.Tensor) -> tuple[Inputs, torch.Tensor]:
    """All values are near 8, so that dP and delta nearly cancel."""
    return inputs._replace(v=inputs.v + V_LEVEL), dout


PROFILES: Mapping[str, HardProfile] = {
    "log-sum-exp of 100 and -100": far_rows,
    "one-hot rows": one_hot_rows,
    "two scores in each row": two_scores,
    "dO 100 times as large": large_dout,
    "dO orthogonal to the output": orthogonal_dout,
    "outlying channel in q and k": outlying_channel,
    "one key 100 times as large": massive_key,
    "values near 8": distant_values,
}
