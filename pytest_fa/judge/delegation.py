"""Whether a candidate does its own work, or calls the backend that it is compared with."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import profiler_legacy

from pytest_fa.errors import WrongResult

# Parts of the names of torch's operators that are attention already.
ATTENTION = (
    "scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
    "multi_head_attention",
)


def require_no_delegation(call: Callable[[], object]) -> None:
    """Call once and raise `WrongResult` where one of torch's own attention operators ran inside, in this thread.

    Torch's older profiler writes down every operator that is dispatched, by compiled code too.  It attaches to no
    device, so that what is timed in this process later is not slowed down, and stands in no compiler's way: a dispatch
    mode around FlexAttention leaves torch.compile broken for the rest of the process.
    """
    with profiler_legacy.profile() as watched:  # type: ignore[no-untyped-call]
        call()
    names = {str(event.name) for event in watched.function_events or ()}
    found = sorted(name for name in names if name.startswith("aten::") and any(part in name for part in ATTENTION))
    if found:
        raise WrongResult(
            "delegation", f"it calls torch's own attention, {found[0]}, and would be compared with itself"
        )
