"""The layers of the package: each imports only from layers above it, and pytest's process imports no torch."""

from __future__ import annotations

import ast
import functools
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

# The layers from top to bottom.  A layer may import from itself and from the layers above it.
LAYERS = (
    "errors",
    "feature",
    "regular_file",
    "processes",
    "locks",
    "attention",
    "catalog",
    "options",
    "records",
    "build",
    "wire",
    "gpu",
    "candidate",
    "judge",
    "host",
    "session",
    "table",
    "plugin",
    "features",
    "server",
    "suite",
    "__main__",
)
# Folders whose modules may import torch; of a feature, those of its folder `judge_side`.
WITH_TORCH = ("gpu", "candidate", "judge", "server")
# What names torch's types: pytest's process reads it, so that it imports torch for type checking only.
WITH_TORCH_TYPES = ("pytest_fa.attention.", "pytest_fa.plugin.fixtures")
# Programs of child processes.  They are started by name, so that pytest's process does not import what they import.
CHILDREN = (
    "pytest_fa.server.__main__",
    "pytest_fa.server.process",
    "pytest_fa.server.resident_process",
    "pytest_fa.build.compile_extension",
)
# Folders that belong to no layer: they contain variants, whose sources are loaded by path like those of a user.
VARIANTS = (
    "builtin",
    "features.selftest.cuda_cheats",
    "features.selftest.cuda_faults",
    "features.selftest.python_autograd",
    "features.selftest.python_backward_faults",
    "features.selftest.python_cheats",
    "features.selftest.python_data_faults",
    "features.selftest.python_faults",
    "features.selftest.python_part_faults",
    "features.selftest.python_twins",
    "template",
)

SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    """`pytest_fa/catalog/case.py` as `pytest_fa.catalog.case`."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer of a module; an empty string for the package itself."""
    return module.partition(".")[2].split(".")[0]


def is_variant(path: Path) -> bool:
    """Whether a source belongs to a variant and not to a layer."""
    return any(module_of(path).startswith(f"pytest_fa.{folder}.") for folder in VARIANTS)


LAYERED = [path for path in MODULES if not is_variant(path)]


def imports_of(tree: ast.AST, module: str, *, is_package: bool) -> set[str]:
    """Every module that is imported anywhere in `tree`, also in functions and for type checking."""
    modules: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from pytest_fa import options` imports the module `pytest_fa.options`, but
            # `from pytest_fa.errors import FaError` only `pytest_fa.errors`.
            names = {f"{base}.{alias.name}" for alias in node.names}
            modules |= {name if is_in_package(name) else base for name in names}
    return modules


def is_in_package(name: str) -> bool:
    """Whether `name` is a module or a subpackage of `pytest_fa`."""
    path = REPOSITORY.joinpath(*name.split("."))
    return name.startswith("pytest_fa.") and (path.is_dir() or path.with_suffix(".py").is_file())


@functools.cache
def imports_of_file(path: Path) -> set[str]:
    """Every module that a source file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return imports_of(tree, module_of(path), is_package=path.name == "__init__.py")


def is_for_type_checking(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:` without an `else`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse


