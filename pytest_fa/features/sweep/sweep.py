"""`--fa-sweep=NAME`: the study of a variant's defines, and what its tests do with it.

space -> study -> trials: build, machine code, limits, judge, time -> finalists again -> checks -> gate -> end
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shlex
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sweep.closed import closed_line
from pytest_fa.features.sweep.finals import NONE, end_sweep
from pytest_fa.features.sweep.kernel_bench import KernelBench
from pytest_fa.features.sweep.plugin import options_of
from pytest_fa.features.sweep.search import run_trial
from pytest_fa.features.sweep.shared_study import SharedStudy, running_elsewhere
from pytest_fa.features.sweep.storage import open_storage
from pytest_fa.features.sweep.study_facts import changed_files, feasible_space, split_cases, sweep_of
from pytest_fa.features.sweep.study_url import is_url, without_password
from pytest_fa.features.sweep.suggest import Space, Suggester
from pytest_fa.features.sweep.sweep_space import Point, point_text
from pytest_fa.features.sweep.trial_result import SweepEnd, SweepTrial
from pytest_fa.options.options import Options
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, Stage, to_builtins
from pytest_fa.session.refusals import CannotRun, ChangedMeanwhile
from pytest_fa.session.session import Session
from pytest_fa.wire.jobs import CaseResult

POLL_SECONDS = 0.2  # between looks at the trials of other processes
ELECTION_SECONDS = {True: 2.0, False: 0.1}  # whether machines share the study


class SweepRun:
    """The sweep of one variant in this process: its study, its space and its bench."""

    def __init__(self, session: Session, parent: Variant, facts: dict[str, Any], say: Callable[[str], None]) -> None:
        self._session, self._say, self.parent, self._facts = session, say, parent, facts
        self.options = session.options
        self.sweep = sweep_of(parent)
        self.searched, self.unsearched = split_cases(session.run_plan, parent, self.sweep)
        self.bench = KernelBench(session, parent, self.searched, self.unsearched, say, self._require_unchanged)

    @cached_property
    def space(self) -> Space:
        """The feasible configurations."""
        return feasible_space(self.parent)

    @cached_property
    def study(self) -> SharedStudy:
        """The shared study, which is created unless it exists."""
        return open_study(self.options, self.parent, self._facts)

    @cached_property
    def suggester(self) -> Suggester:
        """What suggests configurations in this process."""
        seed = random.SystemRandom().randrange(2**31)
        return Suggester(self.space, options_of(self.options).trials, options_of(self.options).sampler, seed)

    def next_trial(self) -> SweepTrial | None:
        """Run the next trial; None if the budget or the space is used up, or if the finals or the gate were begun.

        Raises `CannotRun` if this machine cannot run the parent.
        """
        self.bench.require_parent()
        if self.study.end or self.study.gate_begun is not None:
            return None
        return run_trial(self.study, self.suggester, self.bench, options_of(self.options).trials)

    def end(self) -> Record:
        """Run what is left, wait for other processes, and end the sweep; return the record of its end.

        A sweep ends once: if it has ended before, or if another process ends it, the record is of that end.
        """
        while self.next_trial():
            pass
        self._wait_for_others()
        has_told = False
        while not (end := self.study.end):
            if self.study.is_elected(ELECTION_SECONDS[is_url(study_place(self.options, self.parent))]):
                with self.study.while_elected():
                    self._wait_for_others()  # for a trial that began while this process closed the study
                    end = self._end_here()
                break
            if not has_told:
                self._say("; ".join(filter(None, ("sweep: waiting for the finals of another process", self.closed))))
            has_told = True
            time.sleep(POLL_SECONDS)
        return self._record(end)

    @property
    def closed(self) -> str:
        """Why this run adds no trial to a study whose finals another process runs; empty if it may, or needs none."""
        is_late = self.study.is_closed
        return (
            closed_line(self.study.trials(), options_of(self.options).trials, len(self.space.points)) if is_late else ""
        )

    def _end_here(self) -> SweepEnd:
        """End the sweep in this process.  A gate that was begun before is not repeated."""
        trials = self.study.trials()
        if (gated := self.study.gate_begun) is not None:
            reason = f"{NONE}: the one gate, of {point_text(gated)}, was interrupted"
            return self.study.store_end(SweepEnd(reason, sum(each.is_right for each in trials), gated=gated), None)
        seed = random.SystemRandom().randrange(2**31)
        end = end_sweep(trials, self.bench, self.sweep.counters, seed, self._say, self._begin_gate)
        record = self.bench.gate_record
        return self.study.store_end(end, to_builtins(record) if record and end.winner is not None else None)

    def _begin_gate(self, point: Point) -> None:
        """Mark that the one gate begins.  Raises `CannotRun` if another process ends the sweep."""
        if not self.study.begin_gate(point):
            raise CannotRun(f"another process ends this sweep; to see its end, type: {self._command}")

    def _wait_for_others(self) -> None:
        """Wait until no other process runs a trial; then run what a process that ended has left."""
        told = set[int]()
        while running := list(running_elsewhere(self.study)):
            for trial in running:
                if trial.number not in told:
                    self._say(f"sweep: waiting for trial #{trial.number}, which another process runs")
            told.update(trial.number for trial in running)
            time.sleep(POLL_SECONDS)
            self.study.release_stale()
        while told and self.next_trial():
            pass

    def _record(self, end: SweepEnd) -> Record:
        """The record of the test that ends the sweep: that of the gate if it passed, else one without a verdict."""
        if stored := self.study.gate_record:
            return read_record(stored)
        gated = self.parent if end.gated is None else self.bench.variant_of(end.gated)
        result = CaseResult(Outcome.INCONCLUSIVE, end.reason, (Stage("speed", "failed"),), ("sweep",))
        return self._session.records.make("gate", gated, None, result, rerun=self._command_with(self._next_study))

    def _require_unchanged(self) -> None:
        """Raise `ChangedMeanwhile` if a source or header changed since this run began."""
        if changed := changed_files(self._facts, self.parent):
            raise ChangedMeanwhile(
                f"{', '.join(changed)} of {self.parent.name} changed during the sweep; the study stays as it is; "
                f"for a study of the changed files, type: {self._command}"
            )

    @property
    def _command(self) -> str:
        """The command that continues this sweep."""
        return self._command_with(options_of(self.options).study)

    def _command_with(self, study: str | None) -> str:
        """The command of this sweep with a study."""
        options, asked = self.options, options_of(self.options)
        words = [*options.rerun, f"--fa-sweep={self.parent.name}", f"--fa-trials={asked.trials}", *options.selection]
        return shlex.join([*words, *([f"--fa-study={without_password(study)}"] if study else [])])

    @property
    def _next_study(self) -> str:
        """The first journal of the artifacts that is not there yet, for another search: a sweep ends once."""
        folder, name = self.options.artifacts / "sweeps", self.parent.name
        paths = (folder / f"{name}-{number}.journal" for number in itertools.count(2))
        return os.path.relpath(next(path for path in paths if not path.exists()))


def study_place(options: Options, parent: Variant) -> str:
    """The file or the URL of a study: that of `--fa-study`, else a journal in the artifacts."""
    asked = options_of(options)
    if asked.study is None:
        return str(options.artifacts / "sweeps" / f"{parent.name}.journal")
    return asked.study if is_url(asked.study) else str(asked.base / Path(asked.study).expanduser())


def open_study(options: Options, parent: Variant, facts: dict[str, Any]) -> SharedStudy:
    """The study with these facts.  Other facts make another study of the same storage."""
    name = f"{parent.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]}"
    return SharedStudy(open_storage(study_place(options, parent)), name, facts)
