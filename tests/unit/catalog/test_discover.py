"""Discovery finds variants in kernels folders, in packages and in `builtin/`; a broken manifest affects no other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.catalog import discover as discover_module
from pytest_fa.catalog.discover import BUILTIN_ROOT, ENTRY_POINT_GROUP, discover
from pytest_fa.errors import UsageProblem
from tests.factories import WriteVariant

COMPANIONS = {
    "noop": "overhead",
    "sdpa_flash": "baseline",
    "sdpa_flash_cpu": "baseline",
    "sdpa_cudnn": "baseline",
    "sdpa_efficient": "baseline",
    "sdpa_math": "baseline",
}
SOURCE = {"kernel.cu": ""}


@pytest.fixture(autouse=True)
def _no_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the entry points of installed packages."""
    monkeypatch.setattr(discover_module, "entry_points", lambda **_: ())


def test_the_companions_are_always_found() -> None:
    """Without any root, the launch-overhead variant and the SDPA backends are found, and none is broken."""
    catalog = discover(())
    assert {variant.name: variant.role for variant in catalog.variants.values()} == COMPANIONS
    assert not catalog.broken


def test_a_folder_with_a_manifest_is_a_variant(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A folder with a manifest is a variant; manifests at any other depth are not read."""
    write_variant("thing", **SOURCE)
    write_variant("deeper", root=tmp_path / "kernels" / "group", **SOURCE)
    (tmp_path / "kernels" / "notes").mkdir()
    (tmp_path / "kernels" / "variant.yaml").write_text("not: read", encoding="utf-8")
    catalog = discover((tmp_path / "kernels",))
    assert (["thing", *COMPANIONS], {}) == (list(catalog.variants), catalog.broken)


def test_roots_keep_their_order(tmp_path: Path, write_variant: WriteVariant) -> None:
    """Variants are in the order of their roots, then of their folder names, and have both as fields."""
    for root, name in (("late", "a"), ("early", "z"), ("early", "b")):
        write_variant(name, root=tmp_path / root, **SOURCE)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    variants = [variant for variant in catalog.variants.values() if variant.name not in COMPANIONS]
    expected = [("b", "early"), ("z", "early"), ("a", "late")]
    assert [(name, str(tmp_path / root / name), str(tmp_path / root)) for name, root in expected] == [
        (variant.name, variant.folder, variant.root) for variant in variants
    ]


@pytest.mark.parametrize("second", ["kernels", "kernels/../kernels", "link"])
def test_a_root_is_read_once(tmp_path: Path, write_variant: WriteVariant, second: str) -> None:
    """A root that is passed twice, in any spelling, does not give duplicate variants."""
    write_variant("thing", **SOURCE)
    (tmp_path / "link").symlink_to("kernels")
    catalog = discover((tmp_path / "kernels", tmp_path / second))
    assert (["thing", *COMPANIONS], {}) == (list(catalog.variants), catalog.broken)


def test_a_broken_manifest_does_not_affect_other_variants(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A manifest that cannot be read is returned with its problem, and the other variants are found."""
    write_variant("bad", manifest="step: only\n")
    write_variant("good", **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    assert ["good", *COMPANIONS] == list(catalog.variants)
    path = tmp_path / "kernels" / "bad" / "variant.yaml"
    assert {"bad": f"{path}: key 'because' is missing in the manifest"} == {
        broken.name: broken.problem for broken in catalog.broken.values()
    }


def test_broken_folders_of_the_same_name_are_both_reported(tmp_path: Path, write_variant: WriteVariant) -> None:
    """If two roots hold a broken folder of the same name, both problems are reported."""
    for root in ("early", "late"):
        write_variant("bad", manifest="step: only\n", root=tmp_path / root)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    problems = [broken.problem.split(": key")[0] for broken in catalog.broken.values()]
    assert [str(tmp_path / root / "bad" / "variant.yaml") for root in ("early", "late")] == problems


def test_the_first_variant_of_a_name_is_kept(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A second variant of the same name is broken, with the folder of the first one in its problem."""
    first = write_variant("thing", root=tmp_path / "early", **SOURCE)
    second = write_variant("thing", root=tmp_path / "late", **SOURCE)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    assert str(first) == catalog.variants["thing"].folder
    problem = f"{second / 'variant.yaml'}: variant 'thing' is already defined in {first}"
    assert [("thing", problem)] == [(broken.name, broken.problem) for broken in catalog.broken.values()]


def test_a_member_may_not_reuse_a_name(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A member with the name of another folder is broken; the other members of its folder are found."""
    write_variant("alpha", **SOURCE)
    members = "step: s\nbecause: b\nexpect: e\nvariants: {alpha: {}, beta: {}}\n"
    write_variant("group", manifest=members, **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    broken = [variant.name for variant in catalog.broken.values()]
    assert (["alpha", "beta", *COMPANIONS], ["alpha"]) == (list(catalog.variants), broken)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_root_must_be_a_folder(tmp_path: Path, kind: str) -> None:
    """A root that is missing or is a file is refused, with what it must hold."""
    root = tmp_path / "kernels"
    if kind == "file":
        root.write_text("", encoding="utf-8")
    with pytest.raises(UsageProblem) as problem:
        discover((root,))
    assert f"--fa-kernels: no folder {str(root)!r}; it must hold <variant>/variant.yaml" == str(problem.value)


def test_packages_provide_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant
) -> None:
    """The variants of a package with an entry point come after those of the roots and before the companions."""
    package = tmp_path / "site" / "packaged_kernels"
    write_variant("packaged", root=package, **SOURCE)
    (package / "__init__.py").write_text("", encoding="utf-8")
    write_variant("own", **SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    selections: list[dict[str, Any]] = []

    def entry_points(**selection: Any) -> Sequence[EntryPoint]:
        selections.append(selection)
        return [EntryPoint("packaged", "packaged_kernels", ENTRY_POINT_GROUP)]

    monkeypatch.setattr(discover_module, "entry_points", entry_points)
    try:
        catalog = discover((tmp_path / "kernels",))
    finally:
        sys.modules.pop("packaged_kernels", None)
    expected = ["own", "packaged", *COMPANIONS], [{"group": "pytest_fa.kernels"}]
    assert expected == (list(catalog.variants), selections)


def test_the_companions_are_part_of_the_package() -> None:
    """The companions are in the installed package, so they do not need the repository."""
    assert {str(BUILTIN_ROOT.resolve())} == {variant.root for variant in discover(()).variants.values()}
