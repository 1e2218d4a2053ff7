"""Find the functions of `--fa-truth` and of a manifest's `truth` in their file, without running it."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

from pytest_fa.catalog.own_truth import OwnTruth, digest_of
from pytest_fa.errors import UsageProblem, suggestion

FORM = "FILE.py:TRUTH or FILE.py:TRUTH,REFERENCE"
MAX_FUNCTIONS = 2
Definition = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def functions_of(where: str, text: str, folder: Path) -> OwnTruth:
    """The functions that a text names, in a file relative to `folder`.  `where` is the option or the key.

    Raises `UsageProblem` for a text of another form, a file that cannot be read and a function that is not in it.
    """
    file, separator, listed = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    names = [name.strip() for name in listed.split(",")]
    is_listed = len(names) <= MAX_FUNCTIONS and all(name.isidentifier() for name in names)
    if not file.endswith(".py") or (separator and not is_listed):
        raise UsageProblem(f"{where}: {text!r} is not {FORM}")
    path = Path(os.path.abspath(folder / Path(file).expanduser()))  # noqa: PTH100  # `..` without links
    source = _source(where, path, folder)
    definitions = _definitions(where, path, source)
    functions = [known for known, definition in definitions.items() if definition]
    known_names = ", ".join(functions) or "no function"
    if not separator:
        example = f"; write {file}:{','.join(functions[:MAX_FUNCTIONS])}" if functions else ""
        raise UsageProblem(f"{where}: {text!r} names no function; {path} has: {known_names}{example}")
    for name in names if "*" not in definitions else ():  # what a star imports, only a call can tell
        if name not in definitions:
            raise UsageProblem(f"{where}: {path} has no {name!r}{suggestion(name, functions)} (it has: {known_names})")
    files = (str(path), *_imported(path, source))
    return OwnTruth(
        path=str(path),
        shown_path=file,
        function=names[0],
        sha256=digest_of(files),
        imports=files[1:],
        reference=names[1] if len(names) == MAX_FUNCTIONS else None,
        takes=tuple(_keywords(definitions.get(name)) for name in names),
    )


def _source(where: str, path: Path, folder: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise UsageProblem(
            f"{where}: {path} cannot be read: {problem.strerror} (a path is relative to {folder})"
        ) from None


def _imported(path: Path, source: bytes) -> tuple[str, ...]:
    """The modules beside a file that it imports, and those that these import: all files of a package."""
    folder, pending, files = path.parent, [source], dict[str, None]()
    while pending:
        for name in _imported_names(pending.pop()):
            beside = [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]
            for each in (file for file in beside if str(file) not in files and file != path and file.is_file()):
                files[str(each)] = None
                pending.append(each.read_bytes())
    return tuple(sorted(files))


def _imported_names(source: bytes) -> set[str]:
    """The first parts of the names of the modules that a source imports; none if it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    listed = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in (*plain, *listed)}


@functools.lru_cache(maxsize=16)
def _definitions(where: str, path: Path, source: bytes) -> dict[str, Definition | None]:
    """The names that the file defines at its top level; None for one that is no plain function."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as problem:
        line = getattr(problem, "lineno", None) or 1
        raise UsageProblem(f"{where}: {path}, line {line}: {getattr(problem, 'msg', problem)}") from None
    found: dict[str, Definition | None] = {}
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = None if node.decorator_list else node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= dict.fromkeys(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        if not isinstance(node, SCOPES):
            pending += reversed(list(ast.iter_child_nodes(node)))
    return found


def _keywords(definition: Definition | None) -> tuple[str, ...] | None:
    """The keyword arguments that a function takes; None if only a call can tell."""
    if definition is None or definition.args.kwarg is not None:
        return None
    return tuple(argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs))
