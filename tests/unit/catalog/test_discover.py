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
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant
from pytest_fa.errors import UnusableRun, UsageProblem
from tests.factories import WriteVariant

COMPANIONS = {
    "flex_attention": "baseline",
    "noop": "overhead",
    "sdpa_flash": "baseline",
    "sdpa_flash_cpu": "baseline",
    "sdpa_cudnn": "baseline",
    "sdpa_efficient": "baseline",
    "sdpa_math": "baseline",
    "sdpa_cudnn_mask": "baseline",
    "sdpa_efficient_mask": "baseline",
    "sdpa_math_mask": "baseline",
    "sdpa_cudnn_gathered": "baseline",
    "sdpa_efficient_gathered": "baseline",
    "sdpa_math_gathered": "baseline",
    "torch_varlen": "baseline",
    "sdpa_math_autograd": "baseline",
    "sdpa_flash_autograd": "baseline",
    "sdpa_cudnn_autograd": "baseline",
    "sdpa_efficient_autograd": "baseline",
    "sdpa_flash_backward": "baseline",
    "sdpa_cudnn_backward": "baseline",
    "sdpa_efficient_backward": "baseline",
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
    write_variant("bad", manifest="stop: wrong\n")
    write_variant("good", **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    assert ["good", *COMPANIONS] == list(catalog.variants)
    path = tmp_path / "kernels" / "bad" / "variant.yaml"
    assert {"bad": f"{path}: unknown key 'stop' in the manifest; did you mean 'step'?"} == {
        broken.name: broken.problem.split(" (allowed")[0] for broken in catalog.broken.values()
    }


def test_broken_folders_of_the_same_name_are_both_reported(tmp_path: Path, write_variant: WriteVariant) -> None:
    """If two roots hold a broken folder of the same name, both problems are reported."""
    for root in ("early", "late"):
        write_variant("bad", manifest="stop: wrong\n", root=tmp_path / root)
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    problems = [broken.problem.split(": unknown key")[0] for broken in catalog.broken.values()]
    assert [str(tmp_path / root / "bad" / "variant.yaml") for root in ("early", "late")] == problems


def test_a_name_selects_no_variant_if_two_have_it(tmp_path: Path, write_variant: WriteVariant) -> None:
    """Of two variants with one name none is chosen; the sentence about them has both paths."""
    folders = [write_variant("thing", root=tmp_path / root, **SOURCE) for root in ("early", "late")]
    catalog = discover((tmp_path / "early", tmp_path / "late"))
    first, second = [folder / "variant.yaml" for folder in folders]
    sentence = (
        f"variant 'thing' is declared 2 times: in {first} and in {second}; rename one (its folder, or its key under "
        f"'variants')"
    )
    assert (list(COMPANIONS), {"thing": sentence}) == (list(catalog.variants), catalog.clashes)
    for use in (catalog.require_unique_names, lambda: select_variants(catalog, ("thi*",))):
        with pytest.raises(UnusableRun) as problem:
            use()
        assert sentence == str(problem.value)


def test_a_member_may_not_reuse_a_name(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A member with the name of another folder clashes with it; the other members of its folder can be selected."""
    write_variant("alpha", **SOURCE)
    members = "step: s\nbecause: b\nexpect: e\nvariants: {alpha: {}, beta: {}}\n"
    write_variant("group", manifest=members, **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    assert (["beta", *COMPANIONS], ["alpha"]) == (list(catalog.variants), list(catalog.clashes))
    assert ["beta"] == [variant.name for variant in select_variants(catalog, ("beta",))]


@pytest.mark.parametrize("name", COMPANIONS)
def test_names_of_built_in_variants_are_reserved(tmp_path: Path, write_variant: WriteVariant, name: str) -> None:
    """A folder with the name of a built-in variant does not replace it, and the sentence says what to rename."""
    folder = write_variant(name, **SOURCE)
    catalog = discover((tmp_path / "kernels",))
    builtin = catalog.variants[name]
    assert str(BUILTIN_ROOT.resolve()) == builtin.root
    expected = (
        f"variant {name!r} of {folder / 'variant.yaml'} has the name of a built-in variant "
        f"({builtin.folder}/variant.yaml), which is reserved; rename yours (its folder, or its key under 'variants')"
    )
    assert {name: expected} == catalog.clashes


def test_a_folder_with_a_broken_manifest_keeps_its_name(tmp_path: Path, write_variant: WriteVariant) -> None:
    """A name selects the folder of that name also if its manifest is broken, and no other variant of that name."""
    write_variant("alpha", manifest="step: only\n")
    members = "step: s\nbecause: b\nexpect: e\nvariants: {alpha: {}}\n"
    write_variant("group", manifest=members, **SOURCE)
    (chosen,) = select_variants(discover((tmp_path / "kernels",)), ("alpha",))
    assert isinstance(chosen, BrokenVariant)


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_root_must_be_a_folder(tmp_path: Path, kind: str) -> None:
    """A root that is missing or is a file is refused, with the command that makes one."""
    root = tmp_path / "kernels"
    if kind == "file":
        root.write_text("", encoding="utf-8")
    with pytest.raises(UsageProblem) as problem:
        discover((root,))
    command = f"`python -m pytest_fa new NAME --kernels={root}` writes a variant into {root}"
    assert f"--fa-kernels: no folder {str(root)!r}; {command}" == str(problem.value)


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
