"""pytest-fa: a pytest plugin that builds, checks, times and profiles CUDA attention kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fa.run.forward import Forward

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(name: str, **keywords: Any) -> Forward:  # noqa: ANN401  # the keywords are those of run.module.load
    """Build the variant `name` if needed and return its `f(q, k, v, *, scale, causal, out)`.

    The keywords are those of `pytest_fa.run.module.load`, whose docstring lists the errors raised.  It is imported in
    this function because it imports torch, and `import pytest_fa` must not.
    """
    from pytest_fa.run.module import load as load_variant  # noqa: PLC0415

    return load_variant(name, **keywords)
