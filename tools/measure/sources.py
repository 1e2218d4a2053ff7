"""Which source files of a variant changed since the commit of a record, apart from comments and prose."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from pytest_fa.build.keys import HEADER_SUFFIXES
from pytest_fa.catalog.manifest import MANIFEST_NAME, PLANTED_NAME
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.record import Source
from tools.measure.machine_code import SameCode

INCLUDE = Path("pytest_fa", "include")
CUDA_SUFFIXES = frozenset({".cu", ".cpp", ".cc", ".cxx", ".c", *HEADER_SUFFIXES})
CODE_KEYS = ("defines", "flags")  # change nothing but the code
PROSE_KEYS = ("step", "because", "expect", "parent", "limits", "suppressions", "sweep")  # change no code and no check
UNKNOWN = "commit unknown"
_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


class SourceHistory:
    """The source files of variants now, and at the commits of records.  Paths are relative to the root folder."""

    def __init__(self, root: Path, same_code: SameCode | None = None) -> None:
        """With `same_code`, changes do not count that leave a variant's code as it was."""
        self.root, self._same_code = root.resolve(), same_code
        self._changed = functools.cache(self._changed_paths)
        self._has_changed = functools.cache(self._content_has_changed)
        self._paths = functools.cache(self._paths_of)

    def changes(self, source: Source, variant: Variant, hashes: dict[str, str], arch: str = "") -> str:
        """What changed since a record was made, such as `kernels/mine/kernel.cu changed`; empty if nothing did.

        `hashes` are those of the record, by path, and `arch` is the architecture that it was built for, if it was.
        Without a commit that this repository has, the answer is `commit unknown`, unless the hashes of all files are
        known and equal.
        """
        paths = dict.fromkeys((*self._paths(variant.folder, variant.entry.include, variant.entry.kind), *hashes))
        if outside := [path for path in paths if Path(path).is_absolute()]:
            return f"{outside[0]} is not in this repository"
        differing = [path for path in paths if hashes.get(path, "") != self._hash(path)]
        changes = self.changed_files(source, differing, variant.name)
        return "" if changes and self._has_same_code(source, variant, differing, arch) else changes

    def changed_files(self, source: Source, paths: Iterable[str], variant: str = "") -> str:
        """Which of these files changed since a commit, in words; empty if none did."""
        changed = self._changed_of(source, list(paths), variant)
        if not changed:
            return UNKNOWN if changed is None else ""
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{changed[0]}{more} changed"

    def _changed_of(self, source: Source, paths: list[str], variant: str) -> list[str] | None:
        """Those of these files that changed since a commit; None without the commit."""
        if not paths:
            return []
        since = self._changed(source.commit) if source.commit else None
        if source.commit is None or since is None:
            return None
        commit = source.commit
        return [path for path in paths if path in since and self._has_changed(commit, path, variant)]

    def _has_same_code(self, source: Source, variant: Variant, paths: list[str], arch: str) -> bool:
        """Whether files of the kernels folder changed that can change nothing but code, and did not change it."""
        changed = self._changed_of(source, paths, variant.name)
        if not (changed and source.commit and arch and self._same_code):
            return False
        kernels = self._relative(Path(variant.root).resolve())
        return all(
            path.startswith(f"{kernels}/") and self._changes_only_code(source.commit, path, variant.name)
            for path in changed
        ) and self._same_code(variant, source.commit, arch)

    def _changes_only_code(self, commit: str, path: str, variant: str) -> bool:
        if Path(path).suffix in CUDA_SUFFIXES:
            return True
        old, file = self._git("show", f"{commit}:{path}"), self.root / path
        if Path(path).name not in (MANIFEST_NAME, PLANTED_NAME) or old is None or not file.is_file():
            return False
        before, now = (essence(path, text, variant) for text in (old, file.read_text(encoding="utf-8")))
        return (
            isinstance(before, dict)
            and isinstance(now, dict)
            and all(before.get(key) == now.get(key) for key in {*before, *now} - {*CODE_KEYS})
        )

    def _hash(self, path: str) -> str | None:
        file = self.root / path
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None

    def _paths_of(self, folder: str, include: tuple[str, ...], kind: str) -> tuple[str, ...]:
        """The files of a variant's folder, and the headers that its sources include."""
        home = Path(folder).resolve()
        suffixes = {*CUDA_SUFFIXES, ".yaml"} if kind == "cuda" else {*CUDA_SUFFIXES, ".yaml", ".py"}
        inside = sorted(path for path in home.rglob("*") if path.is_file() and path.suffix in suffixes)
        roots = [*(home / each for each in include), home, home.parent / "include", self.root / INCLUDE]
        found = dict.fromkeys(inside)
        waiting = [path for path in inside if path.suffix in CUDA_SUFFIXES]
        while waiting:
            for header in _headers(waiting.pop(), roots):
                if header not in found:
                    found[header] = None
                    waiting.append(header)
        return tuple(self._relative(path) for path in found)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def _changed_paths(self, commit: str) -> frozenset[str] | None:
        """The files that differ from a commit, with those that git does not know; None without the commit."""
        differing = self._git("diff", "--name-only", "--no-renames", "-z", commit, "--")
        untracked = self._git("ls-files", "--others", "--exclude-standard", "-z")
        if differing is None or untracked is None:
            return None
        return frozenset(filter(None, (differing + untracked).split("\0")))

    def _content_has_changed(self, commit: str, path: str, variant: str) -> bool:
        old, file = self._git("show", f"{commit}:{path}"), self.root / path
        if old is None or not file.is_file():
            return True
        return essence(path, old, variant) != essence(path, file.read_text(encoding="utf-8"), variant)

    def _git(self, *words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, check=True, timeout=60)  # noqa: S603, S607
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace")


def _headers(source: Path, roots: list[Path]) -> Iterator[Path]:
    """The headers that a source names and that are in its own folder or in one of `roots`."""
    for name in _INCLUDED.findall(source.read_text(encoding="utf-8")):
        places = [(folder / name).resolve() for folder in (source.parent, *roots)]
        yield from [place for place in places if place.is_file()][:1]


def essence(path: str, text: str, variant: str = "") -> object:
    """What of a file can change a kernel or its result: code without comments and docstrings, a manifest without prose.

    Of the manifest of several variants, only the keys of this one count.  A file that cannot be parsed counts whole.
    """
    name = Path(path).name
    try:
        if name in (MANIFEST_NAME, PLANTED_NAME):
            return _manifest_of(yaml.safe_load(text), variant)
        if name.endswith(".py"):
            return _code_of(text)
    except (yaml.YAMLError, SyntaxError, ValueError, AttributeError, TypeError):
        return text
    if Path(path).suffix in CUDA_SUFFIXES:
        code = _COMMENT.sub(lambda match: " " if match[0].startswith("/") else match[0], text)
        return [line for line in map(str.split, code.splitlines()) if line]
    return text


def _code_of(python: str) -> str:
    """The syntax tree without docstrings."""
    tree = ast.parse(python)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _manifest_of(data: dict[str, Any], variant: str) -> dict[str, Any]:
    members = data.get("variants") or {}
    own = {**data, "variants": None, **(members.get(variant) or {})}
    return {key: value for key, value in own.items() if key not in PROSE_KEYS}
