"""The delegation check: a candidate must not call torch's own attention, with which it is compared."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import profiler_legacy

from pytest_fa.errors import WrongResult

# Substrings of the names of torch's attention operators.
ATTENTION = (
    "scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "multi_head_attention",
)


def require_no_delegation(call: Callable[[], object]) -> None:
    """Make one call and raise `WrongResult` if one of torch's attention operators ran inside it, in this thread.

    torch's legacy profiler records every operator that is dispatched, also from compiled code.  It attaches to no
    device, so that it does not slow down later timing in this process.  A `TorchDispatchMode` is no alternative: around
    FlexAttention it breaks torch.compile for the rest of the process.
    """
    with profiler_legacy.profile() as profiler:  # type: ignore[no-untyped-call]
        call()
    names = {str(event.name) for event in profiler.function_events or ()}
    operators = sorted(name for name in names if name.startswith("aten::") and any(part in name for part in ATTENTION))
    if operators:
        raise WrongResult(
            "delegation", f"it calls torch's own attention operator {operators[0]} and would be compared with itself"
        )
