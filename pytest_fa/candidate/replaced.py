"""Which functions a variant has replaced in its process: this package's, clocks, CUDA events, comparisons of tensors.

It changes no verdict of the judge's, which has functions of its own.  It names an attempt: no honest variant replaces
these functions.  A variant can hide it, since the comparison runs in its own process.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator

import torch

from pytest_fa.errors import Tampering

CLOCKS = tuple(
    f"{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")
)
NAMED = 3  # functions, in the message


class Originals:
    """The functions of this process, noted before a variant is loaded."""

    def __init__(self) -> None:
        self._before = dict(_functions())

    def require_all(self) -> None:
        """Raise `Tampering` if some are other objects now."""
        now = dict(_functions())
        replaced = [name for name, function in self._before.items() if now.get(name) is not function]
        if replaced:
            others = f" and {len(replaced) - NAMED} others" if len(replaced) > NAMED else ""
            raise Tampering("functions", f"it replaced functions of its process: {', '.join(replaced[:NAMED])}{others}")


def _functions() -> Iterator[tuple[str, object]]:
    """Each function by its name with the module's, and each method by that of its class, too."""
    for name, module in list(sys.modules.items()):
        if name.startswith("pytest_fa."):
            yield from _functions_of(module, name)
    yield from ((f"time.{name}", getattr(time, name)) for name in CLOCKS)
    yield from ((f"torch.{name}", getattr(torch, name, None)) for name in ("equal", "allclose"))
    yield from ((f"torch.cuda.{name}", getattr(torch.cuda, name, None)) for name in ("Event", "synchronize"))
    yield from (
        (f"torch.cuda.Event.{name}", getattr(torch.cuda.Event, name, None)) for name in ("record", "elapsed_time")
    )


def _functions_of(module: object, module_name: str) -> Iterator[tuple[str, object]]:
    for name, value in list(vars(module).items()):
        if inspect.isfunction(value):
            yield f"{module_name}.{name}", value
        elif inspect.isclass(value) and value.__module__ == module_name:
            methods = ((method, member) for method, member in vars(value).items() if inspect.isfunction(member))
            yield from ((f"{module_name}.{name}.{method}", member) for method, member in methods)
