"""A record as a Python prompt and a notebook show it."""

from __future__ import annotations

import msgspec
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.api.shown_record import shown
from pytest_fa.features.gate.gated import Gate, GatePair
from pytest_fa.records.checks import Repeats
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record, to_json
from tests.factories import OK, WRONG, record, speed

PAIR = GatePair(PairSamples("b1h8s512d64-fp16", "sdpa_flash", (), ()), 0.5, 0.4, None, 0.45, 0.55)
GATE = Gate(0.95, "PASS", "all below", 6, 1, 0, 0.01, 0.002, 21.4, {}, (PAIR,), ("mine does not support x",))


def test_a_check_is_a_small_table() -> None:
    """A check has only the columns that have a value, and the case with its seed."""
    expected = (
        " variant  case                   checks  error / allowed\n"
        " ─────────────────────────────────────────────────────────────\n"
        " mine     b1h2s64d64-fp16-seed3  ok 1/1  max 1.0e-03 / 4.0e-03"
    )
    text = shown(record(case="b1h2s64d64-fp16-seed3", check=OK))
    assert (expected, expected) == (repr(text), str(text))


def test_a_time_is_a_small_table() -> None:
    """A time has the columns of the times as well."""
    header, _, row = str(shown(record(kind="speed", check=OK, speed=speed(7.39)))).splitlines()
    assert header.split()[-3:] == ["device_us", "call_us", "TFLOP/s"]
    assert row.split()[-3:] == ["7.39", "20.00", "72.65"]


def test_a_check_says_what_its_repeats_exclude(snapshot: SnapshotAssertion) -> None:
    """Below the row of a correct record stands which rate of rare faults its repeats exclude."""
    text = str(shown(record(check=OK, repeats=Repeats(30_000, 0, 0, None, None))))
    assert snapshot == text.splitlines()[-1]


def test_a_failure_has_its_diagnosis() -> None:
    """Below the row of a failed record are the message, the bounds and the rerun command."""
    lines = str(shown(record(outcome=Outcome.WRONG, message="max error", check=WRONG))).splitlines()
    assert lines[3] == "wrong: max error"
    assert [lines[2].split()[2], lines[-1]] == ["WRONG", "  rerun: pytest"]


def test_a_gate_has_a_row_for_each_pair(snapshot: SnapshotAssertion) -> None:
    """A gate shows the ratio and the interval of each pair, then the verdict, its cost and the excluded shapes."""
    gated = shown(record(kind="gate", case="b1h8s512d64-fp16-seed0", added={"gate": GATE}))
    assert gated.gate == GATE
    assert snapshot == str(gated)


def test_a_gate_without_a_verdict_says_why() -> None:
    """A gate that ended before its first process shows its message and the rerun command."""
    ended = record(kind="gate", outcome=Outcome.INCONCLUSIVE, message="no baseline")
    assert "no verdict: no baseline" in str(shown(msgspec.structs.replace(ended, case=None)))


def test_a_notebook_gets_a_table() -> None:
    """The HTML has a cell for each value and the diagnosis below; texts of kernels are escaped."""
    html = shown(record("a<b", outcome=Outcome.WRONG, message="<script>", check=WRONG))._repr_html_()
    assert html.startswith("<table><thead><tr><th>variant</th><th>case</th>")
    assert "<td>a&lt;b</td><td>b1h8s512d64-fp16-seed0</td><td>WRONG 1/1</td>" in html
    assert "</table><pre>wrong: &lt;script&gt;\n" in html
    assert "<script>" not in html


def test_texts_are_printable() -> None:
    """Control characters in the texts of a record are shown as escapes."""
    assert "\\x1b" in str(shown(record(outcome=Outcome.FAILED, message="\x1b[2J")))


def test_it_is_still_a_record() -> None:
    """All fields are those of the record, also as JSON; `ok` says whether the outcome is ok."""
    plain = record(check=OK)
    assert isinstance(shown(plain), Record)
    assert (to_json(plain), True, False) == (
        to_json(shown(plain)),
        shown(plain).ok,
        shown(record(outcome=Outcome.HUNG)).ok,
    )
