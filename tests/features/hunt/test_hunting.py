"""The hunt finds a fault, shrinks it to what it needs, says that in words, and goes on to the next one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("hypothesis")

from pytest_fa.catalog.case import parse_case
from pytest_fa.features.hunt.case_strategy import examples_of
from pytest_fa.features.hunt.example import Example, read_example
from pytest_fa.features.hunt.hunting import FoundFault, Hunted, hunt, with_fewer_texts
from pytest_fa.features.hunt.judged import ExampleVerdict
from pytest_fa.features.hunt.what_matters import with_one_text_less
from pytest_fa.records.outcome import Outcome
from tests.factories import record
from tests.features.hunt.simulated import OutcomeOf, SimulatedBench, known_variant

REFERENCE = known_variant("reference")
STRATEGY = examples_of(REFERENCE, "cpu")


def wrong_if(is_wrong: Callable[[Example], bool]) -> OutcomeOf:
    """A kernel that is wrong for some examples."""
    return lambda example: Outcome.WRONG if is_wrong(example) else Outcome.OK


def hunted_by(bench: SimulatedBench, max_faults: int = 1, seconds: float = 60.0, **more: object) -> Hunted:
    """The result of a hunt of a simulated kernel."""
    arguments = {"seconds": seconds, "seed": 1, "max_faults": max_faults, **more}
    return hunt(bench, REFERENCE, STRATEGY, **arguments)  # type: ignore[arg-type]  # as asked


def first_fault(outcome_of: OutcomeOf) -> FoundFault:
    """The first fault of a simulated kernel."""
    (fault,) = hunted_by(SimulatedBench(REFERENCE, outcome_of)).faults
    return fault


FAULTS: dict[str, tuple[Callable[[Example], bool], str, set[str]]] = {
    "everything": (lambda _: True, "b1h1s1d64-fp16-seed0", set()),
    "a sink": (lambda x: bool(x.case.value_of("sink")), "b1h1s1d64-fp16-sink-seed0", {"-sink"}),
    "a sink and a cap": (
        lambda x: bool(x.case.value_of("sink")) and x.case.value_of("softcap") > 0,
        "b1h1s1d64-fp16-cap1-sink-seed0",
        {"-cap1", "-sink"},
    ),
    "bf16": (lambda x: x.case.dtype == "bf16", "b1h1s1d64-bf16-seed0", {"dtype bf16"}),
    "more keys than a tile": (lambda x: x.case.seq_k > 64, "b1h1s1d64-fp16-sk65-seed0", {"S_k >= 65"}),
    "no keys": (lambda x: x.case.seq_k == 0, "b1h1s1d64-fp16-sk0-seed0", {"S_q > S_k"}),
    "fewer keys": (lambda x: x.case.seq_q > x.case.seq_k > 0, "b1h1s2d64-fp16-sk1-seed0", {"S_q > S_k"}),
    "a rest of a tile": (
        lambda x: x.case.seq_q % 64 != 0 and x.case.seq_q > 64,
        "b1h1s65d64-fp16-sk1-seed0",
        {"S_q >= 65 and S_q % 64 != 0"},
    ),
    "a second batch": (lambda x: x.case.batch > 1, "b2h1s1d64-fp16-seed0", {"B >= 2"}),
    "strides": (
        lambda x: x.property_name == "different_strides",
        "different_strides:b1h1s1d64-fp16-seed0",
        {"property different_strides"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_shrunk_and_explained(name: str) -> None:
    """The smallest example has only what the fault needs, and the rules say what that is."""
    is_wrong, smallest, words = FAULTS[name]
    fault = first_fault(wrong_if(is_wrong))
    assert is_wrong(fault.example)
    found = fault.example.case
    expected = read_example(smallest)
    assert (fault.example.property_name, found.modifiers or ()) == (
        expected.property_name,
        expected.case.modifiers or (),
    )
    assert (found.batch, found.heads, found.dtype) == (expected.case.batch, expected.case.heads, expected.case.dtype)
    assert max(found.seq_q, found.seq_k) == max(expected.case.seq_q, expected.case.seq_k)
    assert {rule.words for rule in fault.rules} == words
    assert (fault.failed, fault.judged) == (10, 10)


def test_a_second_fault_is_found_beside_the_first() -> None:
    """What the first fault explains is passed over, and the other one is found."""
    bench = SimulatedBench(REFERENCE, wrong_if(lambda x: x.case.dtype == "bf16" or bool(x.case.value_of("sink"))))
    hunted = hunted_by(bench, max_faults=2)
    assert {str(fault.example) for fault in hunted.faults} == {"b1h1s1d64-bf16-seed0", "b1h1s1d64-fp16-sink-seed0"}


@pytest.mark.parametrize("outcome", [Outcome.HUNG, Outcome.CRASHED, Outcome.DEVICE_ERROR])
def test_what_ends_its_process_is_launched_once(outcome: Outcome) -> None:
    """No example that hung or crashed is judged again, and a hang is not shrunk by further hangs."""
    bench = SimulatedBench(REFERENCE, lambda x: outcome if x.case.value_of("sink") else Outcome.OK)
    hunted = hunted_by(bench)
    assert hunted.faults[0].verdict.outcome == outcome
    ended = [example for example in bench.calls if example.case.value_of("sink")]
    assert max(bench.calls[example] for example in ended) == 1
    if outcome == Outcome.HUNG:
        assert len(ended) == len(hunted.faults) == 1
    else:
        assert str(hunted.faults[0].example) == "b1h1s1d64-fp16-sink-seed0"


def test_a_fault_that_does_not_always_show() -> None:
    """It is told as so many of so many, and still shrunk to what it needs."""
    counts: dict[Example, int] = {}

    def outcome_of(example: Example) -> Outcome:
        counts[example] = counts.get(example, 0) + 1
        return Outcome.WRONG if example.case.value_of("sink") and counts[example] % 3 == 1 else Outcome.OK

    fault = first_fault(outcome_of)
    assert 0 < fault.failed < fault.judged
    assert str(fault.example) == "b1h1s1d64-fp16-sink-seed0"


def test_a_right_kernel_has_no_fault() -> None:
    """Nothing is found, and the hunt ends in its time; examples of earlier hunts that no longer fail are told."""
    known, right = read_example("b1h1s1d64-fp16-sink-seed0"), list[Example]()
    bench = SimulatedBench(REFERENCE, lambda _: Outcome.OK)
    hunted = hunted_by(bench, seconds=1.0, known=[known], right=right.append)
    assert (hunted.faults, right) == ((), [known])
    assert hunted.judged == bench.calls.total() > 5
    assert hunted.seconds < 30


def test_a_known_example_is_the_first() -> None:
    """An example of an earlier hunt is judged before any random one, and is a fault as it is."""
    known = read_example("b2h4s77d64-bf16-sink-seed9")
    bench = SimulatedBench(REFERENCE, wrong_if(lambda x: bool(x.case.value_of("sink"))))
    hunted = hunted_by(bench, known=[known])
    assert next(iter(bench.calls)) == hunted.faults[0].example == known


class Known:
    """A ledger with one entry: wrong without a mask is known."""

    examples = (read_example("b1h1s1d64-fp16-sink-seed0"),)

    def avoids(self, example: Example) -> bool:
        """Examples with a cap end the process."""
        return bool(example.case.value_of("softcap"))

    def excuses(self, example: Example, outcome: Outcome) -> bool:
        """Sinks are known to be wrong."""
        return bool(example.case.value_of("sink")) and outcome == Outcome.WRONG


def test_a_known_fault_hides_no_other_one() -> None:
    """What fails in another way is found, and what is known to end the process is not launched."""

    def outcome_of(example: Example) -> Outcome:
        case = example.case
        if case.value_of("sink"):
            return Outcome.CRASHED if case.batch > 1 else Outcome.WRONG
        return Outcome.OK

    bench = SimulatedBench(REFERENCE, outcome_of)
    hunted = hunted_by(bench, max_faults=2, excuses=Known())
    assert [(str(fault.example), fault.verdict.outcome) for fault in hunted.faults] == [
        ("b1h1s1d64-fp16-sink-seed0", Outcome.WRONG),
        ("b2h1s1d64-fp16-sink-seed0", Outcome.CRASHED),
    ]
    assert not any(example.case.value_of("softcap") for example in bench.calls)


def test_a_known_example_is_right_only_after_many_judgements() -> None:
    """A fault that shows rarely is not forgotten, and neither is one that was not judged."""
    rare, foreign = read_example("b1h1s1d64-fp16-sink-seed0"), read_example("b1h1s1d64-e4m3-seed0")
    right: list[Example] = []
    bench = SimulatedBench(REFERENCE, lambda _: Outcome.WRONG if bench.calls.total() % 10 == 0 else Outcome.OK)
    hunted_by(bench, seconds=0.001, known=[rare, foreign], right=right.append)
    assert right == []
    assert bench.calls[rare] >= 10
    assert bench.calls[foreign] == 0


def test_texts_of_the_id_that_are_not_needed_are_left_out() -> None:
    """Each is tried alone, and again after another one is gone."""
    example = Example(parse_case("b2h4s64d64-bf16-causal-kv2-sink-seed3"), "")
    assert [each.case.id for each in with_one_text_less(example)] == [
        "b2h4s64d64-bf16-kv2-sink-seed3",
        "b2h4s64d64-bf16-causal-sink-seed3",
        "b2h4s64d64-bf16-causal-kv2-seed3",
    ]

    def fails(each: Example) -> bool:
        return "kv2" in each.case.id and ("causal" in each.case.id or "sink" not in each.case.id)

    assert with_fewer_texts(example, fails).case.id == "b2h4s64d64-bf16-kv2-seed3"


def test_lengths_of_a_remainder_are_the_smallest() -> None:
    """Hypothesis stops at a length from which no small step fails."""
    fault = first_fault(wrong_if(lambda x: x.case.seq_q % 7 == 0))
    assert fault.example.case.seq_q == 7
    assert "S_q % 7 = 0" in {rule.words for rule in fault.rules}


class CrashingThoroughly(SimulatedBench):
    """Its kernel ends the process only with as many calls as the suites make."""

    thorough = 0

    def judge_thoroughly(self, example: Example) -> ExampleVerdict:
        """It crashes."""
        self.thorough += 1
        self.calls.clear()
        return ExampleVerdict(record(case=example.case.id, outcome=Outcome.CRASHED))


def test_a_crash_of_the_thorough_judgement_is_launched_once() -> None:
    """The example is not judged again after it."""
    bench = CrashingThoroughly(REFERENCE, wrong_if(lambda x: bool(x.case.value_of("sink"))))
    (fault,) = hunted_by(bench).faults
    assert fault.verdict.outcome == Outcome.CRASHED
    assert (bench.thorough, bench.calls[fault.example]) == (1, 0)
