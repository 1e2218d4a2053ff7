"""`pytest_fa.check`, `.time`, `.gate` and `.load` for scripts and notebooks."""

from __future__ import annotations

from pytest_fa.feature import Feature

FEATURE = Feature("api", requires=("gate",), has_hooks=False)
