"""Discovery: roots in order, a glob one folder deep, packages, companions, and neighbours that go on."""

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
    "sdpa_cudnn": "baseline",
    "sdpa_efficient": "baseline",
    "sdpa_math": "baseline",
}
SOURCE = {"kernel.cu": ""}


@pytest.fixture(autouse=True)
def _no_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is installed beside the project does not reach these tests."""
    monkeypatch.setattr(discover_module, "entry_points", lambda **_: ())


def test_the_companions_are_always_there() -> None:
    """Without any root there are the floor and the SDPA backends, none of them broken."""
    catalog = discover(())
    expected = dict(COMPANIONS)
    assert expected == {each.name: each.role for each in catalog.variants.values()}
    assert not catalog.broken


def test_a_folder_with_a_manifest_is_a_variant(tmp_path: Path, write_variant: WriteVariant) -> None:
    """Adding a folder adds a variant, found by its manifest alone and only one level deep."""
    write_variant("thing", **SOURCE)
    write_variant("deeper", root=tmp_path / "kernels" / "group", **SOURCE)
    (tmp_path / "kernels" / "notes").mkdir()
    (tmp_path / "kernels" / "variant.yaml").write_text("not: read", encoding="utf-8")
    catalog = discover((tmp_path / "kernels",))
    assert (["thing", *COMPANIONS], {}) == (list(catalog.variants), catalog.broken)


def test_roots_keep_their_order(tmp_path: Path, write_variant: WriteVariant) -> None:
    """Variants come in the order of their roots, by folder name within one, and know both."""
    for root, name in (("late", "a"), ("early", "z"), ("early", "b")):
        write_variant(name, root=tmp_path / root, **SOURCE)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    found = [(each.name, each.folder, each.root) for each in catalog.variants.values() if each.name not in COMPANIONS]
    expected = [("b", "early"), ("z", "early"), ("a", "late")]
    assert [(name, str(tmp_path / root / name), str(tmp_path / root)) for name, root in expected] == found


@pytest.mark.parametrize("second", ["kernels", "kernels/../kernels", "link"])
def test_a_root_is_read_once(tmp_path: Path, write_variant: WriteVariant, second: str) -> None:
    """A root that is given twice, however it is spelled, does not make its variants twins of themselves."""
    write_variant("thing", **SOURCE)
    (tmp_path / "link").symlink_to("kernels")
    catalog = discover((tmp_path / "kernels", tmp_path / second))
    assert (["thing", *COMPANIONS], {}) == (list(catalog.variants), catalog.broken)


def test_a_broken_manifest_does_not_stop_its_neighbours(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A manifest that cannot be read is kept with its problem, and the others are found."""
    write_variant("bad", manifest="step: only\n")
    write_variant("good", **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    assert ["good", *COMPANIONS] == list(catalog.variants)
    path = tmp_path / "kernels" / "bad" / "variant.yaml"
    assert {"bad": f"{path}: key 'because' is missing in the manifest"} == {
        each.name: each.problem for each in catalog.broken.values()
    }


def test_broken_folders_of_one_name_are_both_kept(tmp_path: Path, write_variant: WriteVariant) -> None:
    """Two roots may each hold a broken folder of the same name, and neither problem hides the other."""
    for root in ("early", "late"):
        write_variant("bad", manifest="step: only\n", root=tmp_path / root)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    problems = [each.problem.split(": key")[0] for each in catalog.broken.values()]
    assert [str(tmp_path / root / "bad" / "variant.yaml") for root in ("early", "late")] == problems


def test_a_name_belongs_to_whom_it_was_given_first(tmp_path: Path, write_variant: WriteVariant) -> None:
    """The second manifest of a name is broken and says where the first one is; the first stays."""
    first = write_variant("thing", root=tmp_path / "early", **SOURCE)
    second = write_variant("thing", root=tmp_path / "late", **SOURCE)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    assert str(first) == catalog.variants["thing"].folder
    problem = f"{second / 'variant.yaml'}: variant 'thing' is already defined in {first}"
    assert [("thing", problem)] == [(each.name, each.problem) for each in catalog.broken.values()]


def test_members_may_not_take_a_name_either(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A folder's member that takes another folder's name is broken alone; its siblings are found."""
    write_variant("alpha", **SOURCE)
    members = "step: s\nbecause: b\nexpect: e\nvariants: {alpha: {}, beta: {}}\n"
    write_variant("group", manifest=members, **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    broken = [each.name for each in catalog.broken.values()]
    assert (["alpha", "beta", *COMPANIONS], ["alpha"]) == (list(catalog.variants), broken)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_root_must_be_a_folder(tmp_path: Path, kind: str) -> None:
    """A root that is not there, or is a file, is named with what it must hold."""
    root = tmp_path / "kernels"
    if kind == "file":
        root.write_text("", encoding="utf-8")
    with pytest.raises(UsageProblem) as problem:
        discover((root,))
    assert f"--fa-kernels: no folder {str(root)!r}; it must hold <variant>/variant.yaml" == str(problem.value)


def test_packages_bring_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant) -> None:
    """A package that is named by an entry point provides its folders after the roots and before the companions."""
    package = tmp_path / "site" / "brought_kernels"
    write_variant("brought", root=package, **SOURCE)
    (package / "__init__.py").write_text("", encoding="utf-8")
    write_variant("own", **SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    asked: list[dict[str, Any]] = []

    def entry_points(**selection: Any) -> Sequence[EntryPoint]:
        asked.append(selection)
        return [EntryPoint("brought", "brought_kernels", ENTRY_POINT_GROUP)]

    monkeypatch.setattr(discover_module, "entry_points", entry_points)
    try:
        catalog = discover((tmp_path / "kernels",))
    finally:
        sys.modules.pop("brought_kernels", None)
    expected = ["own", "brought", *COMPANIONS], [{"group": "pytest_fa.kernels"}]
    assert expected == (list(catalog.variants), asked)


def test_the_companions_lie_in_the_package() -> None:
    """What stands beside every timed shape travels with the package and needs no repository."""
    assert {str(BUILTIN_ROOT.resolve())} == {each.root for each in discover(()).variants.values()}
