"""The hooks of `--fa-shard`."""

from __future__ import annotations

import pytest

from pytest_fa.features.shards.shard import ShardLog, keep_shard
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import RESULTS_KEY


class Hooks:
    """The shard in one run."""

    def __init__(self, config: pytest.Config) -> None:
        if RESULTS_KEY in config.stash:  # not in a worker of pytest-xdist
            path = config.stash[RESULTS_KEY].file.log.path
            config.pluginmanager.register(ShardLog(config, path), "fa-shard-log")

    @pytest.hookimpl(trylast=True)  # after companions without a variant are deselected
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests of the other shards."""
        keep_shard(config, items, config.stash[OPTIONS_KEY])
