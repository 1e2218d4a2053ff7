"""Architectures: what runs on which GPU, and what is compiled with and without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_fa.build import target
from pytest_fa.catalog.variant import ARCHES, Arch, Variant
from pytest_fa.errors import BuildError
from pytest_fa.records.environment import Gpu

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace


def variant_for(place: Workplace, *arches: str) -> Variant:
    """The variant with these architectures in its manifest."""
    manifest = place.folder / "variant.yaml"
    text = manifest.read_text(encoding="utf-8").replace("[sm_80]", f"[{', '.join(arches)}]")
    manifest.write_text(text, encoding="utf-8")
    return place.variant()


def put_in(monkeypatch: pytest.MonkeyPatch, compute_capability: tuple[int, int] | None) -> None:
    """Make this a machine with such a GPU, or with none."""
    gpu = Gpu("NVIDIA X", "GPU-0", compute_capability, "580.1", "13.0") if compute_capability else None
    monkeypatch.setattr(target, "find_gpu", lambda: gpu)


@pytest.mark.parametrize(
    ("compute_capability", "arches"),
    [
        ((7, 5), []),
        ((8, 0), ["sm_80"]),
        ((8, 6), ["sm_80"]),
        ((8, 9), ["sm_80", "sm_89"]),
        ((9, 0), ["sm_80", "sm_90a"]),
        ((10, 0), ["sm_80"]),
        ((12, 0), ["sm_80"]),
    ],
)
def test_runs_on(compute_capability: tuple[int, int], arches: list[str]) -> None:
    """sm_80 runs from 8.0 on, by its PTX; sm_89 and sm_90a on their own chips alone."""
    assert [arch for arch in ARCHES if target.runs_on(arch, compute_capability)] == arches


@pytest.mark.parametrize(
    ("compute_capability", "native"), [(None, "sm_90a"), ((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((10, 0), "sm_80")]
)
def test_native_arch(
    unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch, compute_capability: tuple[int, int] | None, native: Arch
) -> None:
    """The best architecture that runs on this GPU, or the variant's last without a GPU."""
    put_in(monkeypatch, compute_capability)

    assert target.native_arch(variant_for(unbuilt, *ARCHES)) == native


def test_no_arch_for_this_gpu(unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, the message names what the variant is for and what the GPU is."""
    put_in(monkeypatch, (9, 0))
    variant = variant_for(unbuilt, "sm_89")

    with pytest.raises(BuildError) as caught:
        target.target_arches(variant, ())

    assert str(caught.value) == "tile is for sm_89; this GPU, NVIDIA X, is sm_90"


@pytest.mark.parametrize(
    ("asked", "compute_capability", "compiled"),
    [
        ((), None, ("sm_80", "sm_90a")),
        ((), (9, 0), ("sm_90a",)),
        ((), (8, 6), ("sm_80",)),
        (("sm_80",), (9, 0), ("sm_80",)),
        (("sm_90a", "sm_80"), None, ("sm_80", "sm_90a")),
        (("sm_89", "sm_90a"), None, ("sm_90a",)),
    ],
)
def test_target_arches(
    unbuilt: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    asked: tuple[str, ...],
    compute_capability: tuple[int, int] | None,
    compiled: tuple[str, ...],
) -> None:
    """What was asked for and the variant has, else the GPU's own, else all."""
    put_in(monkeypatch, compute_capability)

    assert target.target_arches(variant_for(unbuilt, "sm_80", "sm_90a"), asked) == compiled


def test_asked_for_what_the_variant_does_not_have(unbuilt: Workplace) -> None:
    """The message names what the variant has and what was asked for."""
    with pytest.raises(BuildError) as caught:
        target.target_arches(variant_for(unbuilt, "sm_80", "sm_90a"), ("sm_89",))

    assert str(caught.value) == "tile is for sm_80, sm_90a; --fa-arch asks for sm_89"
