"""The wheel works outside of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, unpacked into a separate folder."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    copy = tmp_path_factory.mktemp("source") / "copy"
    tracked = ["pytest_fa", "pyproject.toml", "README.md", "LICENSE"]
    copy.mkdir()
    for name in tracked:
        (copy / name).symlink_to(REPOSITORY / name)
    subprocess.run([*command, str(copy)], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


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
