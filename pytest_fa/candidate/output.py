"""What a variant's function may return: a plain tensor of the right dtype and shape."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import OF_KEYS, OF_PARTS
from pytest_fa.candidate.adapter import output_index
from pytest_fa.errors import ENTRY, Tampering, WrongResult

MAX_CHARACTERS = 60  # of a value that a message shows


class Returned(dict[str, Any]):
    """What a backward function returned for the gradients of a call, by name, in their order."""


def written(result: object, outs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the first of the outputs, into which results that the function allocated are copied.

    `outs` are the output and further ones.  Only gradients are returned together (`Returned`).  Raises `WrongResult`.
    """
    if result is not outs[0]:
        results = result if isinstance(result, Returned) else {"out": result}
        for (name, each), out in zip(results.items(), outs, strict=False):
            if each is not out:
                out.copy_(require_output(each, out, name).detach())
    return outs[0]


def require_output(out: object, like: torch.Tensor, name: str = "out") -> torch.Tensor:
    """Return `out` if it is a plain tensor of the dtype and shape of `like`; raise `WrongResult` otherwise.

    `name` is that of a gradient, or `out`.

    What is no tensor, such as a tuple, is caught by `entry`: no other case can be right either.  A subclass of
    torch.Tensor raises `Tampering`: it can compute when it is looked at, outside the timed call.
    """
    title = "the output" if name == "out" else name
    if isinstance(out, torch.Tensor) and type(out) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(out).__module__}.{type(out).__qualname__}"
        raise Tampering("output", f"{title} is a {kind}, it must be a torch.Tensor and not a subclass of it")
    if not isinstance(out, torch.Tensor) or (out.shape, out.dtype) != (like.shape, like.dtype):
        message = f"{title} is {_described(out)}, it must be {like.dtype} {list(like.shape)}"
        if isinstance(out, torch.Tensor):
            message += _what_to_return(out, like, name)
        raise WrongResult("output" if isinstance(out, torch.Tensor) else ENTRY, message)
    return out


def _what_to_return(out: torch.Tensor, like: torch.Tensor, name: str) -> str:
    """What to write if another dtype or layout is all that is wrong."""
    verb = "write `return " if name == "out" else "return `"
    if out.shape == like.shape:
        is_float32 = name in OF_PARTS and like.dtype == torch.float32
        return f" ({verb}{name}.to({'torch.float32' if is_float32 else 'q.dtype'})`)"
    if name in OF_PARTS:
        return ""
    batch, heads, rows, columns = like.shape
    if out.shape == (batch, rows, heads, columns):
        others = "keys" if name in OF_KEYS else "queries"
        return f" (heads and {others} are exchanged: {verb}{name}.transpose(-3, -2)`)"
    return ""


def _described(out: object) -> str:
    """What a function returned instead of its output; for a tuple or None, also what to write."""
    if isinstance(out, torch.Tensor):
        return f"{out.dtype} {list(out.shape)}"
    if out is None:
        return "None (write `return out` at the end of the function)"
    if (index := output_index(out)) is not None:
        always = parts.always_passed()
        keywords = ", ".join(f"{word}: {word}" for word in ("scale", *always))
        line = f"call: {{keywords: {{{keywords}}}, returns: {index}}}"
        return (
            f"a {type(out).__name__} (return item {index} alone, or write in the manifest's entry `{line}`, which "
            f"passes {', '.join(always)} as true or false)"
        )
    kind = f"{type(out).__module__}.{type(out).__qualname__}".removeprefix("builtins.")
    if isinstance(out, Coroutine):
        return f"a {kind} (the function must not be `async`)"
    if kind == "numpy.ndarray":
        return f"a {kind} (write `return torch.from_numpy(out)`)"
    text = repr(out)
    return text if len(text) <= MAX_CHARACTERS and "\n" not in text else f"a {kind}"
