"""A function that no `entry.call` can call: the message has the lines of an adapter, with which it is judged."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.candidate.module import load_forward
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import FaError
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.truth import make_truth
from tests.factories import WriteVariant

# Functions as attention libraries have them, each of which reads what makes it special.
ATTEND = """\
import torch


def attend(q, k, v, scale, causal):  # [batch, seq, heads, dim]
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def by_sequence(q, k, v, starts_q, starts_k, scale, causal):  # [total, heads, dim]
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    parts = [
        attend(q[None, a:b], k[None, c:d], v[None, c:d], scale, causal)[0]
        for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:])
    ]
    assert (starts_q[-1], starts_k[-1]) == (len(q), len(k))
    return torch.cat(parts)


def gathered(cache, table, lengths):  # [pages, page, heads, dim] -> [batch, seq, heads, dim]
    return cache[table.long()].flatten(1, 2)[:, : int(lengths.max())]


"""
FUNCTIONS = {
    "varlen": """\
def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
            causal=False):
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    out = by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return out, torch.zeros(1)
""",
    "packed_varlen": """\
def forward(qkv, cu_seqlens, max_seqlen, softmax_scale, causal=False):
    return by_sequence(*qkv.unbind(1), cu_seqlens, cu_seqlens, softmax_scale, causal)
""",
    "paged_varlen": """\
def forward(q, k_cache, v_cache, cu_seqlens_q, seqused_k, page_table, *, softmax_scale, causal=False):
    k, v = (gathered(cache, page_table, seqused_k) for cache in (k_cache, v_cache))
    starts = torch.arange(len(seqused_k) + 1) * k.shape[1]
    return by_sequence(q, k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q, starts, softmax_scale, causal)
""",
}


def complaint(path: Path, root: Path) -> str:
    """What the variant of a manifest cannot be loaded for."""
    with pytest.raises(FaError) as caught:
        load_forward(read_manifest(path, root)[0], None)
    return str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("is_own", [True, False], ids=["own file", "package"])
def test_the_lines_make_the_function_callable(
    write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_own: bool
) -> None:
    """With the lines pasted where the message says, and its line in the manifest, the function is called correctly."""
    library = f"library_of_{name}"
    manifest = f'entry: {{target: "{"entry" if is_own else library}:forward"}}\n'
    folder = write_variant("mine", manifest=manifest, **({"entry.py": ATTEND + FUNCTIONS[name]} if is_own else {}))
    (tmp_path / f"{library}.py").write_text(ATTEND + FUNCTIONS[name], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    problem, lines = complaint(folder / "variant.yaml", tmp_path).split("\n\n", 1)
    assert ("add these lines to entry.py" if is_own else "write these lines into adapter.py") in problem
    with (folder / ("entry.py" if is_own else "adapter.py")).open("a", encoding="utf-8") as file:
        file.write("\n\n" + lines)
    for loaded in [module for module in sys.modules if module.startswith("pytest_fa_variants")]:
        del sys.modules[loaded]  # a run has a new process
    (line,) = re.findall(r"write in variant.yaml `(.*?)`", problem)
    is_packed = "self_attention_only: true` in `supports`" in problem
    assert is_packed == (name == "packed_varlen")
    (folder / "variant.yaml").write_text(line, encoding="utf-8")
    forward = load_forward(read_manifest(folder / "variant.yaml", tmp_path)[0], None)
    for mask in ("", "-causal_br"):
        case = f"b2h3s70d64-fp32{mask}{'' if is_packed else '-sk300'}-seed0"
        inputs = make_inputs(parse_case(case.replace("_br-seed", "-seed")), torch.device("cpu"))
        out = forward(*inputs[:3], scale=inputs.scale, causal=inputs.word("causal"))
        torch.testing.assert_close(out.double(), make_truth(inputs).out)


def test_the_message_says_what_is_not_judged(
    write_variant: WriteVariant, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """It names the call, the parameters, what of the function is not judged, the place and the lines."""
    source = "def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, sinks, *, scale, causal=False): pass\n"
    folder = write_variant("mine", manifest='entry: {target: "entry:forward"}\n', **{"entry.py": source})
    assert snapshot == complaint(folder / "variant.yaml", tmp_path)
