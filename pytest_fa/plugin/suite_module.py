"""A file of the shipped suite, with the tests that features add to it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_fa.feature import suite_tests
from pytest_fa.plugin.keys import OPTIONS_KEY


class SuiteModule(pytest.Module):
    """Collects the functions of the file and those of the used features, each at its place."""

    @classmethod
    def of(cls, path: Path, parent: pytest.Collector) -> SuiteModule:
        """The module of a file.  Outside the root folder its node id is its name; pytest uses an empty one."""
        is_inside = path.is_relative_to(parent.config.rootpath)
        module: SuiteModule = cls.from_parent(parent, path=path, nodeid=None if is_inside else path.name)
        return module

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Collect the tests.  They are shown as tests of this file."""
        self._add_tests(self.obj)
        for node in super().collect():
            if isinstance(node, pytest.Function):
                node.location = (self._shown_path, node.location[1], node.location[2])
            yield node

    @property
    def _shown_path(self) -> str:
        """The path of this file as pytest shows it for a test that is defined here."""
        return self.session._node_location_to_relpath(self.path)  # noqa: SLF001  # as `Item.location` does

    def _add_tests(self, module: ModuleType) -> None:
        """Put the functions of features among those of the file: pytest collects them in this order."""
        used = self.config.stash[OPTIONS_KEY].used
        added = {
            name: entry
            for name, entry in suite_tests().items()
            if entry[0].name in used and entry[1].file == self.path.name
        }
        names = [name for name in vars(module) if name.startswith("test_") and name not in suite_tests()]
        functions = {name: vars(module)[name] for name in names}
        for name in [name for name in vars(module) if name.startswith("test_")]:
            delattr(module, name)  # those of an earlier run in this process are among them
        for name, (feature, test) in added.items():
            names.insert(names.index(test.before) if test.before else len(names), name)
            functions[name] = getattr(feature.module("suite_tests"), name)
        for name in names:
            setattr(module, name, functions[name])
