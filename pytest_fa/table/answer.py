"""The last lines of a run: the answer, and what to type next.

ws_p2: 16/16 checks passed; 1.405 x the time of sdpa_cudnn at b1h8s512d64-fp16
why: pytest --fa-variant=ws_p2 ...

After a failure, the cause of the first one stands between them.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pytest_fa.catalog.suites import TARGET_SHAPE
from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.feature import features
from pytest_fa.records.added import Proposal, added_kinds, added_types
from pytest_fa.records.agreement import is_unconfirmed
from pytest_fa.records.outcome import WORST_FIRST, Outcome, State
from pytest_fa.records.record import JUDGED_KINDS, Record
from pytest_fa.records.spread import is_clear_ratio
from pytest_fa.records.timing import Speed
from pytest_fa.table.baselines import baseline_name, best_baseline, comparable, compared_baseline
from pytest_fa.table.failure import failure_text
from pytest_fa.table.layout import Style, TextLine
from pytest_fa.table.rows import NOT_ATTENTION, UNCLEAR, ratio_text
from pytest_fa.table.tolerance_lines import reference_part, tolerance_part

Times = dict[str, dict[str, Speed]]  # by variant, then by shape id


class RunFacts(NamedTuple):
    """What the answer needs beside the records of a run.

    `rerun` has the first words of a command that runs variants of this run, and `selection` the options that select
    its cases, as they were typed.  `why_not_run` is the most frequent reason why a test with a case did not run; empty
    if all of them ran.  `failed_tests` is the number of tests that failed without the record of a failure,
    `failed_files` that of the files that pytest could not collect, and `unjudged_cases` that of the cases that the user
    named and that no test judged.  `has_failed` says that nothing ran or that records were lost.  `saves_times` says
    whether --benchmark-save would be something new: pytest-benchmark is switched on, and this run has not saved its
    times.
    """

    rerun: tuple[str, ...] = ("pytest",)
    selection: tuple[str, ...] = ()
    why_not_run: str = ""
    failed_tests: int = 0
    failed_files: int = 0
    unjudged_cases: int = 0
    has_failed: bool = False
    is_static: bool = False
    saves_times: bool = True

    @property
    def failures(self) -> list[str]:
        """The failures that no record has, as parts of the answer."""
        counted = (
            (self.failed_tests, "test", "failed without a result"),
            (self.failed_files, "file", "could not be collected"),
            (self.unjudged_cases, "named case", "not judged"),
        )
        return [f"{count} {thing}{'s' * (count != 1)} {words}" for count, thing, words in counted if count]


def answer_lines(records: list[Record], run: RunFacts) -> list[TextLine]:
    """The answer and the next command.  No lines for a run of the self-test, or without records."""
    subjects = [record for record in records if record.role not in COMPANION_ROLES] or records
    if not subjects or any(record.kind == "selftest" for record in records):
        return []
    by_variant: dict[str, list[Record]] = {}
    for record in subjects:
        by_variant.setdefault(record.variant, []).append(record)
    times = _times(by_variant)
    if len(by_variant) == 1:
        text = _about_one(subjects, records, times, run.why_not_run)
    else:
        text = _about_many(by_variant, records, times, run.why_not_run)
    command = _next_command(subjects, records, times, run)
    judged_by = [*tolerance_part(subjects), *reference_part(subjects)]
    answer = TextLine("; ".join([text, *judged_by, *run.failures]), _style(records, run))
    return [answer, *(TextLine(line) for line in (_cause(subjects, records), command) if line)]


def _simplest_first(records: list[Record]) -> list[Record]:
    """The failures: of builds, then of outputs by the number of scores, then others; else in the order of the run."""

    def effort(record: Record) -> tuple[int, int]:
        case = record.case if record.kind == "correct" else None
        scores = case.batch * case.heads * case.seq_q * case.seq_k if case else 0
        return (0 if record.kind == "build" else 1 if case else 2, scores)

    return sorted(filter(_is_failure, records), key=effort)


def _style(records: list[Record], run: RunFacts) -> Style:
    """Red for a run that failed, yellow for a test without a verdict, else green."""
    if run.failures or run.has_failed or any(record.outcome.is_failure for record in records):
        return "red"
    return "yellow" if any(record.outcome == Outcome.INCONCLUSIVE for record in records) else "green"


def _cause(subjects: list[Record], records: list[Record]) -> str:
    """The first line of the simplest failure; without a failure, of the first test that could not be decided."""
    without_verdict = [record for record in (*subjects, *records) if _has_no_verdict(record)]
    first = next(iter((*_simplest_first(subjects), *_simplest_first(records), *without_verdict)), None)
    return f"{first.id}: {failure_text(first).splitlines()[0]}" if first and first.message else ""


def _about_one(group: list[Record], records: list[Record], times: Times, why_not_run: str) -> str:
    name = group[0].variant
    judged = [record for record in group if _is_judged(record)]
    is_failed = any(_is_failure(record) for record in group)
    built = [
        build.arch
        for record in group
        if record.kind == "build" and record.outcome == Outcome.OK
        for build in record.builds
    ]
    parts = _failure_parts(group)
    if judged and not any(_is_failure(record) for record in judged):
        parts.append(f"{len(judged)}/{len(judged)} checks passed")
    elif built and not is_failed:
        parts.append(f"built for {', '.join(built)}")
    parts += _undecided_part(group)
    parts += [words for each in added_types().values() for words in each.words(group)]
    if times.get(name):
        parts.append(_versus_baseline(name, records, times))
    elif not is_failed and not any(record.kind in added_kinds() for record in group):
        parts.append(_not_timed(name, judged, why_not_run))
    return f"{name}: {'; '.join([*parts, *_failed_companions(records)])}"


def _failure_parts(group: list[Record]) -> list[str]:
    """The kind of the first failed judgement with the number of all, then the failures of builds and of features."""
    judged = [record for record in group if _is_judged(record)]
    failed = [record for record in judged if _is_failure(record)]
    parts = []
    if failed:
        count = f" in {len(failed)} of {len(judged)}" if failed[0].outcome != Outcome.NOT_BUILT else ""
        parts.append(f"{_words(failed[0])}{count}")
    prefixes = {each.kind: each.prefix for each in added_types().values()}
    others = [record for record in group if _is_failure(record) and not _is_judged(record)]
    parts += [f"{prefixes.get(record.kind, '')}{_words(record)}" for record in others]
    return list(dict.fromkeys(parts))


def _undecided_part(records: list[Record]) -> list[str]:
    """How many tests of outputs ended without a verdict; nothing if none did."""
    count = sum(_is_undecided(record) for record in records)
    return [f"{count} without a verdict"] if count else []


def _words(record: Record) -> str:
    return record.outcome.replace("_", " ")


def _about_many(by_variant: dict[str, list[Record]], records: list[Record], times: Times, why_not_run: str) -> str:
    """How many variants are in which state, and the fastest correct one."""
    states = Counter(state_of(group) for group in by_variant.values())
    counts = [f"{states[state]} {state}" for state in State if states[state]]
    parts = [f"{len(by_variant)} variants: {', '.join(counts)}"]
    subjects = [record for group in by_variant.values() for record in group]
    parts += _undecided_part(subjects)
    parts += [words for each in added_types().values() for words in each.words_of_many(subjects)]
    fastest = _fastest(times)
    if fastest:
        parts.append(_about_fastest(fastest, records, times))
    elif why_not_run and states[State.ONLY_BUILT]:
        first = next(name for name, group in by_variant.items() if state_of(group) is State.ONLY_BUILT)
        parts.append(_not_timed(first, [], why_not_run))
    return "; ".join([*parts, *_failed_companions(records)])


def state_of(group: list[Record]) -> State:
    """The state of the variant of these records.

    A variant is wrong only if an output or a property was judged to be wrong, and a cheat only if that was proven.
    """
    if failures := {record.outcome.state for record in group if _is_failure(record)}:
        return next(state for state in WORST_FIRST if state in failures)
    if any(_is_judged(record) for record in group):
        return State.RIGHT
    return State.ONLY_BUILT if all(record.kind == "build" for record in group) else State.NOT_JUDGED


def judged_counts(group: list[Record]) -> tuple[int, int]:
    """How many of a variant's runs passed, and how many were judged or ended without a verdict."""
    judged = [record for record in group if _is_judged(record)]
    undecided = sum(_is_undecided(record) for record in group)
    return sum(not _is_failure(record) for record in judged), len(judged) + undecided


