"""A variant in e4m3: plain commands judge it, and SDPA is timed on the same shape in fp16."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.projects import NewProject, Project, cases_of, variants_of

KERNEL = Path(__file__).parents[2] / "kernels" / "reference_e4m3"
CASE = "b1h2s64d64-e4m3-seed0"


@pytest.fixture(scope="module")
def lab(new_project: NewProject) -> Project:
    """A candidate in fp16, and the ladder's variant in e4m3."""
    project = new_project("lab_e4m3")
    project.python_variant("alpha")
    source = (KERNEL / "reference_e4m3.py").read_text(encoding="utf-8")
    manifest = (KERNEL / "variant.yaml").read_text(encoding="utf-8").replace("reference_e4m3:forward", "entry:forward")
    project.python_variant("fp8", source, manifest.replace("parent: reference\n", ""))
    return project


def test_only_the_variant_in_e4m3_gets_its_cases(lab: Project) -> None:
    """A plain run has e4m3 cases for one variant and fp16 cases for the other, special heads included."""
    correct = [test_id for test_id in lab.ids() if "test_correct" in test_id]
    assert {"e4m3" in test_id for test_id in correct if "[fp8-" in test_id} == {True}
    assert {"e4m3" in test_id for test_id in correct if "[alpha-" in test_id} == {False}
    assert all(any(f"{part}-seed0" in test_id for test_id in correct) for part in ("zero_head", "outlier", "tiny"))


@pytest.mark.nightly
def test_sdpa_is_timed_in_fp16(lab: Project) -> None:
    """SDPA runs the shape in fp16, under that name; the heading says which backend is the baseline."""
    ids = lab.ids("--fa-variant=fp8", f"--fa-case={CASE}")
    assert {"fp8", "sdpa_flash", "sdpa_math"} <= set(variants_of(ids, "test_speed"))
    assert set(cases_of([test_id for test_id in ids if "sdpa" in test_id], "test_speed")) == {"b1h2s64d64-fp16"}
    run = lab.suite("--fa-variant=fp8", f"--fa-case={CASE}")
    assert run.outcomes["test_correct[fp8-" + CASE + "]"] == "passed"
    assert "in fp16, because SDPA has no e4m3)" in run.text
