"""`--fa-sweep=NAME`: the study of a variant's defines, and what its tests do with it.

space -> study -> trials: build, machine code, limits, judge, time -> finalists again -> checks -> gate -> end
"""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.sweep_space import Sweep
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.options.options import Options
from pytest_fa.records.environment import find_gpu
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, Stage, to_builtins
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.session.session import Session
from pytest_fa.session.shard_split import folder_hash
from pytest_fa.sweep.finals import end_sweep
from pytest_fa.sweep.kernel_bench import KernelBench
from pytest_fa.sweep.search import run_trial
from pytest_fa.sweep.shared_study import (
    SharedStudy,
    is_url,
    open_storage,
    require_optuna,
    running_elsewhere,
    without_password,
)
from pytest_fa.sweep.suggest import Space, Suggester
from pytest_fa.sweep.trial_result import SweepEnd, SweepTrial
from pytest_fa.worker.jobs import CaseResult

POLL_SECONDS = 0.2  # between looks at the trials of other processes
ELECTION_SECONDS = {True: 2.0, False: 0.1}  # whether machines share the study


class SweepRun:
    """The sweep of one variant in this process: its study, its space and its bench."""

    def __init__(self, session: Session, parent: Variant, say: Callable[[str], None]) -> None:
        self._session, self._say, self.parent = session, say, parent
        self.options = session.options
        self.sweep = sweep_of(parent)
        self.searched, self.unsearched = split_cases(session.run_plan, parent, self.sweep)
        self.bench = KernelBench(session, parent, self.searched, self.unsearched, say)

    @cached_property
    def space(self) -> Space:
        """The feasible configurations."""
        return feasible_space(self.parent)

    @cached_property
    def study(self) -> SharedStudy:
        """The shared study, which is created unless it exists."""
        return open_study(self._session.run_plan, self.parent)

    @cached_property
    def suggester(self) -> Suggester:
        """What suggests configurations in this process."""
        seed = random.SystemRandom().randrange(2**31)
        return Suggester(self.space, self.options.trials, self.options.sampler, seed)

    def next_trial(self) -> SweepTrial | None:
        """Run the next trial; None if the budget or the space is used up, or if the sweep has ended.

        Raises `CannotRun` if this machine cannot run the parent.
        """
        self.bench.require_parent()
        if self.study.end:
            return None
        return run_trial(self.study, self.suggester, self.bench, self.options.trials)

    def end(self) -> Record:
        """Run what is left, wait for other processes, and end the sweep; return the record of its end.

        A sweep ends once: if it has ended before, or if another process ends it, the record is of that end.
        """
        while self.next_trial():
            pass
        for trial in self._others():
            self._say(f"sweep: waiting for trial #{trial.number}, which another process runs")
        while not (end := self.study.end):
            if not self.study.is_elected(ELECTION_SECONDS[is_url(study_place(self.options, self.parent))]):
                time.sleep(POLL_SECONDS)
                continue
            seed = random.SystemRandom().randrange(2**31)
            end = end_sweep(self.study.trials(), self.bench, self.sweep.counters, seed, self._say)
            record = self.bench.gate_record
            self.study.store_end(end, to_builtins(record) if record and end.winner is not None else None)
        return self._record(end)

    def _others(self) -> list[SweepTrial]:
        """Wait until no other process runs a trial; return those that were waited for."""
        waited: dict[int, SweepTrial] = {}
        while running := list(running_elsewhere(self.study)):
            waited.update({trial.number: trial for trial in running})
            time.sleep(POLL_SECONDS)
            self.study.release_stale()
        if waited:
            while self.next_trial():  # what a process that ended has left
                pass
        return list(waited.values())

    def _record(self, end: SweepEnd) -> Record:
        """The record of the test that ends the sweep: that of the gate if it passed, else one without a verdict."""
        if stored := self.study.gate_record:
            return read_record(stored)
        gated = self.parent if end.gated is None else self.bench.variant_of(end.gated)
        result = CaseResult("inconclusive", end.reason, (Stage("speed", "failed"),), ("sweep",))
        record = self._session.records.make("gate", gated, None, result, ())
        return msgspec.structs.replace(record, rerun_command=self._command)

    @property
    def _command(self) -> str:
        """The command that continues this sweep."""
        options = self.options
        words = [*options.rerun, f"--fa-sweep={self.parent.name}", f"--fa-trials={options.trials}", *options.selection]
        return shlex.join([*words, *([f"--fa-study={without_password(options.study)}"] if options.study else [])])


