"""Let functions write or return the log-sum-exp of each row, [batch, heads, seq_q] float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fa.candidate.forward import Forward
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import descale_keywords
from pytest_fa.gpu.quantised import descales_of

PAIR = 2  # what a function returns with its log-sum-exp: (out, lse)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """An uninitialized log-sum-exp for q, [batch, heads, seq_q, head_dim]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def taking_lse(function: Callable[..., Any]) -> Forward:
    """Return a `Forward` for a function with the parameter `lse` that writes it, or returns (out, lse).

    Without a request, `lse` is None.
    """

    def forward(  # noqa: PLR0913  # one argument for each tensor
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: str = "none",
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        descales = descale_keywords(descales_of(q_descale, k_descale, v_descale))
        returned = function(q, k, v, scale=scale, causal=causal, out=out, lse=lse, **descales)
        if not isinstance(returned, tuple) or len(returned) != PAIR:
            return returned  # type: ignore[no-any-return]  # what it is, is checked with the output
        keep_lse(returned[1], lse)
        return returned[0]  # type: ignore[no-any-return]

    return forward


def keep_lse(returned: object, lse: torch.Tensor | None) -> None:
    """Copy a log-sum-exp that a function returned into the requested one.  Raises `WrongResult` for another kind."""
    if lse is None or returned is lse or returned is None:
        return  # one that was not written is still full of NaN
    if type(returned) is not torch.Tensor or (returned.shape, returned.dtype) != (lse.shape, lse.dtype):
        raise WrongResult("lse", f"the log-sum-exp is {_described(returned)}, it must be {lse.dtype} {list(lse.shape)}")
    lse.copy_(returned.detach())


def _described(returned: object) -> str:
    if isinstance(returned, torch.Tensor):
        return f"{returned.dtype} {list(returned.shape)}"
    return f"a {type(returned).__name__}"