def _is_failure(record: Record) -> bool:
    return record.outcome.defect is not None


def _has_no_verdict(record: Record) -> bool:
    """Whether a feature ended before it could have a verdict."""
    return record.outcome == Outcome.INCONCLUSIVE and not record.added


def _is_undecided(record: Record) -> bool:
    return record.kind in JUDGED_KINDS and record.outcome == Outcome.INCONCLUSIVE


def _is_judged(record: Record) -> bool:
    if record.outcome == Outcome.INCONCLUSIVE:
        return False
    has_verdict = record.check is not None or record.kind == "property" or _is_failure(record)
    return record.kind in JUDGED_KINDS and has_verdict


def _failed_companions(records: list[Record]) -> list[str]:
    failed = (record.variant for record in records if record.role in COMPANION_ROLES and _is_failure(record))
    return [f"{name} failed" for name in dict.fromkeys(failed)]


def _not_timed(name: str, judged: list[Record], why_not_run: str) -> str:
    if why_not_run and not judged:
        return f"not run: {why_not_run.removeprefix(f'{name} ').removeprefix(f'{name}: ')}"
    return "not timed"


# -- times ------------------------------------------------------------------------------------------------------------


def _times(by_variant: dict[str, list[Record]]) -> Times:
    """The confirmed times of each variant without a failure that computes attention."""
    return {
        name: {
            record.case.shape_id: record.speed
            for record in group
            if record.case and record.speed and not is_unconfirmed(record.speed)
        }
        for name, group in by_variant.items()
        if group[0].role not in NOT_ATTENTION and not any(_is_failure(record) for record in group)
    }


