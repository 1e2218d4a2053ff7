"""How pytest loads the modules of this package."""

from __future__ import annotations

import pytest


def import_plainly(pluginmanager: pytest.PytestPluginManager) -> None:
    """Let Python load the modules of this package that are not loaded yet.

    pytest would rewrite their asserts, as those of every plugin, and load each of the hundred modules 0.3 ms later.
    None of them has an assert that a test shows.  Modules with tests are still rewritten, and those of other plugins.
    """
    getattr(pluginmanager.rewrite_hook, "_must_rewrite", set()).discard("pytest_fa")  # a private name: it may be gone
