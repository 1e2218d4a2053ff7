"""Baselines at any head_dim: SDPA is timed at D = 80 and 256, and a backend that refuses one is reported."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from pytest_fa.builtin.sdpa import sdpa
from pytest_fa.errors import UnsupportedCase
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import NewProject

SHAPES = ("b1h2s64d80-fp16", "b1h2s64d256-fp16")
REFUSES_80 = PYTHON_SOURCE.replace(
    "    scores =",
    '    if q.shape[3] == 80:\n        raise UnsupportedCase("no kernel for D = 80")\n    scores =',
    1,
).replace("import torch\n", "import torch\n\nfrom pytest_fa.errors import UnsupportedCase\n", 1)


def test_each_head_dim_has_a_baseline(new_project: NewProject) -> None:
    """SDPA is timed beside a kernel for D = 80 and 256; a user's baseline that refuses D = 80 is skipped, with why."""
    project = new_project("head_dims")
    project.python_variant("mine", manifest=PYTHON_MANIFEST.replace("{device:", "{head_dim: [80, 256], device:"))
    baseline = PYTHON_MANIFEST.replace("{device:", "{any_head_dim: true, device:") + "role: baseline\n"
    project.python_variant("picky", REFUSES_80, baseline)
    cases = ",".join(f"{shape}-seed0" for shape in SHAPES)
    chosen = "test_speed and (mine or math or picky) and not mask"
    run = project.suite("--fa-variant=mine", f"--fa-case={cases}", "-k", chosen)
    assert run.ret == 0, run.text
    assert run.outcomes == {
        f"test_speed[{name}-{shape}]": "skipped" if (name, shape) == ("picky", SHAPES[0]) else "passed"
        for shape in SHAPES
        for name in ("mine", "picky", "sdpa_math")
    }
    assert run.reasons[f"test_speed[picky-{SHAPES[0]}]"].endswith("no kernel for D = 80")
    assert all(f"{shape} (CPU, 1 thread; baseline: " in run.text for shape in SHAPES)
    assert "without a baseline" not in run.text


@pytest.mark.parametrize(
    "words", ["No available kernel. Aborting execution.", "cuDNN Frontend error: No execution plans"]
)
def test_a_backend_without_a_kernel_refuses(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """What torch raises where a backend has no kernel for a head_dim is a refusal with torch's words."""

    def attend(*_: Any, **__: Any) -> NoReturn:  # the arguments of torch's function
        raise RuntimeError(words)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attend)
    q = torch.zeros(1, 1, 2, 80)
    with pytest.raises(UnsupportedCase, match=words.split(".", maxsplit=1)[0]):
        sdpa.forward(q, q, q, scale=1.0)


def test_another_error_of_torch_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other error of torch stays one."""

    def attend(*_: Any, **__: Any) -> NoReturn:  # the arguments of torch's function
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attend)
    q = torch.zeros(1, 1, 2, 80)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sdpa.forward(q, q, q, scale=1.0)