def run_time_imports_of_file(path: Path) -> set[str]:
    """Every module that a source file imports, except for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not is_for_type_checking(node)]
    return imports_of(tree, module_of(path), is_package=path.name == "__init__.py")


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
        ("if TYPE_CHECKING:\n    from pytest_fa.candidate.module import Forward", {"pytest_fa.candidate.module"}),
    ],
)
def test_every_way_to_import_is_seen(text: str, expected: set[str]) -> None:
    """`imports_of` finds every form of import, anywhere in a module."""
    assert expected == imports_of(ast.parse(text), "pytest_fa.catalog.plan", is_package=False)


def package_imports(path: Path) -> set[str]:
    """The modules of the package that a source file imports."""
    return {name for name in imports_of_file(path) if name.split(".")[0] == "pytest_fa"}


def layers_up_to(layer: str) -> set[str]:
    """The layers that a module of this layer may import from; the package itself is one of them."""
    return {"", *LAYERS[: LAYERS.index(layer) + 1]}


def test_every_module_belongs_to_a_layer() -> None:
    """Every module belongs to a layer in the list above."""
    assert [module_of(path) for path in LAYERED if layer_of(module_of(path)) not in LAYERS] == []


def test_imports_point_up() -> None:
    """A module imports only from its own layer and from those above, also inside functions."""
    wrong = [
        f"{module_of(path)} imports {name}"
        for path in LAYERED
        for name in sorted(package_imports(path))
        if layer_of(name) not in layers_up_to(layer_of(module_of(path)))
    ]
    assert wrong == []


def test_shipped_variants_are_like_a_users() -> None:
    """A variant that is shipped imports only `pytest_fa.errors`, as a user's variant may, and files of its folder.

    Exploits import what they attack by its name at run time.
    """
    variants = [path for path in MODULES if is_variant(path)]
    imported = {path: package_imports(path) - {"pytest_fa.errors"} for path in variants}
    beside = {path: module_of(path).rpartition(".")[0] for path in variants}
    others = [each for path in variants for each in imported[path] if each.rpartition(".")[0] != beside[path]]
    assert others == []


def test_the_package_itself_imports_no_module() -> None:
    """`import pytest_fa` imports no module of the package; its functions import those of the feature `api`."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        imported = imports_of(function, "pytest_fa", is_package=True)
        assert {name.rpartition(".")[0] for name in imported} == {"pytest_fa.features.api"}
    code = "import sys, pytest_fa; print(*sorted(name for name in sys.modules if name.startswith('pytest_fa.')))"
    assert python(code) == ""


def test_no_function_of_the_package_has_the_name_of_a_module() -> None:
    """No name in `pytest_fa.__all__` is that of a module, whose import would replace it."""
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert modules & set(importlib.import_module("pytest_fa").__all__) == set()


def test_only_a_child_imports_a_child() -> None:
    """Only child programs import child programs, so that pytest's process does not import torch through them."""
    importers = {module_of(path) for path in SOURCES if not imports_of_file(path).isdisjoint(CHILDREN)}
    assert importers - set(CHILDREN) == set()


def test_only_the_plugin_and_features_have_hooks() -> None:
    """Hooks are defined in `plugin` and in the folders of features, which import them only if they are used."""
    folders = {
        layer_of(module_of(path))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_")
    }
    assert folders == {"plugin", "features"}


def test_every_hook_is_offered() -> None:
    """`pytest_fa.plugin`, which pytest imports, exports every hook that each run has."""
    plugin = importlib.import_module("pytest_fa.plugin")
    hooks = importlib.import_module("pytest_fa.plugin.hooks")
    assert sorted(name for name in vars(hooks) if name.startswith("pytest_")) == sorted(plugin.__all__)


# -- names ------------------------------------------------------------------------------------------------------------

MAX_ROOT_MODULES = 8


def test_few_modules_are_in_the_root() -> None:
    """The root of the package contains folders and only a few modules."""
    root_modules = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert len(root_modules) <= MAX_ROOT_MODULES
    assert [name for name in root_modules if name.endswith("ing")] == []


def test_no_two_classes_share_a_name() -> None:
    """The name of a class or type alias is unique in the package."""
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
    assert sorted(name for name, count in names.items() if count > 1) == ["Hooks"]  # the hooks of each feature


# -- torch ------------------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """The output of `code` in a fresh interpreter."""
    process = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return process.stdout.strip()


IN_PROCESS = "pytest_fa.plugin.in_process"  # runs kernels of users' own tests in pytest's process


def needs_no_torch(path: Path) -> bool:
    """Whether pytest's own process may import a module."""
    name = module_of(path)
    return layer_of(name) not in WITH_TORCH and "judge_side" not in path.parts and name not in (*CHILDREN, IN_PROCESS)


