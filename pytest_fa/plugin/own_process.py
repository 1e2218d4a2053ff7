"""Protects pytest's own process, which decides, from the kernels of its run.  They run as the same user.

Other processes of the user can then neither attach to it nor open its files.  Modules that it imports after the first
kernel are those of before, and what is known of the machine must not change.
"""

from __future__ import annotations

import pytest

from pytest_fa.build.late_imports import forget_package, installed_folders, keep_package
from pytest_fa.plugin.files_before import FilesBefore
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import FILES_KEY, IMPORTS_KEY
from pytest_fa.processes import forbid_attaching


def protect_process(config: pytest.Config) -> None:
    """Protect this process, before the first kernel runs.  Later calls change nothing."""
    if IMPORTS_KEY in config.stash:
        return
    forbid_attaching()
    config.stash[IMPORTS_KEY] = keep_package(installed_folders())
    options = config.stash[OPTIONS_KEY]
    config.stash[FILES_KEY] = FilesBefore(options.artifacts, options.records_folder)


def release_imports(config: pytest.Config) -> None:
    """Let this process import as usual again, when all kernels have ended."""
    if IMPORTS_KEY in config.stash:
        forget_package(config.stash[IMPORTS_KEY])
