"""Variants that an installed package provides."""

from __future__ import annotations

import pytest

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import CASE, Project

METADATA = "Metadata-Version: 2.1\nName: brings-kernels\nVersion: 1.0\n"


def install(project: Project, entry_points: str) -> dict[str, str]:
    """Write an installed package with one variant into the project; return the environment that makes it importable."""
    project.write("site/brings_kernels/__init__.py", "")
    project.write("site/brings_kernels/brought/variant.yaml", PYTHON_MANIFEST)
    project.write("site/brings_kernels/brought/entry.py", PYTHON_SOURCE)
    project.write("site/brings_kernels-1.0.dist-info/METADATA", METADATA)
    project.write("site/brings_kernels-1.0.dist-info/entry_points.txt", f"[pytest_fa.kernels]\n{entry_points}\n")
    return {"PYTHONPATH": str(project.folder / "site")}


@pytest.mark.nightly
def test_installing_makes_them_appear(project: Project) -> None:
    """A package's variant is listed and judged like a variant of the project."""
    project.python_variant("own")
    environment = install(project, "any = brings_kernels")
    listed = project.run("--fa-list", env=environment).text
    assert all(name in listed for name in ("own", "brought"))
    run = project.suite("--fa-variant=brought", f"--fa-case={CASE}", "-k", "test_correct", env=environment)
    assert run.outcomes == {f"test_correct[brought-{CASE}]": "passed"}


@pytest.mark.nightly
def test_listing_and_collecting_run_no_code_of_a_package(project: Project) -> None:
    """--fa-list and --collect-only read the manifests of a package without importing it."""
    project.python_variant("own")
    environment = install(project, "any = brings_kernels")
    project.write("site/brings_kernels/__init__.py", "open('imported', 'w').close()\n")
    project.write("site/brings_kernels/brought/entry.py", "open('imported', 'w').close()\n" + PYTHON_SOURCE)
    assert "brought" in project.run("--fa-list", env=environment).text
    collect = ("--pyargs", "pytest_fa.suite", "--collect-only", "-q", "--fa-variant=brought")
    assert "brought" in project.run(*collect, env=environment).text
    assert not (project.folder / "imported").exists()


def test_a_package_that_cannot_be_imported_is_named(project: Project) -> None:
    """An entry point that cannot be imported is listed as a broken variant; the other variants are listed, too."""
    project.python_variant("own")
    environment = install(project, "gone = no_such_package")
    listed = project.run("--fa-list", env=environment).text
    assert "own" in listed
    assert "entry point gone (no_such_package) provides no variants" in listed.replace("\n", " ")
