"""The delegation check: a candidate must not call torch's own attention, with which it is compared."""

from __future__ import annotations

from pytest_fa.candidate.without_attention import ATTENTION
from pytest_fa.errors import WrongResult


def require_no_delegation(operators: tuple[str, ...]) -> None:
    """Raise `WrongResult` if one of torch's attention operators is among those that ran in a call."""
    delegated = sorted(
        name for name in operators if name.startswith("aten::") and any(part in name for part in ATTENTION)
    )
    if delegated:
        raise WrongResult(
            "delegation", f"it calls torch's own attention operator {delegated[0]} and would be compared with itself"
        )
