"""`CudaBackward`: a CUDA variant that computes gradients, called through its binding."""

from __future__ import annotations

from typing import Any

import torch

from pytest_fa.attention.abi import CAUSAL_CODES
from pytest_fa.candidate.cuda_forward import UNKNOWN, Allocate, further, translate_error


class CudaBackward:
    """The binding's entry point for gradients, with a workspace allocated where needed.

    A call has the words of `_arguments`.  Its `out` is the buffer of dq, allocated if it is None, and it returns `out`.
    """

    def __init__(self, library: str, allocate: Allocate) -> None:
        import tvm_ffi  # noqa: PLC0415  # only a process that calls kernels needs it

        module = tvm_ffi.load_module(library)
        self._entry, self._workspace_bytes = module.backward, module.backward_workspace_bytes
        self._allocate, self._library = allocate, library

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # as `_arguments` has them
    ) -> torch.Tensor:
        """Make one call.  Raises as `Forward` says, and `TypeError` for a word that the binding lacks."""
        if out is None:
            out = torch.empty_like(q)
        tensors, rest = _arguments(q, k, v, out, **words)
        try:
            if size := self._entry(*tensors, None, *rest):  # nothing was launched
                self._entry(*tensors, self._allocate(size, q.device), *rest)
        except (ValueError, RuntimeError) as problem:
            error = translate_error(problem, q, k, self._library)
        else:
            return out
        raise error

    def workspace_bytes(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        **words: Any,  # noqa: ANN401  # as `_arguments` has them
    ) -> int:
        """The size of the workspace that a call needs; 0 if it needs none.  The buffers dk and dv may be left out."""
        tensors, rest = _arguments(q, k, v, out, **{"dk": k, "dv": v, **words})
        return int(self._workspace_bytes(*tensors, None, *rest))


def _arguments(  # noqa: PLR0913  # one argument for each tensor
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    *,
    scale: float,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dout: torch.Tensor,
    forward_out: torch.Tensor,
    forward_lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    dsink: torch.Tensor | None = None,
    causal: str = "none",
    softcap: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    **others: Any,  # noqa: ANN401  # tensors of parts of attention
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The binding's arguments before and after the workspace.

    Each gradient has the shape of its input; dbias is 1 along each axis along which the bias is the same.  dout and
    forward_out are [batch, heads, seq_q, head_dim_v], forward_lse and dlse [batch, heads, seq_q].
    """
    rows = q.shape[:3]  # the binding knows one order of the axes
    row_gradient = dlse if dlse is None else dlse.view(rows)
    tensors = (q, k, v, forward_out, forward_lse.view(rows), dout, row_gradient, dq, dk, dv, dbias, dsink)
    words = (scale, CAUSAL_CODES.get(causal, UNKNOWN), softcap, window_left, window_right)
    return tensors, (*words, *further(others)) if others else words
