"""Operators of an installed library are variants by a manifest alone: they are found, compared and called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.candidate.module import load_forward
from pytest_fa.candidate.operators import signature_of
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError, ManifestError, UnsupportedCase
from pytest_fa.judge.pipeline import run_case
from tests.adopted import FLASH_ATTENTION_3, FLASH_ATTENTION_3_SCHEMA, LIBRARIES, cases_of
from tests.factories import WriteVariant, cpu_job

MOST_PAIRS = 300 * 300  # of queries and keys: larger cases take seconds
EVERY = 8
ReadText = Callable[..., Variant]


@pytest.fixture
def read_text(write_variant: WriteVariant) -> ReadText:
    """`read_text(manifest)`: the first variant of a manifest that has no file beside it, or one by its place."""

    def read(text: str, place: int = 0) -> Variant:
        folder = write_variant("adopted", manifest=text)
        return read_manifest(folder / "variant.yaml", folder.parent)[place]

    return read


def attention(  # what the operator computes, in float32
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The output, [batch, seq_q, heads, head_dim], its log-sum-exp, and two tensors without a meaning."""
    if options.get("attention_chunk"):
        raise RuntimeError("attention_chunk is left out of this build\nwith a second line")
    keys, queries, values = (x.transpose(1, 2).float() for x in (k, q, v))
    keys, values = (x.repeat_interleave(queries.shape[1] // x.shape[1], 1) for x in (keys, values))
    scores = queries @ keys.transpose(2, 3) * options["softmax_scale"]
    if cap := options["softcap"]:
        scores = cap * torch.tanh(scores / cap)
    own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = own - torch.arange(k.shape[1])
    left, right = options["window_size_left"], 0 if options["is_causal"] else options["window_size_right"]
    hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
    scores = scores.masked_fill(hidden, -torch.inf)
    out = (torch.softmax(scores, -1).nan_to_num() @ values).to(q.dtype).transpose(1, 2)
    lse = scores.logsumexp(-1)
    written = out if options.get("out") is None else options["out"].copy_(out)
    return written, lse, lse.new_empty(0), lse.new_empty(0)


@pytest.fixture
def flash_attention_3() -> Iterator[Any]:
    """An operator with the name and the schema of FlashAttention-3's, which computes on the CPU."""
    new: Any = torch.library.Library
    library = new("flash_attn_3", "FRAGMENT")
    library.define(f"fwd{FLASH_ATTENTION_3_SCHEMA}")
    signature = signature_of(torch.ops.flash_attn_3.fwd)

    def fwd(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        bound = signature.bind(*arguments, **keywords)
        bound.apply_defaults()  # the dispatcher leaves out what is a default
        return attention(**bound.arguments)

    library.impl("fwd", fwd, "CPU")
    yield torch.ops.flash_attn_3.fwd
    library._destroy()


def on_cpu(manifest: str) -> str:
    """The manifest of FlashAttention-3 for the operator of this file, which is registered before it is loaded."""
    assert (manifest.count(LIBRARIES), manifest.count("\nsupports:\n")) == (1, 1)
    return manifest.replace(LIBRARIES, "[math]").replace("\nsupports:\n", "\nsupports:\n  device: [cpu]\n")


@pytest.mark.usefixtures("flash_attention_3")
def test_the_manifest_of_flash_attention_3_is_right(read_text: ReadText) -> None:
    """Every case that it claims is right for an operator with that schema: windows, caps, groups and both layouts."""
    variant = read_text(on_cpu(FLASH_ATTENTION_3))
    wide, narrow = (cases_of(read_text(on_cpu(FLASH_ATTENTION_3), place)) for place in (1, 2))
    assert {(64, 512), (192, 128)} <= {(case.head_dim, case.head_dim_v) for case in (*wide, *narrow)}
    cases = [case for case in cases_of(variant) if case.seq_q * case.seq_k <= MOST_PAIRS]
    has = {(bool(case.value_of("softcap")), case.value_of("window") != (None, None)) for case in cases}
    assert len(has) == 4
    for case in cases[::EVERY]:
        result = run_case(cpu_job(variant, case.id, repeats=2))
        assert (case.id, result.outcome, result.message) == (case.id, "ok", "")


@pytest.mark.usefixtures("flash_attention_3")
def test_an_operator_with_other_parameters_gets_the_line(read_text: ReadText, snapshot: SnapshotAssertion) -> None:
    """Without `entry.call`, the failure has the line, with the libraries, and by name what follows a default."""
    variant = read_text('entry: {target: "flash_attn_3::fwd", libraries: [math]}\n')
    with pytest.raises(FaError) as caught:
        load_forward(variant, None)
    assert snapshot == str(caught.value).partition("; write in ")[2]


@pytest.mark.usefixtures("flash_attention_3")
def test_a_keyword_that_the_schema_lacks_is_named(read_text: ReadText) -> None:
    """The schema of an operator is compared before the first call."""
    variant = read_text(on_cpu(FLASH_ATTENTION_3.replace("softmax_scale:", "sm_scale:")))
    with pytest.raises(FaError, match="got an unexpected keyword argument 'sm_scale'"):
        load_forward(variant, None)


@pytest.mark.usefixtures("flash_attention_3")
def test_a_failed_check_of_an_operator_is_a_refusal(read_text: ReadText) -> None:
    """The first line of its RuntimeError is the reason."""
    manifest = FLASH_ATTENTION_3.replace("    keywords:\n", "    keywords:\n      attention_chunk: 8\n")
    variant = read_text(on_cpu(manifest))
    q = torch.zeros(1, 2, 8, 64, dtype=torch.float16)
    with pytest.raises(UnsupportedCase, match=r"^attention_chunk is left out of this build$"):
        load_forward(variant, None)(q, q, q, scale=0.125)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('target: "fa_absent::fwd"', "there is no operator of this name .in namespace fa_absent: none.; write `librar"),
        ('target: "fa_absent::fwd", libraries: [math]', "in namespace fa_absent: none.; write another entry.target"),
        ('target: "fa_absent::fwd", libraries: [no.such]', "'no.such' of entry.libraries cannot be loaded: No module"),
        ('target: "fa_absent::fwd", libraries: [../_C.so]', "'../_C.so' of entry.libraries cannot be loaded: .*_C.so"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(read_text: ReadText, entry: str, problem: str) -> None:
    """The error has the variant, the target and what to write."""
    variant = read_text(f"entry: {{{entry}}}\n")
    with pytest.raises(FaError, match=f"^adopted: entry.target 'fa_absent::fwd': .*{problem}"):
        load_forward(variant, None)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            'target: "mine:fwd", libraries: [_C.so]',
            "entry.libraries is for an operator, but entry.target is 'mine:fwd'",
        ),
        ('target: "mine::fwd", libraries: ["$HOME/_C.so"]', "entry.libraries has '\\$HOME/_C.so' is not a path"),
        ('target: "mine::fwd", context: "mine::pin"', "entry.context is 'mine::pin'; .* 'package.module:function'$"),
        ("source: kernel.cu, libraries: [_C.so]", "entry.libraries is only for kind python; this entry's kind is cuda"),
    ],
)
def test_what_cannot_be_read_is_one_error(read_text: ReadText, entry: str, problem: str) -> None:
    """A library belongs to an operator, and is a path or a module."""
    with pytest.raises(ManifestError, match=problem):
        read_text(f"entry: {{{entry}}}\n")


def test_a_second_library_of_an_operator_is_refused(read_text: ReadText, tmp_path: Path) -> None:
    """PyTorch would end the process, so the second library is not loaded."""
    for name in ("a.so", "b.so"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    texts = [f'entry: {{target: "fa_twice::fwd", libraries: [{tmp_path / name}]}}\n' for name in ("a.so", "b.so")]
    with pytest.raises(FaError, match=r"a.so' of entry.libraries cannot be loaded"):
        load_forward(read_text(texts[0]), None)
    with pytest.raises(FaError, match=r"a.so has already registered this operator in this process"):
        load_forward(read_text(texts[1]), None)
