"""Properties: their names, the case that each variant gets, and the variants that hold or break them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import (
    GRADIENTS_ONLY,
    ON_GPU,
    PROMISED,
    PROPERTIES,
    STRIDES_OF,
    applies,
    declared_against,
    property_case,
)
from pytest_fa.catalog.variant import Call, Variant
from pytest_fa.errors import LacksMemory, UnsupportedCase
from pytest_fa.judge import properties
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.properties import memory
from pytest_fa.judge.subject import PropertySubject
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

MakeVariant = Callable[..., Variant]
LEFT_OUT = PROMISED | GRADIENTS_ONLY  # of a kernel of attention that promises nothing
ON_CPU = [name for name in PROPERTIES if name not in ON_GPU | LEFT_OUT]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> MakeVariant:
    """`variant_of(source, more)`: a Python variant; `more` is appended to its manifest."""

    def make(source: str = PYTHON_SOURCE, more: str = "") -> Variant:
        folder = write_variant("entry_of_a_test", manifest=PYTHON_MANIFEST + more, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def hold(variant: Variant, name: str, case: Case | None = None) -> CaseResult:
    """The result of testing a property of a variant on the CPU; the case is that of the property by default."""
    case = case or property_case(variant)
    job = CaseJob(variant, case, None, "cpu", "same_precision", checks_output=True, time=False, property_name=name)
    return run_case(job)


def test_every_property_has_its_code() -> None:
    """The catalog's promises and the functions that test them have the same names in the same order."""
    assert list(PROPERTIES) == list(properties.PROPERTIES)


GROUPED_SOURCE = PYTHON_SOURCE.replace(
    "    scores =",
    "    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))\n    scores =",
    1,
)


@pytest.mark.parametrize("name", ["head_independence", "contained_nan"])
def test_heads_that_share_keys_are_not_independent(variant_of: MakeVariant, name: str) -> None:
    """If head 1 of K is changed, the outputs of all query heads that share it may change, and of no others."""
    result = hold(variant_of(GROUPED_SOURCE), name, parse_case("b1h4s64d64-fp16-kv2-seed0"))
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("name", ON_CPU)
def test_a_right_kernel_holds(variant_of: MakeVariant, name: str) -> None:
    """A right kernel holds every property that can be tested on a CPU."""
    result = hold(variant_of(), name)
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("name", ON_CPU)
def test_a_right_kernel_of_the_other_layout_holds(variant_of: MakeVariant, name: str) -> None:
    """A right kernel of layout `bshd` holds them too, except `new_shape`, which needs a copy in that layout."""
    variant = variant_of()
    supports = msgspec.structs.replace(variant.supports, layout=("bshd",), dtype=("bf16",))
    result = hold(msgspec.structs.replace(variant, supports=supports, instantiations=(("bf16", 64),)), name)
    assert (result.outcome, name == "new_shape") in (("ok", False), ("unsupported", True)), result.message


def test_a_property_that_does_not_hold_is_named(variant_of: MakeVariant) -> None:
    """The message begins with the property and the data, and `caught_by` is the property."""
    source = PYTHON_SOURCE.replace("* scale", "* scale\n    scores = scores.clamp(-20, 20)")
    result = hold(variant_of(source), "hard_data")
    assert (result.outcome, result.caught_by) == ("wrong", ("hard_data",))
    assert result.message.startswith("hard_data (scores 30 times as large): ")


def test_a_wrong_output_of_a_property_has_place_map_and_cause(variant_of: MakeVariant) -> None:
    """An output for which a property does not hold is diagnosed as that of a case: bounds, element, map and cause."""
    source = PYTHON_SOURCE.replace("* scale", "* scale\n    scores = 30 * torch.tanh(scores / 30)")
    result = hold(variant_of(source), "hard_data")
    assert result.message.startswith("hard_data (scores 30 times as large): max error ")
    assert result.check is not None
    assert result.diagnosis is not None
    assert (result.check.passed, result.check.worst is None) == (False, False)
    assert result.diagnosis.error_map[0].startswith("error by head and tile of 16 queries")
    assert result.diagnosis.cause == (
        "the scores are 30 tanh(S / 30): a soft cap of 30 is on; if it is meant, declare `softcap` in `supports`"
    )


