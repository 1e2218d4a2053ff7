"""Starts the worker server of a run, which imports torch while pytest reads manifests, collects and builds."""

from __future__ import annotations

import pytest

from pytest_fa.host.client import Workers
from pytest_fa.options import options
from pytest_fa.plugin.keys import OPTIONS_KEY, WORKERS_KEY

_SHOWING = ("help", "version", "markers", "show_fixtures", "show_fixtures_per_test", "cacheshow")
_LISTING = (*_SHOWING, "collectonly", "setupplan")  # pytest's options with which no test runs


def runs_kernels(config: pytest.Config) -> bool:
    """Whether this process will run kernels: not if it only lists something, and not in the controller of xdist."""
    only_lists = any(config.getoption(name, default=None) for name in _LISTING)
    is_controller = config.getoption("dist", default="no") != "no" and not hasattr(config, "workerinput")
    runs_tests = not (options.wants_list(config) or only_lists or is_controller)
    return config.stash[OPTIONS_KEY].is_given and runs_tests


def start_main(config: pytest.Config) -> None:
    """Start the server of judge and candidates, before anything is known about the variants.

    A worker of xdist chooses its GPU first, and then starts all its servers.
    """
    if runs_kernels(config) and not config.stash[OPTIONS_KEY].static and not hasattr(config, "workerinput"):
        config.stash[WORKERS_KEY] = workers = Workers(config.stash[OPTIONS_KEY].cache)
        workers.start()
