"""The hooks of pytest-xdist, in its controller: builds before the workers start, and which tests share a worker.

Each worker has a GPU of its own, as long as there are enough.  So tests that are timed at one shape stay together: a
candidate and its baselines meet on one GPU.

Other tests of one variant stay together, in a few parts: a worker that goes on to another variant needs a new process
and a new CUDA context for it.
"""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Container, Iterable
from typing import Any

import pytest

from pytest_fa.plugin.asked import SELECTED_KEY, Selected
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.own_process import protect_process
from pytest_fa.plugin.state import progress_line, session_of

WORKER_SELECTED = "fa_selected"  # in what a worker sends at its end
DEFAULT_DISTRIBUTION = "load"  # what -n means without --dist
PARTS_PER_WORKER = 3  # of the tests of variants that are not timed; more parts are shared out more evenly
# A check of the suite, which times nothing.  Its id may begin with the file.
_CHECK = re.compile(r"(?:.*\bpytest_fa/suite/)?test_attention\.py::test_correct\[")
# The end of a test's id: the shape, and the seed unless the test runs only one.
_CASE = re.compile(r"-(?P<shape>b[0-9]+h[0-9]+s[0-9]+d[0-9]+-[^\]]*?)(?P<seed>-seed[0-9]+)?\]$")


def register_for_xdist(config: pytest.Config) -> None:
    """Add the hooks to a run with `-n`."""
    if config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses", None):
        config.pluginmanager.register(XdistHooks(config), "fa-xdist")


class XdistHooks:
    """Prepares the workers of one run, and distributes its tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(tryfirst=True)  # before the workers start
    def pytest_sessionstart(self) -> None:
        """Build every selected variant, so that no worker waits for another.  With -k or -m, the workers build."""
        protect_process(self._config)
        names = ("collectonly", "keyword", "markexpr")
        if not any(self._config.getoption(name) for name in names):
            session = session_of(self._config)
            plan = session.run_plan.plan
            session.builds.needed = {variant.name: variant for variant in (*plan.runnable, *plan.companions)}
            session.builds.say = progress_line(self._config)
            if title := session.builds.report.title:
                session.builds.say(title)

    def pytest_testnodedown(self, node: Any) -> None:  # noqa: ANN401  # a worker of xdist
        """Join what the tests of a worker do with those of the others."""
        if told := getattr(node, "workeroutput", {}).get(WORKER_SELECTED):
            uses_kernels, has_run, has_request, tests = told
            known = self._config.stash.get(SELECTED_KEY, Selected())
            self._config.stash[SELECTED_KEY] = known.joined(Selected(uses_kernels, has_run, has_request, tuple(tests)))

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:  # noqa: ANN401  # types of xdist
        """Keep together what one worker runs faster, unless the user chose a distribution."""
        if config.getoption("dist") != DEFAULT_DISTRIBUTION or _is_typed(config):
            return None
        from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415  # an optional package

        plan = session_of(config).run_plan.plan
        first_cases = {case.id for case in plan.first_cases}
        may_time = config.stash[OPTIONS_KEY].timing
        variants = {variant.name for variant in (*plan.runnable, *plan.companions)}
        parts = math.ceil(PARTS_PER_WORKER * config.getoption("numprocesses") / max(1, len(plan.runnable)))

        class Scheduling(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
            """Sends the tests of one scope to one worker."""

            @functools.cached_property
            def _timed_shapes(self) -> set[str]:
                return timed_shapes(self.collection) if may_time else set()

            def _split_scope(self, nodeid: str) -> str:
                return timed_shape_of(nodeid, self._timed_shapes, first_cases) or part_of(nodeid, variants, parts)

        return Scheduling(config, log)


def timed_shapes(test_ids: Iterable[str]) -> set[str]:
    """The shapes at which one of these tests may time something, as `test_speed` does, or a test of the user's own."""
    return {match["shape"] for test_id in test_ids if not _CHECK.match(test_id) and (match := _CASE.search(test_id))}


def timed_shape_of(test_id: str, timed: Container[str], first_cases: Container[str]) -> str | None:
    """Return the shape with which the test shares a worker, if it is timed or runs the first seed of a timed shape."""
    match = _CASE.search(test_id)
    if match is None or match["shape"] not in timed:
        return None
    is_first = not match["seed"] or f"{match['shape']}{match['seed']}" in first_cases
    return match["shape"] if is_first else None


def part_of(test_id: str, variants: Container[str], parts: int) -> str:
    """Return what a test that is not timed shares a worker with: one of `parts` parts of its variant's tests.

    Equal cases of several variants are in equal parts.  A test of something else has the worker that is free.
    """
    inside = test_id.removesuffix("]").partition("[")[2]
    match = _CASE.search(test_id)
    rest = match[0][1:-1] if match else inside.rpartition("-")[2]
    variant = inside if inside in variants else inside.removesuffix(f"-{rest}")
    return f"{variant} {zlib.crc32(rest.encode()) % parts}" if variant in variants else test_id


def _is_typed(config: pytest.Config) -> bool:
    words = (*config.invocation_params.args, *config.getini("addopts"))
    return any(str(word).startswith("--dist") for word in words)
