"""Adapt a third-party function to the call signature `Forward`, as the manifest's `entry.call` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.rows import PLAIN
from pytest_fa.attention.scores import Computes
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.more_outputs import keep_output
from pytest_fa.catalog.variant import Argument, Call, Constant
from pytest_fa.errors import ENTRY, UnsupportedCase, WrongResult
from pytest_fa.gpu.inputs import empty_output, empty_rows

DIMENSIONS_OF_THD = 3
DIMENSIONS = {3: "three", 4: "four"}  # of q, k, v and the output: in `thd`, and in other layouts


def adapted(
    function: Callable[..., Any], call: Call, computes: Computes = "attention", conventions: Mapping[str, str] = PLAIN
) -> Forward:
    """Return a `Forward` that calls `function` with the arguments that `call` lists.

    Tensors are passed as views in the call's layout and are never copied.  The returned callable raises
    `UnsupportedCase` for a non-contiguous tensor if `call.contiguous` is set, and for a scale other than
    1/sqrt(head_dim) if `call` does not pass the scale.
    """
    passes_out, passes_scale = call.passes("out"), call.passes("scale")
    passed, made = (
        {word: part for word, part in of.items() if call.passes(word)} for of in (parts.words(), parts.made_words())
    )
    has_batch = call.layout != "thd"
    new_rows = [word for word in passed if word in parts.tensor_words() and parts.tensor_form(word).vector == "rows"]
    axes_of_batch = {name: part.row_axes(conventions).index(0) for name, part in parts.outputs().items()}
    keys_in_layout = _keys_in_layout if any(parts.is_table(word) for word in passed) else _in_layout_alone

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values, tensors and further outputs
    ) -> torch.Tensor:
        if not passes_scale:
            require_default_scale(scale, q.shape[-1])
        if passes_out and out is None:
            out = empty_output(q, k, v, computes)
        values: dict[str, Any] = {"q": in_layout("q", q, call)}
        values |= {name: keys_in_layout(name, each, call, words) for name, each in (("k", k), ("v", v))}
        values |= {"out": in_layout("out", out, call) if passes_out else None}
        values |= {"scale": scale}
        for word, part in passed.items():
            values[word] = part.passed(word, words.get(word, part.plain_argument(word)), conventions)
        values |= {word: in_layout(word, words[word], call) for word in new_rows if words.get(word) is not None}
        known = {**words, "q": q, "k": k, "v": v}
        values |= {word: part.made(word, known, conventions) for word, part in made.items()}
        for name, axis in axes_of_batch.items():
            if call.passes(name):
                rows = empty_rows(name, q, conventions) if words.get(name) is None else words[name]
                values[name] = rows if has_batch else rows.select(axis, 0)
        returned = function(
            *(value_of(argument, values) for argument in call.arguments),
            **{name: value_of(argument, values) for name, argument in call.keywords.items()},
        )
        for name, axis in axes_of_batch.items():
            if (place := call.place_of(name)) is not None:
                rows = item_of(returned, place, call)
                keep_output(name, rows if has_batch else _with_batch(rows, axis), words.get(name), conventions)
        if passes_out:
            assert out is not None  # noqa: S101  # made above
            return out
        output: torch.Tensor = from_layout(_select_output(returned, call), call)
        return output

    return forward


def require_default_scale(scale: float, head_dim: int) -> None:
    """Raise `UnsupportedCase` for a scale that a function without this argument does not use."""
    default = 1.0 / math.sqrt(head_dim)
    if not math.isclose(scale, default, rel_tol=1e-6):
        raise UnsupportedCase(
            f"scale is {scale:g}; entry.call passes no scale, so the function always uses "
            f"1/sqrt({head_dim}) = {default:g}"
        )


def _keys_in_layout(name: str, tensor: torch.Tensor, call: Call, words: Mapping[str, Any]) -> torch.Tensor:
    """A view of k or v in the call's layout; of a cache in pages, in that of its memory."""
    cache: torch.Tensor | None = parts.passed_cache(tensor, words)
    return in_layout(name, tensor, call) if cache is None else cache


def _in_layout_alone(name: str, tensor: torch.Tensor, call: Call, _: Mapping[str, Any]) -> torch.Tensor:
    """The same for a function that gets no table, and therefore no cache."""
    return in_layout(name, tensor, call)


