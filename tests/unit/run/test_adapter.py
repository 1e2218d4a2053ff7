"""A function that is not ours gets its arguments as the manifest says, and its output comes back in our shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fa.catalog.variant import Call, Constant
from pytest_fa.errors import UnsupportedCase
from pytest_fa.run import module
from pytest_fa.run.adapter import adapted

SCALE = 0.25  # of head_dim 16


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q and out [1, 2, 3, 16], k and v [1, 2, 5, 16], each full of a number of its own."""
    q, out = (torch.full((1, 2, 3, 16), value) for value in (1.0, 9.0))
    k, v = (torch.full((1, 2, 5, 16), value) for value in (2.0, 3.0))
    return q, k, v, out


class Recorder:
    """Keeps what it was called with, and returns what it was told to."""

    def __init__(self, result: Any = None) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.result = result

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Keep and return."""
        self.arguments, self.keywords = arguments, keywords
        return self.result


def test_words_and_constants_are_passed_in_their_order() -> None:
    """Tensors by their words, the mask as a truth, constants as they are, keywords by their names."""
    q, k, v, out = tensors()
    function = Recorder()
    call = Call((Constant("fast"), "v", "k", "q", None, "out", 7), {"softmax_scale": "scale", "is_causal": "causal"})
    found = adapted(function, call)(q, k, v, scale=SCALE, causal="top_left", out=out)
    assert [each is tensor for each, tensor in zip(function.arguments[1:4], (v, k, q), strict=True)] == [True] * 3
    assert function.arguments[0] == "fast"
    assert function.arguments[4:] == (None, out, 7)
    assert function.keywords == {"softmax_scale": SCALE, "is_causal": True}
    assert found is out


def test_another_layout_is_a_view_there_and_back() -> None:
    """[batch, seq, heads, head_dim] goes in without a copy, and what is returned so comes back as ours."""
    q, k, v, _ = tensors()
    function = Recorder(torch.zeros(1, 3, 2, 16))
    found = adapted(function, Call(layout="bshd"))(q, k, v, scale=SCALE)
    assert [tuple(each.shape) for each in function.arguments] == [(1, 3, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16)]
    assert [each.data_ptr() for each in function.arguments] == [each.data_ptr() for each in (q, k, v)]
    assert (tuple(found.shape), found.data_ptr()) == ((1, 2, 3, 16), function.result.data_ptr())


def test_an_output_is_made_where_the_function_needs_one() -> None:
    """A caller who gives no output gets one that the function wrote into."""
    q, k, v, _ = tensors()
    function = Recorder()
    found = adapted(function, Call(("q", "k", "v", "out")))(q, k, v, scale=SCALE)
    assert found is function.arguments[3]
    assert found.shape == q.shape


def test_one_of_several_results_is_chosen() -> None:
    """`returns` counts from zero."""
    q, k, v, out = tensors()
    found = adapted(Recorder([None, out, 3]), Call(returns=1))(q, k, v, scale=SCALE)
    assert found is out


@pytest.mark.parametrize(
    ("result", "returns", "message"),
    [
        (None, None, "the function returned a NoneType where its output tensor should be"),
        ((1, 2), None, "the function returned a tuple of 2 where its output tensor should be"),
        ((1, 2), 2, "entry.call.returns is 2, and the function returned a tuple of 2"),
        (torch.zeros(2, 3), None, r"the function returned a tensor of shape \[2, 3\], its output has four dimensions"),
    ],
)
def test_what_is_no_output_is_named(result: Any, returns: int | None, message: str) -> None:
    """A function that returns something else is told so."""
    q, k, v, _ = tensors()
    with pytest.raises(TypeError, match=message):
        adapted(Recorder(result), Call(returns=returns))(q, k, v, scale=SCALE)


def test_a_scale_that_is_not_passed_is_its_own_alone() -> None:
    """A function without a scale takes 1/sqrt(head_dim) and refuses every other."""
    q, k, v, out = tensors()
    forward = adapted(Recorder(out), Call())
    forward(q, k, v, scale=SCALE)
    with pytest.raises(UnsupportedCase, match=r"scale is -0.25; it is not passed, so it is always 1/sqrt\(16\) = 0.25"):
        forward(q, k, v, scale=-SCALE)


def test_tensors_that_are_not_contiguous_are_refused_where_that_is_said() -> None:
    """Never copied behind the caller's back: a copy would be in the time."""
    q, k, v, out = tensors()
    forward = adapted(Recorder(out), Call(contiguous=True))
    forward(q, k, v, scale=SCALE)
    with pytest.raises(UnsupportedCase, match="k is not contiguous in bhsd"):
        forward(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, scale=SCALE)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (RuntimeError("q must be a CUDA tensor"), UnsupportedCase),
        (RuntimeError("CUDA error: invalid configuration argument"), RuntimeError),
        (torch.OutOfMemoryError("no memory is left"), torch.OutOfMemoryError),
        (ValueError("scale"), ValueError),
    ],
)
def test_an_extension_refuses_and_cuda_fails(problem: Exception, expected: type[Exception]) -> None:
    """What a TORCH_CHECK says is a refusal; a launch that failed is none, however it comes."""

    def raising(*_arguments: Any, **_keywords: Any) -> torch.Tensor:
        raise problem

    q, k, v, _ = tensors()
    with pytest.raises(expected) as caught:
        module._refusing(raising)(q, k, v, scale=SCALE)
    assert caught.type is expected
    assert str(problem) in str(caught.value)


def test_an_output_of_scores_is_made_where_none_is_given() -> None:
    """A function that writes its scores gets [batch, heads, seq_q, seq_k]."""
    q, k, v, _ = tensors()
    function = Recorder()
    found = adapted(function, Call(("q", "k", "out", "scale")), "scores")(q, k, v, scale=SCALE)
    assert (found is function.arguments[2], tuple(found.shape)) == (True, (1, 2, 3, 5))
