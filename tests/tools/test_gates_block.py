"""The table of a gate: found by what was asked, with its verdict, its intervals and its A/A control."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.features.gate.gated import Gate, GatePair
from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Record
from tests.factories import SHAPE, SMALL_SHAPE, record
from tools.docs.markdown import rewrite

CASES = f"{SHAPE},{SMALL_SHAPE}"
COMMAND = (
    "pytest --fa-gate=1.0 --fa-gate-baseline={} --fa-variant=fast -k test_gate "
    f"--fa-case={SHAPE}-seed0,{SMALL_SHAPE}-seed0 --fa-gate=1"
)
CONTROL = ((0.001,), (-0.001,), (0.001,), (-0.001,), (0.001,), (-0.001,))


def gate(baseline: str, *shapes: str) -> Record:
    """A gate that passed, with pairs at these shapes."""
    pairs = tuple(
        GatePair(PairSamples(shape, baseline, ((-0.1,),) * 6, CONTROL), 0.905, 0.9, 0.91, None, None, baseline_us=10.0)
        for shape in shapes
    )
    passed = Gate(1.0, "PASS", "by a lot", 6, 1, 0, 0.01, None, 12.0, {}, pairs)
    plain = record("fast", kind="gate", outcome=Outcome.OK, added={"gate": passed})
    return msgspec.structs.replace(plain, id="fast", case=None, rerun_command=COMMAND.format(baseline))


def lines_of(folder: Path, words: str) -> list[str]:
    """The lines of the table that a comment with these words makes, after the comment."""
    text = rewrite(f"<!-- fa-gates profiles=profiles/cpu variant=fast {words} -->\n<!-- /fa-gates -->\n", folder)
    return [line for line in text.splitlines()[1:-1] if line]


def test_a_gate_has_a_row_for_each_shape(tmp_path: Path) -> None:
    """The gate with this baseline and these cases is shown, and a shape that it left out has dashes."""
    save_records([gate("slow", SHAPE, SMALL_SHAPE), gate("slower", SHAPE)], tmp_path / "profiles")
    assert lines_of(tmp_path, f"baseline=slower cases={CASES}") == [
        "PASS, 6 rounds: by a lot.",
        "| shape | `fast` / `slower` | 99.5 % interval | A/A control, % | `slower` us |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| `{SHAPE}` | 0.905 | 0.900 to 0.910 | +0.00 (-0.21 to +0.21) | 10.00 |",
        f"| `{SMALL_SHAPE}` | - | - | - | - |",
        "Measured on the CPU a CPU, 2026-01-01, without a commit.",
    ]


@pytest.mark.parametrize(
    "words", [f"baseline=other cases={CASES}", f"baseline=slow cases={SHAPE}", f"baseline=slow ratio=0.9 cases={CASES}"]
)
def test_another_gate_is_not_shown(tmp_path: Path, words: str) -> None:
    """A gate against another baseline, at another ratio or on other cases answers another question."""
    save_records([gate("slow", SHAPE, SMALL_SHAPE)], tmp_path / "profiles")
    first, *_, last = lines_of(tmp_path, words)
    assert first.startswith("The gate `--fa-gate=")
    assert first.endswith("` is not measured.")
    assert last.endswith("| - | - | - | - |")


def test_a_gate_without_a_verdict_says_why(tmp_path: Path) -> None:
    """Its message takes the place of the verdict."""
    failed = msgspec.structs.replace(gate("slow"), outcome=Outcome.INCONCLUSIVE, added={}, message="the pilot failed")
    save_records([failed], tmp_path / "profiles")
    assert lines_of(tmp_path, f"baseline=slow cases={CASES}")[0] == "No verdict: the pilot failed"
