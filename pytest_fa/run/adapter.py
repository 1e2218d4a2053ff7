"""A function that is not ours, called as its manifest says, in our call shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.variant import Argument, Call, Constant
from pytest_fa.errors import UnsupportedCase
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import empty_output

DIMENSIONS = 4


def adapted(function: Callable[..., Any], call: Call, computes: Computes = "attention") -> Forward:
    """`function` behind the shape of `Forward`.

    Tensors are handed over as views in the call's layout, never copied.  The result refuses, by `UnsupportedCase`,
    tensors that are not contiguous where the function takes no others, and a scale that the function does not take.
    """
    passes_out, passes_scale = call.passes("out"), call.passes("scale")

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: str = "none",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not passes_scale:
            _require_own_scale(scale, q.shape[-1])
        if passes_out and out is None:
            out = empty_output(q, k, computes)
        given: dict[str, Any] = {name: _laid_out(name, each, call) for name, each in (("q", q), ("k", k), ("v", v))}
        given |= {"out": _laid_out("out", out, call) if passes_out else None}
        given |= {"scale": scale, "causal": causal != "none"}
        found = function(
            *(_value(each, given) for each in call.arguments),
            **{name: _value(each, given) for name, each in call.keywords.items()},
        )
        if passes_out:
            assert out is not None  # noqa: S101  # made above
            return out
        return _swapped(_chosen(found, call.returns), call)

    return forward


def _require_own_scale(scale: float, head_dim: int) -> None:
    own = 1.0 / math.sqrt(head_dim)
    if not math.isclose(scale, own, rel_tol=1e-6):
        raise UnsupportedCase(f"scale is {scale:g}; it is not passed, so it is always 1/sqrt({head_dim}) = {own:g}")


def _laid_out(name: str, tensor: Any, call: Call) -> torch.Tensor:  # noqa: ANN401  # a tensor: out was made
    view = _swapped(tensor, call)
    if call.contiguous and not view.is_contiguous():
        raise UnsupportedCase(f"{name} is not contiguous in {call.layout}: strides {tuple(view.stride())}")
    return view


def _swapped(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """[batch, heads, seq, head_dim] from or to [batch, seq, heads, head_dim], where that is the call's layout."""
    return tensor.transpose(1, 2) if call.layout == "bshd" else tensor


def _value(argument: Argument, given: dict[str, Any]) -> Any:  # noqa: ANN401  # what a function takes
    if isinstance(argument, Constant):
        return argument.constant
    return given[argument] if isinstance(argument, str) else argument


def _chosen(found: Any, returns: int | None) -> torch.Tensor:  # noqa: ANN401  # what a function returns
    """The output among what came back.  Raises `TypeError` that says what came in its place."""
    out = found
    if returns is not None:
        if not isinstance(found, (tuple, list)) or returns >= len(found):
            raise TypeError(f"entry.call.returns is {returns}, and the function returned {_described(found)}")
        out = found[returns]
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"the function returned {_described(out)} where its output tensor should be")
    if out.dim() != DIMENSIONS:
        raise TypeError(f"the function returned a tensor of shape {list(out.shape)}, its output has four dimensions")
    return out


def _described(found: Any) -> str:  # noqa: ANN401
    many = isinstance(found, (tuple, list))
    return f"a {type(found).__name__}" + (f" of {len(found)}" if many else "")
