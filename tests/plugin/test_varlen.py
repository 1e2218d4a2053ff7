"""Functions as libraries have them for sequences behind one another: the failure has the lines with which they run."""

from __future__ import annotations

import re

import pytest

from tests.projects import NewProject

ATTEND = """\
import torch


def attend(q, k, v, scale, causal):  # [seq, heads, dim]
    q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1).nan_to_num() @ v).transpose(0, 1)


"""
FUNCTIONS = {
    "varlen": """\
def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
            causal=False):
    out = torch.empty_like(q)
    starts = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:])
    for a, b, c, d in starts:
        out[a:b] = attend(q[a:b], k[c:d], v[c:d], softmax_scale, causal)
    return out, torch.zeros(1)
""",
    "paged_varlen": """\
def forward(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_k, page_table, *, softmax_scale,
            causal=False):
    assert max_seqlen_k >= int(seqused_k.max())
    out = torch.empty_like(q)  # caches are [pages, page_size, heads, dim]
    for row, (a, b) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_q[1:])):
        used = page_table[row, : -(-int(seqused_k[row]) // k_cache.shape[1])].long()
        k, v = (cache[used].flatten(0, 1)[: seqused_k[row]] for cache in (k_cache, v_cache))
        out[a:b] = attend(q[a:b], k, v, softmax_scale, causal)
    return out, torch.zeros(1)
""",
}
CASES = {
    "varlen": "b9h2s129d64-fp16-causal_br-var2-thd-seed0",
    "paged_varlen": "b9h2s65d64-fp16-causal_br-var3-page64-thd-seed0",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_lines_of_a_failure_make_a_function_right(new_project: NewProject, name: str) -> None:
    """The `entry` of the message, its keys of `supports` and the declared rows are all that is missing."""
    project = new_project("varlen")
    manifest = 'entry: {target: "entry:forward"}\nsupports: {device: [cpu]}\n'
    project.python_variant("mine", ATTEND + FUNCTIONS[name], manifest)
    failed = project.suite("--fa-variant=mine", "--benchmark-disable", "-k", "test_correct")
    (entry,) = set(re.findall(r"write in variant.yaml `(.*?)`", failed.text))
    (supports,) = set(re.findall(r"and `(layout: .*?)` in `supports`", failed.text))
    lines = (
        entry.replace("layout: thd", "layout: thd, returns: 0"),
        f"supports: {{device: [cpu], causal: [none, bottom_right], {supports}}}",
        "conventions: {rows_past: any}",
    )
    project.python_variant("mine", ATTEND + FUNCTIONS[name], "\n".join(lines))
    arguments = ("--fa-variant=mine", f"--fa-case={CASES[name]}", "--benchmark-disable", "-k", "test_correct")
    repaired = project.suite(*arguments)
    assert (failed.ret, repaired.ret) == (1, 0), repaired.text
    assert "mine: 1/1 checks passed" in repaired.text
