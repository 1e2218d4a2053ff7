"""`malformed_arguments`: kernels that refuse malformed calls or compute them, and those that do neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import MALFORMED, case_of_property, properties_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from pytest_fa.host.client import Workers
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, WriteVariant
from tests.worker_jobs import workers  # noqa: F401  # a fixture

PROMISE = "checks_arguments: true\n"
SUPPORTS = "supports: {device: [cpu, cuda], causal: [none, top_left]}\n"
ENTRY = 'entry: {target: "entry:forward"}\n'
# A kernel that takes its sizes from q, as one with pointers and strides does, and checks each of them.
CHECKED = """\
import torch


def require_fitting(q, k, v, out):
    for tensor in (q, k, v, out):
        if tensor.dtype != q.dtype or tensor.device != q.device or tensor.dim() != 4:
            raise ValueError("another dtype, device or rank")
    batch, heads, seq_q, head_dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, head_dim) or heads % k.shape[1]:
        raise ValueError("k and v do not fit q")
    if out.shape != q.shape or head_dim != 64 or not batch:
        raise ValueError("another shape")


def forward(q, k, v, *, scale, causal="none", out=None):
    require_fitting(q, k, v, out)
    k, v = read(k, q, v.shape[2]), read(v, q, v.shape[2])
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if causal == "top_left":
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    write(out, (torch.softmax(scores, -1) @ v.float()).to(q.dtype))
    return out


def read(x, q, keys):
    x = x.view(q.dtype) if x.element_size() == q.element_size() else x.to(q.dtype)
    strides = (*(x.stride() if x.dim() == 4 else (0, *x.stride()))[:3], x.stride(-1))
    head = [h * (x.shape[-3] if x.dim() > 3 else 1) // q.shape[1] for h in range(q.shape[1])]
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    offsets = x.storage_offset() + torch.arange(q.shape[0])[:, None, None, None] * strides[0]
    offsets = offsets + torch.tensor(head)[:, None, None] * strides[1]
    offsets = offsets + torch.arange(keys)[:, None] * strides[2] + torch.arange(q.shape[3]) * strides[3]
    return whole[offsets.clamp(0, len(whole) - 1)]


def write(out, result):
    flat = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage())
    batch, heads, rows, dim = result.shape
    for b in range(batch):
        for h in range(heads):
            start = out.storage_offset() + b * out.stride(0) + h * out.stride(1)
            flat.as_strided((rows, dim), (out.stride(2), out.stride(3)), start).copy_(result[b, h])
"""
# Plain torch, which refuses what does not fit, on sequences with lengths and pages.
RAGGED = """\
import torch


def forward(q, k, v, *, scale, causal="none", out=None, seqlens_k=None, block_table=None):
    if block_table is not None:
        known = block_table.clamp(0, len(k) - 1)
        bad = (known != block_table)[..., None, None, None]
        k, v = (x[known.long()].masked_fill(bad, NO_PAGE).transpose(1, 2).flatten(2, 3) for x in (k, v))
    scores = q.float() @ k.float().transpose(2, 3) * scale
    keys = torch.arange(k.shape[2])
    lengths = torch.full((len(q),), k.shape[2]) if seqlens_k is None else seqlens_k
    hidden = (keys >= lengths[:, None])[:, None, None]
    p = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).masked_fill(hidden, 0)
    return out.copy_(p @ v.float().masked_fill(hidden.transpose(2, 3), 0))
