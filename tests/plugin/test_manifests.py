"""Manifests that cannot be read: each fails alone with one line, and the other variants run."""

from __future__ import annotations

import os

import pytest

from tests.factories import MANIFEST, PYTHON_MANIFEST
from tests.projects import CASE, ONE_CASE, NewProject, Project, Run

MANIFEST_KEYS = (
    "step, because, expect, parent, role, computes, cases, entry, arch, supports, instantiations, defines, flags, "
    "rounds, limits, tolerance, deterministic, invariant, checks_arguments, optional, omits, suppressions, returns, "
    "conventions, sweep, truth, variants"
)
BROKEN = {
    "unknown_key": (PYTHON_MANIFEST + "rol: overhead\n", "unknown key 'rol' in the manifest; did you mean 'role'?"),
    "unknown_inside": (MANIFEST + "limits: {registers: 8}\n", "unknown key 'registers' in limits"),
    "duplicate_key": (PYTHON_MANIFEST + "step: again\n", "duplicate key 'step' on line 6"),
    "wrong_value": (PYTHON_MANIFEST + "role: champion\n", "role is 'champion'; allowed: candidate, baseline, overhead"),
    "wrong_type": (
        MANIFEST + 'entry: {kind: python, target: "entry:forward"}\nlimits: {spill_bytes: no}\n',
        "is 'no'; it must be a whole number",
    ),
    "no_yaml": ("step: [\n", "expected the node content, but found the end of the file"),
    "no_source": (MANIFEST, "entry.source is 'kernel.cu'; that file does not exist"),
    "hostile_define": (
        MANIFEST + 'defines: {BLOCK: "1\\n  command = touch hostile"}\n',
        "the value '1\\n  command = touch hostile' of define BLOCK is not allowed",
    ),
    "hostile_flag": (
        MANIFEST + "flags: ['-Xcompiler=`touch hostile`']\n",
        "flags: '-Xcompiler=`touch hostile`' is not a",
    ),
    "hostile_source": (MANIFEST + 'entry: {source: "kernel.cu\\n"}\n', "entry.source is 'kernel.cu\\n' is not a path"),
    "hostile_nul": (MANIFEST + 'entry: {source: "kernel\\0.cu"}\n', "entry.source is 'kernel\\x00.cu' is not a path"),
    "brackets": ("step: " + "[" * 20_000, "line 1 is nested more than 20 levels deep"),
    "many_keys": ("".join(f"key{index}: 1\n" for index in range(50_000)), "it is larger than 65536 bytes"),
    "no_target": (
        MANIFEST + "entry: {kind: python}\n",
        "entry.target is ''; for kind python, the form is 'package.module:func",
    ),
}


@pytest.fixture(scope="module")
def mixed(new_project: NewProject) -> Project:
    """One good variant among broken manifests."""
    project = new_project("manifests")
    project.python_variant("good")
    for name, (manifest, _) in BROKEN.items():
        project.write(f"kernels/{name}/variant.yaml", manifest)
    project.write("kernels/fifo/kernel.cu", "")
    os.mkfifo(project.folder / "kernels" / "fifo" / "variant.yaml")
    return project


@pytest.fixture(scope="module")
def run(mixed: Project) -> Run:
    """A run of all variants."""
    return mixed.suite(ONE_CASE, "-k", "test_build or test_correct")


def test_each_broken_manifest_fails_alone(run: Run) -> None:
    """Every broken manifest gives one failing test_build, and the good variant passes."""
    broken = {f"test_build[{name}]": "failed" for name in (*BROKEN, "fifo")}
    assert run.outcomes == {**broken, f"test_correct[good-{CASE}]": "passed"}


@pytest.mark.parametrize(("name", "problem"), [(name, problem) for name, (_, problem) in BROKEN.items()], ids=BROKEN)
def test_failure_says_what_is_wrong(mixed: Project, run: Run, name: str, problem: str) -> None:
    """The first line of the failure names the file and the problem."""
    line = run.reasons[f"test_build[{name}]"].splitlines()[0]
    file = mixed.folder / "kernels" / name / "variant.yaml"
    assert (line.startswith(f"not built: {file}: "), problem in line) == (True, True)


def test_unknown_key_lists_the_allowed_ones(run: Run) -> None:
    """The message for an unknown key lists all allowed keys."""
    assert f"(allowed: {MANIFEST_KEYS})" in run.reasons["test_build[unknown_key]"]


@pytest.mark.parametrize("name", ["unknown_key", "no_yaml", "no_source"])
def test_named_broken_variant_is_a_usage_error(mixed: Project, run: Run, name: str) -> None:
    """--fa-variant with the name of a broken manifest is a usage error with the same line."""
    result = mixed.collect(f"--fa-variant={name}")
    lines = result.all_lines
    complaint = run.reasons[f"test_build[{name}]"].splitlines()[0].removeprefix("not built: ")
    expected = [f"ERROR: --fa-variant: {name} cannot be used: {complaint}"]
    assert (result.ret, lines) == (pytest.ExitCode.USAGE_ERROR, expected)


def test_good_variant_can_be_selected(mixed: Project) -> None:
    """--fa-variant with the name of the good variant excludes the broken ones."""
    assert mixed.ids(ONE_CASE, "--fa-variant=good", "-k", "not speed") == [f"test_correct[good-{CASE}]"]


def test_folder_name_that_is_no_variant_name(project: Project) -> None:
    """The name of a folder that is not a valid variant name is quoted in the usage error."""
    project.python_variant("Good")
    result = project.collect("--fa-variant=Good")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "folder name 'Good'" in result.all_lines[0]
