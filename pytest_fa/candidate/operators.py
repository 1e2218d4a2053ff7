"""Operators `namespace::name` of torch's registry: those of a built extension, of an installed library, and torch's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pytest_fa.build.keys import file_hash
from pytest_fa.catalog.variant import is_shared_object
from pytest_fa.errors import FaError

# What registered operators, by its hash and by operator; PyTorch keeps both for the whole process.
_loaded: dict[str, Path] = {}
_registered: dict[str, Path] = {}


def installed_operator(target: str, libraries: tuple[str, ...], folder: Path, where: str) -> Callable[..., Any]:
    """The operator `target` after its libraries are loaded, of which the last registers it.

    A library is a file, absolute or relative to `folder`, or a module to import.  Raises `FaError`, which begins with
    `where`, if a library cannot be loaded or the operator does not exist.
    """
    for name in libraries:
        try:
            if not is_shared_object(name):
                importlib.import_module(name)
            elif name == libraries[-1]:
                load_operators(target, folder / name, where)
            else:
                torch.ops.load_library(str(folder / name))  # type: ignore[no-untyped-call]
        except (ImportError, OSError) as problem:
            raise FaError(f"{where}: {name!r} of entry.libraries cannot be loaded: {problem}") from problem
    try:
        return operator_of(target)
    except AttributeError as problem:
        remedy = "another entry.target" if libraries else "`libraries: [FILE_OR_MODULE]` in entry if one registers it"
        raise FaError(f"{where}: there is no operator of this name ({neighbours(target)}); write {remedy}") from problem


def operator_of(target: str) -> Callable[..., Any]:
    """A registered operator.  Raises `AttributeError` if there is none of this name."""
    namespace, _, name = target.partition("::")
    operator: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name)
    return operator


def load_operators(target: str, library: Path, where: str) -> None:
    """Load a library that registers operators, unless a copy of it is loaded: variants may share a build.

    Raises `FaError` if another library has registered the operator: PyTorch would terminate the process.
    """
    first_copy = _loaded.setdefault(file_hash(str(library)) or str(library), library)
    if (registered_by := _registered.setdefault(target, first_copy)) != first_copy:
        raise FaError(
            f"{where}: {registered_by} has already registered this operator in this process; PyTorch allows it once"
        )
    torch.ops.load_library(str(first_copy))  # type: ignore[no-untyped-call]


def neighbours(target: str) -> str:
    """The operators that are registered in the namespace of `target`, in words."""
    namespace, _, _ = target.partition("::")
    names = sorted({name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()})  # noqa: SLF001  # no other way
    registered = ", ".join(name for name in names if name.startswith(f"{namespace}::")) or "none"
    return f"in namespace {namespace}: {registered}"


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters of a function, or of an operator with one schema.

    Raises `TypeError` or `ValueError` if they cannot be read.
    """
    if not isinstance(function, torch._ops.OpOverloadPacket):  # noqa: SLF001  # as above
        return inspect.signature(function)
    (overload,) = function.overloads()  # type: ignore[no-untyped-call]
    arguments = getattr(function, overload)._schema.arguments  # noqa: SLF001  # as above
    return inspect.Signature([_parameter(argument) for argument in arguments])


def _parameter(argument: Any) -> inspect.Parameter:  # noqa: ANN401  # torch has no public type for it
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)
