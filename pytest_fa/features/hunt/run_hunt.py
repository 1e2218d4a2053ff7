"""`run_hunt`: one hunt in pytest's run, from the options to its record."""

from __future__ import annotations

import secrets
import shlex

import msgspec

from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.bench import RunBench, unclaimed
from pytest_fa.features.hunt.case_strategy import examples_of
from pytest_fa.features.hunt.example import Example, read_example
from pytest_fa.features.hunt.find_text import find_of, hunt_words
from pytest_fa.features.hunt.hunted import Hunt
from pytest_fa.features.hunt.hunting import FoundFault, Hunted, hunt, judge_again
from pytest_fa.features.hunt.kept_examples import KeptExamples
from pytest_fa.features.hunt.ledger import Ledger
from pytest_fa.features.hunt.plugin import LARGEST_SEED, HuntOptions
from pytest_fa.options.options import Options
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.state import progress_line
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.builds import device_of
from pytest_fa.session.refusals import CannotRun, NotJudged, Refused
from pytest_fa.session.session import Session
from pytest_fa.wire.jobs import CaseResult


def options_of(options: Options) -> HuntOptions:
    """The options of a run that hunts."""
    part = options.part(HuntOptions)
    assert part  # noqa: S101  # only a hunt asks
    return part


def run_hunt(fa_run: FaRun, variant: Variant, hunter: int) -> Record:
    """Hunt a variant; the record has each fault.  The hunters of one variant have different seeds.

    Raises `CannotRun` if this machine cannot run the variant.
    """
    session, asked = fa_run.session, options_of(fa_run.session.options)
    hunted_as = unclaimed(variant) if asked.unclaimed else variant
    bench, say = RunBench(session.runner, variant, hunted_as), progress_line(fa_run.node.config)
    device, again = device_of(variant), [read_example(text) for text in asked.again]
    if isinstance(session.builds.build_for_this_machine(variant), BuildFailure):
        return session.records.of_kind("hunt", session.build_record(variant))
    if why := next(filter(None, map(bench.why_unusable, again)), ""):
        raise NotJudged(f"--fa-hunt-again: {why}")
    seed = (secrets.randbelow(LARGEST_SEED) if asked.seed is None else asked.seed) + hunter
    ledger = Ledger(session.options.kernels, variant.name, device)
    kept, right = KeptExamples(session.options.cache, variant.name), list[Example]()

    def found(fault: FoundFault) -> None:
        kept.add(fault.example)
        say(f"{variant.name}: a fault: {fault.example}")

    if again:
        hunted = judge_again(bench, again)
    else:
        arguments = (bench, hunted_as, examples_of(hunted_as, device, session.options.dtypes))
        hunted = hunt(
            *arguments,
            seconds=asked.seconds,
            seed=seed,
            known=kept.examples(),
            found=found,
            right=right.append,
            excuses=ledger,
        )
    if not hunted.judged:
        raise _nothing_judged(variant, hunted)
    for example in right:
        kept.forget(example)
    unusable = {example: why for example in ledger.examples if (why := bench.why_unusable(example))}
    return _record(session, variant, hunted, seed, ledger, ledger.unexpected(right, {} if again else unusable))


def _nothing_judged(variant: Variant, hunted: Hunted) -> CannotRun:
    """Why a hunt has no verdict."""
    if hunted.refused:
        return Refused(f"{variant.name} refused all {hunted.refused} cases that it was given")
    return NotJudged(f"no case of {variant.name} was judged in {hunted.seconds:.0f} s; give more --fa-hunt-seconds")


def _record(  # what a hunt is told by
    session: Session, variant: Variant, hunted: Hunted, seed: int, ledger: Ledger, unexpected: tuple[str, ...]
) -> Record:
    """The record of a hunt: that of its first fault that no ledger knows, or of none."""
    finds = tuple(find_of(fault, session.options, variant, ledger) for fault in hunted.faults)
    numbers = (hunted.judged, hunted.refused, hunted.seconds, hunted.judging_seconds)
    added = Hunt(*numbers, seed, finds, unexpected)
    command = shlex.join([*session.options.rerun, *hunt_words(session.options, variant), f"--fa-hunt-seed={seed}"])
    new = next((fault for fault, find in zip(hunted.faults, finds, strict=True) if not find.reference), None)
    if new is not None and (first := new.verdict.record) is not None:
        message = f"{new.example}: {first.message}"
        result = CaseResult(first.outcome, message, first.stages, first.caught_by)
        record = session.records.make("hunt", variant, None, result, first.builds, rerun=command, added=added)
        return msgspec.structs.replace(record, output=first.output)
    outcome, message = (Outcome.FAILED, "; ".join(added.unexpected)) if added.unexpected else (Outcome.OK, "")
    return session.records.make("hunt", variant, None, CaseResult(outcome, message, ()), rerun=command, added=added)
