"""A comparison in the terminal and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_fa.__main__ import main
from pytest_fa.features.compare.compare import ComparedRow, Comparison, Difference
from pytest_fa.features.compare.comparison import comparison_markdown, comparison_text
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import to_json
from tests.factories import record

COMPARISON = Comparison(
    a="before.jsonl",
    b="after.jsonl",
    differences=(Difference("torch", ("2.1",), ("2.5",)),),
    rows=(
        ComparedRow(
            "racy", "b1h2s64d64-fp16", "wrong", "max error is 0.2 | not <b>so</b>", checks_a=(4, 4), checks_b=(1, 4)
        ),
        ComparedRow(
            "ws_p2", "b1h8s512d64-fp16", "faster", "", "", (4, 4), (4, 4), 12.9, 11.4, 0.8837, 0.861, 0.907, True
        ),
        ComparedRow("old", "b1h2s64d64-fp16", "gone"),
        ComparedRow("steady", "b1h2s64d64-fp16", "same", device_us_a=3.0, device_us_b=3.0),
    ),
    counts={"wrong": 1, "faster": 1, "gone": 1, "same": 1},
    complaints=("before.jsonl: 1 of 9 lines cannot be read",),
)

TEXT = """\
A: before.jsonl
B: after.jsonl
differs: torch: 2.1 -> 2.5

verdict  variant  shape             checks A  checks B  A, us  B, us  B / A  99.5 % interval  code
wrong    racy     b1h2s64d64-fp16        4/4       1/4      -      -      -                -  -        max error is 0.2 | not <b>so</b>
faster   ws_p2    b1h8s512d64-fp16       4/4       4/4  12.90  11.40  0.884   0.861 to 0.907  changed

only in A: old (1); --all lists them
before.jsonl: 1 of 9 lines cannot be read
A -> B: 1 wrong, 1 faster, 1 gone, 1 same"""  # noqa: E501

MARKDOWN = """\
**A -> B: 1 wrong, 1 faster, 1 gone, 1 same**

- A: before.jsonl
- B: after.jsonl
- differs: torch: 2.1 -> 2.5

| verdict | variant | shape | checks A | checks B | A, us | B, us | B / A | 99.5 % interval | code |  |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |
| wrong | racy | b1h2s64d64-fp16 | 4/4 | 1/4 | - | - | - | - | - | max error is 0.2 \\| not &lt;b>so&lt;/b> |
| faster | ws_p2 | b1h8s512d64-fp16 | 4/4 | 4/4 | 12.90 | 11.40 | 0.884 | 0.861 to 0.907 | changed |  |

- only in A: old (1); --all lists them
- before.jsonl: 1 of 9 lines cannot be read"""


def test_text() -> None:
    """The environments come first, then the rows that changed, and the last line counts all rows."""
    assert comparison_text(COMPARISON) == TEXT


def test_markdown() -> None:
    """Markdown has the same content, with the answer first, and escapes what a message contains."""
    assert comparison_markdown(COMPARISON) == MARKDOWN


def test_all_rows() -> None:
    """With `with_all`, rows of one side and unchanged rows are in the table, and no note points to them."""
    text = comparison_text(COMPARISON, with_all=True)
    assert [line.split()[1] for line in text.splitlines()[5:9]] == ["racy", "ws_p2", "old", "steady"]
    assert "--all" not in text


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two runs to the current folder: in the second one, a variant became wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(to_json(record("mine")) + b"\n")
    (tmp_path / "b.jsonl").write_bytes(to_json(record("mine", outcome=Outcome.WRONG, message="max error")) + b"\n")


@pytest.mark.usefixtures("runs")
def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object with names, differences, rows and counts."""
    assert main(["compare", "a.jsonl", "b.jsonl", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["a"], content["counts"], content["rows"][0]["reason"]) == (
        "a.jsonl",
        {"wrong": 1},
        "2026-01-01: max error",
    )


@pytest.mark.usefixtures("runs")
def test_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    """The status is 0, 1 with --fail-on if a row has that verdict, and 2 after an error."""
    assert main(["compare", "a.jsonl", "b.jsonl", "--fail-on=slower"]) == 0
    assert main(["compare", "a.jsonl", "b.jsonl", "--fail-on=slower,wrong", "--markdown"]) == 1
    assert main(["compare", "a.jsonl", "c.jsonl"]) == 2
    assert "'c.jsonl' is neither a file nor a revision here" in capsys.readouterr().err
