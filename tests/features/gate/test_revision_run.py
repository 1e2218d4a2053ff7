"""`--fa-gate-baseline=git:REV` and `--fa-bisect` from the command line, and in `git bisect run`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from pytest_fa.features.gate.gated import Gate
from tests.features.gate.revisions import commit, git, write_timed
from tests.projects import ONE_CASE, Project, Run, inner_environment

GATE = ("--fa-variant=mine", ONE_CASE, "-k", "test_gate", "--fa-gate=1.5")
FAST_MS, SLOW_MS = 8, 16  # so long that another process, which takes the core for a moment, matters little
COMMITS, FIRST_SLOW = 16, 11  # the commits behind the good one, and the first of them that is slow


def gate(project: Project, revision: str, *more: str) -> Run:
    """Gate the variant of a project against a revision."""
    return project.suite(*GATE, f"--fa-gate-baseline=git:{revision}", *more)


@pytest.fixture
def repository(project: Project) -> Project:
    """A project that is a repository, with a first commit."""
    project.write(".gitignore", "/artifacts\n/junit.xml\n__pycache__\n.pytest_cache\n")
    write_timed(project.folder, FAST_MS)
    commit(project.folder, "first")
    return project


def test_the_same_sources_pass_at_once(repository: Project) -> None:
    """A commit that changes nothing of the kernels is the same sources: a verdict, no timing, exit status 0."""
    head = git(repository.folder, "rev-parse", "HEAD")
    repository.write("README", "text")
    commit(repository.folder, "a page")
    result = gate(repository, "HEAD~1", "--fa-bisect")
    line = f"PASS mine < 1.5 x baseline: the same sources as mine@{head[:10]}, so nothing was timed"
    assert (result.ret, line in result.outlines) == (0, True)
    (record,) = repository.records
    decided = Gate.of(record)
    assert decided is not None
    assert (decided.processes, decided.revision and decided.revision.commit) == (0, head)
    assert git(repository.folder, "status", "--porcelain") == ""


@pytest.mark.alone
@pytest.mark.nightly
def test_a_slower_commit_fails(repository: Project) -> None:
    """A commit whose kernel takes twice as long fails against the one before it, and the lines name both sides."""
    head = git(repository.folder, "rev-parse", "HEAD")
    write_timed(repository.folder, SLOW_MS)
    result = gate(repository, "HEAD", "--fa-bisect")
    is_noisy = "noisy machine" in result.text  # then the ratio has no verdict, but it is measured
    assert result.ret == (125 if is_noisy else 1), result.text
    assert f"x mine@{head[:10]}, 99.5 % interval" in result.text
    changes = "the gated sources have uncommitted changes: kernels/mine/entry.py"
    assert f"    mine@{head[:10]} is git:HEAD, commit {head}; {changes}" in result.outlines
    (record,) = repository.records
    decided = Gate.of(record)
    assert decided is not None
    assert decided.pairs[0].ratio == pytest.approx(2, rel=0.25)


@pytest.mark.parametrize(
    ("source", "manifest"),
    [("raise OSError('broken')\n", None), (None, "entry: {kind: nonsense}\n"), ("scale is wrong", None)],
    ids=["an entry that cannot be loaded", "a manifest that cannot be read", "a wrong kernel"],
)
def test_a_commit_that_cannot_be_tested_is_skipped(
    repository: Project, source: str | None, manifest: str | None
) -> None:
    """In a bisect, a commit that does not build, cannot be read or is wrong has no verdict: exit status 125."""
    folder = repository.folder / "kernels" / "mine"
    if source == "scale is wrong":
        source = (folder / "entry.py").read_text(encoding="utf-8").replace("* scale", "* scale * 1.5")
    for name, text in (("entry.py", source), ("variant.yaml", manifest)):
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    result = gate(repository, "HEAD", "--fa-bisect")
    assert (result.ret, result.outlines[-1]) == (125, "fa: --fa-bisect: no verdict on this commit, exit status 125")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--fa-gate-baseline=git:--help"],
            "no revision begins with '-', as '--help' does; write a commit, a branch or a tag",
        ),
        (["--fa-gate-baseline=git:nope"], "there is no commit 'nope' in {folder}; `git log --oneline` lists them"),
    ],
    ids=["an option", "unknown"],
)
def test_a_wrong_revision_ends_the_run(repository: Project, words: list[str], sentence: str) -> None:
    """A wrong revision is a usage error of one line, before anything is built; in a bisect, the commit is skipped."""
    (line,) = repository.complaint(*GATE, *words)
    assert line == f"ERROR: {words[0]}: {sentence.format(folder=repository.folder)}"
    result = repository.run_here("--collect-only", *GATE, *words, "--fa-bisect")
    assert (result.ret, result.errlines) == (125, [line])


def test_a_bisect_needs_a_gate(project: Project) -> None:
    """Without a gate, the option would have nothing to say."""
    project.python_variant("mine")
    result = project.run_here("--collect-only", "--fa-variant=mine", "--fa-bisect")
    assert result.errlines == ["ERROR: --fa-bisect: there is no gate; give --fa-gate=RATIO too"]


@pytest.mark.nightly
@pytest.mark.alone
def test_git_bisect_finds_the_slow_commit(repository: Project, tmp_path: Path) -> None:
    """Of 16 commits, `git bisect run` finds the one that made the kernel take twice as long; one does not load."""
    folder = repository.folder
    good, commits = git(folder, "rev-parse", "HEAD"), []
    for number in range(1, COMMITS + 1):
        write_timed(folder, FAST_MS if number < FIRST_SLOW else SLOW_MS)
        entry = folder / "kernels" / "mine" / "entry.py"
        text = entry.read_text(encoding="utf-8")
        entry.write_text(
            f"import nothing_{number}\n" if number == COMMITS // 2 else f"{text}# {number}\n", encoding="utf-8"
        )
        commits.append(commit(folder, f"commit {number}"))
    git(folder, "bisect", "start", commits[-1], good)
    words = (sys.executable, "-m", "pytest", "--pyargs", "pytest_fa.suite", *GATE, "--fa-bisect")
    script = tmp_path / "bisect.sh"
    command = shlex.join([*words, f"--fa-gate-baseline=git:{good}"])
    again = f"{command}; status=$?; test $status = 125 || exit $status; {command}"  # the machine may be busy
    script.write_text(f"cd {shlex.quote(str(folder))}\n{again}\n", encoding="utf-8")
    fixed = {"XDG_CACHE_HOME": str(repository.cache), "PYTEST_FA_SERVER": repository.server}
    said = git(folder, "bisect", "run", "sh", str(script), check=False, environment={**inner_environment(), **fixed})
    assert f"{commits[FIRST_SLOW - 1]} is the first bad commit" in said, said
    assert git(folder, "bisect", "log").count("# skip") >= 1
