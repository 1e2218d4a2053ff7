"""Starts the worker servers before collection, so that they import torch while pytest collects and builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fa.options import options
from pytest_fa.plugin.state import OPTIONS_KEY, session_of

if TYPE_CHECKING:
    import pytest


def will_run_tests(config: pytest.Config) -> bool:
    """Whether this process will run tests: not if it only lists something, and not in the controller of xdist."""
    only_lists = any(config.getoption(name, default=False) for name in ("help", "version", "collectonly"))
    shows_only = any(config.getoption(name, default=None) for name in ("markers", "show_fixtures", "cacheshow"))
    is_controller = config.getoption("dist", default="no") != "no" and not hasattr(config, "workerinput")
    return not (options.wants_list(config) or only_lists or shows_only or is_controller)


def start_servers_early(config: pytest.Config) -> None:
    """Start the servers if this machine can run a selected variant; collection decides whether a test needs them."""
    if not config.stash[OPTIONS_KEY].is_given or not will_run_tests(config):
        return
    from pytest_fa.session.builds import runs_here  # noqa: PLC0415  # only runs with kernels import the catalog

    session = session_of(config)
    if any(runs_here(variant) for variant in session.run_plan.plan.runnable):
        session.start_servers()
