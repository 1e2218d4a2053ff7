"""What a variant's function may return: a plain tensor of the right dtype and shape."""

from __future__ import annotations

import torch

from pytest_fa.attention import parts
from pytest_fa.candidate.adapter import output_index
from pytest_fa.errors import ENTRY, Tampering, WrongResult


def require_output(out: object, like: torch.Tensor) -> torch.Tensor:
    """Return `out` if it is a plain tensor of the dtype and shape of `like`; raise `WrongResult` otherwise.

    What is no tensor, such as a tuple, is caught by `entry`: no other case can be right either.  A subclass of
    torch.Tensor raises `Tampering`: it can compute when it is looked at, outside the timed call.
    """
    if isinstance(out, torch.Tensor) and type(out) not in (torch.Tensor, torch.nn.Parameter):
        kind = f"{type(out).__module__}.{type(out).__qualname__}"
        raise Tampering("output", f"the output is a {kind}, it must be a torch.Tensor and not a subclass of it")
    if not isinstance(out, torch.Tensor) or (out.shape, out.dtype) != (like.shape, like.dtype):
        message = f"the output is {_described(out)}, it must be {like.dtype} {list(like.shape)}"
        if isinstance(out, torch.Tensor) and out.shape == like.shape:
            message += " (write `return out.to(q.dtype)`)"
        raise WrongResult("output" if isinstance(out, torch.Tensor) else ENTRY, message)
    return out


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
    return repr(out)
