"""Builds and Python callables to one call shape: `f(q, k, v, *, scale, causal, out) -> Tensor`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_fa import options
from pytest_fa.build.builder import BuildFailure, ensure
from pytest_fa.build.extension import MODULE_NAME
from pytest_fa.build.target import native_arch
from pytest_fa.catalog.case import Computes
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.select import select_variants
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import (
    BuildError,
    FaError,
    LaunchError,
    ManifestError,
    ToolchainError,
    UnsupportedCase,
    UsageProblem,
)
from pytest_fa.run.adapter import adapted
from pytest_fa.run.forward import Forward
from pytest_fa.run.guards import Workspaces
from pytest_fa.run.inputs import empty_output

CUDA_FAILED = ("CUDA error", "CUDA driver error", "CUDA out of memory")  # how PyTorch's own macros begin
Allocate = Callable[[int, torch.device], torch.Tensor]

CAUSAL_CODES = {"none": 0, "top_left": 1, "bottom_right": 2}


def load(name: str, *, kernels: str | Path | tuple[str | Path, ...] = "kernels", cache: Path | None = None) -> Forward:
    """Build the variant `name` of the folder or folders `kernels` if needed, and load it into this process.

    Raises `UsageProblem` for an unknown name, `ManifestError`, `ToolchainError` or `BuildError`.
    """
    folders = kernels if isinstance(kernels, tuple) else (kernels,)
    found = select_variants(discover(tuple(Path(folder) for folder in folders)), (name,))
    if len(found) != 1:
        raise UsageProblem(f"{name!r} names {len(found)} variants; load takes one")
    variant = found[0]
    if isinstance(variant, BrokenVariant):
        raise ManifestError(variant.problem)
    forward = load_forward(variant, build_library(variant, cache or options.default_cache()))
    return forward if not variant.entry.context else _in_context(forward, variant)


def build_library(variant: Variant, cache: Path, *, no_build: bool = False) -> str | None:
    """The path of the build's library for this machine's GPU; None for a variant that needs no compiler."""
    if not variant.is_built:
        return None
    arch = native_arch(variant)
    report = ensure([(variant, arch)], cache, no_build=no_build)
    if lacking := report.lacking.get(variant.name):
        raise ToolchainError(lacking)
    outcome = report.outcomes[(variant.name, arch)]
    if isinstance(outcome, BuildFailure):
        raise BuildError(outcome.message)
    return str(cache / outcome.library)


def load_forward(
    variant: Variant, library: str | None, allocate: Allocate | None = None, computes: Computes | None = None
) -> Forward:
    """The callable of a variant whose build, if it needs one, lies at `library`; `allocate` gives its workspaces.

    `computes` is what the output is to hold, where that is not the variant's own to say: a floor computes nothing.
    """
    if variant.entry.kind == "python":
        return _called_as_said(_attribute(variant, "target"), variant)
    if library is None:
        raise BuildError(f"{variant.name} has no library: it must be built first")
    if variant.entry.kind == "torch":
        return _refusing(_called_as_said(_extension_function(variant, Path(library)), variant))
    return _cuda_forward(library, allocate or Workspaces(), computes or variant.computes)


@contextmanager
def open_forward(
    variant: Variant, library: str | None, allocate: Allocate | None = None, computes: Computes | None = None
) -> Iterator[Forward]:
    """The variant's callable, as by `load_forward`, inside the context that its manifest names."""
    forward = load_forward(variant, library, allocate, computes)
    with _context(variant):
        yield forward


def _context(variant: Variant) -> AbstractContextManager[object]:
    if not variant.entry.context:
        return nullcontext()
    context: AbstractContextManager[object] = _attribute(variant, "context")()
    return context


