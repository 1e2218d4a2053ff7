"""The hooks of `--fa-watch`: after the summary of the first run, it stays and answers saves until Ctrl-C."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_fa.build import compile_batch  # noqa: F401  # it compiles after kernels have run
from pytest_fa.errors import FaError
from pytest_fa.features.watch.screen import Screen
from pytest_fa.features.watch.tasks import SelectedTests, TaskKey, key_of
from pytest_fa.features.watch.watch import Watch
from pytest_fa.features.watch.watched_files import Hashes, all_files, flat
from pytest_fa.plugin.items import is_shipped, param_of, variant_of
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.other_plugins import other_plugins
from pytest_fa.plugin.state import REFUSED_KEY, RESULTS_KEY, SESSION_KEY, session_of

if TYPE_CHECKING:
    from collections.abc import Collection, Generator

NO_TERMINAL = "--fa-watch: stdout is not a terminal, so no one could read the lines and press Ctrl-C; drop --fa-watch"
ANSWERED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


class FirstRun:
    """What the tests of the first run have said.  `keys` has those of the shipped suite's tests by node id."""

    def __init__(self) -> None:
        self.keys: dict[str, TaskKey | None] = {}
        self.judged: set[TaskKey] = set()  # tests that have passed, or that the variant refuses
        self._ended: set[str] = set()
        self._failed: dict[str, TaskKey | None] = {}

    def note(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Take note of one phase of a test."""
        key = self.keys.get(item.nodeid)
        if report.failed:
            self.note_failure(item.nodeid)
        elif key and report.when == "call" and (report.passed or item.stash.get(REFUSED_KEY, False)):
            self.judged.add(key)
        if report.when == "teardown":
            self._ended.add(item.nodeid)

    def note_failure(self, node_id: str) -> None:
        """Take note that a test or the collection of a file has failed."""
        self._failed[node_id] = key = self.keys.get(node_id)
        if key:
            self.judged.discard(key)

    def never_repeated(self, keys: Collection[TaskKey]) -> list[str]:
        """The tests that failed, and one's own that did not run, apart from those with these keys."""
        failed = [node_id for node_id, key in self._failed.items() if key not in keys]
        not_run = [node_id for node_id, key in self.keys.items() if key is None and node_id not in self._ended]
        return list(dict.fromkeys((*failed, *not_run)))


class Hooks:
    """Remembers which tests were selected and what their files contained, and watches after the last line."""

    def __init__(self, config: pytest.Config) -> None:
        self._results, self._first_run = config.stash[RESULTS_KEY], FirstRun()
        self._early: Hashes = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Refuse a run that could not be watched."""
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if not session.config.getoption("collectonly") and (terminal is None or not terminal.isatty()):
            raise pytest.UsageError(NO_TERMINAL)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the selected tests of the shipped suite, and the content of their files before anything is built."""
        self._first_run.keys = {item.nodeid: task_key(item) for item in session.items}
        if SESSION_KEY in session.config.stash:
            fa_session = session_of(session.config)
            self._early = flat(all_files(fa_session, fa_session.run_plan.plan.chosen).contents())

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest's own wrapper, which lets xfail tests pass
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note what the test has said."""
        report = yield
        self._first_run.note(item, report)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        if report.failed:
            self._first_run.note_failure(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Stay after the last line of a run that has an answer."""
        result = yield
        has_answer = session.exitstatus in ANSWERED or bool(session.shouldstop)
        if has_answer and SESSION_KEY in session.config.stash:
            self._watch(session)
        return result

    def _watch(self, session: pytest.Session) -> None:
        """Answer saves until Ctrl-C; `_end` then sets the exit status."""
        config, options = session.config, session.config.stash[OPTIONS_KEY]
        fa_session, screen = session_of(config), Screen(config.pluginmanager.getplugin("terminalreporter").write_line)
        fa_session.asked_by(other_plugins(config))
        selected = {key for key in self._first_run.keys.values() if key}
        selection = SelectedTests(fa_session.run_plan.plan, selected, timing=options.timing)
        if selection.is_empty:
            screen.title("--fa-watch ends: no test of the shipped suite was selected, so nothing can be repeated")
            return
        log = self._results.file.log.path
        watch = Watch(fa_session, selection, screen, log.with_name(f"{log.stem}-watch.jsonl"))
        try:
            watch.start(self._results.shown_records, self._first_run.judged, self._early)
            watch.run()
        except KeyboardInterrupt:
            self._end(session, watch, screen, self._first_run.never_repeated(selection.keys))
        except FaError as problem:
            screen.title(str(problem), good=False)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _end(self, session: pytest.Session, watch: Watch, screen: Screen, never_repeated: list[str]) -> None:
        """Set the exit status by the last verdicts; that of the first run stays if no save has had one.

        It is pytest's own status for an interruption if a verdict on what was saved last is missing and no failure is
        known.  No verdict makes up for a test of the first run that failed and is not repeated.
        """
        run = "the last verdict" if watch.has_verdict else "the first run"
        if watch.unfinished and not watch.has_known_failure and not never_repeated:
            session.exitstatus, run = pytest.ExitCode.INTERRUPTED, "an interrupted run"
        elif watch.has_verdict:
            is_right = watch.all_right and not never_repeated
            session.exitstatus = pytest.ExitCode.OK if is_right else pytest.ExitCode.TESTS_FAILED
        screen.title(f"ended by Ctrl-C; exit status {int(session.exitstatus)}, that of {run}")
        if watch.unfinished:
            screen.title(f"without a verdict on what was saved last: {', '.join(watch.unfinished)}", good=False)
        if watch.unjudged:
            screen.title(f"without a verdict: {', '.join(watch.unjudged)}", good=False)
        if watch.has_verdict and never_repeated:
            names = ", ".join(never_repeated)
            screen.title(f"failed or not run in the first run, and not repeated: {names}", good=False)
        if watch.log.is_file():
            screen.title(f"records of the last verdict: {os.path.relpath(watch.log)}")


def task_key(item: pytest.Item) -> TaskKey | None:
    """What identifies a test of the shipped suite after a manifest was read again; None for other tests."""
    variant = variant_of(item)
    if variant is None or not is_shipped(item):
        return None
    part = param_of(item, "fa_case") or param_of(item, "fa_property")
    return key_of(str(getattr(item, "originalname", item.name)), variant.name, part)
