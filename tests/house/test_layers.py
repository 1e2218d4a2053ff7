"""The rooms of the house: each imports only from rooms above it, and torch stays below."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "pytest_fa"

# Top to bottom: the design's list.  A room may import from itself and from what stands above it.
ROOMS = (
    "errors",
    "catalog",
    "options",
    "gate",
    "report",
    "build",
    "jobs",
    "workers",
    "profile",
    "run",
    "judge",
    "measure",
    "pipeline",
    "worker",
    "compile_extension",
    "bundle",
    "session",
    "noise",
    "pilot",
    "gating",
    "profiling",
    "sanitizing",
    "selftesting",
    "items",
    "markers",
    "terminal",
    "fixtures",
    "plugin",
    "suite",
    "new",
    "__main__",
)
WITHOUT_TORCH = ROOMS[: ROOMS.index("run")]
# These two need no torch although their room does.
TORCH_FREE_MODULES = ("pytest_fa.measure.replay_clock", "pytest_fa.measure.statistics")
# What pytest's own process imports for a whole run.
PYTEST_SIDE = (*WITHOUT_TORCH, *ROOMS[ROOMS.index("session") : ROOMS.index("new")])
# Variants like a user's: a folder each, with sources that are loaded by path.
VARIANTS = ("builtin", "selftest", "template")

SOURCES = sorted(PACKAGE.rglob("*.py"))
IN_ROOMS = [path for path in SOURCES if path.parent != PACKAGE or path.name != "__init__.py"]


def module_of(path: Path) -> str:
    """`pytest_fa/catalog/case.py` as `pytest_fa.catalog.case`."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room that a module of ours stands in; the package itself is the room ''."""
    return module.partition(".")[2].split(".")[0]