def in_layout(name: str, tensor: Any, call: Call) -> torch.Tensor:  # noqa: ANN401  # a tensor: out was made
    """A view of `tensor` in the call's layout.  Raises `UnsupportedCase` if it must be contiguous and is not."""
    view = swap_layout(tensor, call)
    if call.contiguous and not view.is_contiguous():
        raise UnsupportedCase(f"{name} is not contiguous in {call.layout}: strides {tuple(view.stride())}")
    return view


def _with_batch(rows: Any, axis: int) -> Any:  # noqa: ANN401  # a result of any type
    """A further output, [heads, rows] in some order, as that of one batch."""
    return rows.unsqueeze(axis) if isinstance(rows, torch.Tensor) and axis <= rows.dim() else rows


def swap_layout(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Swap heads and sequence if the call's layout has the heads last; in `thd`, there is no batch."""
    if call.layout == "thd":
        return tensor[0].transpose(0, 1)
    return tensor.transpose(1, 2) if call.layout == "bshd" else tensor


def from_layout(tensor: Any, call: Call) -> Any:  # noqa: ANN401  # a result of any type
    """What a function returned in the call's layout, as [batch, heads, seq, ...]."""
    if call.layout != "thd":
        return swap_layout(tensor, call)
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dim() != DIMENSIONS_OF_THD:
        raise _wrong_return(f"the function returned a tensor of shape {list(tensor.shape)}, expected three dimensions")
    return tensor.transpose(0, 1)[None]


def value_of(argument: Argument, values: dict[str, Any]) -> Any:  # noqa: ANN401  # an argument of any type
    """The value of one argument: a constant, or what the manifest's word (`q`, `scale`, ...) names."""
    if isinstance(argument, Constant):
        return argument.constant
    return values[argument] if isinstance(argument, str) else argument


def _select_output(returned: Any, call: Call) -> torch.Tensor:  # noqa: ANN401  # a result of any type
    """The output tensor in what the function returned; `call.returns` selects it from a tuple or a list.

    Raises `WrongResult`, caught by `entry`, if the output is not a tensor of four dimensions.
    """
    index = call.place_of("out")
    out = returned if index is None else item_of(returned, index, call)
    if not isinstance(out, torch.Tensor):
        raise _wrong_return(f"the function returned {_describe(out)}, expected its output tensor; {_advice(out, call)}")
    if out.dim() != _dimensions(call):
        expected = f"expected {DIMENSIONS[_dimensions(call)]} dimensions"
        raise _wrong_return(f"the function returned a tensor of shape {list(out.shape)}, {expected}")
    return out


def item_of(returned: Any, index: int, call: Call) -> Any:  # noqa: ANN401  # a result of any type
    """Item `index` of a tuple or list that the function returned.  Raises `WrongResult`, caught by `entry`."""
    if not isinstance(returned, (tuple, list)) or index >= len(returned):
        words = call.returns if isinstance(call.returns, tuple) else ()
        shown = f"[{', '.join(word or 'null' for word in words)}]" if words else index
        raise _wrong_return(f"entry.call.returns is {shown}, but the function returned {_describe(returned)}")
    return returned[index]


def _wrong_return(message: str) -> WrongResult:
    """The fault of a function that returns no output, whatever the case is."""
    return WrongResult(ENTRY, message)


def _dimensions(call: Call) -> int:
    return 3 if call.layout == "thd" else 4


def _advice(returned: Any, call: Call) -> str:  # noqa: ANN401  # a result of any type
    """The key of `entry.call` that selects the output in what the function returned."""
    if (index := output_index(returned, _dimensions(call))) is not None:
        return f"write `returns: {index}` in entry.call"
    return "if the function writes its output into an argument, add `out` to entry.call.arguments"


def output_index(returned: object, dimensions: int = 4) -> int | None:
    """The index of the first tensor of so many dimensions in a tuple or list; None if there is none."""
    items = returned if isinstance(returned, (tuple, list)) else ()
    tensors = (index for index, item in enumerate(items) if isinstance(item, torch.Tensor) and item.dim() == dimensions)
    return next(tensors, None)


def _describe(value: Any) -> str:  # noqa: ANN401
    is_sequence = isinstance(value, (tuple, list))
    return f"a {type(value).__name__}" + (f" of {len(value)} elements" if is_sequence else "")
