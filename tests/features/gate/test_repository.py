"""Commits are read without running anything of the repository; each thing that is wrong is one sentence."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.extracted import content_ids, extract
from pytest_fa.features.gate.repository import Repository
from tests.features.gate.revisions import commit, git


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """The kernels folder of a repository with one commit."""
    folder = tmp_path / "repo" / "kernels"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "kernel.cu").write_text("one\n", encoding="utf-8")
    commit(folder.parent, "one")
    return folder


def complaint(folder: Path, revision: str) -> str:
    """The sentence about a revision of a kernels folder."""
    with pytest.raises(UsageProblem) as caught:
        Repository.of(folder).commit(revision)
    return str(caught.value)


@pytest.mark.parametrize(
    ("revision", "sentence"),
    [
        ("", "it names no revision; write one behind git:, such as git:HEAD~1"),
        ("--all", "no revision begins with '-', as '--all' does; write a commit, a branch or a tag"),
        ("a\nb", "'a\\nb' is no revision; write a commit, a branch or a tag"),
        ("nope", "there is no commit 'nope' in {top}; `git log --oneline` lists them"),
        ("HEAD~1", "there is no commit 'HEAD~1' in {top}; `git log --oneline` lists them"),
        ("^HEAD", "there is no commit '^HEAD' in {top}; `git log --oneline` lists them"),
        ("HEAD:kernels", "there is no commit 'HEAD:kernels' in {top}; `git log --oneline` lists them"),
    ],
    ids=["nothing", "an option", "two lines", "unknown", "before the first", "a negation", "a tree"],
)
def test_a_revision_that_is_none_is_named(kernels: Path, revision: str, sentence: str) -> None:
    """Whatever is no commit gives one sentence, and is never an option of git."""
    assert sentence.format(top=kernels.parent) == complaint(kernels, revision)


def test_a_shallow_clone_is_named(kernels: Path, tmp_path: Path) -> None:
    """A commit that a shallow clone lacks gives the command that gets it."""
    first = git(kernels.parent, "rev-parse", "HEAD")
    (kernels / "mine" / "kernel.cu").write_text("two\n", encoding="utf-8")
    commit(kernels.parent, "two")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{kernels.parent}", "shallow")
    for revision in ("HEAD~1", first):
        sentence = complaint(tmp_path / "shallow" / "kernels", revision)
        assert "is a shallow clone; `git fetch --unshallow` gets every commit" in sentence


def test_a_folder_outside_of_a_repository_is_named(tmp_path: Path) -> None:
    """Without a repository, the sentence has the folder and what else can be a baseline."""
    expected = f"{tmp_path} is not in a git repository; give a variant's name or key:KEY"
    assert expected == complaint(tmp_path, "HEAD")


def test_a_machine_without_git_is_named(kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without git, the sentence says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert complaint(kernels, "HEAD").startswith("git is not installed, or not in PATH; install it")


def test_a_folder_that_the_commit_lacks_has_no_tree(kernels: Path) -> None:
    """A kernels folder that was added later, or that is a submodule there, is not in the commit."""
    repository = Repository.of(kernels)
    head = repository.commit("HEAD")
    assert repository._replace(prefix="other").tree(head) is None
    assert repository._replace(prefix="kernels/mine/kernel.cu").tree(head) is None
    assert repository.tree(head) == git(kernels.parent, "rev-parse", "HEAD:kernels")


def test_the_environment_leads_to_no_other_repository(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that git sets for its hooks do not matter: the folder decides."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert Repository.of(kernels) == Repository(kernels.parent, "kernels")


def test_nothing_of_the_repository_runs(kernels: Path, tmp_path: Path) -> None:
    """No hook, filter, textconv or monitor of the repository runs, and its index is not written."""
    top, ran = kernels.parent, tmp_path / "ran"
    script = tmp_path / "script.sh"
    script.write_text(f'#!/bin/sh\necho "$0 $*" >> {shlex.quote(str(ran))}\ncat\n', encoding="utf-8")
    script.chmod(0o755)
    (top / ".gitattributes").write_text("* filter=planted diff=planted merge=planted text eol=crlf\n", encoding="utf-8")
    commit(top, "attributes")
    hooks = top / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    names = ("post-checkout", "pre-commit", "post-index-change", "reference-transaction", "fsmonitor-watchman")
    for name in (*names, "post-merge", "pre-auto-gc", "post-rewrite"):
        (hooks / name).write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
        (hooks / name).chmod(0o755)
    settings = (
        *("filter.planted.smudge", "filter.planted.clean", "filter.planted.process", "diff.planted.textconv"),
        *("diff.planted.command", "diff.external", "core.fsmonitor", "core.pager", "core.editor", "core.sshCommand"),
        *(
            "core.gitProxy",
            "core.alternateRefsCommand",
            "credential.helper",
            "uploadpack.packObjectsHook",
            "gpg.program",
        ),
    )
    with (top / ".git" / "config").open("a", encoding="utf-8") as config:
        for setting in settings:
            section, _, key = setting.rpartition(".")
            name, _, sub = section.partition(".")
            head = f'[{name} "{sub}"]' if sub else f"[{name}]"
            config.write(f"{head}\n\t{key} = {script}\n")
    (kernels / "mine" / "kernel.cu").write_text("changed\n", encoding="utf-8")
    index = (top / ".git" / "index").read_bytes()
    repository = Repository.of(kernels)
    head = repository.commit("HEAD")
    extracted = extract(repository, repository.tree(head) or "", tmp_path / "cache")
    assert (extracted.folder / "mine" / "kernel.cu").read_bytes() == b"one\n"
    assert (ran.exists(), (top / ".git" / "index").read_bytes()) == (False, index)
    git(top, "status")  # the traps work: git itself runs some of them
    assert ran.exists()


def test_a_partial_clone_fetches_nothing(kernels: Path, tmp_path: Path) -> None:
    """Objects that a partial clone lacks are one sentence; the program that would fetch them does not run."""
    top, ran = kernels.parent, tmp_path / "ran"
    git(top, "config", "uploadpack.allowFilter", "true")
    git(tmp_path, "clone", "-q", "--no-checkout", "--filter=blob:none", f"file://{top}", "partial")
    (tmp_path / "partial" / "kernels").mkdir()
    git(tmp_path / "partial", "config", "remote.origin.uploadpack", f"touch {ran}; git-upload-pack")
    repository = Repository.of(tmp_path / "partial" / "kernels")
    tree = repository.tree(repository.commit("HEAD"))
    assert tree is not None
    with pytest.raises(UsageProblem, match=r"git cannot read the objects of|this clone lacks the object"):
        extract(repository, tree, tmp_path / "cache")
    assert not ran.exists()
    git(tmp_path / "partial", "cat-file", "blob", "HEAD:kernels/mine/kernel.cu", check=False)
    assert ran.exists()  # the trap works


def test_a_tree_is_written_once_and_repaired(kernels: Path, tmp_path: Path) -> None:
    """An extracted tree is used again as long as it is whole; a changed, missing or added file gives a new one."""
    (kernels / "mine" / "run.sh").write_text("#!/bin/sh\n", encoding="utf-8")
    (kernels / "mine" / "run.sh").chmod(0o755)
    commit(kernels.parent, "two")
    repository = Repository.of(kernels)
    tree = repository.tree(repository.commit("HEAD")) or ""
    cache = tmp_path / "cache"
    first = extract(repository, tree, cache)
    file = first.folder / "mine" / "kernel.cu"
    state = file.stat()
    assert extract(repository, tree, cache).folder / "mine" / "kernel.cu" == file
    assert (file.stat().st_ino, first.folder.name) == (state.st_ino, tree)
    assert (first.folder / "mine" / "run.sh").stat().st_mode & 0o111
    for damage in (lambda: file.write_text("x"), file.unlink, lambda: (first.folder / "new.h").write_text("")):
        damage()
        extract(repository, tree, cache)
        assert content_ids(first.folder, tree) == {each.path: each.blob for each in first.entries}
    assert [each.name for each in (cache / "trees").iterdir()] == [tree]


def test_links_that_lead_out_are_left_out(kernels: Path, tmp_path: Path) -> None:
    """Symlinks within the tree stay; one that leads out, by whatever way, and a submodule are named and absent."""
    (kernels / "inside.h").symlink_to("mine/kernel.cu")
    (kernels / "absolute.h").symlink_to("/etc/hostname")
    (kernels / "above.h").symlink_to("../secret.h")
    (kernels / "mine" / "top").symlink_to("..")
    (kernels / "chain.h").symlink_to("mine/top/../secret.h")  # by its text, it stays inside
    (kernels / "circle").symlink_to("circle")
    top = kernels.parent
    git(tmp_path, "init", "-q", "library")
    commit(tmp_path / "library", "library")
    git(top, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(tmp_path / "library"), "kernels/library")
    commit(top, "links")
    repository = Repository.of(kernels)
    extracted = extract(repository, repository.tree(repository.commit("HEAD")) or "", tmp_path / "cache")
    paths = (path for path in extracted.folder.rglob("*") if path.is_symlink())
    links = sorted(path.relative_to(extracted.folder).as_posix() for path in paths)
    assert links == ["inside.h", "mine/top"]
    reason = "is a symlink that leads out of the folder"
    left_out = [f"{name} {reason}" for name in ("above.h", "absolute.h", "chain.h", "circle")]
    assert sorted([*left_out, "library is a submodule"]) == sorted(extracted.left_out)
    inode = extracted.folder.stat().st_ino
    assert extract(repository, extracted.folder.name, tmp_path / "cache").folder.stat().st_ino == inode
