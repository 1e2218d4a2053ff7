"""A report that goes to another process: its record is JSON on the way and a value on both sides."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pytest_fa.plugin import hooks
from pytest_fa.plugin.kernel_run import KernelRun
from pytest_fa.plugin.keys import OPTIONS_KEY
from tests.factories import RECORD


def registered() -> pytest.PytestPluginManager:
    """The hooks of a run with kernels beside one that makes data from a report."""

    class Core:
        def pytest_report_to_serializable(self, report: SimpleNamespace) -> dict[str, object]:
            return vars(report).copy()

    ours = SimpleNamespace(pytest_runtest_logreport=hooks.pytest_runtest_logreport)
    manager = pytest.PytestPluginManager()
    manager.register(Core())
    manager.register(ours)
    manager.register(KernelRun(SimpleNamespace(stash={OPTIONS_KEY: None})))  # type: ignore[arg-type]  # all it reads
    return manager


@pytest.mark.parametrize("report", [SimpleNamespace(fa_record=RECORD), SimpleNamespace(nodeid="of another plugin")])
def test_a_report_is_the_same_on_both_sides(report: SimpleNamespace) -> None:
    """What is sent is JSON, and what is received has a record that equals the one that was sent."""
    manager = registered()
    data = manager.hook.pytest_report_to_serializable(config=None, report=report)
    received = SimpleNamespace(**json.loads(json.dumps(data)))
    manager.hook.pytest_runtest_logreport(report=received)
    assert received == report