def _common(times: Times) -> Times:
    """The times at the shapes at which most variants were timed, of the variants that were timed at all of these.

    If not all variants were timed at the same shapes, it is the target shape as soon as two were timed there.
    """
    counts = Counter(shape for speeds in times.values() for shape in speeds)
    if not counts:
        return {}
    shapes = {shape for shape, count in counts.items() if count == max(counts.values())}
    if len(shapes) < len(counts) and counts[TARGET_SHAPE] > 1:
        shapes = {TARGET_SHAPE}
    if not any(shapes <= speeds.keys() for speeds in times.values()):
        shapes = {next(shape for shape in counts if shape in shapes)}
    return {
        name: {shape: speed for shape, speed in speeds.items() if shape in shapes}
        for name, speeds in times.items()
        if shapes <= speeds.keys()
    }


def _fastest(times: Times) -> str | None:
    """The variant with the least geometric mean of its times, at the shapes at which most variants were timed."""
    common = _common(times)
    return min(common, key=lambda name: _mean_log(common[name].values()), default=None)


def _mean_log(speeds: Iterable[Speed]) -> float:
    logs = [math.log(speed.device.median_us) for speed in speeds]
    return sum(logs) / len(logs)


def _about_fastest(fastest: str, records: list[Record], times: Times) -> str:
    """The fastest variant, and how many others the noise does not separate from it on any shape."""
    times = _common(times)
    own, timed = times[fastest], [name for name in times if times[name] and name != fastest]
    shared = {name: own.keys() & times[name] for name in timed}
    timed = [name for name in timed if shared[name]]
    ties = [name for name in timed if not any(_differs(own[at], times[name][at]) for at in shared[name])]
    if ties and len(ties) == len(timed):
        return "the times are too noisy to say which is the fastest"
    noise = f" (too noisy to tell from {len(ties)} other{'s' * (len(ties) != 1)})" if ties else ""
    return f"fastest correct: {fastest}{noise}, {_versus_baseline(fastest, records, times)}"


def _differs(speed: Speed, other: Speed) -> bool:
    return speed.device.median_us != other.device.median_us and is_clear_ratio(speed, other)


