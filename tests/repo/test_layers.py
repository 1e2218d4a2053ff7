"""The layers of the package: each imports only from layers above it, and torch stays out of pytest's process."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "pytest_fa"

# Top to bottom: the design's list.  A layer may import from itself and from what stands above it.
LAYERS = (
    "errors",
    "earlier",
    "catalog",
    "options",
    "records",
    "build",
    "run",
    "judge",
    "measure",
    "worker",
    "session",
    "gate",
    "profile",
    "sanitize",
    "selftest",
    "bundle",
    "report",
    "plugin",
    "suite",
    "new",
    "__main__",
)
# Layers whose modules may import torch, but for those that pytest's own process imports as well.
WITH_TORCH = ("run", "judge", "measure", "worker")
TORCH_FREE_MODULES = (
    "pytest_fa.run.nvtx_range",
    "pytest_fa.measure.replay_clock",
    "pytest_fa.measure.sampling",
    "pytest_fa.measure.timing_lock",
    "pytest_fa.worker.client",
    "pytest_fa.worker.jobs",
    "pytest_fa.worker.stages",
)
# Child programs: started by name, so that what they import stays out of pytest's process.
CHILDREN = ("pytest_fa.worker.__main__", "pytest_fa.worker.process", "pytest_fa.build.compile_extension")
# What stands beside the layers: variants like a user's, a folder each, with sources that are loaded by path.
VARIANTS = ("builtin", "selftest.cuda_faults", "selftest.python_faults", "template")

SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    """`pytest_fa/catalog/case.py` as `pytest_fa.catalog.case`."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer of a module of the package; '' for the package itself."""
    return module.partition(".")[2].split(".")[0]


def is_variant(path: Path) -> bool:
    """Whether a source belongs to a variant, not to a layer."""
    return any(module_of(path).startswith(f"pytest_fa.{folder}.") for folder in VARIANTS)


LAYERED = [path for path in MODULES if not is_variant(path)]


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
        ("from .. import options", {"pytest_fa.options"}),
        ("def f():\n    import torch", {"torch"}),
        ("if TYPE_CHECKING:\n    from pytest_fa.run.module import Forward", {"pytest_fa.run.module"}),
    ],
)
def test_every_way_to_import_is_seen(text: str, expected: set[str]) -> None:
    """The reader of imports misses none, wherever and however it is written."""
    assert expected == imports_of(ast.parse(text), "pytest_fa.catalog.plan", is_package=False)


@pytest.mark.parametrize("path", LAYERED, ids=name_of)
def test_every_module_stands_in_a_layer(path: Path) -> None:
    """A new file or folder takes its place in the list above before it is used."""
    assert layer_of(module_of(path)) in LAYERS


@pytest.mark.parametrize("path", LAYERED, ids=name_of)
def test_imports_point_up(path: Path) -> None:
    """A module imports from its own layer and those above, wherever in the file the import stands."""
    allowed = {"", *LAYERS[: LAYERS.index(layer_of(module_of(path))) + 1]}
    ours = {name for name in imports_of_file(path) if name.split(".")[0] == "pytest_fa"}
    assert sorted(name for name in ours if layer_of(name) not in allowed) == []


@pytest.mark.parametrize("path", [path for path in MODULES if is_variant(path)], ids=name_of)
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


@pytest.mark.parametrize("child", CHILDREN)
def test_only_a_child_imports_a_child(child: str) -> None:
    """A child is started by name: what it imports, torch first, stays out of pytest's process."""
    importers = {module_of(path) for path in SOURCES if child in imports_of_file(path)}
    assert importers <= set(CHILDREN)


def test_only_the_plugin_has_hooks() -> None:
    """A function that pytest would call stands in `plugin/hooks.py` alone."""
    owners = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_")
    }
    assert owners == {"plugin/hooks.py"}


def test_every_hook_and_fixture_is_offered() -> None:
    """`pytest_fa.plugin`, which pytest imports, names every hook and fixture."""
    plugin = importlib.import_module("pytest_fa.plugin")
    hooks = importlib.import_module("pytest_fa.plugin.hooks")
    fixtures = importlib.import_module("pytest_fa.plugin.fixtures")
    expected = [name for name in vars(hooks) if name.startswith("pytest_")]
    expected += [name for name in vars(fixtures) if name.startswith("fa_")]
    assert sorted(expected) == sorted(plugin.__all__)


# -- names and sizes --------------------------------------------------------------------------------------------------

MOST_LOOSE_MODULES = 8
# One name, two modules, one meaning: what is asked of a variant and how it is tried; limits of a GPU and how they are
# measured.  Every feature's folder has a `run`.
SAME_MEANING = {"properties", "ceilings", "earlier", "run"}


def test_few_modules_stand_loose() -> None:
    """The package's root shows the architecture: folders, and few modules beside them."""
    loose = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert len(loose) <= MOST_LOOSE_MODULES
    assert [name for name in loose if name.endswith("ing")] == []


def test_no_two_modules_share_a_name() -> None:
    """A module's name says what it is, wherever it stands."""
    names = Counter(path.stem for path in LAYERED if not path.stem.startswith("__"))
    names.update(path.parent.name for path in LAYERED if path.name == "__init__.py" and path.parent.parent != PACKAGE)
    assert {name for name, count in names.items() if count > 1} <= SAME_MEANING


def test_no_two_classes_share_a_name() -> None:
    """A class, a type alias or a struct means one thing in the whole package."""
    names: Counter[str] = Counter()
    for path in LAYERED:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names.update(node.name for node in body if isinstance(node, ast.ClassDef))
        names.update(
            node.targets[0].id
            for node in body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and re.fullmatch(r"([A-Z][a-z]+)+", node.targets[0].id)
        )
    assert sorted(name for name, count in names.items() if count > 1) == []


def test_functions_and_files_stay_short() -> None:
    """Median at most 7 lines, 95 of 100 at most 24, none past 50; no file past 350."""
    functions = [
        node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    assert (lengths[len(lengths) // 2] <= 7, lengths[len(lengths) * 95 // 100] <= 24, lengths[-1] <= 50) == (True,) * 3
    assert [name_of(path) for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > 350] == []


# -- torch ------------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return run.stdout.strip()


MAY_IMPORT_TORCH_INSIDE = ("pytest_fa.plugin.fixtures", "pytest_fa.plugin.in_process", "pytest_fa.__main__")


def needs_no_torch(path: Path) -> bool:
    """Whether pytest's own process may import a module: all but the worker's side, where single modules are free."""
    name = module_of(path)
    return name not in CHILDREN and (layer_of(name) not in WITH_TORCH or name in TORCH_FREE_MODULES)


TORCH_FREE = [path for path in LAYERED if needs_no_torch(path)]


@pytest.mark.parametrize(
    "path", [path for path in TORCH_FREE if module_of(path) not in MAY_IMPORT_TORCH_INSIDE], ids=name_of
)
def test_no_torch_on_pytests_side(path: Path) -> None:
    """What pytest's process imports names torch nowhere, not even inside a function; fixtures for users' tests may."""
    assert not {name for name in imports_of_file(path) if name.split(".")[0] == "torch"}


def test_pytests_process_imports_no_torch() -> None:
    """All that pytest's own process may import, imported at once, brings no torch along."""
    modules = ", ".join(module_of(path) for path in TORCH_FREE)
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