def sweep_of(parent: Variant) -> Sweep:
    """The `sweep` of a variant's manifest.  Raises `UsageProblem` if it has none, or if it is never gated."""
    if parent.sweep is None:
        raise UsageProblem(
            f"--fa-sweep: the manifest of {parent.name} has no `sweep`; write for example "
            f"`sweep: {{values: {{{next(iter(parent.defines), 'BLOCK_M')}: [32, 64]}}}}` (see docs/sweeps.md)"
        )
    if not parent.may_be_gated:
        raise UsageProblem(f"--fa-sweep: {parent.name} is never gated: role {parent.role}, computes {parent.computes}")
    return parent.sweep


def feasible_space(parent: Variant) -> Space:
    """The feasible configurations of a variant.  Raises `UsageProblem` if there is none."""
    space = Space(sweep_of(parent), parent.defines)
    if not space.points:
        raise UsageProblem(
            f"--fa-sweep: no combination of the values of {parent.name} satisfies all conditions of `sweep.where`"
        )
    return space


def split_cases(run_plan: RunPlan, parent: Variant, sweep: Sweep) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """The cases that are searched, and the other ones of the run's suites, at which only the best one is judged.

    Searched are the first seeds of `--fa-case`; without it, those of the manifest's `sweep.cases`; else of the suites.
    """
    plan = run_plan.plan_of(run_plan.options.suites)
    of_suites = tuple(case for case in plan.cases_of(parent) if parent.refuses(case) is None)
    named = run_plan.plan.cases_of(parent) if run_plan.options.cases else sweep.searched_cases
    searched = {case.shape_id: case for case in reversed(named or of_suites)}
    cases = tuple(reversed(searched.values()))
    if problem := next((reason for case in cases if (reason := parent.refuses(case))), None):
        raise UsageProblem(f"--fa-sweep: {problem}")
    return cases, tuple(case for case in of_suites if case not in cases)


def study_place(options: Options, parent: Variant) -> str:
    """The file or the URL of a study: that of `--fa-study`, else a journal in the artifacts."""
    if options.study is None:
        return str(options.artifacts / "sweeps" / f"{parent.name}.journal")
    return options.study if is_url(options.study) else str(options.rootdir / Path(options.study).expanduser())


def open_study(run_plan: RunPlan, parent: Variant) -> SharedStudy:
    """The study of this sweep.  Other sources, values, cases or another GPU make another study of the same storage."""
    require_optuna()
    facts = _facts(run_plan, parent)
    name = f"{parent.name}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]}"
    return SharedStudy(open_storage(study_place(run_plan.options, parent)), name, facts)


def _facts(run_plan: RunPlan, parent: Variant) -> dict[str, Any]:
    """What the result of a trial depends on."""
    sweep, gpu = sweep_of(parent), find_gpu()
    searched, _ = split_cases(run_plan, parent, sweep)
    return {
        "variant": parent.name,
        "source": folder_hash(Path(parent.folder)),
        "headers": folder_hash(Path(parent.root) / "include"),
        "values": {name: list(values) for name, values in sweep.values.items()},
        "where": list(sweep.where),
        "fitness": list(sweep.fitness),
        "defines": dict(parent.defines),
        "cases": [case.id for case in searched],
        "gpu": gpu.name if gpu else None,
        "feasible": len(feasible_space(parent).points),
    }
