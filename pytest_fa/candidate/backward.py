"""Functions of a backward pass, or of attention with autograd, as callables of gradients.

Such a callable gets q, k and v, the keywords of a forward call, and `dout`, `forward_out`, `forward_lse` and perhaps
`dlse`.  Its `out` is the buffer of dq; `dk` and `dv` are those of the others, and perhaps `dbias` and `dsink`.  It
returns `out` if the function wrote all of them, else what the function returned for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import ALL_GRADIENTS, ARGUMENTS, DLSE, GRADIENTS, OF_PARTS, RESULTS
from pytest_fa.attention.lse import PART as LOG_SUM_EXP
from pytest_fa.attention.rows import PLAIN
from pytest_fa.candidate.adapter import from_layout, in_layout, item_of, require_default_scale, value_of
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.output import Returned, require_output
from pytest_fa.catalog.variant import Call
from pytest_fa.errors import ENTRY, WrongResult

MATRICES = ("q", "k", "v", "dout", "out", *GRADIENTS)  # the words that are tensors with four dimensions
NO_GRADIENT = (
    "its result has no gradient: it computes under `torch.no_grad`, detaches it, or calls a kernel without a backward "
    "formula (write a torch.autograd.Function, or a backward function without `autograd: true`)"
)


def backward_of(function: Callable[..., Any], names: tuple[str, ...] = GRADIENTS) -> Forward:
    """Return a callable of gradients for a function f(dout, q, k, v, out, lse, *, scale, causal, dq, dk, dv).

    `names` are those of the gradients that the function writes or returns.  It gets None for dbias or dsink if a call
    does not ask for it.
    """
    not_asked = dict.fromkeys(name for name in names if name in OF_PARTS)

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
        returned = function(*arguments, scale=scale, dq=out, **{**not_asked, **others})
        return _gradients(returned, names, _buffers(out, words))

    return backward


def adapted_backward(function: Callable[..., Any], call: Call, conventions: Mapping[str, str] = PLAIN) -> Forward:
    """Return a callable of gradients that calls a function with the arguments that `call` lists.

    Tensors are passed as views in the call's layout.  Raises `UnsupportedCase` as `adapter.adapted` says.
    """
    passed = {word: part for word, part in parts.words().items() if call.passes(word) and word not in MATRICES}
    of_rows, axis_of_batch = ("lse", DLSE), LOG_SUM_EXP.row_axes(conventions).index(0)

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
        values |= {"scale": scale, "lse": tensors["lse"], **{name: words.get(name) for name in OF_PARTS}}
        for word, part in passed.items():
            values[word] = part.passed(word, words.get(word, part.plain_argument(word)), conventions)
        if call.layout == "thd":
            values |= {name: values[name].select(axis_of_batch, 0) for name in of_rows if values.get(name) is not None}
        returned = function(
            *(value_of(argument, values) for argument in call.arguments),
            **{name: value_of(argument, values) for name, argument in call.keywords.items()},
        )
        buffers = _buffers(out, words)
        if not any(call.place_of(name) is not None for name in buffers):
            return out  # type: ignore[return-value]  # each call of gradients has one
        return Returned(  # type: ignore[return-value]  # which the agent takes apart
            {name: _result_of(name, returned, buffer, call) for name, buffer in buffers.items()}
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
        dout, buffers = words["dout"], _buffers(out, words)
        sources = {"dq": q, "dk": k, "dv": v, **{name: words[OF_PARTS[name]] for name in buffers if name in OF_PARTS}}
        leaves = {name: _leaf_of(source, buffers[name]) for name, source in sources.items()}
        of_forward = {name: value for name, value in words.items() if name not in ("dout", *RESULTS, *ALL_GRADIENTS)}
        with torch.enable_grad():
            of_leaves = {word: leaves[name].expand_as(words[word]) for name, word in OF_PARTS.items() if name in leaves}
            given = [leaves[name] for name in GRADIENTS]
            result = require_output(forward(*given, scale=scale, **{**of_forward, **of_leaves}), dout)
        if not result.requires_grad:
            raise WrongResult(ENTRY, f"the function is called for its gradients, but {NO_GRADIENT}")
        found = torch.autograd.grad(result, list(leaves.values()), dout, allow_unused=True)
        for name, each in zip(leaves, found, strict=True):
            if each is None:
                word = OF_PARTS.get(name, name[1:])
                raise WrongResult(ENTRY, f"the function gives no {name}: its result does not depend on {word}")
        return _gradients(found, tuple(leaves), buffers)

    return backward


def _buffers(out: torch.Tensor | None, words: Mapping[str, Any]) -> dict[str, Any]:
    """The buffers of the gradients that a call asks for, in their order."""
    return {"dq": out, **{name: words[name] for name in ALL_GRADIENTS if name in words}}


def _result_of(name: str, returned: object, buffer: torch.Tensor, call: Call) -> Any:  # noqa: ANN401  # of any type
    """A gradient in what a function returned, or the buffer into which the function wrote it."""
    if (place := call.place_of(name)) is None:
        return buffer
    result = item_of(returned, place, call)
    return result if name in OF_PARTS else from_layout(result, call)


def _leaf_of(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What a gradient is of: the tensor, without the axes along which it and the gradient are the same."""
    for axis, size in enumerate(gradient.shape):
        tensor = tensor.narrow(axis, 0, size)
    return tensor.detach().requires_grad_()


def _gradients(returned: object, names: tuple[str, ...], buffers: Mapping[str, Any]) -> torch.Tensor:
    """The first buffer if a function returned none or all buffers themselves; else what it returned.

    `names` are those of the tensors in `returned`, of which the call asks for those that have a buffer.
    """
    first: torch.Tensor = buffers["dq"]
    if returned is None:
        return first
    advice = f"return ({', '.join(names)}), or write into them and return None"
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        count = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
        raise WrongResult(ENTRY, f"the function returned a {type(returned).__name__}{count}; {advice}")
    found = {name: each for name, each in zip(names, returned, strict=True) if name in buffers}
    for name, each in found.items():
        if each is None:
            raise WrongResult(ENTRY, f"the function returned None for {name}; {advice}")
    if all(found[name] is buffer for name, buffer in buffers.items()):
        return first
    return Returned(found)  # type: ignore[return-value]  # which the agent takes apart
