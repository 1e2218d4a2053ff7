"""The loop of `--fa-watch`: wait for a save, judge and time the variants that it concerns, and wait again.

The worker servers, the judge and the times of the baselines stay.  After each save, the candidate's process is a new
one.  A save during a run abandons that run.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from pytest_fa.catalog.plan import AnyVariant
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import FaError
from pytest_fa.features.watch.save_watcher import SaveWatcher, seconds_since_save, watching_saves
from pytest_fa.features.watch.screen import Screen
from pytest_fa.features.watch.tasks import SelectedTests, TaskKey
from pytest_fa.features.watch.variant_run import Memory, VariantRun
from pytest_fa.features.watch.watched_files import (
    Contents,
    Hashes,
    all_files,
    compiled_hashes,
    files_of,
    flat,
    with_known,
)
from pytest_fa.host.stop_signal import Abandoned, StopSignal
from pytest_fa.records.built import Build
from pytest_fa.records.log import replace_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.session import Session

MAX_NAMES = 4  # the names of saved files in one line


class Watch:
    """The state between two saves: what each variant's files contained at its last verdict, and its last records."""

    def __init__(self, session: Session, selection: SelectedTests, screen: Screen, log: Path) -> None:
        self._session, self._selection, self._screen, self.log = session, selection, screen, log
        self._done: dict[str, tuple[AnyVariant | None, Hashes | None]] = {}  # None: a variant without a verdict
        self._concerned = selection.variants(session.run_plan.plan)
        self._files, self._contents = all_files(session, self._watched), Contents()
        self._records: dict[str, list[Record]] = {}
        self._times: dict[tuple[str, str], Record] = {}
        self.has_verdict = False  # whether a variant has had one after a save
        self.unfinished: list[str] = []  # the variants whose verdict on what was saved last is still to come
        self._failed: set[str] = set()  # the variants that are not right, and PLAN if there is no plan
        self._not_run: set[str] = set()  # those of them that this machine cannot run
        self._built_only: set[str] = set()  # variants of which nothing was judged but the build
        self._memory = Memory(lambda *key: self._times.get(key), self._baseline, self._builds)

    @property
    def all_right(self) -> bool:
        """Whether every variant has a verdict, and is right by its last one."""
        return not self._failed and not self.unjudged

    @property
    def has_known_failure(self) -> bool:
        """Whether something is not right as it was saved last."""
        return bool(self._failed.difference(self.unfinished))

    @property
    def unjudged(self) -> list[str]:
        """The variants that have no verdict, neither of the first run nor after a save."""
        return [variant.name for variant in self._watched if self._done.get(variant.name, NEVER)[0] is None]

    @property
    def _watched(self) -> list[AnyVariant]:
        """The chosen variants that have a selected test, or had one in an earlier run."""
        names = self._concerned | set(self._done)
        return [variant for variant in self._session.run_plan.plan.chosen if variant.name in names]

    def verdict(self, names: set[str]) -> str:
        """The verdict of these variants: right, or which of them are not, or were not run."""
        wrong, not_run = sorted(names & self._failed - self._not_run), sorted(names & self._not_run)
        parts = [f"not correct: {', '.join(wrong)}"] if wrong else []
        parts += [f"not run: {', '.join(not_run)}"] if not_run else []
        return "; ".join(parts) or ("built" if names <= self._built_only else "correct")

    def start(self, records: list[Record], judged: Collection[TaskKey], early: Hashes) -> None:
        """Take over what the first run has found.

        `judged` are the tests that have passed, or that a variant refuses.  A variant with another test and without a
        failure has no verdict.  `early` has the content of files when that run began.
        """
        for record in records:
            self._records.setdefault(record.variant, []).append(record)
        for own_records in tuple(self._records.values()):
            self._take(own_records)
        self._note_files(self._session, early)
        incomplete = self._selection.variants(self._session.run_plan.plan, judged)
        for variant in self._watched:
            is_judged = variant.name in self._failed or variant.name not in incomplete
            self._done[variant.name] = (variant if is_judged else None, self._contents.get(variant.name))

    def run(self) -> None:
        """Answer one save after the other.  Ctrl-C ends this with `KeyboardInterrupt`."""
        stop = StopSignal()
        runner = self._session.runner
        runner.workers.stop = runner.profiler_workers.stop = stop
        count = len({path for path in flat(self._contents) if Path(path).is_file()})
        self._screen.title(f"watching {count} file{'s' * (count != 1)} of {self._names()}; Ctrl-C ends")
        with watching_saves(stop, lambda text: self._screen.title(f"error: {text}", good=False)) as watcher:
            watcher.expect(self._files, self._contents)
            while True:
                self._answer(watcher)

    def _answer(self, watcher: SaveWatcher) -> None:
        """Wait for a save and judge what it has changed.

        A problem with a manifest, a process or the file system is shown, and nothing is lost.
        """
        try:
            paths = watcher.wait()
            self.unfinished = [variant.name for variant in self._watched]
            self._screen.start_clock(seconds_since_save(paths))
            contents = self._files.contents()
            watcher.expect(self._files, contents)
            self._screen.title(f"saved {_listed(paths)}")
            self._judge(watcher, contents)
        except Abandoned:
            self._screen.title("another save: this run is abandoned")
        except FaError as problem:
            self.has_verdict, self.unfinished = True, []
            self._failed.add(PLAN)
            self._screen.title(f"error: {problem}", good=False)

    def _judge(self, watcher: SaveWatcher, contents: Contents) -> None:
        """Build, check and time every variant whose files or manifest differ from those of its last verdict."""
        session = self._session.renewed()
        session.run_plan.require_usable(needs_variant=True)
        self._failed.discard(PLAN)
        self._session, self._concerned = session, self._selection.variants(session.run_plan.plan)
        changed, watched = self._changed(contents), {variant.name for variant in self._watched}
        self.unfinished = [variant.name for variant in changed]
        self._failed, self._not_run = self._failed & watched, self._not_run & watched
        session.runner.end_workers()  # they have loaded the code before the save
        session.builds.needed = {each.name: each for each in changed if isinstance(each, Variant)}
        session.runner.prepare_candidate(session.builds.needed.values())
        session.builds.say = lambda text: self._notice(watcher, text)
        _ = session.builds.report  # compiles
        watcher.stop.require_unset()
        self._note_files(session, flat(contents))
        watcher.expect(self._files, self._contents)
        for variant in changed:
            self._judge_variant(variant)
        self._conclude(changed)

    def _notice(self, watcher: SaveWatcher, text: str) -> None:
        """Show a message of the builder when it begins or waits for another process.  A save ends the build here."""
        watcher.stop.require_unset()
        if text.startswith(NOTICES):
            self._screen.detail(text)

    def _changed(self, contents: Contents) -> list[AnyVariant]:
        """The variants that are not as at their last verdict; first those whose files differ."""
        known = {variant.name: self._done.get(variant.name, NEVER) for variant in self._watched}
        changed = [each for each in self._watched if known[each.name] != (each, contents.get(each.name))]
        return sorted(changed, key=lambda variant: known[variant.name][1] == contents.get(variant.name))

    def _note_files(self, session: Session, known: Hashes) -> None:
        """Determine the files of each variant from its builds, with the content that was compiled or is known."""
        self._files = files_of(session, self._watched, self._files)
        self._contents = with_known(self._files.contents(), {**known, **compiled_hashes(session)})

    def _judge_variant(self, variant: AnyVariant) -> None:
        if not isinstance(variant, Variant):
            self._failed.add(variant.name)
            self._screen.title(f"error: {variant.problem}", good=False)
        else:
            variant_run = VariantRun(self._session, variant, self._screen, self._memory)
            variant_run.run(self._selection.tasks(self._session.run_plan.plan, variant.name))
            self._records[variant.name] = variant_run.records
            self._take(variant_run.records)
            self._sort(variant.name, variant_run)
        self._done[variant.name] = (variant, self._contents.get(variant.name))
        self.has_verdict = True
        self.unfinished.remove(variant.name)
        self._write()

    def _sort(self, name: str, variant_run: VariantRun) -> None:
        """Put a variant into the sets of its verdict."""
        kinds = {record.kind for record in variant_run.records}
        has_failed = any(record.outcome != Outcome.OK for record in variant_run.records)
        for names, is_in in (
            (self._failed, not variant_run.is_right),
            (self._not_run, bool(variant_run.why_not_run) and not has_failed),
            (self._built_only, kinds == {"build"}),
        ):
            (names.add if is_in else names.discard)(name)

    def _take(self, records: list[Record]) -> None:
        """Keep the times of right records, and which variants failed."""
        for record in records:
            if record.speed and record.case and record.outcome == Outcome.OK:
                self._times[(record.variant, record.case.shape_id)] = record
        self._failed |= {record.variant for record in records if record.outcome != Outcome.OK}

    def _write(self) -> None:
        """Write the records of the latest verdicts, also if this run is abandoned before its end."""
        try:
            replace_records(self.log, [record for records in self._records.values() for record in records])
        except OSError as problem:
            self._screen.title(f"records were lost: {problem}", good=False)

    def _conclude(self, changed: list[AnyVariant]) -> None:
        """Write the last line."""
        if not changed:
            self._screen.title("nothing has changed since the last verdict")
            return
        names = {variant.name for variant in changed}
        self._screen.title(f"{self.verdict(names)}, {self._screen.after_save}", good=not names & self._failed)

    def _baseline(self, shape: str) -> Record | None:
        """The fastest baseline of the first run at a shape."""
        records = [record for (_, at), record in self._times.items() if at == shape and record.role == "baseline"]
        return min(records, key=lambda record: record.speed.device.median_us if record.speed else 0.0, default=None)

    def _builds(self, variant: str) -> list[Build]:
        """The builds of a variant before this save."""
        return [build for record in self._records.get(variant, ()) if record.kind == "build" for build in record.builds]

    def _names(self) -> str:
        return _listed([variant.name for variant in self._watched])


NOTICES = ("building", "waiting")  # how the builder's messages begin that are shown
NEVER = (None, None)  # the last verdict of a variant that is new
PLAN = ""  # stands for the selection as a whole, where variants have names


def _listed(names: list[str]) -> str:
    """Paths from the current folder, or names; at most four of them."""
    shown = [os.path.relpath(name) if Path(name).is_absolute() else name for name in names[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(shown)}{more}"
