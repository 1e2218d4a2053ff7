"""`python -m pytest_fa new`: from nothing to a verdict."""

from __future__ import annotations

import compileall
import shlex
import shutil
from pathlib import Path

import pytest

from pytest_fa import new as new_module
from pytest_fa.__main__ import main
from pytest_fa.build.extension import find_torch
from tests.plugin.conftest import Project


def new(project: Project, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Write a variant into the project, and give the arguments of the pytest that the command names."""
    assert main(["new", *words, "--kernels", str(project.folder / "kernels")]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("next: ")]
    return shlex.split(line)[2:]


def test_a_python_variant_is_right_at_once(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """What the command writes passes what the command says to run next, on a CPU."""
    run = project.run(*new(project, capsys, "mine", "--kind=python"), "-k", "mine and not test_speed")
    assert run.ret == pytest.ExitCode.OK
    assert run.outcomes["test_correct[mine-b1h8s512d64-fp16-seed0]"] == "passed"


@pytest.mark.needs_nvcc
def test_a_cuda_variant_builds_at_once(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """It compiles for every architecture without a spill."""
    run = project.run(*new(project, capsys, "mine"), "-k", "test_build and mine")
    assert run.outcomes == {"test_build[mine]": "passed"}
    (record,) = project.records
    assert [build.arch for build in record.builds] == ["sm_80", "sm_89", "sm_90a"]
    assert {kernel.spill_bytes for build in record.builds for kernel in build.kernels} == {0}


@pytest.mark.skipif(find_torch().cuda is not None, reason="this torch has CUDA")
def test_an_extension_says_what_it_lacks(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest reads, its module has the name that torch gives it, and without a torch with CUDA it is skipped."""
    run = project.run(*new(project, capsys, "mine", "--kind=torch"), "-k", "test_build and mine")
    assert run.outcomes == {"test_build[mine]": "skipped"}
    assert "has no CUDA, which CUDA sources need" in run.reasons["test_build[mine]"]
    binding = (project.folder / "kernels" / "mine" / "binding.cpp").read_text(encoding="utf-8")
    assert binding.startswith("// mine: ")
    assert "PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)" in binding


def test_a_triton_variant_waits_for_a_gpu(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest reads, and without a GPU each case is skipped with that reason."""
    words = (*new(project, capsys, "mine", "--kind=triton"), "-k", "test_correct and mine")
    run = project.run(*words)
    assert set(run.outcomes.values()) == {"skipped"}
    assert set(run.reasons.values()) == {"mine needs a GPU, and this machine has none"}


def test_an_installed_template_is_written_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installer compiles the templates' Python; what it builds beside them is not part of a variant."""
    templates = tmp_path / "template"
    shutil.copytree(new_module.TEMPLATES, templates)
    assert compileall.compile_dir(templates / "python", quiet=1)
    assert (templates / "python" / "__pycache__").is_dir()
    monkeypatch.setattr(new_module, "TEMPLATES", templates)
    assert main(["new", "mine", "--kind", "python", "--kernels", str(tmp_path / "kernels")]) == 0
    assert "entry.py, variant.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2fast"], "new: '2fast' is no name for a variant; it must be small letters, digits and _, a letter first"),
        (["Mine"], "new: 'Mine' is no name for a variant; it must be small letters"),
        (["../mine"], "new: '../mine' is no name for a variant"),
        (["noop"], "new: there is a variant 'noop' already"),
        (["taken"], "taken' exists already; nothing was written"),
    ],
)
def test_what_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """A name that cannot be, or is taken: one line, status 2, and nothing is written."""
    (tmp_path / "taken").mkdir()
    assert main(["new", *words, "--kernels", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.rglob("*")] == ["taken"]
