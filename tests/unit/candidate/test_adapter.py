"""The adapter passes a third-party function the arguments that `entry.call` lists and returns the output it selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fa.candidate import module
from pytest_fa.candidate.adapter import adapted
from pytest_fa.catalog.variant import Call, Constant
from pytest_fa.errors import UnsupportedCase, WrongResult

SCALE = 0.25  # 1/sqrt(head_dim) for head_dim 16


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q and out [1, 2, 3, 16], k and v [1, 2, 5, 16], each filled with a different number."""
    q, out = (torch.full((1, 2, 3, 16), value) for value in (1.0, 9.0))
    k, v = (torch.full((1, 2, 5, 16), value) for value in (2.0, 3.0))
    return q, k, v, out


class Recorder:
    """A function that records its arguments and returns `result`."""

    def __init__(self, result: Any = None) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.result = result

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Record the arguments."""
        self.arguments, self.keywords = arguments, keywords
        return self.result


def test_words_and_constants_are_passed_in_order() -> None:
    """Words stand for tensors, `causal` is passed as a bool, constants are passed unchanged, keywords by name."""
    q, k, v, out = tensors()
    function = Recorder()
    call = Call((Constant("fast"), "v", "k", "q", None, "out", 7), {"softmax_scale": "scale", "is_causal": "causal"})
    result = adapted(function, call)(q, k, v, scale=SCALE, causal="top_left", out=out)
    assert [passed is tensor for passed, tensor in zip(function.arguments[1:4], (v, k, q), strict=True)] == [True] * 3
    assert function.arguments[0] == "fast"
    assert function.arguments[4:] == (None, out, 7)
    assert function.keywords == {"softmax_scale": SCALE, "is_causal": True}
    assert result is out


def test_descales_are_passed_by_their_words() -> None:
    """A function gets the descales where the manifest names them."""
    q, k, v, out = tensors()
    descales: dict[str, Any] = {f"{name}_descale": torch.ones(1, 2) for name in "qkv"}
    function = Recorder()
    call = Call(("q", "k", "v", "out", "v_descale"), {"descale_q": "q_descale", "descale_k": "k_descale"})
    adapted(function, call)(q, k, v, scale=SCALE, out=out, **descales)
    assert function.arguments[4] is descales["v_descale"]
    assert [function.keywords[f"descale_{name}"] is descales[f"{name}_descale"] for name in "qk"] == [True, True]


def test_the_other_layout_needs_no_copy() -> None:
    """Inputs become views [batch, seq, heads, head_dim]; a result of that layout becomes a view of the usual one."""
    q, k, v, _ = tensors()
    function = Recorder(torch.zeros(1, 3, 2, 16))
    result = adapted(function, Call(layout="bshd"))(q, k, v, scale=SCALE)
    assert [tuple(each.shape) for each in function.arguments] == [(1, 3, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16)]
    assert [each.data_ptr() for each in function.arguments] == [each.data_ptr() for each in (q, k, v)]
    assert (tuple(result.shape), result.data_ptr()) == ((1, 2, 3, 16), function.result.data_ptr())


def test_an_output_is_allocated_if_the_function_needs_one() -> None:
    """Without `out`, the adapter allocates the output that the function writes into, and returns it."""
    q, k, v, _ = tensors()
    function = Recorder()
    result = adapted(function, Call(("q", "k", "v", "out")))(q, k, v, scale=SCALE)
    assert result is function.arguments[3]
    assert result.shape == q.shape


def test_one_of_several_results_is_selected() -> None:
    """`returns` is the zero-based index of the output in the returned sequence."""
    q, k, v, out = tensors()
    result = adapted(Recorder([None, out, 3]), Call(returns=1))(q, k, v, scale=SCALE)
    assert result is out


@pytest.mark.parametrize(
    ("result", "returns", "message"),
    [
        (
            None,
            None,
            (
                "the function returned a NoneType, expected its output tensor; if the function writes its output into "
                "an argument, add `out` to entry.call.arguments"
            ),
        ),
        ((1, 2), None, "the function returned a tuple of 2 elements, expected its output tensor"),
        ((1, 2), 2, "entry.call.returns is 2, but the function returned a tuple of 2 elements"),
        (torch.zeros(2, 3), None, r"the function returned a tensor of shape \[2, 3\], expected four dimensions"),
    ],
)
def test_a_result_without_an_output_is_an_error(result: Any, returns: int | None, message: str) -> None:
    """If the function does not return its output tensor, the error says what it returned, and the check is `entry`."""
    q, k, v, _ = tensors()
    with pytest.raises(WrongResult, match=message) as raised:
        adapted(Recorder(result), Call(returns=returns))(q, k, v, scale=SCALE)
    assert raised.value.caught_by == ("entry",)


def test_a_function_without_a_scale_takes_the_default_only() -> None:
    """If the scale is not passed, 1/sqrt(head_dim) is accepted and every other scale is refused."""
    q, k, v, out = tensors()
    forward = adapted(Recorder(out), Call())
    forward(q, k, v, scale=SCALE)
    message = r"scale is -0.25; entry.call passes no scale, so the function always uses 1/sqrt\(16\) = 0.25"
    with pytest.raises(UnsupportedCase, match=message):
        forward(q, k, v, scale=-SCALE)


def test_non_contiguous_tensors_are_refused_if_the_manifest_says_so() -> None:
    """With `contiguous`, a strided tensor is refused and not copied: the copy would be part of the measured time."""
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
def test_a_failed_torch_check_is_a_refusal(problem: Exception, expected: type[Exception]) -> None:
    """A failed TORCH_CHECK becomes `UnsupportedCase`; CUDA errors and other exceptions do not change."""

    def raising(*_arguments: Any, **_keywords: Any) -> torch.Tensor:
        raise problem

    q, k, v, _ = tensors()
    with pytest.raises(expected) as caught:
        module._translate_refusals(raising)(q, k, v, scale=SCALE)
    assert caught.type is expected
    assert str(problem) in str(caught.value)


def test_an_output_of_scores_is_allocated_in_their_shape() -> None:
    """Without `out`, a function that writes scores gets a tensor [batch, heads, seq_q, seq_k]."""
    q, k, v, _ = tensors()
    function = Recorder()
    result = adapted(function, Call(("q", "k", "out", "scale")), "scores")(q, k, v, scale=SCALE)
    assert (result is function.arguments[2], tuple(result.shape)) == (True, (1, 2, 3, 5))
