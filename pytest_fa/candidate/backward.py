"""Functions of a backward pass, or of attention with autograd, as callables of gradients.

Such a callable gets q, k and v, the keywords of a forward call, and `dout`, `forward_out`, `forward_lse` and perhaps
`dlse`.  Its `out` is the buffer of dq; `dk` and `dv` are those of the others.  It returns `out` if the function wrote
all of them, else what the function returned for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import ARGUMENTS, GRADIENTS, RESULTS
from pytest_fa.attention.rows import PLAIN
from pytest_fa.candidate.adapter import in_layout, item_of, require_default_scale, swap_layout, value_of
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.output import Returned, require_output
from pytest_fa.catalog.variant import Call
from pytest_fa.errors import ENTRY, WrongResult

ALL_GRADIENTS = f"return ({', '.join(GRADIENTS)}), or write into them and return None"
MATRICES = ("q", "k", "v", "dout", "out", *GRADIENTS)  # the words that are tensors with four dimensions
NO_GRADIENT = (
    "its result has no gradient: it computes under `torch.no_grad`, detaches it, or calls a kernel without a backward "
    "formula (write a torch.autograd.Function, or a backward function without `autograd: true`)"
)


def backward_of(function: Callable[..., Any]) -> Forward:
    """Return a callable of gradients for a function f(dout, q, k, v, out, lse, *, scale, causal, dq, dk, dv)."""

    def backward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values and tensors
    ) -> torch.Tensor:
        given = {"q": q, "k": k, "v": v, **words}
        arguments = [given[name] for name in ARGUMENTS.values()]
        others = {name: value for name, value in words.items() if name not in ARGUMENTS.values()}
        returned = function(*arguments, scale=scale, dq=out, **others)
        return _gradients(returned, (out, words["dk"], words["dv"]))

    return backward


def adapted_backward(function: Callable[..., Any], call: Call, conventions: Mapping[str, str] = PLAIN) -> Forward:
    """Return a callable of gradients that calls a function with the arguments that `call` lists.

    Tensors are passed as views in the call's layout.  Raises `UnsupportedCase` as `adapter.adapted` says.
    """
    passed = {word: part for word, part in parts.words().items() if call.passes(word) and word not in MATRICES}

    def backward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values and tensors
    ) -> torch.Tensor:
        if not call.passes("scale"):
            require_default_scale(scale, q.shape[-1])
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "dq": out, **words}
        tensors |= {name: words[inside] for name, inside in ARGUMENTS.items() if inside in words}
        values: dict[str, Any] = {name: in_layout(name, tensors[name], call) for name in MATRICES if call.passes(name)}
        values |= {"scale": scale, "lse": tensors["lse"]}
        for word, part in passed.items():
            values[word] = part.passed(word, words.get(word, part.plain_argument(word)), conventions)
        returned = function(
            *(value_of(argument, values) for argument in call.arguments),
            **{name: value_of(argument, values) for name, argument in call.keywords.items()},
        )
        buffers = (out, words["dk"], words["dv"])
        if all(map(call.passes, GRADIENTS)):
            return buffers[0]  # type: ignore[return-value]  # each call of gradients has one
        places = {name: call.place_of(name) for name in GRADIENTS}  # None of those that the function writes
        return Returned(  # type: ignore[return-value]  # which the agent takes apart
            buffer if (place := places[name]) is None else swap_layout(item_of(returned, place, call), call)
            for name, buffer in zip(GRADIENTS, buffers, strict=True)
        )

    return backward


def by_autograd(forward: Forward) -> Forward:
    """Return a callable of gradients that calls a function of attention and takes its gradients by autograd.

    It raises `WrongResult` if the function's result is no output, or has no gradient.
    """

    def backward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values and tensors
    ) -> torch.Tensor:
        dout, buffers = words["dout"], (out, words["dk"], words["dv"])
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        of_forward = {name: value for name, value in words.items() if name not in ("dout", *RESULTS, *GRADIENTS)}
        with torch.enable_grad():
            result = require_output(forward(*leaves, scale=scale, **of_forward), dout)
        if not result.requires_grad:
            raise WrongResult(ENTRY, f"the function is called for its gradients, but {NO_GRADIENT}")
        found = torch.autograd.grad(result, leaves, dout, allow_unused=True)
        for name, each in zip("qkv", found, strict=True):
            if each is None:
                raise WrongResult(ENTRY, f"the function gives no d{name}: its result does not depend on {name}")
        return _gradients(found, buffers)

    return backward


def _gradients(returned: object, buffers: tuple[Any, ...]) -> torch.Tensor:
    """The first buffer if a function returned none or all buffers themselves; else what it returned."""
    if returned is None:
        return buffers[0]  # type: ignore[no-any-return]  # a tensor
    if not isinstance(returned, (tuple, list)) or len(returned) != len(GRADIENTS):
        count = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
        raise WrongResult(ENTRY, f"the function returned a {type(returned).__name__}{count}; {ALL_GRADIENTS}")
    for name, each in zip(GRADIENTS, returned, strict=True):
        if each is None:
            raise WrongResult(ENTRY, f"the function returned None for {name}; {ALL_GRADIENTS}")
    if all(each is buffer for each, buffer in zip(returned, buffers, strict=True)):
        return buffers[0]  # type: ignore[no-any-return]  # as above
    return Returned(returned)  # type: ignore[return-value]  # which the agent takes apart
