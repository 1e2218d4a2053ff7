"""The hooks of `--fa-watch`: after the summary of the first run, it stays and answers saves until Ctrl-C."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from pytest_fa.plugin.fa_run import with_output
from pytest_fa.plugin.other_plugins import other_plugins
from pytest_fa.plugin.state import OPTIONS_KEY, SESSION_KEY, session_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_fa.plugin.terminal import Results
    from pytest_fa.records.record import Record
    from pytest_fa.watch.run import Watch
    from pytest_fa.watch.screen import Screen
    from pytest_fa.watch.tasks import TaskKey
    from pytest_fa.watch.watched_files import Hashes

NO_TERMINAL = "--fa-watch: stdout is not a terminal, so no one could read the lines and press Ctrl-C; drop --fa-watch"
ANSWERED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)


def register_watch(config: pytest.Config, results: Results) -> None:
    """Add the hooks to a run with `--fa-watch`."""
    if config.stash[OPTIONS_KEY].watch:
        config.pluginmanager.register(WatchHooks(results), "fa-watch")


class WatchHooks:
    """Remembers which tests were selected and what their files contained, and watches after the last line."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._selected: set[TaskKey] = set()
        self._early: Hashes = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Refuse a run that could not be watched."""
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if not session.config.getoption("collectonly") and (terminal is None or not terminal.isatty()):
            raise pytest.UsageError(NO_TERMINAL)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the selected tests of the shipped suite, and the content of their files before anything is built."""
        from pytest_fa.plugin.items import task_key  # noqa: PLC0415  # only runs with kernels import the catalog
        from pytest_fa.watch.watched_files import all_files, flat  # noqa: PLC0415

        self._selected = {key for item in session.items if (key := task_key(item))}
        if SESSION_KEY in session.config.stash:
            self._early = flat(all_files(session_of(session.config)).contents())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Stay after the last line of a run that has an answer."""
        result = yield
        has_answer = session.exitstatus in ANSWERED or bool(session.shouldstop)
        if has_answer and SESSION_KEY in session.config.stash:
            start = time.time()
            self._watch(session)
            self._results.clock.exclude(time.time() - start)
        return result

    def _watch(self, session: pytest.Session) -> None:
        """Answer saves until Ctrl-C; the exit status is then that of the last verdict."""
        from pytest_fa.errors import FaError  # noqa: PLC0415  # only runs with kernels need these
        from pytest_fa.watch.run import Watch  # noqa: PLC0415
        from pytest_fa.watch.tasks import SelectedTests  # noqa: PLC0415

        config, options = session.config, session.config.stash[OPTIONS_KEY]
        fa_session, screen = session_of(config), self._screen(config)
        selection = SelectedTests(fa_session.run_plan.plan, self._selected, timing=options.timing)
        if selection.is_empty:
            screen.title("--fa-watch ends: no test of the shipped suite was selected, so nothing can be repeated")
            return
        log = self._results.log.path
        watch = Watch(fa_session, selection, screen, log.with_name(f"{log.stem}-watch.jsonl"))
        try:
            watch.start(self._results.records, self._early)
            watch.run()
        except KeyboardInterrupt:
            self._end(session, watch, screen)
        except FaError as problem:
            screen.title(str(problem), good=False)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _end(self, session: pytest.Session, watch: Watch, screen: Screen) -> None:
        """Set the exit status by the last verdict; that of the first run stays if no save has had one."""
        if watch.has_verdict:
            session.exitstatus = pytest.ExitCode.OK if watch.all_right else pytest.ExitCode.TESTS_FAILED
        run = "the last verdict" if watch.has_verdict else "the first run"
        screen.title(f"ended by Ctrl-C; exit status {int(session.exitstatus)}, that of {run}")
        if watch.log.is_file():
            screen.title(f"records of the last verdict: {os.path.relpath(watch.log)}")

    def _screen(self, config: pytest.Config) -> Screen:
        import msgspec  # noqa: PLC0415  # only runs with kernels need these

        from pytest_fa.records.text import printable_struct  # noqa: PLC0415
        from pytest_fa.watch.screen import Screen  # noqa: PLC0415

        terminal = config.pluginmanager.getplugin("terminalreporter")

        def complete(record: Record, output: str) -> Record:
            named = msgspec.structs.replace(record, other_plugins=other_plugins(config))
            return with_output(printable_struct(named), output)

        return Screen(terminal.write_line, complete)
