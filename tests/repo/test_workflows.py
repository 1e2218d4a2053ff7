"""The workflows for GitHub: our own, and those that `docs/how-to/` offers.

They are valid, and their commands work.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

import pytest_fa
from pytest_fa.options.flags import all_options
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE
from tests.projects import NewProject, Project, inner_environment
from tests.projects import new_project as _new_project
from tests.projects import resident_server as _resident_server

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/how-to/ci.md").read_text(encoding="utf-8")
BUNDLE_PAGE = (REPOSITORY / "docs/how-to/publish.md").read_text(encoding="utf-8")
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / ".github/workflows").glob("*.yml")}
SHARD_PAGE = (REPOSITORY / "docs/how-to/many-gpus.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", f"{PAGE}\n{SHARD_PAGE}", re.MULTILINE | re.DOTALL)
WORKFLOWS |= {text.split()[1]: text for text in EXAMPLES if text.startswith("name:")}
TRIGGERS = {"push", "pull_request", "schedule", "workflow_dispatch"}
SIMPLE_COMMANDS = (
    "pip",
    "python",
    "python3",
    "pytest",
    "test",
    "grep",
    ".venv/bin/pip",
    ".venv/bin/python",
    ".venv/bin/pytest",
)
FLAGS = {option.flag for option in all_options()}

new_project, resident_server = _new_project, _resident_server  # pytest looks for fixtures in this module


def workflow(name: str) -> dict[Any, Any]:
    """One workflow as YAML; YAML 1.1 reads its key `on` as True."""
    content: dict[Any, Any] = yaml.safe_load(WORKFLOWS[name])
    return content


def steps_of(name: str) -> list[dict[str, Any]]:
    """The steps of every job of a workflow."""
    return [step for job in workflow(name)["jobs"].values() for step in job["steps"]]


def commands_of(name: str) -> list[str]:
    """The commands of a workflow."""
    return [step["run"] for step in steps_of(name) if "run" in step]


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_is_valid(name: str) -> None:
    """A workflow has triggers, limited permissions, and jobs whose steps are either actions or commands."""
    content = workflow(name)
    assert set(content[True]) <= TRIGGERS
    assert content["permissions"] == {"contents": "read"}
    for key, job in content["jobs"].items():
        assert {"runs-on", "steps"} <= set(job)
        assert set(job.get("needs", "").split()) <= set(content["jobs"]) - {key}
    assert [step for step in steps_of(name) if ("uses" in step) == ("run" in step)] == []


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_every_command_exists(name: str) -> None:
    """Each command is accepted by bash, and is a program of the runner or an executable file of the repository."""
    for command in commands_of(name):
        assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
        program = shlex.split(command)[0]
        assert program in SIMPLE_COMMANDS or os.access(REPOSITORY / program, os.X_OK)


def test_the_scripts_of_ci_are_accepted_by_bash() -> None:
    """The scripts that CI starts have no syntax error, and each program of the repository that they start exists."""
    for name in (".ci/run", ".ci/nightly", ".ci/package", ".ci/docs", "repro.sh"):
        assert subprocess.run(["bash", "-n", str(REPOSITORY / name)], check=False).returncode == 0
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        started = re.findall(r"^ *(?:PYTHON=\S+ )?(\./repro\.sh|\.ci/\w+)", text, re.MULTILINE)
        assert [program for program in (name, *started) if not os.access(REPOSITORY / program, os.X_OK)] == []


def test_each_step_of_the_nightly_run_is_a_function(snapshot: SnapshotAssertion) -> None:
    """`.ci/nightly` has a function for each step that it lists, and a wrong step is named with the allowed ones."""
    text = (REPOSITORY / ".ci/nightly").read_text(encoding="utf-8")
    (steps,) = re.findall(r"^STEPS=\((.*)\)$", text, re.MULTILINE)
    assert steps.split() == re.findall(r"^([a-z-]+)\(\) \{", text, re.MULTILINE)
    wrong = subprocess.run([REPOSITORY / ".ci/nightly", "--from", "test"], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert snapshot == wrong.stderr


def test_the_commands_of_repro_sh_are_those_that_it_lists() -> None:
    """Each command of the help of `./repro.sh` is accepted, and another one is named with the allowed ones."""
    script = str(REPOSITORY / "repro.sh")
    shown = subprocess.run([script, "--help"], check=True, capture_output=True, text=True).stdout
    wrong = subprocess.run([script, "tset"], check=False, capture_output=True, text=True)
    listed = re.findall(r"[a-z-]+", wrong.stderr.partition("allowed: ")[2].partition(", --env")[0].replace(" FILE", ""))
    assert wrong.returncode == 2
    in_help = re.findall(r"^  \./repro\.sh ([a-z][a-z-]+)", shown, re.MULTILINE)
    assert sorted({*in_help, "prepare-without-torch"}) == sorted(listed)


@pytest.mark.nightly
def test_the_tests_without_torch_are_collected_without_it(tmp_path: Path) -> None:
    """The tests of `./repro.sh test-without-torch` can be imported where torch is not installed."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('torch is not installed')", encoding="utf-8")
    command = (REPOSITORY / "repro.sh").read_text(encoding="utf-8").partition("\ntest_without_torch() {")[2]
    places = re.findall(r"tests/(?!pytest\.ini)\S+", command.partition("\n}")[0])
    assert places != []
    collect = (
        f"{shlex.quote(sys.executable)} -m pytest -c tests/pytest.ini -p no:syrupy --collect-only -q {' '.join(places)}"
    )
    process = subprocess.run(
        ["bash", "-c", collect],  # expands {a,b}
        cwd=REPOSITORY,
        env={**inner_environment(), "PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (process.returncode, re.findall(r"^ERROR.*", process.stdout, re.MULTILINE)) == (0, [])


def test_ci_builds_the_documentation() -> None:
    """The environment in which the site is built has what `.ci/docs` needs, and the nightly run keeps the site."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(extras["docs"]) <= set(extras["test"])
    kept = [step["with"]["path"] for step in steps_of("nightly.yml") if "upload-artifact" in step.get("uses", "")]
    assert kept == ["artifacts/repro_bundle_*.tar.gz", "site/"]


RELEASE_CHECKS = [command for command in commands_of("release.yml") if "GITHUB_REF_NAME" in command]


def statuses_of(command: str, tags: tuple[str, ...]) -> list[int]:
    """The exit status of a command of the release for each tag."""
    run = ("bash", "-c", command)
    environments = [{**os.environ, "GITHUB_REF_NAME": tag} for tag in tags]
    return [subprocess.run(run, cwd=REPOSITORY, env=each, check=False).returncode for each in environments]


@pytest.mark.parametrize("command", RELEASE_CHECKS, ids=["version", "changelog"])
def test_a_release_needs_the_version_as_its_tag(command: str) -> None:
    """The commands that compare the tag pass for the version of the package, and for no other tag."""
    text = (REPOSITORY / "pytest_fa/__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    assert version is not None
    assert statuses_of(command, (f"v{version[1]}", "v0.0.0", f"v{version[1]}.1")) == [0, 1, 1]


def test_a_tag_without_v_is_not_released() -> None:
    """A tag such as `0.1.0` starts no release, and its comparison with the version fails."""
    assert workflow("release.yml")[True] == {"push": {"tags": ["v*"]}}
    assert statuses_of(RELEASE_CHECKS[0], (pytest_fa.__version__,)) == [1]


def test_a_release_is_tested_before_it_is_published() -> None:
    """Tests, then the build, then the index; only the last job has a right, and it gets what `.ci/package` wrote."""
    jobs = workflow("release.yml")["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {"test": None, "build": "test", "publish": "build"}
    assert {name: job["steps"][-1].get("run") for name, job in jobs.items()} == {
        "test": ".ci/run",
        "build": None,
        "publish": None,
    }
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert (jobs["publish"]["permissions"], jobs["publish"]["environment"]) == ({"id-token": "write"}, "release")
    sent, got = jobs["build"]["steps"][-1]["with"], jobs["publish"]["steps"][0]["with"]
    assert (sent["name"], sent["path"]) == (got["name"], got["path"]) == ("dist", "dist/")
    assert "-m build --outdir dist ." in (REPOSITORY / ".ci/package").read_text(encoding="utf-8")


def test_slurm_and_buildkite_split_into_the_parts_of_their_arrays() -> None:
    """The scripts of the page are accepted by bash, and number the shards from 1 to the number of jobs."""
    (script,) = re.findall(r"^```bash\n(.*?)^```", SHARD_PAGE, re.MULTILINE | re.DOTALL)
    (buildkite,) = [yaml.safe_load(text) for text in EXAMPLES if text.startswith("steps:")]
    command = buildkite["steps"][0]["command"]
    assert buildkite["steps"][1] == {"wait": None, "continue_on_failure": True}
    slurm = {"SLURM_ARRAY_TASK_ID": "8", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_JOB_ID": "77"}
    agent = {"BUILDKITE_PARALLEL_JOB": "3", "BUILDKITE_PARALLEL_JOB_COUNT": "4"}
    shards = []
    for text, variables in ((script, slurm), (command, agent)):
        words = subprocess.run(
            ["bash", "-c", f'pytest() {{ printf "%s\\n" "$@"; }}\n{text}'],
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        shards += [word for word in words if word.startswith("--fa-shard=")]
        assert {word.partition("=")[0] for word in words if word.startswith("--fa-")} <= FLAGS
    assert shards == ["--fa-shard=8/8", "--fa-shard=4/4"]


def test_the_job_of_the_page_about_bundles_signs_what_make_writes() -> None:
    """The job of the page may sign and nothing more, and its pattern matches the archive of `bundle make`."""
    (job,) = re.findall(r"^```yaml\n(.*?)^```", BUNDLE_PAGE, re.MULTILINE | re.DOTALL)
    content = yaml.safe_load(job)
    assert content["permissions"] == {"id-token": "write", "attestations": "write", "contents": "read"}
    (step,) = content["steps"]
    assert step["uses"].partition("@")[0] == "actions/attest-build-provenance"
    assert PurePath("artifacts/repro_bundle_0123456789ab_20260101T000000Z.tar.gz").match(step["with"]["subject-path"])


@pytest.fixture
def project(new_project: NewProject) -> Project:
    """A user's repository with one variant that runs on a CPU."""
    project = new_project("user")
    project.ini(has_html=True)  # an option of the page is that of pytest-html
    project.write("kernels/mine/variant.yaml", PYTHON_MANIFEST)
    project.write("kernels/mine/entry.py", PYTHON_SOURCE)
    return project


@pytest.mark.parametrize("name", ["kernels", "kernels-gpu", "kernels-shards"])
def test_pytest_accepts_every_command_of_the_page(project: Project, name: str) -> None:
    """The options of each command of the page are accepted by pytest, and it selects the tests that it is for."""
    commands = [command.partition(" || ")[0] for command in commands_of(name) if "pytest --pyargs" in command]
    commands = [command.replace("${{ matrix.shard }}/4", "1/1") for command in commands]
    tests = []
    for command in commands:
        run = project.run(*shlex.split(command)[1:], "--collect-only", "-q")
        tests.append((run.ret, {test_id.partition("[")[0] for test_id in run.ids}))
    checks = {"test_correct", "test_property", "test_speed"}
    expected = {
        "kernels": [(5, set()), (0, checks)],  # nothing is compiled for a variant of kind python
        "kernels-shards": [(0, checks)],
        "kernels-gpu": [(0, checks), (0, {"test_gate"}), (0, {"test_profile"})],
    }
    assert tests == expected[name]


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_the_run_without_a_gpu_compiles(project: Project) -> None:
    """The page's command for a machine without a GPU compiles a CUDA variant and passes."""
    project.cuda_variant("zero")
    command = next(command for command in commands_of("kernels") if "--fa-static" in command)
    run = project.run(*shlex.split(command)[1:])
    assert (run.ret, run.outcomes["test_build[zero]"]) == (0, "passed"), run.text
