"""`python -m tests.honest_cases`: which variants are judged."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.variant import Device
from tests import honest_cases
from tests.honest_cases import HONEST, honest_variants, judge_honest

ON_CPU = {*HONEST, "reference", "cublas_hybrid"}
ON_GPU = {*HONEST, "reference", "flex", "triton_tiles", "flash_attention_3", "cluster_latency", "sdpa_cudnn"}


@pytest.mark.parametrize(("device", "expected"), [("cpu", ON_CPU), ("cuda", ON_GPU)])
def test_all_kinds_of_variants_are_judged(tmp_path: Path, device: Device, expected: set[str]) -> None:
    """On each device: the ladder, the baselines, and the small variants; on a GPU also FlexAttention and Triton."""
    with patch.object(honest_cases, "find_gpu", return_value=True if device == "cuda" else None):
        names = {variant.name for variant in honest_variants(tmp_path, device)}
    assert expected - names == set()


def test_a_variant_that_cannot_be_read_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that would silently not be judged is an error."""
    monkeypatch.setattr(honest_cases, "ENTRY", "entry:\n")
    with pytest.raises(SystemExit, match=r"allocates cannot be judged: "):
        honest_variants(tmp_path, "cpu")


def test_an_unknown_name_is_one_error(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """A word of --only that names no variant of this device gets a suggestion, and nothing is judged."""
    monkeypatch.setattr(honest_cases, "find_gpu", lambda: None)
    with pytest.raises(SystemExit) as error:
        judge_honest(1.0, 1, ("allocate",))
    assert snapshot == str(error.value)
