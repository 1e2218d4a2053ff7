"""`planted.yaml`: the ablations and wrong kernels of a folder, as if they stood in its `variant.yaml`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_fa.catalog import discover as discover_module
from pytest_fa.catalog.discover import Catalog, discover
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UnusableRun
from tests.factories import CUDA_SOURCE, WriteVariant

HEAD = """\
step: two stages
because: loads wait
expect: less time
supports: {dtype: [fp16, bf16], head_dim: [64, 128]}
limits: {spill_bytes: 0, stack_bytes: 0}
defines: {STAGES: 2, OMIT: NONE}
"""
OWN = "variants:\n  two: {}\n  three: {defines: {STAGES: 3}}\n"
PLANTED = """\
  # Without the load.
  two_without_load:
    role: ablation
    parent: two
    omits: load
    defines: {OMIT: LOAD}
    limits: {spill_bytes: 8}
  race_two:
    role: wrong
    parent: two
    step: a barrier is omitted
    supports: {head_dim: [64]}
    limits: {stack_bytes: 16}
    defines: {OMIT: BARRIER}
"""


@pytest.fixture(autouse=True)
def _no_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the entry points of installed packages."""
    monkeypatch.setattr(discover_module, "entry_points", lambda **_: ())


@pytest.fixture
def folder(write_variant: WriteVariant) -> Path:
    """The folder of one kernel, without a `planted.yaml` yet."""
    return write_variant("two", manifest=HEAD, **{"kernel.cu": CUDA_SOURCE})


def catalog_of(folder: Path, planted: str | None = None) -> Catalog:
    """The catalog of the folder's root, with this `planted.yaml`."""
    if planted is not None:
        (folder / "planted.yaml").write_text(planted, encoding="utf-8")
    return discover((folder.parent,))


def own(catalog: Catalog, folder: Path) -> list[Variant]:
    """The variants of the folder, in the order of the catalog."""
    return [variant for variant in catalog.variants.values() if variant.folder == str(folder)]


@pytest.mark.parametrize("members", [OWN, "variants:\n  two: {}\n"])
def test_they_are_the_variants_that_one_file_has(folder: Path, members: str) -> None:
    """Moved from `variant.yaml` to `planted.yaml`, variants are the same, in the same order."""
    (folder / "variant.yaml").write_text(HEAD + members + PLANTED, encoding="utf-8")
    one_file = own(catalog_of(folder), folder)
    (folder / "variant.yaml").write_text(HEAD + members, encoding="utf-8")
    two_files = catalog_of(folder, f"variants:\n{PLANTED}")
    assert one_file == own(two_files, folder)
    assert {"two_without_load", "race_two"} == two_files.planted.keys()
    assert {str(folder / "planted.yaml")} == set(two_files.planted.values())


def test_a_manifest_without_members_keeps_its_variant(folder: Path) -> None:
    """Beside a `planted.yaml`, the folder's own variant needs no `variants`, and merges nothing of it."""
    alone = own(catalog_of(folder), folder)
    catalog = catalog_of(folder, f"variants:\n{PLANTED}")
    first, ablation, race = own(catalog, folder)
    assert (alone, ["two", "two_without_load", "race_two"]) == ([first], [first.name, ablation.name, race.name])
    assert ("ablation", "load", {"STAGES": 2, "OMIT": "LOAD"}, 8, 0) == (
        ablation.role,
        ablation.omits,
        ablation.defines,
        ablation.limits.spill_bytes,
        ablation.limits.stack_bytes,
    )
    assert (("fp16", "bf16"), (64,), "a barrier is omitted", "loads wait") == (
        race.supports.dtype,
        race.supports.head_dim,
        race.step,
        race.because,
    )


BROKEN = {
    "no YAML": ("variants: [\n", "line 2, column 1: "),
    "twice": ("variants:\n  a: {role: wrong}\n  a: {role: wrong}\n", "duplicate key 'a' on line 3"),
    "empty": ("", "key 'variants' is missing in the manifest"),
    "none": ("variants: {}\n", "variants is "),
    "another key": ("step: one\n", "unknown key 'step' in the manifest (allowed: variants)"),
    "a key of a member": (
        "variants: {a: {role: wrong, limit: {}}}\n",
        "unknown key 'limit' in variants[...]; did you mean 'limits'?",
    ),
    "a value of a member": ("variants: {a: {role: bad}}\n", "variants[...].role is 'bad'; allowed: "),
    "a name": ("variants: {'a b': {role: wrong}}\n", "variants: name 'a b' "),
    "a define": ("variants: {a: {role: wrong, defines: {'1X': 1}}}\n", "defines: name '1X' "),
    "a candidate": (
        "variants: {a: {}}\n",
        "a: role is 'candidate'; here it is 'wrong' or 'ablation', others belong in variant.yaml",
    ),
    "an ablation": (
        "variants: {a: {role: wrong, omits: load}}\n",
        "a: omits is 'load', role is 'wrong', parent is None; omits needs role 'ablation' and a parent",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_problem_names_the_file(folder: Path, name: str) -> None:
    """Of a folder whose `planted.yaml` cannot be read, no variant is found; the problem names that file."""
    text, problem = BROKEN[name]
    catalog, path = catalog_of(folder, text), folder / "planted.yaml"
    assert ([], [str(path)]) == (own(catalog, folder), list(catalog.broken))
    assert ("two", True) == (catalog.broken[str(path)].name, catalog.broken[str(path)].problem.startswith(f"{path}: "))
    assert catalog.broken[str(path)].problem.removeprefix(f"{path}: ").startswith(problem)


def test_a_broken_manifest_is_named_itself(folder: Path) -> None:
    """If `variant.yaml` cannot be read, it is the file that is named, and `planted.yaml` is not read."""
    (folder / "variant.yaml").write_text("stop: wrong\n", encoding="utf-8")
    catalog = catalog_of(folder, "also: wrong\n")
    assert ([str(folder / "variant.yaml")], []) == (list(catalog.broken), own(catalog, folder))


@pytest.mark.parametrize("kind", ["fifo", "dangling link"])
def test_another_kind_of_file_is_a_problem(folder: Path, kind: str) -> None:
    """A FIFO is not waited for, and a link that leads nowhere is not overlooked."""
    path = folder / "planted.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    assert [str(path)] == list(catalog_of(folder).broken)


def test_a_name_in_both_files_is_a_clash(folder: Path) -> None:
    """A name that both files declare selects nothing; the sentence names both files."""
    catalog = catalog_of(folder, "variants: {two: {role: wrong}}\n")
    files = f"in {folder / 'variant.yaml'} and in {folder / 'planted.yaml'}"
    with pytest.raises(UnusableRun, match=f"variant 'two' is declared 2 times: {files}; rename one"):
        catalog.require_unique_names()


def test_without_a_manifest_it_is_no_variant(tmp_path: Path, folder: Path) -> None:
    """A folder with a `planted.yaml` alone is no variant's."""
    (tmp_path / "kernels" / "lonely").mkdir()
    (tmp_path / "kernels" / "lonely" / "planted.yaml").write_text(f"variants:\n{PLANTED}", encoding="utf-8")
    catalog = catalog_of(folder)
    assert ({}, {}, ["two"]) == (catalog.broken, catalog.planted, [each.name for each in own(catalog, folder)])
