"""FlashAttention-3 is adopted by a manifest alone: that of the documentation, with the place of its extension."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from pytest_fa.records.environment import find_gpu
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.adopted import FLASH_ATTENTION_3, LIBRARIES, cases_of
from tests.factories import WriteVariant

LIBRARY = "FLASH_ATTN_3_LIBRARY"
LEFT_OUT = "This flash attention build does not support"
HOPPER = (9, 0)
NAMES = ("flash", "flash_wide_v", "flash_narrow_v")
MIN_CASES = 15


@pytest.fixture
def variants(write_variant: WriteVariant) -> dict[str, Variant]:
    """The variants by name; without the extension or a Hopper GPU, tests are skipped with the reason."""
    gpu, path = find_gpu(), os.environ.get(LIBRARY, "")
    if not Path(path).is_file():
        pytest.skip(f"needs FlashAttention-3: set {LIBRARY} to the path of its extension")
    if gpu is None or gpu.compute_capability != HOPPER:
        pytest.skip("FlashAttention-3 needs a GPU of compute capability 9.0")
    libraries = [*sorted(map(str, Path(path).parent.glob("libcudart.so.*[0-9]"))), path]
    manifest = FLASH_ATTENTION_3.replace(LIBRARIES, f"[{', '.join(libraries)}]")
    folder = write_variant("adopted", manifest=manifest)
    return {variant.name: variant for variant in read_manifest(folder / "variant.yaml", folder.parent)}


def judged(variant: Variant, case: Case) -> CaseResult:
    """The result of one case on the GPU."""
    return run_case(CaseJob(variant, case, None, "cuda", variant.tolerance, checks_output=True, time=False, repeats=20))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_manifest_claims_is_right(variants: dict[str, Variant], name: str) -> None:
    """The cases of smoke, edge and modifiers that it supports, and its claims; a build may leave out a part."""
    cases = cases_of(variants[name])
    assert len(cases) >= MIN_CASES
    results = {case.id: judged(variants[name], case) for case in cases}
    wrong = {
        case: f"{result.outcome}: {result.message}"
        for case, result in results.items()
        if result.outcome != "ok" and LEFT_OUT not in result.message
    }
    assert wrong == {}
