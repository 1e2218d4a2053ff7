"""A function that does not take the arguments of a call: the message has the line of the manifest that calls it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.attention.backward import ARGUMENTS
from pytest_fa.candidate import module
from pytest_fa.candidate.adapter import adapted
from pytest_fa.candidate.module import load_forward
from pytest_fa.candidate.output import require_output
from pytest_fa.candidate.signature import defines_problem, signature_problem
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Call, Constant, Entry
from pytest_fa.errors import FaError, WrongResult
from tests.factories import WriteVariant

PYTHON = Entry(kind="python", target="entry:forward")


# Functions as users have them; only their parameters matter.
FUNCTIONS: dict[str, Any] = {}
exec(  # noqa: S102  # so that no function has unused arguments
    """
def flash(q, k, v, softmax_scale=None, is_causal=False): pass
def after_dropout(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False): pass
def with_block(query, key, value, block, *, causal): pass
def with_dropout(query, key, value, dropout_p, sinks, *, causal): pass
def three(q, k, v): pass
def into_out(q, k, v, out): pass
def plain(q, k, v, *, scale, causal="none", out=None): pass
def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None): pass
def paged_varlen(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, seqused_k, page_table, *, softmax_scale): pass
def with_optional_starts(q, k, v, cu_seqlens_q=None, causal=False): pass
def packed_varlen(qkv, cu_seqlens, max_seqlen): pass
def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal): pass
def anything(*args, **keywords): pass
""",
    FUNCTIONS,
)
SDPA = torch.nn.functional.scaled_dot_product_attention
LIBRARY: Any = torch.library.Library


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("flash", "arguments: [q, k, v, scale, causal]"),
        ("after_dropout", "arguments: [q, k, v], keywords: {softmax_scale: scale, causal: causal}"),
        ("with_block", "arguments: [q, k, v], keywords: {block: VALUE, causal: causal}"),
        ("three", "arguments: [q, k, v]"),
        ("into_out", "arguments: [q, k, v, out]"),
        ("with_optional_starts", "arguments: [q, k, v], keywords: {causal: causal}"),
    ],
)
def test_the_line_for_another_signature_is_given(function: str, line: str) -> None:
    """The message names the call and the parameters, and has the whole `entry`; VALUE stands for what is unknown."""
    problem = signature_problem(FUNCTIONS[function], PYTHON)
    assert problem is not None
    assert problem.startswith(
        "it is called as f(q, k, v, scale=scale, causal=causal, out=out), but its parameters are ("
    )
    value = ", with a value in place of VALUE" if "VALUE" in line else ""
    assert problem.endswith(f'; write in variant.yaml `entry: {{target: "entry:forward", call: {{{line}}}}}`{value}')


def test_a_backward_function_gets_its_line() -> None:
    """It has the words of gradients; a manifest that does not compute them is to say so."""
    line = "arguments: [dout, q, k, v, out, lse, dq, dk, dv], keywords: {dropout_p: 0.0, softmax_scale: scale, "
    answer = "; and `computes: gradients`"
    problems = [
        signature_problem(FUNCTIONS["backward"], PYTHON),
        signature_problem(FUNCTIONS["backward"], PYTHON, ("dq", "dk", "dv"), tuple(ARGUMENTS)),
    ]
    assert [line in str(problem) for problem in problems] == [True, True]
    assert [answer in str(problem) for problem in problems] == [True, False]


def test_what_is_not_judged_is_switched_off(snapshot: SnapshotAssertion) -> None:
    """A parameter of what is not judged gets the value that switches it off, and the message says so."""
    assert snapshot == signature_problem(FUNCTIONS["with_dropout"], PYTHON)


@pytest.mark.parametrize("name", ["varlen", "paged_varlen", "packed_varlen"])
def test_a_function_of_sequences_behind_one_another_gets_its_layout(name: str, snapshot: SnapshotAssertion) -> None:
    """The entry has `layout: thd`, and the message what `supports` must list; one tensor for all is not judged."""
    assert snapshot == signature_problem(FUNCTIONS[name], PYTHON)


@pytest.mark.parametrize("function", [FUNCTIONS["plain"], FUNCTIONS["anything"], SDPA])
def test_a_function_that_fits_or_cannot_be_read_has_no_problem(function: Callable[..., Any]) -> None:
    """The signature of this package, *args and **keywords, and a function written in C are accepted."""
    assert signature_problem(function, PYTHON) is None


def test_the_declared_call_is_compared() -> None:
    """With `entry.call`, its arguments and keywords are compared, and the message shows them."""
    call = Call(("q", "k", "v", Constant("fast"), 3), {"scale": "scale"})
    problem = signature_problem(FUNCTIONS["flash"], Entry(kind="python", target="entry:flash", call=call))
    assert problem is not None
    assert "it is called as f(q, k, v, 'fast', 3, scale=scale), but its parameters are (q, k, v, " in problem
    assert signature_problem(FUNCTIONS["flash"], Entry(call=Call(keywords={"softmax_scale": "scale"}))) is None


def test_the_line_makes_the_function_callable(
    write_variant: WriteVariant, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """Loading fails with the line; with that line in the manifest, the function is called."""
    source = "def forward(q, k, v, softmax_scale=None):\n    return q * softmax_scale\n"
    folder = write_variant("mine", manifest='entry: {target: "entry:forward"}\n', **{"entry.py": source})
    manifest = folder / "variant.yaml"
    with pytest.raises(FaError) as caught:
        load_forward(read_manifest(manifest, tmp_path)[0], None)
    assert snapshot == str(caught.value)
    (line,) = re.findall(r"`(.*)`", str(caught.value))
    manifest.write_text(line, encoding="utf-8")
    q = torch.ones(1, 1, 2, 4)
    assert torch.equal(q * 0.25, load_forward(read_manifest(manifest, tmp_path)[0], None)(q, q, q, scale=0.25))


# -- results ----------------------------------------------------------------------------------------------------------

OUT = torch.zeros(1, 2, 3, 4)
LSE = torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            (OUT, LSE),
            (
                "the output is a tuple (return item 0 alone, or write in the manifest's entry `call: {keywords: "
                "{scale: scale, causal: causal}, returns: 0}`, which passes causal as true or "
                "false), it must be torch.float32"
            ),
        ),
        ([LSE, OUT], "the output is a list (return item 1 alone"),
        (None, "the output is None (write `return out` at the end of the function), it must be torch.float32"),
        (
            OUT.half(),
            (
                "the output is torch.float16 [1, 2, 3, 4], it must be torch.float32 [1, 2, 3, 4] "
                "(write `return out.to(q.dtype)`)"
            ),
        ),
    ],
)
def test_an_output_among_others_is_found(result: object, message: str) -> None:
    """For `(out, lse)` without `entry.call`, the message has the index of the output and the line to write."""
    with pytest.raises(WrongResult) as caught:
        require_output(result, OUT)
    assert str(caught.value).startswith(message)


def test_an_output_among_others_of_a_declared_call_is_found() -> None:
    """For `(out, lse)` with `entry.call` but without `returns`, the message has the key to write."""
    forward = adapted(lambda *_: (OUT, LSE), Call())
    with pytest.raises(WrongResult, match=r"returned a tuple of 2 elements, .*; write `returns: 0` in entry.call"):
        forward(OUT, OUT, OUT, scale=0.5)


# -- extensions -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_an_extension_without_a_module_gets_the_line(write_variant: WriteVariant, tmp_path: Path) -> None:
    """If the library defines no Python module, the message has the line of pybind11 to write."""
    manifest = "entry: {sources: [a.cpp], target: forward}\nsupports: {device: [cpu]}\n"
    folder = write_variant("mine", manifest=manifest, **{"a.cpp": "int value = 1;\n", "module.txt": "fa_mine"})
    library = folder / "kernel.so"
    subprocess.run(["gcc", "-shared", "-o", str(library), "-x", "c", str(folder / "a.cpp")], check=True)
    with pytest.raises(FaError, match=r"the extension cannot be loaded: .*PyInit_fa_mine") as caught:
        load_forward(read_manifest(folder / "variant.yaml", tmp_path)[0], str(library))
    line = 'write `PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("forward", &forward); }`'
    assert str(caught.value).endswith(line)


def test_a_missing_operator_is_named_with_its_neighbours(snapshot: SnapshotAssertion) -> None:
    """If the operator is missing, the message has the operators of its namespace and the line that registers it."""
    library = LIBRARY("fa_neighbours", "DEF")
    library.define("backward(Tensor q) -> Tensor")
    assert snapshot == module._neighbours("fa_neighbours::forward")


def test_a_define_that_is_no_parameter_is_named(snapshot: SnapshotAssertion) -> None:
    """Each define must be a parameter of a Python entry, or the function must take any keyword."""

    def takes_block(q: object, *, BLOCK: int) -> None:  # noqa: N803  # a define's name
        """Takes one define."""

    def takes_all(q: object, **defines: object) -> None:
        """Takes every define."""

    assert snapshot == defines_problem(takes_block, {"BLOCK": 1, "STAGES": 2})
    assert [None, None] == [defines_problem(takes_block, {"BLOCK": 1}), defines_problem(takes_all, {"STAGES": 2})]
