"""Tables in Markdown files: made from records, between their comments, and checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.records.judged import Bound
from pytest_fa.records.log import save_records
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.tool_results import Bottleneck, CountedKernel, NsightReport
from pytest_fa.report.blocks import TableProblem
from pytest_fa.report.markdown import main, rewrite
from tests.factories import OTHER, RECORD, SHAPE, check, record, speed

HEAD = f"<!-- fa-table profiles=profiles/cpu case={SHAPE} variants=slow,fast,empty against=fast -->"
TEXT = f"Before.\n\n{HEAD}\nold\n<!-- /fa-table -->\n\nAfter.\n"
TABLE = """\
| variant | right | device_us | call_us | TFLOP/s | x fast | regs | spill B |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| `slow` | 2/2 | 20.00 | 30.00 | 26.84 | 2.000 | - | - |
| `fast` | 1/1 | 10.00 | 20.00 | 53.69 | 1.000 | - | - |
| `empty` | not judged | 1.00 | 5.00 | - | - | - | - |"""
EXPECTED = f"Before.\n\n{HEAD}\n\n{TABLE}\n\n<!-- /fa-table -->\n\nAfter.\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three variants' records and a file with a table, where the command is run."""
    records: list[Record] = [
        record("slow", check=check()),
        record("slow", kind="speed", check=check(), speed=speed(20.0, 30.0)),
        record("fast", kind="speed", check=check(), speed=speed(10.0)),
        record("empty", kind="speed", role="overhead", speed=speed(1.0, 5.0)),
    ]
    save_records(records, tmp_path / "profiles")
    (tmp_path / "page.md").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_is_made_from_records(root: Path) -> None:
    """Every variant has its row, in the order that was asked for; the text around stays."""
    assert rewrite(TEXT, root) == EXPECTED


MARGINS = "<!-- fa-margins profiles=profiles/cpu variants=slow,fast -->\n<!-- /fa-margins -->\n"


def test_margins_are_the_worst_of_all_checks(tmp_path: Path) -> None:
    """A row for each variant and dtype: how many checks, the largest used fraction of each bound, and where."""
    finite, shown = Bound("finite", 0.0, 0.0, holds=True), Bound("shown", 9.0, 1.0, holds=False, judged=False)
    near, far = Bound("max", 0.3, 1.0, holds=True), Bound("max", 0.1, 1.0, holds=True)
    records = [
        record("slow", check=check(finite, near, shown)),
        record("slow", f"{OTHER}-seed0", check=check(finite, far, Bound("rms", 0.2, 0.5, holds=True))),
        record("fast", check=check(far)),
    ]
    save_records(records, tmp_path / "profiles")
    assert rewrite(MARGINS, tmp_path).split("\n\n")[1].splitlines() == [
        "| variant | dtype | checks | max | rms | worst at |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        f"| `slow` | fp16 | 2 | 0.30 | 0.40 | `{OTHER}` |",
        f"| `fast` | fp16 | 1 | 0.10 | - | `{SHAPE}` |",
    ]


def test_a_table_that_is_right_stays(root: Path) -> None:
    """Making a table again changes nothing."""
    assert rewrite(EXPECTED, root) == EXPECTED


def test_the_command_rewrites_and_checks(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` is 1 for an old table and does not change it; the command rewrites it; then `--check` is 0."""
    assert main(["--check", "page.md"]) == 1
    assert (root / "page.md").read_text(encoding="utf-8") == TEXT
    assert main(["page.md"]) == 0
    assert main(["--check", "page.md"]) == 0
    assert (root / "page.md").read_text(encoding="utf-8") == EXPECTED
    assert "page.md: its tables are not what the records say" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slow,fast,empty", "slow,gone", f"no record of gone at {SHAPE} in profiles/cpu"),
        ("against=fast", "againts=fast", "Object contains unknown field `againts`"),
        ("case=", "cases=", "unknown field `cases`"),
        ("against=fast", "against", "fa-table profiles"),
        ("fa-table", "fa-tables", "1 tables are opened, 0 are whole"),
    ],
)
def test_a_comment_that_is_wrong_is_named(root: Path, old: str, new: str, message: str) -> None:
    """A variant without records, an unknown word or one without a value: the table's comment and what is wrong."""
    with pytest.raises(TableProblem) as raised:
        rewrite(TEXT.replace(old, new, 1), root)
    assert message in str(raised.value)


def test_the_command_names_what_it_cannot_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, a wrong comment and no file at all are 2, each with its words."""
    (root / "page.md").write_text(TEXT.replace("slow", "gone"), encoding="utf-8")
    assert [main(["none.md"]), main(["page.md"]), main([])] == [2, 2, 2]
    said = capsys.readouterr().err
    assert all(words in said for words in ("No such file", "no record of gone", "rewrite every table"))


def test_verdicts_quote_what_decided(tmp_path: Path) -> None:
    """A row for each kernel with its sentence and counters; a variant that was not profiled says so."""
    bottleneck = Bottleneck("latency", "latency-bound: no unit is busy", {"launch__grid_size": 32.0})
    kernel = CountedKernel("void ns::k<1>(int)", {}, bottleneck)
    profile = NsightReport("ok", "", "verdict", "ncu 1", 6.0, (), (kernel, CountedKernel("other(int)", {})))
    record = msgspec.structs.replace(RECORD, kind="profile", variant="one", nsight=profile)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "one.jsonl").write_bytes(to_json(record) + b"\n")
    assert record.case is not None
    words = f"profiles=profiles case={record.case.shape_id} variants=one,two"
    made = rewrite(f"<!-- fa-verdicts {words} -->\n<!-- /fa-verdicts -->\n", tmp_path)
    assert made.splitlines()[4:7] == [
        "| `one` | `k` | latency-bound: no unit is busy | `launch__grid_size` 32 |",
        "| `one` | `other` | a counter is missing | - |",
        "| `two` | - | not measured | - |",
    ]


def test_a_variant_without_ablations_has_no_stages(tmp_path: Path) -> None:
    """The comment names the wrong variant, or the ablations are gone: no empty table."""
    (tmp_path / "kernels").mkdir()
    words = "profiles=profiles kernels=kernels of=one cases=b1h8s512d64-fp16"
    with pytest.raises(TableProblem, match="one has no ablations in kernels"):
        rewrite(f"<!-- fa-stages {words} -->\n<!-- /fa-stages -->\n", tmp_path)
