"""Architectures: which builds run on which GPU, and what is compiled with and without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build import target
from pytest_fa.catalog.variant import ARCHES, Arch, Variant
from pytest_fa.errors import BuildError
from pytest_fa.records.environment import Gpu

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace


def variant_for(place: Workplace, *arches: str) -> Variant:
    """Return the variant with these architectures in its manifest."""
    manifest = place.folder / "variant.yaml"
    text = manifest.read_text(encoding="utf-8").replace("[sm_80]", f"[{', '.join(arches)}]")
    manifest.write_text(text, encoding="utf-8")
    return place.variant()


def put_in(monkeypatch: pytest.MonkeyPatch, compute_capability: tuple[int, int] | None) -> None:
    """Simulate a machine with a GPU of this compute capability, or without a GPU."""
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
    """sm_80 builds run on 8.0 and all newer GPUs, by their PTX; sm_89 and sm_90a only on their own version."""
    assert [arch for arch in ARCHES if target.runs_on(arch, compute_capability)] == arches


@pytest.mark.parametrize(
    ("arch", "runs", "does_not_run"),
    [
        ("sm_86", [(8, 6), (8, 9), (9, 0), (12, 0)], [(8, 0), (7, 5)]),
        ("sm_90", [(9, 0), (10, 0)], [(8, 9)]),
        ("sm_100a", [(10, 0)], [(10, 3), (11, 0), (12, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (11, 0), (12, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 3)]),
        ("sm_121a", [(12, 1)], [(12, 0)]),
    ],
)
def test_suffixes_restrict_where_code_runs(
    arch: Arch, runs: list[tuple[int, int]], does_not_run: list[tuple[int, int]]
) -> None:
    """Plain code also runs on newer GPUs, by PTX; `a` code on one version only, `f` code on newer minor versions."""
    assert [version for version in (*runs, *does_not_run) if target.runs_on(arch, version)] == runs


@pytest.mark.parametrize(
    ("arches", "compute_capability", "native"),
    [
        (("sm_90a", "sm_100a"), (10, 0), "sm_100a"),
        (("sm_90", "sm_90a"), (9, 0), "sm_90a"),
        (("sm_80", "sm_120", "sm_120a", "sm_120f"), (12, 0), "sm_120a"),
        (("sm_80", "sm_120", "sm_120a", "sm_120f"), (12, 1), "sm_120f"),
        (("sm_80", "sm_90a"), (12, 0), "sm_80"),
    ],
)
def test_the_nearest_architecture_is_native(
    unbuilt: Workplace,
    monkeypatch: pytest.MonkeyPatch,
    arches: tuple[str, ...],
    compute_capability: tuple[int, int],
    native: Arch,
) -> None:
    """The highest number that runs is chosen, which is not the last in the alphabet; then `a`, then `f`."""
    put_in(monkeypatch, compute_capability)

    assert target.native_arch(variant_for(unbuilt, *arches)) == native


@pytest.mark.parametrize(
    ("compute_capability", "native"), [(None, "sm_90a"), ((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((10, 0), "sm_80")]
)
def test_native_arch(
    unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch, compute_capability: tuple[int, int] | None, native: Arch
) -> None:
    """`native_arch` is the best architecture that runs on this GPU, or the variant's last one without a GPU."""
    put_in(monkeypatch, compute_capability)

    assert target.native_arch(variant_for(unbuilt, *ARCHES)) == native


def test_no_arch_for_this_gpu(unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no architecture runs on the GPU, the message names the variant's architectures and the GPU's."""
    put_in(monkeypatch, (9, 0))
    variant = variant_for(unbuilt, "sm_89")

    with pytest.raises(BuildError) as caught:
        target.target_arches(variant, ())

    assert str(caught.value) == (
        "tile is only for sm_89; this GPU (NVIDIA X) needs sm_90; if the kernel supports it, add sm_90 to arch in "
        f"{unbuilt.folder}/variant.yaml"
    )


@pytest.mark.parametrize(
    ("requested", "compute_capability", "compiled"),
    [
        ((), None, ("sm_90a",)),
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
    requested: tuple[str, ...],
    compute_capability: tuple[int, int] | None,
    compiled: tuple[str, ...],
) -> None:
    """The requested architectures are compiled, else that of the GPU, else the last one."""
    put_in(monkeypatch, compute_capability)

    assert target.target_arches(variant_for(unbuilt, "sm_80", "sm_90a"), requested) == compiled


def test_a_manifest_without_architectures_accepts_every_one(unbuilt: Workplace) -> None:
    """If the manifest names no architectures, --fa-arch selects any of them, in the order of their numbers."""
    manifest = unbuilt.folder / "variant.yaml"
    manifest.write_text("", encoding="utf-8")

    variant = unbuilt.variant()

    assert target.target_arches(variant, (), every=True) == ARCHES
    assert target.target_arches(variant, ("sm_120", "sm_86", "sm_120")) == ("sm_86", "sm_120")


def test_every_architecture_of_a_manifest(unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `every`, a GPU does not restrict what is compiled."""
    put_in(monkeypatch, (9, 0))

    assert target.target_arches(variant_for(unbuilt, "sm_90a", "sm_120"), (), every=True) == ("sm_90a", "sm_120")


def test_requested_arch_that_the_variant_does_not_have(unbuilt: Workplace, snapshot: SnapshotAssertion) -> None:
    """The message names the variant's architectures and the requested ones."""
    with pytest.raises(BuildError) as caught:
        target.target_arches(variant_for(unbuilt, "sm_80", "sm_90a"), ("sm_89",))

    assert snapshot == str(caught.value)
