"""When the worker servers start and end.

They import torch while pytest reads manifests, collects and builds, and end while it writes its last lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fa.options import options
from pytest_fa.plugin.state import OPTIONS_KEY, SESSION_KEY, WORKERS_KEY, session_of

if TYPE_CHECKING:
    import pytest


_SHOWING = ("help", "version", "markers", "show_fixtures", "show_fixtures_per_test", "cacheshow")
_LISTING = (*_SHOWING, "collectonly", "setupplan")  # pytest's options with which no test runs


def will_run_tests(config: pytest.Config) -> bool:
    """Whether this process will run tests: not if it only lists something, and not in the controller of xdist."""
    only_lists = any(config.getoption(name, default=None) for name in _LISTING)
    is_controller = config.getoption("dist", default="no") != "no" and not hasattr(config, "workerinput")
    return not (options.wants_list(config) or only_lists or is_controller)


def start_main(config: pytest.Config) -> None:
    """Start the server of judge and candidates, before anything is known about the variants.

    A worker of xdist chooses its GPU first, and then starts its servers with `start_others`.
    """
    options_of_run = config.stash[OPTIONS_KEY]
    if _runs_kernels(config) and not options_of_run.static and not hasattr(config, "workerinput"):
        from pytest_fa.host.client import Workers  # noqa: PLC0415  # only runs with kernels need it

        config.stash[WORKERS_KEY] = workers = Workers(options_of_run.cache)
        workers.start()


def start_others(config: pytest.Config) -> None:
    """Start the servers that do not run yet if this machine can run a selected variant, else end the first one.

    Collection then decides whether a test needs them.
    """
    if not _runs_kernels(config):
        return
    from pytest_fa.session.builds import runs_here  # noqa: PLC0415  # only runs with kernels import the catalog

    session = session_of(config)
    if any(runs_here(variant) for variant in session.run_plan.plan.runnable):
        session.start_servers()
    else:
        session.close()


def let_go(config: pytest.Config) -> None:
    """Let the servers end with their workers, unless a feature goes on with them."""
    stays = any(part.keeps_servers for part in config.stash[OPTIONS_KEY].parts)
    if SESSION_KEY in config.stash and not stays:
        session_of(config).let_go()


def end(config: pytest.Config) -> None:
    """End all workers, and wait for it.  If the options were wrong, there may be a server without a session."""
    if SESSION_KEY in config.stash:
        session_of(config).close()
    elif WORKERS_KEY in config.stash:
        config.stash[WORKERS_KEY].close()


def _runs_kernels(config: pytest.Config) -> bool:
    return config.stash[OPTIONS_KEY].is_given and will_run_tests(config)
