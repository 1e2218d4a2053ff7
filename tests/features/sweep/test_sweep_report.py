"""What is shown of a sweep: its lines and the picture."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main
from pytest_fa.features.sweep.sweep_lines import define_effects, end_lines, history_lines, study_lines, takeover_lines
from pytest_fa.features.sweep.sweep_picture import draw_sweep
from pytest_fa.features.sweep.trial_result import (
    ConfirmedRatio,
    Finalist,
    PairedTime,
    SweepEnd,
    SweepTrial,
    TrialOutcome,
    TrialResult,
)

FACTS = {
    "variant": "tuned",
    "defines": {"M": 32, "STAGES": 2, "MODE": "yes"},
    "values": {"M": [32, 64], "MODE": ["A", "B"]},
    "cases": ["b1h8s512d64-fp16-seed0"],
    "gpu": "NVIDIA H200",
    "feasible": 4,
}


def right(number: int, m: int, mode: str, ratio: float) -> SweepTrial:
    """A configuration that was timed."""
    shapes = {"b1h8s512d64-fp16": PairedTime(10 * ratio, 10.0, math.log(ratio))}
    result = TrialResult(
        TrialOutcome.RIGHT, "", math.log(ratio), shapes, {"registers_per_thread": 96}, "c0de", None, 1.5, 4.0
    )
    return SweepTrial(number, "ended", {"M": m, "MODE": mode}, result=result, begun=1_790_000_000.0)


TRIALS = [
    right(0, 32, "A", 1.1),
    right(1, 64, "A", 0.9),
    SweepTrial(2, "ended", {"M": 64, "MODE": "B"}, result=TrialResult(TrialOutcome.WRONG, "max error 1, allowed 0.1")),
    SweepTrial(
        3, "ended", {"M": 32, "MODE": "B"}, result=TrialResult(TrialOutcome.SAME_CODE, "t000 has it", same_as=0)
    ),
    SweepTrial(4, "released", {"M": 32, "MODE": "B"}),
]
FINALISTS = (Finalist(1, TRIALS[1].point, math.log(0.9), (math.log(0.92), math.log(0.92))),)
LOST = SweepEnd(
    "no configuration is better than the parent: timed again, the best one takes 1.0010 x the time of the parent",
    timed=200,
    noise_sd=0.008,
    luck=0.0219674,
    finalists=FINALISTS,
)
WON = SweepEnd(
    "the gate of M=64@MODE=A against the parent: PASS: the upper confidence limit of every ratio is below 1",
    timed=2,
    winner=TRIALS[1].point,
    gated=TRIALS[1].point,
    gate_verdict="PASS",
    ratios=(ConfirmedRatio("b1h8s512d64-fp16", 0.92, 0.91, 0.93),),
    noise_sd=0.008,
    luck=0.0045,
    finalists=FINALISTS,
    unsearched={"b1h2s64d64-fp16": math.log(1.001)},
    checked=31,
)


def test_the_history_shows_each_new_best(snapshot: SnapshotAssertion) -> None:
    """A line for each trial that was the best so far, the best ones, and the effect of each define."""
    assert snapshot == history_lines(TRIALS)


def test_of_many_values_the_extremes_are_shown(snapshot: SnapshotAssertion) -> None:
    """A define with more than ten values has one line that can be read: its fastest and its slowest value."""
    trials = [right(number, 32 + number, "A", 1.0 + 0.001 * (number % 7)) for number in range(21)]
    (line,) = [line for line in history_lines(trials) if line.startswith("  M: ")]
    assert snapshot == line


def test_the_counts_are_those_of_the_trials(snapshot: SnapshotAssertion) -> None:
    """Trials without a run, and released ones, are listed but not counted."""
    (counts, places) = study_lines(FACTS, TRIALS)
    assert snapshot == counts
    assert places.startswith("searched at b1h8s512d64-fp16 on NVIDIA H200; ")


def test_an_effect_is_a_share_of_the_variance() -> None:
    """Two defines that add up explain the variance between them, in proportion to their squared effects."""
    trials = [
        right(number, m, mode, math.exp(0.03 * (m == 64) + 0.01 * (mode == "B")))
        for number, (m, mode) in enumerate((m, mode) for m in (32, 64) for mode in "AB")
    ]
    assert {"M": pytest.approx(0.9), "MODE": pytest.approx(0.1)} == {
        effect.name: effect.share for effect in define_effects(trials)
    }


def test_luck_stands_beside_the_end(snapshot: SnapshotAssertion) -> None:
    """The expected luck is shown with its noise, and without a winner no line for the manifest is."""
    lines = end_lines(LOST)
    assert snapshot == lines[0]
    assert snapshot == lines[1]
    in_full = msgspec.structs.replace(FINALISTS[0], again=(math.log(0.92),) * 6)
    assert "     #1  search 0.9000, again 0.9200  M=64@MODE=A" in end_lines(
        msgspec.structs.replace(LOST, finalists=(in_full,))
    )
    assert (LOST.reason, []) == (lines[-1], takeover_lines(LOST, FACTS))
    assert (["the sweep has not ended"], []) == (end_lines(None), takeover_lines(None, FACTS))


def test_an_earlier_end_is_not_shown_as_this_run_s() -> None:
    """The end of an earlier run is shown with its date; the end of this run is not."""
    end = msgspec.structs.replace(LOST, ended=1_790_000_000.0)
    line = "ended on 2026-09-21 14:13 UTC by an earlier run; nothing was timed now"
    assert [line, LOST.reason] == end_lines(end, 1_790_000_001.0)[-2:]
    assert line not in end_lines(end, 1_789_999_999.0)


def test_only_a_confirmed_winner_is_taken_over(snapshot: SnapshotAssertion) -> None:
    """A winner gives the line of the manifest, the gate's ratio, and what was checked besides."""
    assert "  gate, b1h8s512d64-fp16: 0.9200 x parent, interval 0.9100 to 0.9300" in end_lines(WON)
    assert snapshot == takeover_lines(WON, FACTS)


