"""The study of a sweep: the state that all processes and machines of a sweep share, kept by Optuna.

A trial gets its configuration at the moment in which it is created, and the one with the lower number keeps a
configuration that two trials have.  So no lock is needed, and no configuration runs again after its trial has ended.
Only this module knows how a trial is stored.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from pytest_fa.features.sweep.optional_optuna import optuna
from pytest_fa.features.sweep.owners import is_stale, this_process
from pytest_fa.features.sweep.suggest import Suggester
from pytest_fa.features.sweep.sweep_space import Point
from pytest_fa.features.sweep.trial_result import Owner, SweepEnd, SweepTrial, TrialOutcome, TrialResult, TrialState

RENEW_SECONDS = 60.0  # far below the age at which another machine takes over


class SharedStudy:
    """One study, opened by its name.  With `facts`, which say what it is about, it is created unless it exists."""

    def __init__(self, storage: optuna.storages.BaseStorage, name: str, facts: dict[str, Any] | None = None) -> None:
        self.name = name
        sampler = optuna.samplers.RandomSampler()  # is never asked: each trial is enqueued with its configuration
        if facts is None:
            self._study = optuna.load_study(storage=storage, study_name=name, sampler=sampler)
        else:
            self._study = optuna.create_study(storage=storage, study_name=name, sampler=sampler, load_if_exists=True)
        if facts is not None and not self.facts:
            self._study.set_user_attr("facts", facts)
        self._ended: dict[int, SweepTrial] = {}  # their views never change again
        self._own: dict[int, optuna.trial.Trial] = {}  # those that this process has begun

    @property
    def facts(self) -> dict[str, Any]:
        """What was stored when the study was created; empty in a study of something else."""
        facts: dict[str, Any] = self._study.user_attrs.get("facts", {})
        return facts

    def trials(self) -> list[SweepTrial]:
        """All trials by number, as every process sees them now."""
        return [self._view(each) for each in self._study.get_trials(deepcopy=False) if "point" in each.user_attrs]

    def claim(self, suggester: Suggester, budget: int) -> SweepTrial | None:
        """Begin a trial of a configuration that no other trial has.

        None if the budget or the space is used up, or if another process runs the finals.
        """
        while True:
            self.release_stale()
            trials = self.trials()
            if self.is_closed or sum(trial.is_counted for trial in trials) >= budget:
                return None
            if not any(trial.state == "waiting" for trial in trials) and not self._enqueue(suggester, trials):
                return None
            if (claimed := self._begin_waiting()) is None:
                continue
            if self.is_closed:  # since the look above; the process that runs the finals waits for this trial
                self.release(claimed)
                return None
            if (first := self._first_with_point(claimed)) is None:
                return claimed
            reason = f"trial #{first.number} has the same configuration"
            self.finish(claimed, TrialResult(TrialOutcome.REPEATED, reason, same_as=first.number))

    def note_code(self, trial: SweepTrial, code: str) -> SweepTrial | None:
        """Store the machine code of a trial; return an earlier trial that has the same, or None."""
        self._own[trial.number].set_user_attr("code", code)
        same = (each for each in self.trials() if code and each.code == code and each.state != "released")
        return next((each for each in same if each.number < trial.number), None)

    def finish(self, trial: SweepTrial, result: TrialResult) -> None:
        """Store what came of a trial.  A trial that was released meanwhile stays released."""
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self._own[trial.number].set_user_attr("result", msgspec.to_builtins(result))
            self._tell(trial.number, result)

    def release(self, trial: SweepTrial) -> None:
        """Give a trial up, so that its configuration is tried again."""
        self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)

    def release_stale(self) -> None:
        """Release the running trials whose process has ended, so that their configurations are tried again.

        A trial whose result was already stored is completed instead.
        """
        for trial in self.trials():
            if trial.state == "running" and is_stale(trial):
                if trial.result is not None:
                    self._tell(trial.number, trial.result)
                else:
                    self.release(trial)

    @property
    def end(self) -> SweepEnd | None:
        """How the sweep ended; None before that."""
        stored = self._study.user_attrs.get("ended")
        return msgspec.convert(stored["end"], SweepEnd) if stored else None

    @property
    def gate_record(self) -> dict[str, Any] | None:
        """The record of the gate that confirmed the winner; None if there is no winner."""
        stored = self._study.user_attrs.get("ended")
        record: dict[str, Any] | None = stored["gate_record"] if stored else None
        return record

    @property
    def gate_begun(self) -> Point | None:
        """The configuration whose gate was begun; None before that.  An interrupted gate counts."""
        point: Point | None = self._study.user_attrs.get("gate_begun")
        return point

    def begin_gate(self, point: Point) -> bool:
        """Store that the one gate begins, and return True; False if this process may not begin it.

        It may not if a gate was begun before, or if another process ends the sweep meanwhile.
        """
        if self.gate_begun is not None or self.end is not None or not self._is_ours(self._study.user_attrs["ending"]):
            return False
        self._study.set_user_attr("gate_begun", point)
        return True

    def store_end(self, end: SweepEnd, gate_record: dict[str, Any] | None) -> SweepEnd:
        """Store how the sweep ended, and the record of the gate of a winner; return the end that is stored.

        An end that was stored before stays.
        """
        if (stored := self.end) is not None:
            return stored
        dated = msgspec.structs.replace(end, ended=time.time())
        self._study.set_user_attr("ended", {"end": msgspec.to_builtins(dated), "gate_record": gate_record})
        return dated

    @property
    def is_closed(self) -> bool:
        """Whether another process, which is alive, ends the sweep: no trial may begin any more."""
        elected = self._study.user_attrs.get("ending")
        if not elected or self._is_ours(elected):
            return False
        owner = SweepTrial(0, "running", {}, msgspec.convert(elected["owner"], Owner), begun=elected["begun"])
        return not is_stale(owner)

    def is_elected(self, wait_seconds: float) -> bool:
        """Whether this process ends the sweep: of those that ask, the last one that finds no other alive.

        The others may ask again: a process that ended before the sweep did is replaced.
        """
        if self.is_closed:
            return False
        try:
            self._renew()
            time.sleep(wait_seconds)  # another process that asked at the same time has written by then
            return self._is_ours(self._study.user_attrs["ending"])
        except BaseException:
            self._resign()
            raise

    @contextlib.contextmanager
    def while_elected(self, seconds: float = RENEW_SECONDS) -> Iterator[None]:
        """Say every few seconds that the process that ends the sweep is alive: other machines see only this.

        If an exception ends it, another process may end the sweep at once.
        """
        is_over, writing = threading.Event(), threading.Lock()

        def renew() -> None:
            while not is_over.wait(seconds):
                # a database that cannot be reached may be there the next time
                with contextlib.suppress(Exception), writing:
                    if not is_over.is_set() and self._is_ours(self._study.user_attrs["ending"]):
                        self._renew()

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            is_over.set()
            with writing:  # what the thread is writing does not replace the resignation
                self._resign()
            raise
        finally:
            is_over.set()
            thread.join()

    def _renew(self) -> None:
        ending = {"owner": msgspec.to_builtins(this_process()), "begun": time.time()}
        self._study.set_user_attr("ending", ending)

    def _resign(self) -> None:
        """Let another process end the sweep at once, and not only after 30 minutes without a sign of life."""
        with contextlib.suppress(Exception):
            if self._is_ours(self._study.user_attrs["ending"]):
                self._study.set_user_attr("ending", None)

    @staticmethod
    def _is_ours(ending: dict[str, Any] | None) -> bool:
        return ending is not None and bool(ending["owner"] == msgspec.to_builtins(this_process()))

    # -- how a trial is stored ----------------------------------------------------------------------------------------

    def _enqueue(self, suggester: Suggester, trials: list[SweepTrial]) -> bool:
        """Create a waiting trial with the next configuration; return whether there is one."""
        attributes = {
            each.number: each.user_attrs["sampler"]
            for each in self._study.get_trials(deepcopy=False)
            if each.user_attrs.get("sampler")
        }
        suggestion = suggester.next(trials, attributes)
        if suggestion is None:
            return False
        user_attrs = {"point": suggestion.point, "sampler": suggestion.sampler_attributes}
        self._study.enqueue_trial(suggestion.point, user_attrs=user_attrs)
        return True

    def _begin_waiting(self) -> SweepTrial | None:
        """Begin a waiting trial, which only one process can; None if others have begun all of them."""
        trial = self._study.ask()
        if (point := trial.user_attrs.get("point")) is None:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return None
        self._own[trial.number] = trial
        begun = time.time()
        trial.set_user_attr("begun", begun)  # a database keeps only the local time of the machine that began the trial
        trial.set_user_attr("owner", msgspec.to_builtins(this_process()))
        for name, choices in self.facts.get("values", {}).items():
            trial.suggest_categorical(name, choices)
        return SweepTrial(trial.number, "running", point, this_process(), begun=begun)

    def _first_with_point(self, claimed: SweepTrial) -> SweepTrial | None:
        """The trial with a lower number that has the same configuration, and was not released."""
        earlier = (each for each in self.trials() if each.number < claimed.number and each.state != "released")
        return next((each for each in earlier if each.point == claimed.point and not _is_repetition(each)), None)

    def _tell(self, number: int, result: TrialResult) -> None:
        pruned = optuna.trial.TrialState.PRUNED
        values = result.log_ratio
        self._study.tell(number, values, state=None if values is not None else pruned, skip_if_finished=True)

    def _view(self, frozen: optuna.trial.FrozenTrial) -> SweepTrial:
        if frozen.number in self._ended:
            return self._ended[frozen.number]
        states: dict[str, TrialState] = {"WAITING": "waiting", "RUNNING": "running", "FAIL": "released"}
        attributes = frozen.user_attrs
        started = frozen.datetime_start.timestamp() if frozen.datetime_start else 0.0
        view = msgspec.convert(
            {
                "number": frozen.number,
                "state": states.get(frozen.state.name, "ended"),
                "point": attributes["point"],
                "owner": attributes.get("owner"),
                "code": attributes.get("code", ""),
                "result": attributes.get("result"),
                "begun": attributes.get("begun", started),
            },
            SweepTrial,
        )
        if view.state in ("ended", "released"):
            self._ended[view.number] = view
        return view


def _is_repetition(trial: SweepTrial) -> bool:
    return trial.result is not None and trial.result.outcome == TrialOutcome.REPEATED


def running_elsewhere(study: SharedStudy) -> Iterator[SweepTrial]:
    """Yield the trials that other living processes run."""
    me = this_process()
    for trial in study.trials():
        if trial.state == "running" and trial.owner != me and not is_stale(trial):
            yield trial