def _versus_baseline(name: str, records: list[Record], times: Times) -> str:
    """The ratio to the fastest baseline; for several shapes, the least and the largest ratio with their shapes."""
    ratios = []
    for shape, speed in times[name].items():
        baseline = compared_baseline(records, shape)
        baseline_speed = comparable(baseline, speed)
        if baseline and baseline_speed and baseline.variant != name:
            ratio = speed.device.median_us / baseline_speed.device.median_us
            ratios.append((ratio, ratio_text(speed, baseline_speed), baseline_name(baseline, shape), shape))
    clear = sorted(entry for entry in ratios if entry[1] != UNCLEAR)
    if not ratios:
        shape, speed = next(iter(times[name].items()))
        return f"{speed.device.median_us:.2f} us at {shape}, without a baseline"
    if not clear:
        return "too noisy for a ratio to the baseline"
    (_, least, against, shape), (_, most, _, last_shape) = clear[0], clear[-1]
    if len(clear) == 1:
        return f"{least} x the time of {against} at {shape}"
    return f"{least} x (at {shape}) to {most} x (at {last_shape}) the time of the fastest baseline"


def _of_shape(records: list[Record], shape: str) -> list[Record]:
    return [record for record in records if record.case and record.case.shape_id == shape]


# -- what to type next ------------------------------------------------------------------------------------------------


def _next_command(subjects: list[Record], records: list[Record], times: Times, run: RunFacts) -> str:
    """The last line: a command behind a few words; empty if the command of this run would only be repeated."""
    failed = [*_simplest_first(subjects), *_simplest_first(records)]
    undecided = [record for record in subjects if record.outcome == Outcome.INCONCLUSIVE]
    if failed or undecided:
        return f"rerun: {(failed or undecided)[0].rerun_command}"
    if line := next(filter(None, (each.last_line(subjects) for each in added_types().values())), ""):
        return line
    if run.failures:
        return ""
    name = _fastest(times)
    return _next_with_times(name, subjects, records, times, run) if name else _next_without_times(subjects, run)


def _next_with_times(name: str, subjects: list[Record], records: list[Record], times: Times, run: RunFacts) -> str:
    """The command after a run in which `name` was the fastest correct variant."""
    if any(speed.is_on_cpu for speed in times[name].values()):
        save = f"to compare with a later run: {_command(run, name, '--benchmark-save=before')}"
        return save if run.saves_times else ""
    is_faster = _is_faster(name, records, times)
    proposals = (each.proposal(subjects, is_faster=is_faster) for each in added_types().values())
    proposal = next((each for each in proposals if each is not None), Proposal())
    return f"{proposal.word}: {_command(run, name, *proposal.options)}" if proposal.options else ""


def _next_without_times(subjects: list[Record], run: RunFacts) -> str:
    """The command after a run that timed nothing."""
    name, kinds = subjects[0].variant, {record.kind for record in subjects}
    if kinds == {"build"} and subjects[0].builds and not run.is_static:
        return f"to read the machine code: {_command(run, name, '--fa-static')}"
    was_only_checked = kinds & {"correct", "property"} and "speed" not in kinds
    return f"next: {_command(run, name, '-k', 'test_speed')}" if was_only_checked else ""


def _is_faster(name: str, records: list[Record], times: Times) -> bool:
    """Whether a variant takes less time than the fastest baseline on every shape."""
    pairs = ((speed, best_baseline(_of_shape(records, shape))) for shape, speed in times[name].items())
    baselines = [(speed, comparable(baseline, speed)) for speed, baseline in pairs]
    return all(baseline and speed.device.median_us < baseline.device.median_us for speed, baseline in baselines)


def _command(run: RunFacts, name: str, *words: str) -> str:
    """The command of a run with these words, without what features were asked; what decides a check stays."""
    rows = [row for feature in features() for row in feature.options]
    asked = {"--benchmark-disable", *(row.flag for row in rows if not (row.in_rerun and row.configures))}
    first_words = [word for word in run.rerun if word.partition("=")[0] not in asked]
    return shlex.join([*first_words, f"--fa-variant={name}", *run.selection, *words])
