"""What `python -m pytest_fa judge` is."""

from __future__ import annotations

from pytest_fa.feature import Feature, Subcommand

HELP = "judge and gate one variant; the exit status says the verdict (`judge --help` lists the options)"
FEATURE = Feature(
    "judge_command",
    commands=(Subcommand("judge", HELP, "judge_command", forgets_folder=True),),
    requires=("api", "gate", "ncu"),
    has_hooks=False,
)
