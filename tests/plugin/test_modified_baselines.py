"""Baselines for windows, biases, masks, caps, slopes and sinks: SDPA with a mask, and FlexAttention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import pytest_fa
from pytest_fa.builtin.flex import flex as flex_module
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.suites import SUITES
from pytest_fa.errors import UnsupportedCase
from tests.projects import NewProject, Project

FLEX = Path(inspect.getfile(pytest_fa)).parent / "builtin" / "flex"
COMPILED = "torch.compile(_attend, dynamic=False, fullgraph=True)"
MASKED = (
    "b1h2s70d64-fp16-win37_21-seed0",
    "b1h4s9d80-fp16-win20_o-kv2-sk40-biasbhq-seed0",
    "b2h2s90d64-fp32-causal_br-sk130-dv72-maskbq-seed0",
    "b2h2s90d64-bf16-winm8_57-biasq-maskbhq-bshd-seed0",
)
GATHERED = (
    "b9h4s5d64-fp16-kv2-sk257-var1-seed0",
    "b4h4s70d64-bf16-causal_br-kv2-var2-bshd-seed0",
    "b4h4s3d80-fp32-causal_br-kv2-sk150-var4-page16-seed0",
    "b4h4s1d64-fp16-kv1-sk300-var5-page64hnd-seed0",
    "b4h4s3d64-bf16-causal_br-kv2-sk150-var4-page16-append-seed0",
)


def test_sdpa_with_a_mask_takes_windows_biases_and_masks(new_project: NewProject) -> None:
    """It is right wherever it is compared, also in rows that see no key."""
    project = new_project("masked")
    run = project.run(f"--fa-case={','.join(MASKED)}", "--fa-variant=sdpa_math_mask", "--benchmark-disable")
    of_baseline = {name: outcome for name, outcome in run.outcomes.items() if "test_correct[sdpa_math_mask" in name}
    assert of_baseline == {f"test_correct[sdpa_math_mask-{case}]": "passed" for case in MASKED}, run.reasons


def test_sdpa_on_gathered_copies_takes_lengths_and_pages(new_project: NewProject) -> None:
    """It is right wherever it is compared, also in rows that see no key."""
    project = new_project("gathered")
    run = project.run(f"--fa-case={','.join(GATHERED)}", "--fa-variant=sdpa_math_gathered", "--benchmark-disable")
    of_baseline = {name: outcome for name, outcome in run.outcomes.items() if "sdpa_math_gathered" in name}
    tests = {f"test_correct[sdpa_math_gathered-{case}]": "passed" for case in GATHERED}
    assert {name: of_baseline.get(name) for name in tests} == tests, run.reasons


def test_sdpa_with_a_mask_leaves_plain_cases_to_faster_ones() -> None:
    """A causal mask alone is plain attention, with the scale as it is."""
    variants = discover(()).variants
    masked = [each for each in variants.values() if each.name.endswith("_mask")]
    assert len(masked) == 3
    for variant in masked:
        for plain in ("b1h2s70d64-fp16-seed0", "b1h2s70d64-fp16-causal_br-sk90-seed0", "b1h2s70d64-fp16-causal-seed0"):
            assert "it is plain attention, supports.plain is false" in str(variant.refuses(parse_case(plain)))
        assert variant.refuses(parse_case("b1h2s70d64-fp16-win9_0-seed0")) is None
        assert "softcap is 50" in str(variant.refuses(parse_case("b1h2s70d64-fp16-win9_0-cap50-seed0")))


@pytest.fixture(scope="module")
def flex(new_project: NewProject) -> Project:
    """A project with FlexAttention, whose manifest says here that it also runs on a CPU."""
    project = new_project("flex")
    manifest = (FLEX / "variant.yaml").read_text(encoding="utf-8")
    on_cpu_too = manifest.replace("\nsupports:\n", "\nsupports:\n  device: [cuda, cpu]\n")
    project.write("kernels/flex/variant.yaml", on_cpu_too.replace("flex_attention: {}", "flex_on_cpu: {}"))
    source = (FLEX / "flex.py").read_text(encoding="utf-8")
    assert COMPILED in source
    project.write("kernels/flex/flex.py", source.replace(COMPILED, "_attend"))
    return project


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.nightly)])
def test_flex_attention_takes_every_part(flex: Project, share: int) -> None:
    """Without a compiler, it computes the same; the suite has every pair of parts.  It has no lengths and no scales."""
    even = [
        case for case in SUITES["modifiers"] if not case.value_of("ragged") and case.value_of("cache_dtype") == "none"
    ]
    cases = [case.id for case in even if case.dtype in ("fp16", "bf16")][::share]
    run = flex.run(
        f"--fa-case={','.join(cases)}",
        "--fa-variant=flex_on_cpu",
        "-k",
        "test_correct and flex_on_cpu",
    )
    assert run.outcomes == {f"test_correct[flex_on_cpu-{case}]": "passed" for case in cases}, run.reasons


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        (
            "No valid triton configs. out of resource: 245760\nmore",
            UnsupportedCase,
            "FlexAttention has no kernel for this",
        ),
        ("CUDA error: an illegal memory access", RuntimeError, "CUDA error: an illegal memory access"),
    ],
)
def test_a_case_without_a_kernel_is_refused_by_flex_attention(
    monkeypatch: pytest.MonkeyPatch, problem: str, kind: type[Exception], message: str
) -> None:
    """A case that no kernel of torch fits is no failure of the baseline; any other error is."""

    def refuses(*_: object) -> None:
        raise RuntimeError(problem)

    monkeypatch.setattr(flex_module, "_compiled", lambda: refuses)
    q = torch.zeros(1, 1, 8, 64)
    with pytest.raises(kind, match=message) as raised:
        flex_module.forward(q, q, q, scale=1.0)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


@pytest.mark.nightly
def test_flex_attention_is_compiled_for_each_of_many_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, torch compiles eight cases of a process, and runs the others slowly without a word."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    flex_module._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        for keys in range(16, 26):
            q = torch.zeros(1, 1, keys, 16)
            flex_module.forward(q, q, q, scale=1.0, window_left=keys - 10, window_right=0)
    flex_module._compiled.cache_clear()
    assert len(compiled) == 10