IGNORES_SCALE = PYTHON_SOURCE.replace("* scale", "* q.shape[-1] ** -0.5")
IGNORES_HEADS = PYTHON_SOURCE.replace(
    "    scores =", "    k, v = k[:, :1].expand_as(k), v[:, 1:2].expand_as(v)\n    scores =", 1
)
ADDS_HEAD_1 = PYTHON_SOURCE.replace("    return result", "    result[:, 0] += result[:, 1]\n    return result")
ZEROS = PYTHON_SOURCE.replace("    return result", "    result[:, :, 128:] *= k.stride(1) != 0\n    return result")


@pytest.mark.parametrize(
    ("name", "source", "cause"),
    [
        ("zero_scale", IGNORES_SCALE, "the softmax scale is 1/sqrt(D), not 0: the scale of the call is not used"),
        ("negative_scale", IGNORES_SCALE, "the softmax scale is 1/sqrt(D), not -0.125: the scale of the call"),
        ("padded_rows", IGNORES_HEADS, "no known mistake gives this output"),
        ("head_independence", ADDS_HEAD_1, "wrong in head 0 of 3; no known mistake gives this output"),
        ("expanded_heads", ZEROS, "the output is 0 in query 128 to 149 of 150: never written there, or a zero"),
    ],
)
def test_each_property_has_a_cause(variant_of: MakeVariant, name: str, source: str, cause: str) -> None:
    """Each property is diagnosed on the inputs of its own call, also one that compares outputs bit by bit."""
    result = hold(variant_of(source), name)
    assert (result.outcome, result.caught_by) == ("wrong", (name,))
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause


def test_a_property_about_nan_makes_up_no_cause(variant_of: MakeVariant) -> None:
    """Where the right output has NaN, or an input was changed, there is no output to diagnose."""
    source = PYTHON_SOURCE.replace("    return result", "    result += v.isnan().any() * 2.0\n    return result")
    result = hold(variant_of(source), "contained_nan")
    assert (result.outcome, result.caught_by, result.diagnosis, result.check) == (
        "wrong",
        ("contained_nan",),
        None,
        None,
    )


def test_a_right_kernel_with_many_keys_holds(variant_of: MakeVariant) -> None:
    """Row sums that are 1e-5 too large do not matter: no output of `hard_data` lies halfway between two numbers."""
    source = PYTHON_SOURCE.replace("torch.softmax(scores, -1)", "(torch.softmax(scores, -1) * (1 - 1e-5))")
    assert source != PYTHON_SOURCE
    result = hold(variant_of(source), "hard_data", parse_case("b1h1s150d64-bf16-sk4096-seed0"))
    assert (result.outcome, result.message) == ("ok", "")


WRAPS = PYTHON_SOURCE.replace("    return result if", "    result[:, 64:] = result[:, :1]\n    return result if")


@pytest.mark.parametrize(("source", "outcome"), [(PYTHON_SOURCE, "ok"), (WRAPS, "wrong")], ids=["right", "wraps"])
def test_heads_that_are_not_computed_are_found(
    variant_of: MakeVariant, monkeypatch: pytest.MonkeyPatch, source: str, outcome: str
) -> None:
    """A kernel that computes only the first 64 heads breaks `many_heads`."""
    monkeypatch.setattr("pytest_fa.judge.properties.memory.MANY", 65)
    assert hold(variant_of(source), "many_heads").outcome == outcome


def test_inputs_that_a_property_changes_are_found(variant_of: MakeVariant) -> None:
    """If a kernel changes an input during a property, the result is `wrong`, caught by `inputs`."""
    source = PYTHON_SOURCE.replace("    scores =", "    if scale < 0:\n        q.zero_()\n    scores =", 1)
    result = hold(variant_of(source), "negative_scale")
    assert (result.outcome, result.caught_by) == ("wrong", ("inputs",))


