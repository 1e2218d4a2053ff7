"""Load a variant, built or in Python, as a callable `f(q, k, v, *, scale, out, ...) -> Tensor` (`Forward`)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import ALL_GRADIENTS, ARGUMENTS
from pytest_fa.attention.backward import PART as BACKWARD
from pytest_fa.attention.scores import Computes
from pytest_fa.build.extension import MODULE_NAME
from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.build.target import native_arch
from pytest_fa.candidate.adapter import adapted
from pytest_fa.candidate.backward import adapted_backward, backward_of, by_autograd
from pytest_fa.candidate.cuda_backward import CudaBackward
from pytest_fa.candidate.cuda_forward import Allocate, CudaForward
from pytest_fa.candidate.forward import Forward
from pytest_fa.candidate.more_outputs import taking_outputs
from pytest_fa.candidate.operators import installed_operator, load_operators, neighbours, operator_of
from pytest_fa.candidate.signature import defines_problem, signature_problem
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import (
    BuildError,
    FaError,
    ManifestError,
    ToolchainError,
    UnsupportedCase,
    UsageProblem,
    suggestion,
)
from pytest_fa.gpu.guards import Workspaces
from pytest_fa.options import options

WatchFunction = Callable[[Callable[..., Any]], Callable[..., Any]]  # a function that is called in place of another

CUDA_FAILED = ("CUDA error", "CUDA driver error", "CUDA out of memory")  # how the errors of PyTorch's CUDA checks begin
MODULE_LINE = 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {{ module.def("{0}", &{0}); }}'
VARIANTS = "pytest_fa_variants"  # the package of the packages of variants' folders
OPERATOR_LINE = 'TORCH_LIBRARY({0}, library) {{ library.def("{1}", &{1}); }}'


def load(name: str, *, kernels: str | Path | tuple[str | Path, ...] = "kernels", cache: Path | None = None) -> Forward:
    """Load the variant `name` of the folder or folders `kernels` into this process, and build it first if needed.

    Raises `UsageProblem` unless the name selects exactly one variant.  Raises `ManifestError` for a broken manifest,
    `ToolchainError` if the compiler is missing and `BuildError` if the build fails.
    """
    folders = kernels if isinstance(kernels, tuple) else (kernels,)
    selected = select_variants(discover(tuple(Path(folder) for folder in folders)), (name,))
    if len(selected) != 1:
        raise UsageProblem(f"{name!r} selects {len(selected)} variants; `load` takes the name of exactly one")
    variant = selected[0]
    if isinstance(variant, BrokenVariant):
        raise ManifestError(variant.problem)
    if variant.computes == "gradients":
        raise UsageProblem(f"{name} computes gradients, which `load` cannot call; import its function, or judge it")
    forward = load_forward(variant, build_library(variant, cache or options.default_cache()))
    return forward if not variant.entry.context else _in_context(forward, variant)


def build_library(variant: Variant, cache: Path, *, no_build: bool = False) -> str | None:
    """Build the variant for this machine's GPU and return its library's path; None if it needs no compiler.

    Raises `ToolchainError` if the compiler is missing and `BuildError` if the build fails.
    """
    if not variant.is_built:
        return None
    from pytest_fa.build.builder import ensure  # noqa: PLC0415  # a worker loads what is built

    arch = native_arch(variant)
    report = ensure([(variant, arch)], cache, no_build=no_build)
    if lacking := report.lacking.get(variant.name):
        raise ToolchainError(lacking)
    outcome = report.outcomes[(variant.name, arch)]
    if isinstance(outcome, BuildFailure):
        raise BuildError(outcome.message)
    return str(cache / outcome.library)


def load_forward(
    variant: Variant,
    library: str | None,
    allocate: Allocate | None = None,
    computes: Computes | None = None,
    watch: WatchFunction = lambda function: function,
) -> Forward:
    """Return the callable of a variant.

    `library` is the path of the built library, None for an entry of kind `python`.  `allocate` provides workspaces.
    `computes` replaces the variant's own value: a variant of role `overhead` computes nothing, and is called with the
    tensors of attention or of scores.  What is called of a function in Python or an extension is `watch` of it.
    """
    if variant.entry.kind == "python":
        function = _with_defines(_python_function(variant), variant)
        arguments = ARGUMENTS if variant.computes == "gradients" and not variant.entry.autograd else "qkv"
        if problem := signature_problem(function, variant.entry, variant.passed, tuple(arguments)):
            raise FaError(f"{variant.name}: entry.target {variant.entry.target!r}: {problem}")
        forward = _adapt_if_declared(watch(function), variant)
        return _translate_refusals(forward) if variant.entry.is_operator else forward
    if library is None:
        raise BuildError(f"{variant.name} has no library; build it first, for example with `build_library`")
    if variant.entry.kind == "torch":
        return _translate_refusals(_adapt_if_declared(watch(_extension_function(variant, Path(library))), variant))
    if variant.computes == "gradients":
        return CudaBackward(library, allocate or Workspaces())
    launched = CudaForward(library, allocate or Workspaces(), computes or variant.computes)
    return _beside_gradients(launched) if computes == "gradients" else launched


def _beside_gradients(launched: Forward) -> Forward:
    """An empty kernel beside backward kernels: it gets the tensors of the forward pass, and writes nothing."""

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor | None = None,
        **words: Any,  # noqa: ANN401  # values and tensors
    ) -> torch.Tensor:
        own = {name: value for name, value in words.items() if name not in (*BACKWARD.words, *ALL_GRADIENTS)}
        launched(q, k, v, scale=scale, out=words["forward_out"], **own)
        return out  # type: ignore[return-value]  # each call of gradients has one

    return launch


@contextmanager
def open_forward(
    variant: Variant, library: str | None, allocate: Allocate | None = None, computes: Computes | None = None
) -> Iterator[Forward]:
    """Yield the callable that `load_forward` returns, inside the context that the manifest names."""
    forward = load_forward(variant, library, allocate, computes)
    with _context(variant):
        yield forward


def _context(variant: Variant) -> AbstractContextManager[object]:
    if not variant.entry.context:
        return nullcontext()
    context: AbstractContextManager[object] = _import_attribute(variant, "context")()
    return context


def _in_context(forward: Forward, variant: Variant) -> Forward:
    """Wrap `forward` so that each call enters the manifest's context."""

    def call_in_context(*args: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401  # passed through
        with _context(variant):
            return forward(*args, **keywords)

    return call_in_context


def _with_defines(function: Callable[..., Any], variant: Variant) -> Callable[..., Any]:
    """The function, which gets each define of the manifest as a keyword.  Raises `FaError` if it does not take one."""
    if problem := defines_problem(function, variant.defines):
        raise FaError(f"{variant.name}: entry.target {variant.entry.target!r}: {problem}")
    return functools.partial(function, **variant.defines) if variant.defines else function


def _adapt_if_declared(function: Callable[..., Any], variant: Variant) -> Forward:
    """Adapt the function if the manifest has `entry.call` or further outputs; otherwise return it unchanged."""
    if variant.computes == "gradients":
        return _backward(function, variant)
    if variant.entry.call:
        return adapted(function, variant.entry.call, variant.computes, variant.conventions)
    outputs = tuple(name for name in parts.outputs() if name in variant.returns)
    return taking_outputs(function, outputs, variant.conventions) if outputs else function


def _backward(function: Callable[..., Any], variant: Variant) -> Forward:
    """The function as a callable of gradients."""
    call = variant.entry.call
    if variant.entry.autograd:
        return by_autograd(adapted(function, call, "attention", variant.conventions) if call else function)
    if call:
        return adapted_backward(function, call, variant.conventions)
    return backward_of(function, variant.returns)


def _translate_refusals(forward: Forward) -> Forward:
    """Wrap an extension's or operator's function so that a failed TORCH_CHECK raises `UnsupportedCase`.

    TORCH_CHECK raises a plain RuntimeError.  CUDA errors, which also are RuntimeErrors, are passed on unchanged.
    """

    def translated(*args: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401  # passed through
        try:
            return forward(*args, **keywords)
        except RuntimeError as problem:
            text = str(problem).splitlines()[0] if str(problem) else repr(problem)
            if text.startswith(CUDA_FAILED) or type(problem) is not RuntimeError:
                raise
            raise UnsupportedCase(text) from problem

    return translated


def _python_function(variant: Variant) -> Callable[..., Any]:
    """The function that `entry.target` names, in a module or as an operator.  Raises `FaError` if there is none."""
    entry = variant.entry
    if not entry.is_operator:
        function: Callable[..., Any] = _import_attribute(variant, "target")
        return function
    where = f"{variant.name}: entry.target {entry.target!r}"
    return installed_operator(entry.target, entry.libraries, Path(variant.folder), where)


def _extension_function(variant: Variant, library: Path) -> Callable[..., Any]:
    """The function `entry.target` of the extension's module, or the operator `namespace::name` that it registers.

    Each build was compiled under its own module name, so that several can be loaded in one process.  The module is not
    added to `sys.modules`.  Raises `FaError`, which quotes `entry.target`, if it does not exist.
    """
    name, target = library.with_name(MODULE_NAME).read_text(encoding="utf-8"), variant.entry.target
    where = f"{variant.name}: entry.target {target!r}"
    try:
        if variant.entry.is_operator:
            load_operators(target, library, where)
            return operator_of(target)
        module = _extension_module(name, library)
    except (ImportError, OSError) as problem:
        hint = f"; write `{MODULE_LINE.format(target)}`" if "PyInit_" in str(problem) else ""
        raise FaError(f"{where}: the extension cannot be loaded: {problem}{hint}") from problem
    except AttributeError as problem:
        raise FaError(f"{where}: the extension registers no operator of this name{_neighbours(target)}") from problem
    if not hasattr(module, target):
        public = ", ".join(each for each in dir(module) if not each.startswith("_")) or "nothing"
        line = f"write `{MODULE_LINE.format(target)}`, or another entry.target"
        raise FaError(f"{where}: the module has no function of this name (it has: {public}); {line}")
    function: Callable[..., Any] = getattr(module, target)
    return function


@functools.cache
def _extension_module(name: str, library: Path) -> ModuleType:
    """The module of an extension, which a process can load once.  Raises `ImportError`."""
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018  # the path ends in .so
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _neighbours(target: str) -> str:
    """The operators beside a missing one, and the line that registers it."""
    namespace, _, operator = target.partition("::")
    return f" ({neighbours(target)}); write `{OPERATOR_LINE.format(namespace, operator)}`, or another entry.target"


def _import_attribute(variant: Variant, field: str) -> Any:  # noqa: ANN401  # any callable
    """Import what `entry.target` or `entry.context` names.  A module in the manifest's folder takes precedence.

    Raises `FaError`, which quotes the manifest's text, if the module or the attribute does not exist.
    """
    text: str = getattr(variant.entry, field)
    module_name, _, name = text.partition(":")
    where = f"entry.{field} {text!r} of {variant.name}"
    try:
        module = _import_from_folder(variant, module_name) or importlib.import_module(module_name)
    except ImportError as problem:
        hint = _hint_at(problem, module_name, Path(variant.folder))
        raise FaError(f"{problem}: {where} cannot be imported{hint}") from problem
    if not hasattr(module, name):
        functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        own = [known for known in functions if getattr(vars(module)[known], "__module__", "") == module.__name__]
        listed = suggestion(name, functions) or (f"; it has {', '.join(own)}" if own else "")
        raise FaError(f"{module_name} has no {name!r}{listed} ({where})")
    return getattr(module, name)


def _hint_at(problem: ImportError, module_name: str, folder: Path) -> str:
    """What to do about a module that is missing: the file of the folder that is meant, or an installation."""
    if not isinstance(problem, ModuleNotFoundError) or problem.name is None:
        return ""
    if problem.name == module_name.partition(".")[0]:
        return suggestion(module_name, [path.stem for path in folder.glob("*.py")])
    if problem.name.startswith(f"{VARIANTS}."):
        missing = problem.name.rpartition(".")[2]
        return suggestion(missing, [path.stem for path in folder.glob("*.py")]) or f"; {folder} has no {missing}.py"
    return f"; install the package with {problem.name!r} for the Python that runs pytest"


class _FromSource(SourceFileLoader):
    """Compiles a file each time.

    The compiled module beside it may be that of another content: Python compares only its size and its second.
    """

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002  # the base class's signature
        return self.source_to_code(self.get_data(self.path), self.path)


class _BesideEntry(MetaPathFinder):
    """Finds the modules that a variant's module imports by `from .other import name`, compiled each time, too."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002  # the base class's signature
    ) -> ModuleSpec | None:
        if not path or not fullname.startswith(f"{VARIANTS}."):
            return None
        file = Path(path[0]) / f"{fullname.rpartition('.')[2]}.py"
        loader = _FromSource(fullname, str(file))
        return importlib.util.spec_from_file_location(fullname, file, loader=loader) if file.is_file() else None


sys.meta_path.insert(0, _BesideEntry())


def _import_from_folder(variant: Variant, module_name: str) -> ModuleType | None:
    """Import `<variant folder>/<module>.py`, if it exists, as a module of the folder's own package.

    Two folders may thus have modules of the same name, and a module imports one beside it by `from .other import name`.
    """
    path = Path(variant.folder) / f"{module_name}.py"
    if not path.is_file():
        return None
    name = f"{_package_of(Path(variant.folder))}.{module_name}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [each for each in sys.modules if each.startswith(f"{spec.parent}.")]:
            del sys.modules[loaded]  # so that the next import fails in the same way
        raise
    setattr(sys.modules[spec.parent or VARIANTS], module_name, module)
    return module


def _package_of(folder: Path) -> str:
    """The name of a folder's package, made with its parent.  Folders of one name have packages of their own."""
    root = _package(VARIANTS, [])
    for number in itertools.count(1):
        name = folder.name if number == 1 else f"{folder.name}_{number}"
        package = _package(f"{VARIANTS}.{name}", [str(folder)])
        if package.__path__ == [str(folder)]:
            setattr(root, name, package)  # so that pickle finds functions and classes by their names
            break
    return package.__name__


def _package(name: str, path: list[str]) -> ModuleType:
    package = sys.modules.setdefault(name, ModuleType(name))
    if not hasattr(package, "__path__"):
        package.__path__ = path
    return package
