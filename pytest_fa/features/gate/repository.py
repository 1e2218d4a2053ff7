"""Read commits, trees and files of a git repository, so that nothing that the repository configures runs.

Only `rev-parse`, `ls-tree` and `cat-file` are used.  They read objects: they run no hook, no filter, no textconv and no
file-system monitor, and touch neither the index nor the working tree.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.gated import SHORT_DIGITS
from pytest_fa.records.text import printable

GIT_SECONDS = 120
SHA1_DIGITS = 40
_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FIXED = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
_ENVIRONMENT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",  # an id stands for its own content
    # A partial clone would fetch what it lacks by a program that the repository names.  Git before 2.45 knows only the
    # list of protocols.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
    "LANGUAGE": "C",
}


class TreeEntry(NamedTuple):
    """A file, a symlink (mode 120000) or a submodule (160000) of a tree, with its path from the tree's top."""

    mode: str
    blob: str
    path: str


class Repository(NamedTuple):
    """The repository that contains a kernels folder: the top of its working tree, and the folder's path from there."""

    top: Path
    prefix: str

    @staticmethod
    def of(folder: Path) -> Repository:
        """The repository of a folder.  Raises `UsageProblem` if there is none, or git cannot read it."""
        output, reason = _git(folder, "rev-parse", "--show-toplevel")
        if output is None and "not a git repository" in reason:
            raise UsageProblem(f"{folder} is not in a git repository; give a variant's name or key:KEY")
        top = Path(os.path.realpath(os.fsdecode(output.removesuffix(b"\n")))) if output else Path()
        real = Path(os.path.realpath(folder))
        if not output or not real.is_relative_to(top):
            raise UsageProblem(
                f"git cannot read the repository of {folder}: {reason or 'it has no working tree there'}"
            )
        return Repository(top, "" if real == top else real.relative_to(top).as_posix())

    @property
    def shown_prefix(self) -> str:
        """The kernels folder in words."""
        return f"{self.prefix}/" if self.prefix else "the top folder"

    def commit(self, revision: str) -> str:
        """The id of the commit that a revision stands for.  Raises `UsageProblem`."""
        if not revision:
            raise UsageProblem("it names no revision; write one behind git:, such as git:HEAD~1")
        if revision.startswith("-"):
            raise UsageProblem(f"no revision begins with '-', as {revision!r} does; write a commit, a branch or a tag")
        if not revision.isprintable():
            raise UsageProblem(f"{revision!r} is no revision; write a commit, a branch or a tag")
        output, reason = _git(self.top, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        commit = (output or b"").decode(errors="replace").strip()
        if _ID.fullmatch(commit):
            return commit
        if "ambiguous" in reason:
            raise UsageProblem(f"{revision!r} is the beginning of several ids in {self.top}; write more digits")
        if _git(self.top, "rev-parse", "--is-shallow-repository")[0] == b"true\n":
            raise UsageProblem(
                f"{revision!r} is not in {self.top}, which is a shallow clone; `git fetch --unshallow` gets every "
                f"commit (in actions/checkout, `fetch-depth: 0`)"
            )
        raise UsageProblem(f"there is no commit {revision!r} in {self.top}; `git log --oneline` lists them")

    def tree(self, commit: str) -> str | None:
        """The id of the kernels folder's tree in a commit; None if the commit has no such folder."""
        name = f"{commit}:{self.prefix}" if self.prefix else f"{commit}^{{tree}}"
        output, _ = _git(self.top, "rev-parse", "--verify", "--quiet", "--end-of-options", name)
        tree = (output or b"").decode(errors="replace").strip()
        is_tree = _ID.fullmatch(tree) and _git(self.top, "cat-file", "-t", tree)[0] == b"tree\n"
        return tree if is_tree else None

    def entries(self, tree: str) -> list[TreeEntry]:
        """Everything in a tree and in the trees below it.  Raises `UsageProblem` if objects are missing."""
        return list(_entries(self._read("ls-tree", "-r", "-z", "--full-tree", tree)))

    def total_bytes(self, blobs: Iterable[str]) -> int:
        """The size of these blobs together.  Raises `UsageProblem` if one is missing."""
        sizes = self._read("cat-file", "--batch-check=%(objectname) %(objectsize)", given="\n".join(blobs)).split(b"\n")
        _require_present(sizes)
        return sum(int(line.split()[1]) for line in sizes if line)

    def contents(self, blobs: Iterable[str]) -> Iterator[bytes]:
        """The content of each blob, in their order.  Raises `UsageProblem` if one is missing."""
        output, start = self._read("cat-file", "--batch", given="\n".join(blobs)), 0
        while start < len(output):
            end = output.index(b"\n", start)
            _require_present([output[start:end]])
            size = int(output[start:end].split()[2])
            yield output[end + 1 : end + 1 + size]
            start = end + size + 2

    def _read(self, *words: str, given: str = "") -> bytes:
        output, reason = _git(self.top, *words, given=f"{given}\n" if given else "")
        if output is None:
            raise UsageProblem(f"git cannot read the objects of {self.top}: {reason}; `git fsck` checks them")
        return output


def blob_id(content: bytes, like: str) -> str:
    """The id that git gives to a file with this content, in a repository with ids such as `like`."""
    name = "sha1" if len(like) == SHA1_DIGITS else "sha256"
    return hashlib.new(name, b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _entries(output: bytes) -> Iterator[TreeEntry]:
    for line in output.split(b"\0")[:-1]:
        facts, _, path = line.partition(b"\t")
        mode, _, blob = facts.decode().split()
        yield TreeEntry(mode, blob, os.fsdecode(path))


def _require_present(lines: Iterable[bytes]) -> None:
    for line in lines:
        if line.endswith(b" missing"):
            blob = line.split()[0].decode()
            raise UsageProblem(f"this clone lacks the object {blob[:SHORT_DIGITS]}; fetch the commit completely")


def _git(folder: Path, *words: str, given: str = "") -> tuple[bytes | None, str]:
    """What a git command prints, and None with the first line of its error if it fails.

    Variables of git in the environment could lead to another repository: git itself sets them for hooks.  What this
    user and this machine have configured, such as `safe.directory`, counts.  Raises `UsageProblem` without git.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        run = subprocess.run(  # noqa: S603
            ["git", *_FIXED, *words],  # noqa: S607
            cwd=folder,
            env={**environment, **_ENVIRONMENT},
            input=given.encode(),
            capture_output=True,
            check=False,
            timeout=GIT_SECONDS,
        )
    except FileNotFoundError:
        raise UsageProblem("git is not installed, or not in PATH; install it, or give a name or key:KEY") from None
    except (OSError, subprocess.SubprocessError) as problem:
        raise UsageProblem(printable(f"git cannot be run: {problem}")) from None
    first_line = run.stderr.decode(errors="replace").strip().partition("\n")[0]
    return (run.stdout if run.returncode == 0 else None), printable(first_line.removeprefix("fatal: "))
