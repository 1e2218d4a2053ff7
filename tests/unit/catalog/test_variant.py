"""Which cases a variant supports and refuses, and the device it runs on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Device, Entry, EntryKind, Limits, Role, Supports, Variant

EVERYTHING = Supports(
    dtype=("fp16", "bf16"),
    head_dim=(64, 128),
    causal=("none", "top_left", "bottom_right"),
    layout=("bhsd", "bshd"),
    grouped_heads=True,
    seq_k_min=0,
)
PLAIN = Variant(
    name="thing",
    folder="kernels/thing",
    root="kernels",
    role="candidate",
    entry=Entry(),
    arch=("sm_90a",),
    supports=EVERYTHING,
    instantiations=(("fp16", 64), ("bf16", 64), ("fp16", 128), ("bf16", 128)),
    defines={},
    flags=(),
    rounds=(),
    limits=Limits(),
    tolerance="same_precision",
    step="",
    parent=None,
    because="",
    expect="",
)


def supporting(**changes: Any) -> Variant:
    """Return a variant that supports everything, with these changes."""
    return msgspec.structs.replace(PLAIN, supports=msgspec.structs.replace(EVERYTHING, **changes))


# The change of `supports`, a shape that is then refused, and the reason, with the field and the value found.
REFUSALS = [
    ({"dtype": ("fp16",)}, "b1h2s64d64-bf16", "dtype is bf16, supports fp16 (extend supports.dtype if the kernel can)"),
    (
        {"head_dim": (64, 96)},
        "b1h2s64d128-fp16",
        "head_dim is 128, supports 64, 96 (extend supports.head_dim if the kernel can)",
    ),
    (
        {"causal": ("none",)},
        "b1h2s64d64-fp16-causal",
        "causal is top_left, supports none (extend supports.causal if the kernel can)",
    ),
    (
        {"causal": ("none", "top_left")},
        "b1h2s64d64-fp16-causal_br",
        "causal is bottom_right, supports none, top_left (extend supports.causal if the kernel can)",
    ),
    (
        {"layout": ("bhsd",)},
        "b1h2s64d64-fp16-bshd",
        "layout is bshd, supports bhsd (extend supports.layout if the kernel can)",
    ),
    (
        {"grouped_heads": False},
        "b1h4s64d64-fp16-kv2",
        "kv_heads is 2 for 4 heads, supports equal numbers (grouped_heads: false)",
    ),
    ({"seq_q_multiple_of": 64}, "b1h2s65d64-fp16", "seq_q is 65, supports multiples of 64"),
    ({"seq_k_multiple_of": 32}, "b1h2s64d64-fp16-sk33", "seq_k is 33, supports multiples of 32"),
    ({"seq_k_min": 1}, "b1h2s64d64-fp16-sk0", "seq_k is 0, supports 1 and more"),
]


@pytest.mark.parametrize(("changes", "shape", "reason"), REFUSALS, ids=[reason for *_, reason in REFUSALS])
def test_a_case_outside_supports_is_refused_with_the_field(changes: dict[str, Any], shape: str, reason: str) -> None:
    """The refusal names the variant, the shape, the manifest's field, the value found and the values allowed."""
    case = parse_case(f"{shape}-seed3")
    assert f"thing does not support {shape}: {reason}" == supporting(**changes).refuses(case)


@pytest.mark.parametrize("shape", [shape for _, shape, _ in REFUSALS])
def test_a_case_inside_supports_is_accepted(shape: str) -> None:
    """A variant without the limit supports the same shape."""
    assert PLAIN.refuses(parse_case(f"{shape}-seed3")) is None


@pytest.mark.parametrize(
    ("limits", "shape"),
    [
        ({"seq_q_multiple_of": 64}, "b1h2s128d64-fp16-sk65"),
        ({"seq_k_multiple_of": 32}, "b1h2s65d64-fp16-sk96"),
        ({"seq_k_min": 5}, "b1h2s4d64-fp16-sk5"),
        ({"grouped_heads": False}, "b1h4s64d64-fp16"),
    ],
)
def test_a_case_at_a_limit_is_accepted(limits: dict[str, Any], shape: str) -> None:
    """A multiple, the minimum and equal head counts are accepted; a limit on queries does not apply to keys."""
    assert supporting(**limits).refuses(parse_case(f"{shape}-seed0")) is None


def test_a_pair_that_was_not_compiled_is_refused(snapshot: SnapshotAssertion) -> None:
    """A supported dtype and a supported head_dim are refused if this pair is not instantiated."""
    variant = msgspec.structs.replace(PLAIN, instantiations=(("fp16", 64), ("bf16", 128)))
    refusal = variant.refuses(parse_case("b1h2s64d128-fp16-seed0"))
    assert snapshot == refusal


@pytest.mark.parametrize(
    ("devices", "gpu", "expected"),
    [
        (("cuda",), True, "cuda"),
        (("cuda",), False, None),
        (("cpu",), True, "cpu"),
        (("cpu",), False, "cpu"),
        (("cpu", "cuda"), True, "cuda"),
        (("cuda", "cpu"), False, "cpu"),
    ],
)
def test_the_gpu_comes_first(devices: tuple[Device, ...], *, gpu: bool, expected: Device | None) -> None:
    """A variant runs on the GPU if it supports it and there is one, else on the CPU if it supports that."""
    assert expected == supporting(device=devices).device_for(gpu=gpu)


@pytest.mark.parametrize(("kind", "expected"), [("cuda", True), ("python", False)])
def test_only_cuda_sources_are_built(kind: EntryKind, *, expected: bool) -> None:
    """A variant of kind cuda is compiled, one of kind python is not."""
    assert expected is msgspec.structs.replace(PLAIN, entry=Entry(kind=kind)).is_built


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("candidate", True),
        ("baseline", True),
        ("overhead", False),
        ("ablation", True),
        ("probe", True),
        ("wrong", True),
    ],
)
def test_only_the_role_overhead_is_not_judged(role: Role, *, expected: bool) -> None:
    """The role `overhead` computes nothing, so its output is not checked; all other roles are judged."""
    assert expected is msgspec.structs.replace(PLAIN, role=role).is_judged