TORCH_FREE = [path for path in LAYERED if needs_no_torch(path)]
IMPORTS_BY_NAME = (
    "pytest_fa.candidate.module",
    "pytest_fa.candidate.operators",
    "pytest_fa.feature",
    "pytest_fa.features.ncu.report_module",
)
# What these import inside functions although it imports torch: for users' own tests and functions.
LATE_TORCH = {
    "pytest_fa.features.api.functions": {"pytest_fa.candidate.module"},
    "pytest_fa.features.api.this_process": {
        "pytest_fa.candidate.adapter",
        "pytest_fa.features.api.judge_side.judged_here",
    },
    "pytest_fa.plugin.fa_benchmark": {IN_PROCESS},
    "pytest_fa.plugin.fixtures": {IN_PROCESS},
}


def test_no_torch_on_pytests_side() -> None:
    """The modules of pytest's process do not import torch, even inside functions, except that of users' own tests."""
    roots = {}
    for path in TORCH_FREE:
        imports = run_time_imports_of_file if module_of(path).startswith(WITH_TORCH_TYPES) else imports_of_file
        roots[module_of(path)] = {name.split(".")[0] for name in imports(path)}
    assert [module for module, names in roots.items() if "torch" in names] == []


@functools.cache
def needs_torch(module: str) -> bool:
    """Whether importing a module of the package imports torch, by itself or by what it imports."""
    path = REPOSITORY.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = imports_of(tree, module, is_package=path.name == "__init__.py")
    return any(name.split(".")[0] == "torch" or (is_in_package(name) and needs_torch(name)) for name in names)


def test_only_users_own_tests_bring_torch_into_pytests_process() -> None:
    """No other module of pytest's process imports one that needs torch, even inside functions."""
    late: dict[str, set[str]] = {}
    for path in TORCH_FREE:
        names = {name for name in run_time_imports_of_file(path) if is_in_package(name) and needs_torch(name)}
        late |= {module_of(path): names} if names else {}
    assert late == LATE_TORCH


def test_modules_are_imported_by_name_in_few_places() -> None:
    """A module with `import_module` or `__import__` could hide what it imports: these are all."""
    texts = {module_of(path): path.read_text(encoding="utf-8") for path in LAYERED}
    hiding = [module for module, text in texts.items() if re.search(r"import_module\(|__import__\(", text)]
    assert hiding == sorted(IMPORTS_BY_NAME)


def test_pytests_process_imports_no_torch() -> None:
    """Importing every module that pytest's own process may import does not import torch."""
    for extra in ("optuna", "matplotlib"):  # modules of the sweep import them
        pytest.importorskip(extra)
    modules = ", ".join(module_of(path) for path in TORCH_FREE)
    assert python(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    """Importing the plugin, which every pytest run does, imports neither torch nor packages that only kernels need."""
    heavy = ("torch", "msgspec", "yaml", "rich", "pynvml", "tvm_ffi", "filelock", "elftools")
    code = f"import sys, pytest_fa.plugin; print(*[name for name in {heavy} if name in sys.modules])"
    assert python(code) == ""


# -- the wheel --------------------------------------------------------------------------------------------------------


def files_beside_modules() -> list[str]:
    """Every file of the package that is no Python module of it: sources, headers, manifests and others."""
    names = []
    for path in PACKAGE.rglob("*"):
        is_module = path.suffix == ".py" and (path.parent / "__init__.py").is_file()
        if path.is_file() and not is_module and "__pycache__" not in path.parts:
            names.append(str(path.relative_to(PACKAGE)))
    return sorted(names)


def test_the_wheel_carries_every_file() -> None:
    """Every file that is no module matches a pattern in `package-data`, so that the wheel contains it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["pytest_fa"]
    carried = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert [name for name in files_beside_modules() if PACKAGE / name not in carried] == []


def test_the_data_files_are_found() -> None:
    """`files_beside_modules` finds the C header, the binding, the companions and the typing marker."""
    needed = {"py.typed", "build/binding.cpp", "include/fa_forward.h", "builtin/noop/kernel.cu", "builtin/sdpa/sdpa.py"}
    assert needed <= set(files_beside_modules())