# A right kernel that writes the log-sum-exp, which is `expression`.
WRITES_LSE = PYTHON_SOURCE.replace("out=None)", "out=None, lse=None)").replace(
    "    return result", "    exact = torch.logsumexp(scores, -1)\n    lse.copy_(expression)\n    return result"
)
LOSES_NAN = "exact.nan_to_num(-math.inf, neginf=-math.inf)"


@pytest.mark.parametrize(
    ("expression", "caught_by", "message"),
    [
        ("exact", (), ""),
        (LOSES_NAN, ("contained_nan",), "NaN in key 75 of head 1): the log-sum-exp of 300 rows is not NaN"),
        (
            f"torch.where(k.isnan().any(), exact, {LOSES_NAN})",
            ("contained_nan",),
            "NaN in query 75 of head 1): the log-sum-exp of 2 rows is not NaN; in row (0, 1, 75) it is -inf",
        ),
    ],
    ids=["right", "key", "query"],
)
def test_a_log_sum_exp_that_loses_nan_is_found(
    variant_of: MakeVariant, expression: str, caught_by: tuple[str, ...], message: str
) -> None:
    """A kernel whose log-sum-exp is -inf in a row with a NaN score breaks `contained_nan`."""
    source = "import math\n" + WRITES_LSE.replace("expression", expression)
    result = hold(variant_of(source, "returns: [out, lse]\n"), "contained_nan")
    assert (result.caught_by, message in result.message) == (caught_by, True)


REFUSES = """\
    if k.stride(1) == 0:
        from pytest_fa.errors import UnsupportedCase
        raise UnsupportedCase("a stride of 0")
"""


def test_a_refusal_is_no_failure(variant_of: MakeVariant) -> None:
    """If a kernel refuses the strides of a property, the result is `unsupported` with its reason."""
    head, body = PYTHON_SOURCE.split("out=None):\n")
    result = hold(variant_of(f"{head}out=None):\n{REFUSES}{body}"), "expanded_heads")
    assert (result.outcome, result.message) == ("unsupported", "a stride of 0")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"dtype": "fp16", "head_dim": 64, "seq_q": 150, "seq_k": 150, "causal": "none", "layout": "bhsd"}),
        (
            "{dtype: [bf16], head_dim: [128], causal: [top_left]}",
            {"dtype": "bf16", "head_dim": 128, "causal": "top_left"},
        ),
        (
            "{seq_q_multiple_of: 64, seq_k_multiple_of: 128, layout: [bshd]}",
            {"seq_q": 192, "seq_k": 256, "layout": "bshd"},
        ),
        ("{seq_k_min: 2048}", {"seq_k": 2048}),
    ],
)
def test_the_case_is_one_that_the_variant_takes(
    write_variant: WriteVariant, tmp_path: Path, more: str, expected: dict[str, Any]
) -> None:
    """The property's case has a dtype, head_dim, mask, layout and lengths that the manifest supports."""
    manifest = "step: a\nbecause: b\nexpect: c\n" + (f"supports: {more}\n" if more else "")
    folder = write_variant("mine", manifest=manifest, **{"kernel.cu": ""})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    case = property_case(variant)
    assert {name: getattr(case, name) for name in expected} == expected
    assert variant.refuses(case) is None