"""
RAGGED_SUPPORTS = "supports: {device: [cpu], ragged: [none, keys], pages: [none, 16]}\n"
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source, supports, entry, more)`: a variant that promises to check its arguments."""

    def make(source: str, supports: str = SUPPORTS, entry: str = ENTRY, more: str = PROMISE) -> Variant:
        folder = write_variant("checked", manifest=f"{MANIFEST}{entry}{supports}{more}", **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def job(variant: Variant) -> CaseJob:
    """The job of the property."""
    case = case_of_property(variant, MALFORMED)
    return CaseJob(
        variant, case, None, "cpu", "same_precision", checks_output=True, time=False, property_name=MALFORMED
    )


def hold(variant: Variant) -> CaseResult:
    """The result of the property in this process."""
    return run_case(job(variant))


def test_a_kernel_that_checks_everything_holds(variant_of: VariantOf) -> None:
    """The result says how many kinds of calls apply to a kernel without lengths and pages."""
    result = hold(variant_of(CHECKED))
    assert (result.outcome, result.message) == ("ok", "14 of 17 kinds of malformed calls apply")


def test_only_a_promise_is_judged(variant_of: VariantOf) -> None:
    """Without the key, a kernel need not check anything."""
    assert MALFORMED not in properties_of(variant_of(CHECKED, more=""))
    assert MALFORMED in properties_of(variant_of(CHECKED))


@pytest.mark.parametrize(
    ("check", "without", "message"),
    [
        ("tensor.dtype != q.dtype or ", "", "k of another dtype (bf16 beside fp16) was accepted: the output has "),
        ("batch, heads,", "k = k.expand_as(v)\n    batch, heads,", "k of 3 dimensions was accepted: it has no correct"),
        ("(k.shape[0], k.shape[3]) != (batch, head_dim)", "False", "2 batches of q beside 1 of k and v was accepted: "),
        (" or heads % k.shape[1]", "", "3 heads of q beside 2 of k and v was accepted: it has no correct result"),
        (
            "k.shape != v.shape or ",
            "",
            "32 rows of k beside 31 of v was accepted: it has no correct result, and 12288 ",
        ),
        ("out.shape != q.shape or ", "", "an output of 31 rows beside 32 of q: the kernel wrote outside its output, "),
    ],
)
def test_what_is_not_checked_is_named(variant_of: VariantOf, check: str, without: str, message: str) -> None:
    """The message has the call, what became of it, what to do, and how many kinds were tried."""
    assert check in CHECKED
    result = hold(variant_of(CHECKED.replace(check, without, 1).replace(" or tensor.dim() != 4", "")))
    assert (result.outcome, result.caught_by) == ("wrong", (MALFORMED,))
    assert f"{MALFORMED}: {message}" in result.message, result.message
    remedy = "; refuse the call, or drop `checks_arguments` (14 of 17 kinds of malformed calls apply)"
    assert result.message.partition("\n")[0].endswith(remedy)


def test_a_kernel_that_writes_an_input_of_a_refused_call_is_caught(variant_of: VariantOf) -> None:
    """A refusal comes before anything is written."""
    source = CHECKED.replace('raise ValueError("k and v', 'k.zero_(); raise ValueError("k and v')
    assert "the kernel wrote outside its output, k: an input was changed" in hold(variant_of(source)).message


def test_an_untouched_output_is_no_answer(variant_of: VariantOf) -> None:
    """A kernel that returns without a word has not refused a call."""
    source = CHECKED.replace('raise ValueError("k and v do not fit q")', "return")
    source = source.replace("    require_fitting(q, k, v, out)\n", "    if k.shape != v.shape:\n        return out\n")
    assert "0 of 12288 elements were written" in hold(variant_of(source)).message


@pytest.mark.parametrize(
    ("no_page", "outcome", "message"),
    [
        ("float('nan')", "ok", "16 of 17 kinds of malformed calls apply"),
        ("1", "wrong", "page 18 of 11 in block_table was accepted: the output has "),
    ],
)
def test_a_number_in_a_tensor_may_give_nan(variant_of: VariantOf, no_page: str, outcome: str, message: str) -> None:
    """A kernel that reads a table on the device alone may write NaN; lengths may be cut to what there is."""
    result = hold(variant_of(RAGGED.replace("NO_PAGE", no_page), RAGGED_SUPPORTS))
    assert result.outcome == outcome, result.message
    assert message in result.message


def test_lengths_that_reach_beyond_the_keys_are_caught(variant_of: VariantOf) -> None:
    """A kernel may take them for the length of its tensor, and for nothing else."""
    source = RAGGED.replace("NO_PAGE", "float('nan')")
    source = source.replace("hidden =", "lengths = lengths.where(lengths <= k.shape[2], 5)\n    hidden =")
    message = hold(variant_of(source, RAGGED_SUPPORTS)).message
    assert message.startswith(f"{MALFORMED}: seqlens_k of 39 where k has 32 rows was accepted: the output has "), (
        message
    )


def test_what_the_adapter_refuses_does_not_count(variant_of: VariantOf) -> None:
    """A function of contiguous tensors never sees others, nor None in place of a tensor that is transposed."""
    call = "call: {arguments: [q, k, v, scale, out], contiguous: true, layout: bshd}"
    source = CHECKED.replace(
        'def forward(q, k, v, *, scale, causal="none", out=None):\n',
        "def forward(*args):\n    q, k, v, scale, out = args\n    causal = 'none'\n"
        "    q, k, v, out = (x.transpose(1, 2) if x.dim() == 4 else x for x in (q, k, v, out))\n",
    )
    supports = "supports: {device: [cpu], layout: [bshd]}\n"
    result = hold(variant_of(source, supports, f'entry: {{target: "entry:forward", {call}}}\n'))
    assert (result.outcome, result.message) == ("ok", "11 of 17 kinds of malformed calls apply")


def test_a_function_with_an_output_of_its_own_gets_no_malformed_one(variant_of: VariantOf) -> None:
    """What `out` is means nothing to it."""
    source = CHECKED.replace("    write(out,", "    out = torch.empty_like(q)\n    write(out,").replace(
        "require_fitting(q, k, v, out)\n", "require_fitting(q, k, v, q)\n"
    )
    assert hold(variant_of(source)).message == "12 of 17 kinds of malformed calls apply"


def test_a_kernel_that_is_wrong_anyway_is_no_evidence(variant_of: VariantOf) -> None:
    """Malformed calls are made only after well-formed ones are right."""
    result = hold(variant_of(CHECKED.replace("* scale", "* scale * 2")))
    assert result.message.startswith(f"{MALFORMED}: a well-formed call, before malformed ones: the output has ")


@pytest.mark.parametrize(
    ("more", "supports", "reason"),
    [
        ("computes: scores\nrole: probe\ncases: [b1h1s4d64-fp16]\n", SUPPORTS.replace(", top_left", ""), "computes is"),
        ("", "supports: {layout: [packed], self_attention_only: true, device: [cpu]}\n", "one tensor for several"),
    ],
)
def test_a_promise_without_malformed_calls_is_refused(
    variant_of: VariantOf, more: str, supports: str, reason: str
) -> None:
    """A manifest promises only what can be judged."""
    entry = ENTRY if more else 'entry: {target: "entry:forward", call: {arguments: [qkv, scale], layout: bshd}}\n'
    with pytest.raises(ManifestError) as raised:
        variant_of(CHECKED, supports, entry, PROMISE + more)
    assert "checked: checks_arguments is true, but " in str(raised.value)
    assert reason in str(raised.value)


def test_a_crash_names_the_call(variant_of: VariantOf, workers: Workers) -> None:  # noqa: F811  # the fixture
    """The process ends, and the next job gets a new one."""
    source = CHECKED.replace(
        "    require_fitting(", "    if k is not None and k.dim() == 3: import os; os._exit(3)\n    require_fitting("
    )
    result = workers.run(job(variant_of(source)))
    assert (result.outcome, result.caught_by) == ("crashed", (MALFORMED,))
    assert result.message.startswith(f"{MALFORMED}: k of 3 dimensions: crashed: exit status 3 in stage correct")
