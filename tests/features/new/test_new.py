"""`python -m pytest_fa new`: the variants that it writes can be tested at once."""

from __future__ import annotations

import compileall
import shlex
import shutil
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main
from pytest_fa.build.extension import find_torch
from pytest_fa.features.new import new as new_module
from tests.projects import Project


def new(project: Project, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Write a variant into the project; return the arguments of the pytest command that `new` prints."""
    assert main(["new", *words, "--kernels", str(project.folder / "kernels")]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("next: ")]
    return shlex.split(line)[2:]


def test_a_python_variant_is_right_at_once(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python variant passes the tests that `new` recommends, on a CPU."""
    run = project.run(*new(project, capsys, "mine", "--kind=python"), "-k", "mine and not test_speed")
    assert run.ret == pytest.ExitCode.OK
    assert run.outcomes["test_correct[mine-b1h8s512d64-fp16-seed0]"] == "passed"


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_cuda_variant_builds_at_once(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The CUDA variant compiles without spills."""
    run = project.run(*new(project, capsys, "mine"), "-k", "test_build and mine")
    assert run.outcomes == {"test_build[mine]": "passed"}
    (record,) = project.records
    assert [build.arch for build in record.builds] == ["sm_90a"]
    assert {kernel.spill_bytes for build in record.builds for kernel in build.kernels} == {0}


@pytest.mark.skipif(find_torch().cuda is not None, reason="this torch has CUDA")
def test_an_extension_needs_a_torch_with_cuda(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The extension has a readable manifest and a binding; with a torch without CUDA it is skipped with that reason."""
    run = project.run(*new(project, capsys, "mine", "--kind=torch"), "-k", "test_build and mine")
    assert run.outcomes == {"test_build[mine]": "skipped"}
    assert "has no CUDA, which CUDA sources need" in run.reasons["test_build[mine]"]
    binding = (project.folder / "kernels" / "mine" / "binding.cpp").read_text(encoding="utf-8")
    assert binding.startswith("// mine: ")
    assert "PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)" in binding


def test_a_triton_variant_waits_for_a_gpu(
    project: Project, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    """The Triton variant has a readable manifest; without a GPU each case is skipped with that reason."""
    arguments = (*new(project, capsys, "mine", "--kind=triton"), "-k", "test_correct and mine")
    run = project.run(*arguments)
    assert set(run.outcomes.values()) == {"skipped"}
    assert snapshot == set(run.reasons.values())


def test_an_installed_template_is_written_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an installer has compiled the templates' Python files, `__pycache__` is not copied into the variant."""
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
        (
            ["2fast"],
            ("new: '2fast' is not a valid variant name; use lowercase letters, digits and _, starting with a letter"),
        ),
        (["Mine"], "new: 'Mine' is not a valid variant name; use lowercase letters"),
        (["../mine"], "new: '../mine' is not a valid variant name"),
        (["noop"], "new: variant 'noop' already exists"),
        (["taken"], "taken' already exists; nothing was written"),
    ],
)
def test_an_invalid_name_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """For an invalid or existing name the command prints one line, returns 2 and writes nothing."""
    (tmp_path / "taken").mkdir()
    assert main(["new", *words, "--kernels", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.rglob("*")] == ["taken"]