def _in_context(forward: Forward, variant: Variant) -> Forward:
    """For callers who hold the function alone: each call enters the context."""

    def within(*args: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401  # passed through
        with _context(variant):
            return forward(*args, **keywords)

    return within


def _cuda_forward(library: str, allocate: Allocate, computes: Computes) -> Forward:
    """The binding's entry for what is computed, with the output and the workspace seen to."""
    import tvm_ffi  # noqa: PLC0415  # only a process that calls kernels needs it

    module = tvm_ffi.load_module(library)
    entry, workspace_bytes = module.forward, module.workspace_bytes
    if computes == "scores":
        entry, workspace_bytes = module.scores, module.scores_workspace_bytes
    needs_workspace = bool(module.needs_workspace())

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: str = "none",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = empty_output(q, k, computes)
        code = CAUSAL_CODES.get(causal, -1)  # the binding refuses -1
        workspace = None
        if needs_workspace:
            size = workspace_bytes(q, k, v, out, scale, code)
            workspace = allocate(size, q.device)
        try:
            entry(q, k, v, out, None, workspace, scale, code)
        except (ValueError, RuntimeError) as problem:
            raise _translated(problem) from None
        return out

    return forward


def _called_as_said(function: Callable[..., Any], variant: Variant) -> Forward:
    """The function as it is, or as the manifest's `entry.call` says that it wants to be called."""
    return adapted(function, variant.entry.call, variant.computes) if variant.entry.call else function


def _refusing(forward: Forward) -> Forward:
    """An extension says no by a RuntimeError of TORCH_CHECK; CUDA's own errors are not of that kind."""

    def refusing(*args: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401  # passed through
        try:
            return forward(*args, **keywords)
        except RuntimeError as problem:
            text = str(problem).splitlines()[0] if str(problem) else repr(problem)
            if text.startswith(CUDA_FAILED) or type(problem) is not RuntimeError:
                raise
            raise UnsupportedCase(text) from problem

    return refusing


def _extension_function(variant: Variant, library: Path) -> Callable[..., Any]:
    """A function of the extension's module, or the operator that it registers.

    The module bears the name that it was compiled under, one for each build, and is in no one's way in `sys.modules`.
    Raises `FaError` with the manifest's words where it is not there.
    """
    name, target = library.with_name(MODULE_NAME).read_text(encoding="utf-8"), variant.entry.target
    where = f"{variant.name}: entry.target {target!r}"
    try:
        if "::" in target:
            _require_first(target, library, where)
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
            namespace, _, operator = target.partition("::")
            return getattr(getattr(torch.ops, namespace), operator)  # type: ignore[no-any-return]
        spec = importlib.util.spec_from_file_location(name, library)
        assert spec is not None and spec.loader is not None  # noqa: S101, PT018  # the path ends in .so
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as problem:
        raise FaError(f"{where}: the extension cannot be loaded: {problem}") from problem
    except AttributeError as problem:
        raise FaError(f"{where}: the extension registers no such operator") from problem
    if not hasattr(module, target):
        public = ", ".join(each for each in dir(module) if not each.startswith("_")) or "nothing"
        raise FaError(f"{where}: the module has no such function (it has: {public})")
    function: Callable[..., Any] = getattr(module, target)
    return function


_registered: dict[str, Path] = {}  # operators by name, as PyTorch itself keeps them: for the life of a process


def _require_first(target: str, library: Path, where: str) -> None:
    """Raise `FaError` where another build has registered the operator: PyTorch would end the process."""
    if (other := _registered.setdefault(target, library)) != library:
        raise FaError(f"{where}: {other} has registered it in this process already, and it can be registered once")


def _translated(problem: Exception) -> Exception:
    """The binding's exceptions in our tree; those about arguments stay what they are."""
    text = str(problem).splitlines()[0] if str(problem) else repr(problem)
    if text.startswith("refused: "):
        return UnsupportedCase(text.removeprefix("refused: "))
    if text.startswith("launch failed: "):
        return LaunchError(text)
    return problem


def _attribute(variant: Variant, field: str) -> Any:  # noqa: ANN401  # what the manifest names
    """What `entry.target` or `entry.context` names; a module beside the manifest comes before an installed one.

    Raises `FaError` with the manifest's words where it cannot be had.
    """
    text: str = getattr(variant.entry, field)
    module_name, _, name = text.partition(":")
    where = f"{variant.name}: entry.{field} {text!r}"
    try:
        module = _import_beside(variant, module_name) or importlib.import_module(module_name)
    except ImportError as problem:
        raise FaError(f"{where} cannot be imported: {problem}") from problem
    if not hasattr(module, name):
        raise FaError(f"{where}: the module has no {name!r}")
    return getattr(module, name)


def _import_beside(variant: Variant, module_name: str) -> ModuleType | None:
    """Import `<variant folder>/<module>.py` under a name of its own, so that folders cannot shadow one another."""
    path = Path(variant.folder) / f"{module_name}.py"
    if not path.is_file():
        return None
    name = f"pytest_fa_variants.{Path(variant.folder).name}.{module_name}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # the next one who asks hears the same
        raise
    return module
