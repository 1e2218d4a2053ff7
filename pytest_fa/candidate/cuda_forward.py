"""`CudaForward`: a CUDA variant, called through its binding.  Its arguments are those of the binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fa.attention.abi import CAUSAL_CODES, FURTHER
from pytest_fa.attention.scores import Computes
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.launch_hint import launch_hint
from pytest_fa.errors import LaunchError, UnsupportedCase
from pytest_fa.gpu.inputs import empty_output

Allocate = Callable[[int, torch.device], torch.Tensor]
UNKNOWN = -1  # a code that the binding rejects


class CudaForward:
    """The binding's entry point for attention or scores, with an output and a workspace allocated where needed.

    A call that the kernel refuses, or whose tensors are not on a GPU, is passed to `otherwise` if that is given.
    """

    def __init__(self, library: str, allocate: Allocate, computes: Computes, otherwise: Forward | None = None) -> None:
        import tvm_ffi  # noqa: PLC0415  # only a process that calls kernels needs it

        module = tvm_ffi.load_module(library)
        self._entry, self._workspace_bytes = module.forward, module.workspace_bytes
        if computes == "scores":
            self._entry, self._workspace_bytes = module.scores, module.scores_workspace_bytes
        self._allocate, self._computes, self._library = allocate, computes, library
        self._otherwise = otherwise

    def __call__(  # noqa: PLR0913  # one argument for each tensor
        self,
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
        softcap: float | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        **others: Any,  # noqa: ANN401  # tensors of parts of attention
    ) -> torch.Tensor:
        """Make one call.  Raises as `Forward` says, and `TypeError` for a word that the binding lacks."""
        if out is None:
            out = empty_output(q, k, v, self._computes)
        code = CAUSAL_CODES.get(causal, UNKNOWN)
        words = (scale, code, q_descale, k_descale, v_descale, softcap, window_left, window_right)
        if others:
            words = (*words, *further(others))  # other calls do not pass them, so that they take no longer
        rows = lse if lse is None else lse.view(q.shape[:3])  # the binding knows one order of the axes
        try:
            if size := self._entry(q, k, v, out, rows, None, *words):  # nothing was launched
                self._entry(q, k, v, out, rows, self._allocate(size, q.device), *words)
        except (ValueError, RuntimeError) as problem:
            error = translate_error(problem, q, k, self._library)
        else:
            return out
        is_refused = isinstance(error, UnsupportedCase) or not q.is_cuda
        if self._otherwise is None or not is_refused:
            raise error
        features = {"softcap": softcap, "window_left": window_left, "window_right": window_right, "lse": lse}
        descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        given = {name: value for name, value in {**features, **descales, **others}.items() if value is not None}
        return self._otherwise(q, k, v, scale=scale, causal=causal, out=out, **given)

    def workspace_bytes(  # noqa: PLR0913  # as `__call__`
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        causal: str = "none",
        softcap: float | None = None,
        window_left: int | None = None,
        window_right: int | None = None,
        **others: object,  # further tensors, and descales, on which no size depends
    ) -> int:
        """The size of the workspace that a call needs; 0 if it needs none, or takes none from outside."""
        if self._otherwise is not None:
            return 0
        features = (softcap, window_left, window_right, *(others.get(word) for word in FURTHER))
        return int(self._workspace_bytes(q, k, v, out, scale, CAUSAL_CODES.get(causal, UNKNOWN), *features))


def further(words: dict[str, Any]) -> tuple[Any, ...]:
    """The binding's last arguments.  Raises `TypeError` for a word that the binding lacks."""
    if unknown := words.keys() - {*FURTHER}:
        raise TypeError(f"the C interface has no {', '.join(sorted(unknown))}")
    return tuple(words.get(word) for word in FURTHER)


def translate_error(problem: Exception, q: torch.Tensor, k: torch.Tensor, library: str) -> Exception:
    """The binding's exception as one of this package's; exceptions about arguments do not change."""
    text = str(problem).splitlines()[0] if str(problem) else repr(problem)
    if text.startswith("refused: "):
        return UnsupportedCase(text.removeprefix("refused: "))
    if text.startswith("launch failed: "):
        return LaunchError(f"{text}{launch_hint(text, q, k, library)}")
    return problem
