"""What the judge makes of the results of the user's functions, which here run in a thread."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from pytest_fa.attention.rows import PLAIN
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Rounding
from pytest_fa.errors import NoTruth
from pytest_fa.features.truth.functions import functions_of
from pytest_fa.features.truth.judge_side.asked_truth import AskedTruth
from pytest_fa.features.truth.judge_side.own_functions import serve_functions
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.wire.channel import Channel, channel_pair

SOURCE = """\
import functools

import torch


def weights(q, k, scale, causal):
    scores = q @ k.transpose(2, 3) * scale
    if causal:
        assert causal == "top_left"
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(scores, -1), scores.logsumexp(-1)


def truth(q, k, v, *, scale, causal):
    return weights(q, k, scale, causal)[0] @ v


def reference(q, k, v, *, scale, causal, dtype):
    if dtype == torch.float32:
        return truth(q.float(), k.float(), v.float(), scale=scale, causal=causal)
    p = weights(q, k, scale, causal)[0]
    largest = p.amax(-1, keepdim=True)
    return (p / largest).to(dtype).double() @ v * largest


def of_lengths(q, k, v, *, scale, seqlens_q, seqlens_k):
    scores = q @ k.transpose(2, 3) * scale
    is_seen = torch.arange(k.shape[2]) < seqlens_k.view(-1, 1, 1, 1)
    is_query = torch.arange(q.shape[2])[:, None] < seqlens_q.view(-1, 1, 1, 1)
    return torch.softmax(scores.masked_fill(~(is_seen & is_query), float("-inf")), -1).nan_to_num() @ v


def truth_lse(q, k, v, *, scale, causal):
    p, lse = weights(q, k, scale, causal)
    return p @ v, lse


def reference_lse(q, k, v, *, scale, causal, dtype):
    return reference(q, k, v, scale=scale, causal=causal, dtype=dtype), weights(q, k, scale, causal)[1].float()


def exact_sums(q, k, v, *, scale, causal, dtype):
    p = weights(q, k, scale, causal)[0]
    largest = p.amax(-1, keepdim=True)
    return ((p / largest).float().double() @ v * largest).float()


def rounded_scores(q, k, v, *, scale, causal, dtype):
    scores = (q @ k.transpose(2, 3) * scale).to(dtype).double()
    return (torch.softmax(scores, -1) @ v).to(dtype)


def kernel_words(q, k, v, *, scale, causal):
    assert causal == "none" and not causal
    return truth(q, k, v, scale=scale, causal=causal)


def without_mask(q, k, v, *, scale):
    return truth(q, k, v, scale=scale, causal=False)


def with_sink(q, k, v, *, scale, sink):
    assert (sink.shape, sink.dtype) == (q.shape[1:2], torch.float64)
    scores = torch.cat([q @ k.transpose(2, 3) * scale, sink[:, None, None].expand(*q.shape[:3], 1)], -1)
    return torch.softmax(scores, -1)[..., :-1] @ v, scores.logsumexp(-1)