def test_properties_that_need_a_gpu_do_not_apply_without_one(variant_of: MakeVariant) -> None:
    """On a CPU, the properties that need a GPU do not apply; `first_call_in_capture` also needs a library."""
    variant = variant_of()
    assert {name for name in PROPERTIES if not applies(name, variant, "cpu")} == ON_GPU | LEFT_OUT
    assert {name for name in PROPERTIES if not applies(name, variant, "cuda")} == {"first_call_in_capture", *LEFT_OUT}


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ({}, set()),
        ({"strides": "aligned16"}, {"unaligned_rows", "offset_pointers"}),
        ({"strides": "equal"}, {"unaligned_rows", "offset_pointers", "different_strides"}),
        ({"strides": "dense"}, set(STRIDES_OF)),
        ({"fixed_scale": True}, {"zero_scale", "negative_scale"}),
        ({"default_stream_only": True}, {"streams", "graph_capture", "first_call_in_capture"}),
    ],
    ids=["nothing", "aligned16", "equal", "dense", "fixed_scale", "default_stream_only"],
)
def test_what_a_manifest_declares_is_not_judged(
    variant_of: MakeVariant, declared: dict[str, Any], names: set[str]
) -> None:
    """Each declaration takes exactly its properties away, and says itself as the reason."""
    variant = variant_of()
    variant = msgspec.structs.replace(variant, supports=msgspec.structs.replace(variant.supports, **declared))
    reasons = {name: reason for name in PROPERTIES if (reason := declared_against(name, variant))}
    assert set(reasons) == names
    assert {reason.split(":")[0].removeprefix("supports.") for reason in reasons.values()} <= set(declared)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_right_kernel_holds_under_the_absolute_policy(variant_of: MakeVariant, name: str) -> None:
    """Its bound is below a unit in the last place of large values, which it is therefore not given."""
    variant = variant_of()
    job = CaseJob(variant, property_case(variant), None, "cpu", "absolute", checks_output=True, time=False)
    result = run_case(msgspec.structs.replace(job, property_name=name))
    assert (result.outcome, result.message) == ("ok", "")


def test_a_function_for_contiguous_tensors_has_no_properties_about_strides(variant_of: MakeVariant) -> None:
    """`entry.call.contiguous` declares it, but for the offset of a pointer."""
    variant = variant_of()
    entry = msgspec.structs.replace(variant.entry, call=Call(contiguous=True))
    declared = {name: declared_against(name, msgspec.structs.replace(variant, entry=entry)) for name in PROPERTIES}
    assert {name for name, reason in declared.items() if reason} == set(STRIDES_OF) - {"offset_pointers"}


def test_far_strides_of_a_large_tensor_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other axes fit behind the far end, whichever axis is far."""
    monkeypatch.setattr(memory, "FAR_ELEMENTS", 2**22)
    tensor = torch.zeros(2, 3, 64, 128)
    for axis in (0, 1, 2):
        far = memory._far(axis, 2**22 + 2 * tensor.numel(), 8, tensor)
        assert (tensor.shape[axis] - 1) * far.stride(axis) >= 2**22


@pytest.mark.parametrize("name", ["many_heads", "many_batches", "many_queries"])
def test_a_right_kernel_computes_many(variant_of: MakeVariant, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A right kernel computes 65 heads, batches or queries, under each mask."""
    monkeypatch.setattr(memory, "MANY", 65)
    variant = variant_of()
    for shape in ("b2h3s150d64-fp16", "b2h3s150d64-fp16-causal"):
        result = hold(variant, name, parse_case(f"{shape}-seed0"))
        assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize(
    ("free_bytes", "total_bytes", "refused_with"),
    [(2**25, 2**30, None), (2**22, 2**30, LacksMemory), (2**22, 2**22, UnsupportedCase)],
)
def test_far_offsets_needs_free_memory(
    variant_of: MakeVariant,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    total_bytes: int,
    refused_with: type[UnsupportedCase] | None,
) -> None:
    """It needs K and V twice: for the judge and for the candidate.  Memory that others use may become free."""
    monkeypatch.setattr(memory, "FAR_ELEMENTS", 2**16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, total_bytes))
    variant = variant_of()
    case, candidate = property_case(variant), Candidate.in_this_process()
    candidate.open(variant, None, "cpu", case.computes)
    subject = PropertySubject(variant, case, "same_precision", candidate)

    if refused_with is None:
        properties.PROPERTIES["far_offsets"](subject)
        return
    with pytest.raises(UnsupportedCase, match="GPU memory") as refusal:
        properties.PROPERTIES["far_offsets"](subject)
    assert type(refusal.value) is refused_with
