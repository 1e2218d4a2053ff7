"""Which plugins could have changed a run, besides pytest's own, pytest-benchmark and this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXPECTED_PACKAGES = ("_pytest", "pytest", "pytest_fa", "pytest_benchmark")


def other_plugins(config: pytest.Config) -> tuple[str, ...]:
    """The top-level modules of the other plugins of this run; a conftest.py by its path from the root folder."""
    modules = (_module_of(plugin) for _, plugin in config.pluginmanager.list_name_plugin() if plugin is not None)
    names = {_name_of(module, config.rootpath) for module in modules}
    return tuple(sorted(names.difference(EXPECTED_PACKAGES)))


def _module_of(plugin: object) -> ModuleType | str:
    """The module of a plugin, or that of its class; its name if it is no longer loaded."""
    if isinstance(plugin, ModuleType):
        return plugin
    name = type(plugin).__module__
    return sys.modules.get(name, name)


def _name_of(module: ModuleType | str, rootdir: Path) -> str:
    if isinstance(module, str):
        return module.partition(".")[0]
    path = getattr(module, "__file__", None)
    if path and Path(path).name == "conftest.py":
        return os.path.relpath(path, rootdir)
    return module.__name__.partition(".")[0]
