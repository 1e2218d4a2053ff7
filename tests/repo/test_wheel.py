"""The sdist is whole, and the wheel that is made from it works outside of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import pytest_fa
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE

REPOSITORY = Path(__file__).parents[2]
ROOT_FILES = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt")


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, made from a copy of what is in the repository."""
    copy = tmp_path_factory.mktemp("source") / "copy"
    tracked = ["pytest_fa", "docs", "pyproject.toml", "setup.py", "MANIFEST.in", *ROOT_FILES]
    copy.mkdir()
    for name in tracked:
        (copy / name).symlink_to(REPOSITORY / name)
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def installed(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, which is made from the sdist alone, unpacked into a separate folder."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(archive)], check=True)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return folder / "site"


def test_sdist_has_what_a_user_reads(archive: Path) -> None:
    """The sdist contains the licence, the constraints, the changelog and the documentation."""
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    pages = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("docs/**/*.md")}
    assert {*ROOT_FILES, *pages} - names == set()


def test_wheel_from_the_sdist_is_whole(installed: Path) -> None:
    """The wheel that is made from the sdist has every file of the package."""
    package = REPOSITORY / "pytest_fa"
    files = {path.relative_to(REPOSITORY) for path in package.rglob("*") if path.is_file()}
    expected = {path for path in files if "__pycache__" not in path.parts}
    assert {path for path in expected if not (installed / path).is_file()} == set()


def test_metadata_has_the_places(installed: Path) -> None:
    """The metadata of the wheel names the homepage, the source and the issues."""
    (metadata,) = installed.glob("*.dist-info/METADATA")
    urls = re.findall(r"^Project-URL: (\w+), https://", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert urls == ["Homepage", "Documentation", "Source", "Issues", "Changelog"]


def test_links_of_the_description_work_on_an_index(installed: Path) -> None:
    """The description of the wheel is the README; its links and pictures are addresses of the version's files."""
    (metadata,) = installed.glob("*.dist-info/METADATA")
    headers, _, text = metadata.read_text(encoding="utf-8").partition("\n\n")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    files = [target for target in re.findall(r"\]\(([^)]+)\)", readme) if not target.startswith("https:")]
    tag = f"v{pytest_fa.__version__}/"
    assert "Description-Content-Type: text/markdown" in headers.splitlines()
    assert [target for target in targets if not target.startswith("https://")] == []
    assert files == [target.partition(tag)[2] for target in targets if tag in target]
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(pictures) >= 2
    assert {target.partition(tag)[0] for target in pictures} == {
        "https://raw.githubusercontent.com/pytest-fa/pytest-fa/"
    }


@pytest.mark.nightly
def test_doctor_passes_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    """With the wheel in an empty folder, doctor finds all that a run needs, and shows the wheel's own version."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest_fa", "doctor", "--cache", "cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].endswith(f"pytest-fa {pytest_fa.__version__}")
    assert [line for line in lines if line.startswith("missing") or "could not be checked" in line] == []
    assert lines[-1].startswith("runs work here")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_suite_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    """In a folder with one variant, the suite of the wheel judges it and times it with the wheel's baselines."""
    folder = tmp_path / "kernels" / "mine"
    folder.mkdir(parents=True)
    (folder / "variant.yaml").write_text(PYTHON_MANIFEST, encoding="utf-8")
    (folder / "entry.py").write_text(PYTHON_SOURCE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_fa.suite", "--fa-case=b1h2s64d64-fp16-seed0", "-v"]
    suite = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert suite.returncode == 0, suite.stdout + suite.stderr
    for line in ("test_correct[mine-b1h2s64d64-fp16-seed0] PASSED", "test_speed[sdpa_math-b1h2s64d64-fp16] PASSED"):
        assert line in suite.stdout
    code = "import pytest_fa; print(pytest_fa.__file__)"
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert imported.stdout.strip() == str(installed / "pytest_fa" / "__init__.py")


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_wheel_builds_kernels(installed: Path, tmp_path: Path) -> None:
    """The wheel contains the header, the binding and the source of `noop`, so that a variant compiles."""
    script = """
from pathlib import Path
from pytest_fa.build.builder import ensure
from pytest_fa.catalog.discover import discover

noop = discover(()).variants["noop"]
print([type(each).__name__ for each in ensure([(noop, "sm_90a")], Path("cache")).outcomes.values()])
"""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.stdout.strip() == "['Build']", process.stderr