def test_a_winner_that_is_slower_elsewhere_says_so() -> None:
    """A winner that is slower where it was not searched, by more than the noise, is not shown without that."""
    slower = msgspec.structs.replace(WON, unsearched={"b1h2s64d64-fp16": math.log(1.1)})
    assert takeover_lines(slower, FACTS)[1].endswith("but was slower at b1h2s64d64-fp16")


@pytest.mark.parametrize("end", [None, LOST, WON], ids=["running", "lost", "won"])
def test_the_picture_is_the_same_each_time(tmp_path: Path, end: SweepEnd | None) -> None:
    """The picture is well-formed SVG, and equal studies give equal files."""
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in paths:
        draw_sweep(FACTS, TRIALS, end, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert ET.parse(paths[0]).getroot().tag.endswith("svg")  # noqa: S314  # our own file


def test_a_study_without_times_can_be_drawn(tmp_path: Path) -> None:
    """A study in which nothing was timed has a picture, and lines that say so."""
    assert [] == history_lines(TRIALS[2:])
    pytest.importorskip("matplotlib")
    draw_sweep(FACTS, TRIALS[2:], None, tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text(encoding="utf-8")


def test_the_command_shows_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sweep show` prints a stored study, and draws the picture on request."""
    pytest.importorskip("optuna")
    pytest.importorskip("matplotlib")
    from pytest_fa.features.sweep.search import run_trial
    from pytest_fa.features.sweep.shared_study import SharedStudy
    from pytest_fa.features.sweep.storage import open_storage
    from pytest_fa.features.sweep.suggest import Space, Suggester
    from tests.features.sweep.simulated import DEFINES, SIXTY, RecordedBench, facts_of

    journal = str(tmp_path / "tuned.journal")
    study = SharedStudy(open_storage(journal), "tuned-1234", facts_of(SIXTY))
    run_trial(study, Suggester(Space(SIXTY, DEFINES), 10, "tpe", 0), RecordedBench(lambda _: 0.0, 0), 10)
    svg = tmp_path / "sweep.svg"
    assert 0 == main(["sweep", "show", journal, f"--svg={svg}"])
    shown = capsys.readouterr().out.splitlines()
    assert "tuned-1234" == shown[0]
    assert "the sweep has not ended" in shown
    assert "<?xml" == svg.read_text()[:5]
    assert 2 == main(["sweep", "show", journal, "--name=tuned-1235"])
    expected = f"pytest_fa: {journal!r} has no study 'tuned-1235'; did you mean 'tuned-1234'? (it has: tuned-1234)\n"
    assert expected == capsys.readouterr().err
