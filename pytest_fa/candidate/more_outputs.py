"""Let functions write or return further outputs, [batch, heads, seq_q] float32 each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.rows import PLAIN
from pytest_fa.candidate.forward import Forward
from pytest_fa.errors import WrongResult


def taking_outputs(
    function: Callable[..., Any], names: tuple[str, ...], conventions: Mapping[str, str] = PLAIN
) -> Forward:
    """Return a `Forward` for a function with parameters of these names that writes them, or returns them after `out`.

    Without a request, they are None.
    """

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values, tensors and further outputs
    ) -> torch.Tensor:
        returned = function(q, k, v, scale=scale, out=out, **{**dict.fromkeys(names), **words})
        if not isinstance(returned, tuple) or len(returned) != 1 + len(names):
            return returned  # type: ignore[no-any-return]  # what it is, is checked with the output
        for name, tensor in zip(names, returned[1:], strict=True):
            keep_output(name, tensor, words.get(name), conventions)
        return returned[0]  # type: ignore[no-any-return]

    return forward


def keep_output(
    name: str, returned: object, requested: torch.Tensor | None, conventions: Mapping[str, str] = PLAIN
) -> None:
    """Copy an output that a function returned into the requested one.  Raises `WrongResult` for another kind."""
    if requested is None or returned is requested or returned is None:
        return  # one that was not written is still full of NaN
    if type(returned) is not torch.Tensor or (returned.shape, returned.dtype) != (requested.shape, requested.dtype):
        must_be = f"it must be {requested.dtype} {list(requested.shape)}"
        meant = _order(name, returned, requested, conventions)
        raise WrongResult(name, f"the {parts.title_of(name)} is {_described(returned)}, {must_be}{meant}")
    requested.copy_(returned.detach())


def _order(name: str, returned: object, requested: torch.Tensor, conventions: Mapping[str, str]) -> str:
    """What to declare if the axes of an output are in another order; empty if that is not what is wrong."""
    part = parts.outputs()[name]
    sizes = [requested.shape[axis] for axis in part.row_axes(conventions)]
    for key, convention in part.conventions.items() if isinstance(returned, torch.Tensor) else ():
        for value in convention.values:
            axes = part.row_axes({**conventions, key: value})
            if list(returned.shape) == [sizes[axis] for axis in axes] != list(requested.shape):  # type: ignore[attr-defined]  # as above
                return f"; {convention.advice(key, conventions.get(key), value)}"
    return ""


def _described(returned: object) -> str:
    if isinstance(returned, torch.Tensor):
        return f"{returned.dtype} {list(returned.shape)}"
    return f"a {type(returned).__name__}"
