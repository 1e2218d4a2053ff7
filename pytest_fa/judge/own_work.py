"""Whether a candidate does its own work, or calls the backend that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fa.errors import WrongResult

# Parts of the names of torch's operators that are attention already.
ATTENTION = (
    "scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "multi_head_attention",
)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every torch operator that is called inside, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note the name and go on."""
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def warm_up() -> None:
    """Pay for the first watch of a process, a second of imports, so that forked ones need not."""
    with _Operators():
        torch.ones(1).neg()


def require_own_work(call: Callable[[], object]) -> None:
    """Call once and raise `WrongResult` where one of torch's own attention operators ran inside, in this thread.

    What cannot run under the watch, such as a higher-order operator, is not covered; it must run without it.
    """
    operators = _Operators()
    try:
        with operators:
            call()
    except (NotImplementedError, RuntimeError):
        call()
    found = sorted(name for name in operators.names if name.startswith("aten.") and any(p in name for p in ATTENTION))
    if found:
        raise WrongResult("own work", f"it calls torch's own attention, {found[0]}, and would be compared with itself")
