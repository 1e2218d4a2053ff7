"""Make torch's own attention compute something else in this process, before any code of a variant is loaded.

A variant that computes attention itself does not notice.  One that calls torch's attention, by whatever name and from
whatever thread or child process, has a wrong output.  This is evidence that lies in the judge's memory: no list of
observed calls, which the variant's code could shorten.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any

import torch

# Substrings of the names of torch's attention operators.
ATTENTION = (
    "scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "multi_head_attention",
)
WRONG_SCALE = 1.3  # the output still looks like attention
DISPATCH_KEYS = ("CPU", "CUDA")


def attention_operators() -> list[str]:
    """The full names of torch's attention operators, such as `aten::scaled_dot_product_attention`."""
    names: list[str] = torch._C._dispatch_get_all_op_names()  # noqa: SLF001  # no other way
    return sorted(name for name in names if name.startswith("aten::") and any(part in name for part in ATTENTION))


def replace_attention() -> None:
    """Let every attention operator of torch return another result, or raise, for the rest of this process."""
    library: Any = torch._C._dispatch_library("IMPL", "aten", "", "", 0)  # noqa: SLF001  # as torch.library does, unlisted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that an operator is replaced, which is the purpose
        for name in attention_operators():
            replacement = functools.partial(_replacement, _operator(name))
            for key in DISPATCH_KEYS:
                library.impl(name.removeprefix("aten::"), key, replacement, False)  # positional there
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(library))  # it would undo its work when it is deleted


def _operator(name: str) -> Any:  # noqa: ANN401  # torch has no public type for it
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _replacement(operator: Any, *args: Any, **keywords: Any) -> Any:  # noqa: ANN401  # arguments of any operator
    """The result of an operator with query, key and value: attention with another scale."""
    named = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}  # noqa: SLF001
    named |= keywords
    returns = operator._schema.returns  # noqa: SLF001
    tensors: list[Any] = [named.get(name) for name in ("query", "key", "value")]
    if str(returns[0].type) != "Tensor" or not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in tensors):  # noqa: PLR2004
        raise RuntimeError(f"{operator} is not available in this process")
    out = _attention(tensors, named)
    others = [out.new_empty(0) if str(each.type) == "Tensor" else 0 for each in returns[1:]]
    return (out, *others) if others else out


def _attention(tensors: list[torch.Tensor], named: dict[str, Any]) -> torch.Tensor:
    q, k, v = tensors
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1).float() for tensor in (k, v))
    scale = WRONG_SCALE * (named.get("scale") or q.shape[-1] ** -0.5)
    scores = q.float() @ k.transpose(2, 3) * scale  # [batch, heads, seq_q, seq_k]
    if named.get("is_causal"):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v).to(q.dtype)