def imports_of(tree: ast.AST, module: str, *, is_package: bool) -> set[str]:
    """Every module that is imported anywhere in `tree`, in functions and for type checking too."""
    found: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from pytest_fa import options` imports a module, `from pytest_fa.errors import FaError` none.
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if is_ours(name) else base for name in names}
    return found


def is_ours(name: str) -> bool:
    """Whether `name` is a module or a folder of the package."""
    path = REPOSITORY.joinpath(*name.split("."))
    return name.startswith("pytest_fa.") and (path.is_dir() or path.with_suffix(".py").is_file())


def imports_of_file(path: Path) -> set[str]:
    """Every module that a source file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return imports_of(tree, module_of(path), is_package=path.name == "__init__.py")


def name_of(path: Path) -> str:
    """A test id."""
    return module_of(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("from pytest_fa import options", {"pytest_fa.options"}),
        ("from pytest_fa import __version__", {"pytest_fa"}),
        ("from pytest_fa.errors import FaError", {"pytest_fa.errors"}),
        ("from pytest_fa.catalog import case", {"pytest_fa.catalog.case"}),
        ("from . import case", {"pytest_fa.catalog.case"}),
        ("from .. import jobs", {"pytest_fa.jobs"}),
        ("def f():\n    import torch", {"torch"}),
        ("if TYPE_CHECKING:\n    from pytest_fa.run.module import Forward", {"pytest_fa.run.module"}),
    ],
)
def test_every_way_to_import_is_seen(text: str, expected: set[str]) -> None:
    """The reader of imports misses none, wherever and however it is written."""
    assert expected == imports_of(ast.parse(text), "pytest_fa.catalog.plan", is_package=False)


@pytest.mark.parametrize("path", IN_ROOMS, ids=name_of)
def test_every_module_stands_in_a_room(path: Path) -> None:
    """A new file or folder takes its place in the list above before it is used."""
    assert room_of(module_of(path)) in (*ROOMS, *VARIANTS)


@pytest.mark.parametrize("path", [path for path in IN_ROOMS if room_of(module_of(path)) in ROOMS], ids=name_of)
def test_imports_point_up(path: Path) -> None:
    """A module imports from its own room and those above, wherever in the file the import stands."""
    room = room_of(module_of(path))
    allowed = {"", *ROOMS[: ROOMS.index(room) + 1]}
    ours = {name for name in imports_of_file(path) if name.split(".")[0] == "pytest_fa"}
    assert sorted(name for name in ours if room_of(name) not in allowed) == []


@pytest.mark.parametrize(
    "path", [path for folder in VARIANTS for path in sorted((PACKAGE / folder).rglob("*.py"))], ids=name_of
)
def test_our_variants_are_like_a_users(path: Path) -> None:
    """A variant that travels with the package uses what a user's may: the errors to raise."""
    ours = {name for name in imports_of_file(path) if name.split(".")[0] == "pytest_fa"}
    assert ours <= {"pytest_fa.errors"}


def test_the_package_itself_imports_one_thing_when_asked() -> None:
    """`import pytest_fa` imports nothing of ours; `load` imports `run.module`, in its own body, types aside."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (load,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    ours = {name for name in imports_of(tree, "pytest_fa", is_package=True) if name.startswith("pytest_fa")}
    assert imports_of(load, "pytest_fa", is_package=True) == {"pytest_fa.run.module"}
    assert ours == {"pytest_fa.run.forward", "pytest_fa.run.module"}
    run = "import sys, pytest_fa; print(*sorted(name for name in sys.modules if name.startswith('pytest_fa.')))"
    assert python(run) == ""


@pytest.mark.parametrize("child", ["pytest_fa.worker", "pytest_fa.compile_extension"])
def test_a_child_is_imported_by_nobody(child: str) -> None:
    """A child is started by name: what it imports, torch first, stays out of pytest's process."""
    importers = [module_of(path) for path in SOURCES if child in imports_of_file(path)]
    assert importers == []


def test_only_the_plugin_has_hooks() -> None:
    """A function that pytest would call stands in `plugin.py` alone."""
    owners = {
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_")
    }
    assert owners == {"plugin.py"}


# -- torch ------------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def needs_no_torch(path: Path) -> bool:
    """Whether a module stands above `run`, or is one of the two that could."""
    return room_of(module_of(path)) in WITHOUT_TORCH or module_of(path) in TORCH_FREE_MODULES


@pytest.mark.parametrize("path", [path for path in IN_ROOMS if needs_no_torch(path)], ids=name_of)
def test_no_torch_above_run(path: Path) -> None:
    """What stands above `run` imports torch nowhere, not even inside a function."""
    assert not {name for name in imports_of_file(path) if name.split(".")[0] == "torch"}


def test_pytests_process_imports_no_torch() -> None:
    """All that pytest's own process may import, imported at once, brings no torch along."""
    side = [module_of(path) for path in IN_ROOMS if room_of(module_of(path)) in PYTEST_SIDE]
    modules = ", ".join((*side, *TORCH_FREE_MODULES))
    assert python(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    """Every pytest on the machine imports the plugin: it brings no torch, and none of what only kernels need."""
    heavy = ("torch", "msgspec", "yaml", "rich", "pynvml", "tvm_ffi", "filelock", "elftools")
    code = f"import sys, pytest_fa.plugin; print(*[name for name in {heavy} if name in sys.modules])"
    assert python(code) == ""


# -- the wheel --------------------------------------------------------------------------------------------------------


def files_beside_modules() -> list[str]:
    """Every file of the package that is no module of a package: sources, headers, manifests, marks."""
    found = []
    for path in PACKAGE.rglob("*"):
        is_module = path.suffix == ".py" and (path.parent / "__init__.py").is_file()
        if path.is_file() and not is_module and "__pycache__" not in path.parts:
            found.append(str(path.relative_to(PACKAGE)))
    return sorted(found)


@pytest.mark.parametrize("name", files_beside_modules())
def test_the_wheel_carries_every_file(name: str) -> None:
    """A file that is no module is named in `package-data`, so that nothing in the wheel needs the repository."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["pytest_fa"]
    assert any(PACKAGE / name in PACKAGE.glob(pattern) for pattern in patterns)


def test_the_files_that_must_travel_are_seen() -> None:
    """The C entry point, the binding, the companions and the typing mark are among those that are looked for."""
    needed = {"py.typed", "build/binding.cpp", "include/fa_forward.h", "builtin/noop/kernel.cu", "builtin/sdpa/sdpa.py"}
    assert needed <= set(files_beside_modules())
