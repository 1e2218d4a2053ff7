"""What `python -m pytest_fa bundle` is."""

from __future__ import annotations

from pytest_fa.feature import Feature, Subcommand

FEATURE = Feature(
    "bundle",
    commands=(Subcommand("bundle", "make, verify or replay a bundle", "commands"),),
    requires=("gate",),
    has_hooks=False,
)