def with_tensors(q, k, v, *, scale, attn_bias, attn_mask):
    shape = (*q.shape[:3], k.shape[2])
    assert [(each.shape, each.dtype) for each in (attn_bias, attn_mask)] == [
        (shape, torch.float64), (shape, torch.bool)
    ]
    scores = (q @ k.transpose(2, 3) * scale + attn_bias).masked_fill(~attn_mask, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num() @ v


hidden_signature = functools.partial(without_mask)
"""
Ask = Callable[..., Truth]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Ask for the truth of some functions on the data of a case."""
    (tmp_path / "mine.py").write_text(SOURCE)
    near, end = channel_pair()
    far = Channel(end)
    thread = threading.Thread(target=serve_functions, args=(far,), daemon=True)
    thread.start()
    asked = AskedTruth(near, os.getpid())

    def ask_for(
        names: str,
        case: str,
        policy: str = "same_precision",
        max_error: float | None = None,
        rounds: tuple[Rounding, ...] = (),
        conventions: Mapping[str, str] = PLAIN,
    ) -> Truth:
        own = msgspec.structs.replace(functions_of("truth", f"mine.py:{names}", tmp_path), max_error=max_error)
        return asked.truth_of(own, inputs_of(case).in_conventions(conventions), rounds, policy)

    yield ask_for
    near.close()
    thread.join()
    far.close()


LARGE_SCORES = "b1h2s64d64-fp16-seed0 x8"


def inputs_of(case: str) -> Inputs:
    """The data of a case on the CPU; with `x8` behind it, with scores that are eight times as large."""
    name, _, factor = case.partition(" x")
    inputs = make_inputs(parse_case(name), torch.device("cpu"))
    return inputs._replace(q=inputs.q * float(factor or 1))


def test_functions_get_the_tensors_of_parts(ask: Ask) -> None:
    """A sink comes as a keyword in float64; a function that does not take it is refused."""
    case = "b2h6s64d64-fp16-sink-seed0"
    truth = ask("with_sink", case, max_error=1.0)
    assert float((truth.out - make_truth(inputs_of(case)).out).abs().max()) < 1e-12
    case = "b2h2s64d64-bf16-sk48-biashq-maskb-seed0"
    truth = ask("with_tensors", case, max_error=1.0)
    assert float((truth.out - make_truth(inputs_of(case)).out).abs().max()) < 1e-12
    in_others = ask("with_tensors", case, max_error=1.0, conventions={"mask_true": "hides", "scale": "times_log2e"})
    assert float((in_others.out - truth.out).abs().max()) < 1e-12
    case = "b2h6s64d64-fp16-sink-seed0"
    with pytest.raises(NoTruth, match="takes no keyword argument `sink`, without which this call cannot be judged"):
        ask("truth", case, max_error=1.0)


@pytest.mark.parametrize("layout", ["", "-thd"])
def test_functions_of_lengths_need_not_know_how_sequences_lie(ask: Ask, layout: str) -> None:
    """They get padded sequences, and need no longest number of rows."""
    case = f"b4h2s64d64-fp16-var2{layout}-seed0"
    truth = ask("of_lengths", case, max_error=1.0)
    assert float((truth.out - make_truth(inputs_of(case)).out).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "case",
    [
        "b1h2s64d64-fp16-seed0",
        "b1h2s64d64-bf16-seed0",
        "b1h2s64d64-fp32-seed0",
        "b2h4s48d64-fp16-kv2-seed0",
        "b1h2s64d64-fp16-causal-seed0",
    ],
)
def test_plain_attention_as_own_truth(ask: Ask, case: str) -> None:
    """Functions that compute attention give our truth, in every dtype, and a right output passes by them."""
    ours, truth = make_truth(inputs_of(case)), ask("truth,reference", case)
    assert float((truth.out - ours.out).abs().max()) < 1e-12
    out = ours.same_precision.to(inputs_of(case).q.dtype)
    assert check_output(out, truth, "same_precision").passed
    assert not check_output(out * 1.01, truth, "same_precision").passed


@pytest.mark.parametrize(
    ("names", "max_error", "outputs"),
    [
        ("truth,reference", None, []),
        ("truth_lse,reference", None, []),
        ("truth_lse,reference_lse", None, ["lse"]),
        ("truth_lse", 0.01, ["lse"]),
    ],
)
def test_a_log_sum_exp_is_judged_if_it_is_returned(
    ask: Ask, names: str, max_error: float | None, outputs: list[str]
) -> None:
    """The log-sum-exp has a truth if both functions return it, or if its allowed error is a number."""
    truth = ask(names, "b1h2s64d64-fp16-seed0", max_error=max_error)
    assert [name for name, _ in truth.rows] == outputs
    assert all(bool((rows.allowed > 0).all()) for _, rows in truth.rows)


def test_a_function_without_the_mask_is_not_believed(ask: Ask) -> None:
    """A function whose signature only a call can tell says so when it is called for a masked case."""
    sentence = "takes no keyword argument `causal`, without which this call cannot be judged"
    with pytest.raises(NoTruth, match=sentence):
        ask("hidden_signature", "b1h2s64d64-fp16-causal-seed0", max_error=0.01)


@pytest.mark.parametrize(
    ("names", "case", "rounds", "complaint"),
    [
        (
            "truth,exact_sums",
            "b1h2s64d64-fp32-seed0",
            (),
            "mine.py:exact_sums does not compute in float32: V times 1 + 7e-9, which float32 rounds to V, changes its",
        ),
        (
            "truth,rounded_scores",
            LARGE_SCORES,
            (),
            "so it computes something else; a kernel that also rounds Q or the scores declares `rounds: [q]` or",
        ),
        ("truth,rounded_scores", LARGE_SCORES, ("s",), ""),
        ("kernel_words,reference", "b1h2s64d64-fp16-seed0", (), ""),
    ],
)
def test_a_reference_has_the_roundings_of_the_kernel(
    ask: Ask, names: str, case: str, rounds: tuple[Rounding, ...], complaint: str
) -> None:
    """Exact sums are no reference of a float32 kernel, and rounded scores only if the manifest declares them."""
    with pytest.raises(NoTruth, match=re.escape(complaint)) if complaint else contextlib.nullcontext():
        ask(names, case, rounds=rounds)


def test_another_file_has_its_own_modules(tmp_path: Path) -> None:
    """Of two files in two folders, each gets the module beside it, though both modules have one name."""
    near, end = channel_pair()
    far = Channel(end)
    thread = threading.Thread(target=serve_functions, args=(far,), daemon=True)
    thread.start()
    asked, outs = AskedTruth(near, os.getpid()), []
    for factor in (1, 2):
        folder = tmp_path / str(factor)
        folder.mkdir()
        (folder / "factor.py").write_text(f"FACTOR = {factor}\n")
        (folder / "mine.py").write_text(f"from factor import FACTOR\n{SOURCE.replace('[0] @ v', '[0] @ v * FACTOR')}")
        own = msgspec.structs.replace(functions_of("truth", "mine.py:truth", folder), max_error=0.1)
        outs.append(asked.truth_of(own, inputs_of("b1h2s64d64-fp16-seed0"), (), "same_precision").out)
    near.close()
    thread.join()
    far.close()
    assert torch.equal(outs[0] * 2, outs[1])


def test_fp8_needs_p(ask: Ask) -> None:
    """Policy fp8 needs P, which no function returns."""
    with pytest.raises(NoTruth, match="cannot be judged by policy fp8, which needs P; use same_precision"):
        ask("truth,reference", "b1h2s64d64-fp16-seed0", policy="fp8")


def test_without_a_process_there_is_no_truth(tmp_path: Path) -> None:
    """A judge that has no process of the functions gives no verdict, and never one against attention."""
    (tmp_path / "mine.py").write_text(SOURCE)
    own, inputs = functions_of("truth", "mine.py:truth", tmp_path), inputs_of("b1h2s64d64-fp16-seed0")
    with pytest.raises(NoTruth, match=r"mine\.py:truth needs a process of its own"):
        TruthStore().truth_of("attention", inputs, (), "same_precision", own)
