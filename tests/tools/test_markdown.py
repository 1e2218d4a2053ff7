"""Tables in Markdown files: they are generated from records, between their comments, and can be checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from kernels.auto.rung_times import UNSEEN, RungTimes, write_rung_times
from pytest_fa.features.ncu import presets
from pytest_fa.features.ncu.nsight_report import CountedKernel, NsightReport
from pytest_fa.records.checks import Bound
from pytest_fa.records.log import save_records
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.timing import Agreement, Clocks
from tests.factories import OK, RECORD, SHAPE, SMALL_SHAPE, check, record, speed
from tools.docs.block import TableProblem
from tools.docs.markdown import main, rewrite
from tools.docs.pipes import Loop, Pipes, write_pipes

SAVED = Path(__file__).parents[1] / "recorded" / "profiles" / "nvidia-h200"
COLUMNS = "columns=variant,checks,device_us,call_us,tflops,ratios,registers,spills"
HEAD = f"<!-- fa-variants profiles=profiles/cpu cases={SHAPE} variants=slow,fast,empty against=fast {COLUMNS} -->"
TEXT = f"Before.\n\n{HEAD}\nold\n<!-- /fa-variants -->\n\nAfter.\n"
TABLE = """\
| variant | checks passed | device_us | call_us | TFLOP/s | x fast | regs | spill B |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| `slow` | 2/2 | 20.00 | 30.00 | 26.84 | 2.000 | - | - |
| `fast` | 1/1 | 10.00 | 20.00 | 53.69 | 1.000 | - | - |
| `empty` | not checked | 1.00 | 5.00 | - | - | - | - |

Measured on the CPU a CPU, 2026-01-01, without a commit and older than the saving of failures (2026-11-27)."""
EXPECTED = f"Before.\n\n{HEAD}\n\n{TABLE}\n\n<!-- /fa-variants -->\n\nAfter.\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the records of three variants and a file with a table."""
    records: list[Record] = [
        record("slow", check=OK),
        record("slow", kind="speed", check=OK, speed=speed(20.0, 30.0)),
        record("fast", kind="speed", check=OK, speed=speed(10.0)),
        record("empty", kind="speed", role="overhead", speed=speed(1.0, 5.0)),
    ]
    save_records(records, tmp_path / "profiles")
    (tmp_path / "page.md").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_is_made_from_records(root: Path) -> None:
    """Every variant has its row, in the order of the comment; the text around the table does not change."""
    assert rewrite(TEXT, root) == EXPECTED


MARGINS = "<!-- fa-findings of=margins profiles=profiles/cpu variants=slow,fast -->\n<!-- /fa-findings -->\n"


def test_margins_are_the_worst_of_all_checks(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each variant and dtype has a row with the number of checks, the largest used fractions, and the worst shape."""
    finite, shown = Bound("finite", 0.0, 0.0, holds=True), Bound("shown", 9.0, 1.0, holds=False, enforced=False)
    near, far = Bound("max", 0.3, 1.0, holds=True), Bound("max", 0.1, 1.0, holds=True)
    records = [
        record("slow", check=check(finite, near, shown)),
        record("slow", f"{SMALL_SHAPE}-seed0", check=check(finite, far, Bound("rms", 0.2, 0.5, holds=True))),
        record("fast", check=check(far)),
    ]
    save_records(records, tmp_path / "profiles")
    assert snapshot == rewrite(MARGINS, tmp_path).split("\n\n")[1].splitlines()


def test_a_table_that_is_right_stays(root: Path) -> None:
    """Generating an up-to-date table again changes nothing."""
    assert rewrite(EXPECTED, root) == EXPECTED


def test_the_command_rewrites_and_checks(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` returns 1 for an old table without changing it; after the command has rewritten it, it returns 0."""
    assert main(["--check", "page.md"]) == 1
    assert (root / "page.md").read_text(encoding="utf-8") == TEXT
    assert main(["page.md"]) == 0
    assert main(["--check", "page.md"]) == 0
    assert (root / "page.md").read_text(encoding="utf-8") == EXPECTED
    assert "page.md: its tables differ from the records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("slow,fast,empty", "slow,gone", f"no record of gone at {SHAPE} in profiles/cpu"),
        ("against=fast", "againts=fast", "Object contains unknown field `againts`"),
        ("cases=", "case=", "unknown field `case`"),
        ("against=fast", "against", "profiles=profiles/cpu cases="),
        ("fa-variants", "fa-speeds", "1 tables are opened, 0 of them are closed"),
    ],
)
def test_a_comment_that_is_wrong_is_named(root: Path, old: str, new: str, message: str) -> None:
    """The error for a wrong comment names what is wrong: records that do not exist, an unknown key, a missing value."""
    with pytest.raises(TableProblem) as raised:
        rewrite(TEXT.replace(old, new, 1), root)
    assert message in str(raised.value)


def test_the_command_names_what_it_cannot_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a missing file, a wrong comment and no file at all, the command returns 2 and prints the cause."""
    (root / "page.md").write_text(TEXT.replace("slow", "gone"), encoding="utf-8")
    assert [main(["none.md"]), main(["page.md"]), main([])] == [2, 2, 2]
    printed = capsys.readouterr().err
    assert all(words in printed for words in ("No such file", "no record of gone", "rewrite every table"))


def test_bottlenecks_quote_the_decisive_counters(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each kernel has a row with its sentence and counters; a variant without a profile has `not measured`."""
    rates = {presets.MEMORY: 20.0, presets.TENSOR: 30.0, presets.XU: 25.0, presets.FMA: 10.0}
    counters = {presets.ACTIVE_MAX: 170.0, presets.ELAPSED_MAX: 175.0, presets.GRID: 32.0, presets.SMS: 132.0, **rates}
    kernel = CountedKernel("void ns::k<1>(int)", counters)
    profile = NsightReport("ok", "", "verdict", "ncu 1", 6.0, (), (kernel, CountedKernel("other(int)", {})))
    record = msgspec.structs.replace(RECORD, kind="profile", variant="one", added={"ncu": profile})
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "one.jsonl").write_bytes(to_json(record) + b"\n")
    assert record.case is not None
    words = f"of=bottlenecks profiles=profiles cases={record.case.shape_id} variants=one,two"
    made = rewrite(f"<!-- fa-findings {words} -->\n<!-- /fa-findings -->\n", tmp_path)
    assert snapshot == made.splitlines()[4:7]


def test_a_variant_without_ablations_has_no_phases(tmp_path: Path) -> None:
    """A table of phases for a variant without ablations is an error, not an empty table."""
    (tmp_path / "kernels").mkdir()
    words = "profiles=profiles kernels=kernels ablations_of=one cases=b1h8s512d64-fp16 columns=saved_us"
    with pytest.raises(TableProblem, match="one has no ablations in kernels"):
        rewrite(f"<!-- fa-variants {words} -->\n<!-- /fa-variants -->\n", tmp_path)


@pytest.mark.parametrize("words", ["--check", ""])
def test_a_line_that_is_no_record_is_refused(root: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    """If a line of a record file cannot be read, the page stays, and the command prints one sentence and returns 2."""
    with (root / "profiles" / "cpu" / "fast.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"schema":99}\n')
    assert main([*words.split(), "page.md"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"page.md: {root}/profiles/cpu/fast.jsonl: 1 of 2 lines cannot be read; line 2: record")
    assert (root / "page.md").read_text(encoding="utf-8") == TEXT


@pytest.mark.parametrize("content", ["{", '{"pairs": []}', "\0"])
def test_noise_that_cannot_be_read_is_refused(root: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    """A noise.json that cannot be read is refused with a sentence; it does not count as missing."""
    (root / "profiles" / "cpu" / "noise.json").write_text(content, encoding="utf-8")
    (root / "page.md").write_text("<!-- fa-file profiles/cpu/noise.json -->\n<!-- /fa-file -->\n", encoding="utf-8")
    assert main(["page.md"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"page.md: {root}/profiles/cpu/noise.json cannot be read: ")


DECODE_SHAPE = "b8h32s1d128-fp16-kv8-sk4096"  # 134 MB, 40 us at 3359 GB/s
BANDWIDTH = (
    "<!-- fa-shapes profiles=profiles/cpu cases={} variants=mine,other,none "
    "columns=copy_us,cold_and_hot,gigabytes,copy_share,to_fastest -->\n<!-- /fa-shapes -->\n"
)


@pytest.fixture
def timed_decode(tmp_path: Path) -> Path:
    """A folder with the times of two variants at a decode shape, and with the ceilings of an H200."""
    case = f"{DECODE_SHAPE}-seed0"
    times = {"mine": speed(40.0), "other": msgspec.structs.replace(speed(50.0), cold=speed(55.0).device)}
    save_records(
        [record(name, case=case, kind="speed", speed=each) for name, each in times.items()], tmp_path / "profiles"
    )
    (tmp_path / "profiles" / "cpu" / "ceilings.json").write_bytes((SAVED / "ceilings.json").read_bytes())
    return tmp_path


def test_bandwidth_is_compared_with_a_copy(timed_decode: Path) -> None:
    """Each shape has the time of its bytes, cold and hot times, GB/s, the share of a copy, and the best ratio."""
    last = rewrite(BANDWIDTH.format(f"{SHAPE},{DECODE_SHAPE}"), timed_decode).splitlines()[-5]
    expected = ["31.6", "-", "40.00", "55.00", "50.00", "-", "-", "3359", "79", "0.800"]
    assert [f"`{DECODE_SHAPE}`", *expected] == [cell.strip() for cell in last.strip("|").split("|")]


@pytest.mark.parametrize("name", ["mine", "other"])
def test_bandwidth_without_a_confirmed_time_has_no_ratio(timed_decode: Path, name: str) -> None:
    """A time that another clock does not confirm has a mark, whichever side it is on."""
    unconfirmed = msgspec.structs.replace(speed(45.0), agreement=Agreement(valid=False, reason="simulated"))
    case = f"{DECODE_SHAPE}-seed0"
    save_records([record(name, case=case, kind="speed", speed=unconfirmed)], timed_decode / "profiles")
    last = rewrite(BANDWIDTH.format(DECODE_SHAPE), timed_decode).splitlines()[-5]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert (cells.count("45.00!"), cells[-1]) == (1, "-")


def test_bandwidth_leaves_out_calls_that_overlap(timed_decode: Path) -> None:
    """The period of overlapping calls is shown, but is no time with which that of a chain is compared."""
    overlapping = msgspec.structs.replace(speed(30.0), order="programmatic")
    case = f"{DECODE_SHAPE}-seed0"
    save_records([record("none", case=case, kind="speed", speed=overlapping)], timed_decode / "profiles")
    last = rewrite(BANDWIDTH.format(DECODE_SHAPE), timed_decode).splitlines()[-5]
    assert "30.00" in last
    assert last.strip("| ").split("|")[-1].strip() == "0.800"


def test_bandwidth_needs_ceilings_and_records(timed_decode: Path, snapshot: SnapshotAssertion) -> None:
    """Without ceilings, or without a record of the variant, the table is refused."""
    with pytest.raises(TableProblem, match=f"no record of mine at {SHAPE} in profiles/cpu"):
        rewrite(BANDWIDTH.format(SHAPE), timed_decode)
    (timed_decode / "profiles" / "cpu" / "ceilings.json").unlink()
    with pytest.raises(TableProblem) as error:
        rewrite(BANDWIDTH.format(DECODE_SHAPE), timed_decode)
    assert snapshot == str(error.value)


def test_loops_of_products_and_softmax_have_rates_and_clocks(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each loop has its time, the rate that it measures, clock and power; without a file the table is refused."""
    words = "<!-- fa-file profiles/nvidia-h200/pipes.json -->\n<!-- /fa-file -->\n"
    with pytest.raises(TableProblem, match=r"there is no pipes\.json in profiles/nvidia-h200; .* writes one"):
        rewrite(words, tmp_path)
    environment = msgspec.structs.replace(record().environment, gpu="NVIDIA H200")
    loops = {"products": Loop((2.0, 3.0), 2.5, Clocks(1700, 3201, 650.4, 60, 0)), "maxima": Loop((9.0,), 9.0, None)}
    write_pipes(Pipes(loops, {"products": 819.4}, {"maxima": 55.6}, environment), tmp_path / "profiles")
    rows = rewrite(words, tmp_path).splitlines()[-6:-4]
    assert snapshot == rows


def test_choices_of_auto_are_compared_by_kind_of_problem(tmp_path: Path) -> None:
    """A kind without a problem has dashes; without a file the table is refused."""
    words = "<!-- fa-regret profiles/nvidia-h200 -->\n<!-- /fa-regret -->\n"
    with pytest.raises(TableProblem, match=r"no unseen\.json in profiles/nvidia-h200; measure it with"):
        rewrite(words, tmp_path)
    environment = msgspec.structs.replace(record().environment, gpu="NVIDIA H200")
    all_rungs = {"cluster_latency": 10.0, "long_shapes": 10.0, "long_from_end": 10.0, "decode_cluster": 10.0}
    us = {
        "b1h7s512d64-fp16": {**all_rungs, "sdpa_cudnn": 40.0, "sdpa_flash": 20.0},
        "b1h7s70d64-fp16-sk900": {**all_rungs},
    }
    write_rung_times(RungTimes(us, environment, record().source, "2026-01-01"), tmp_path / "profiles", UNSEEN)
    rows = rewrite(words, tmp_path).splitlines()[4:9]
    assert rows == [
        "| all | 2 | 1.000 | 1.000 | 0.500 | 0.500 |",
        "| as many keys as queries | 1 | 1.000 | 1.000 | 0.500 | 0.500 |",
        "| fewer queries than keys | 1 | 1.000 | 1.000 | - | - |",
        "| of these, at most 64 rows of queries | 0 | - | - | - | - |",
        "| grouped heads | 0 | - | - | - | - |",
    ]


def test_an_unconfirmed_time_is_marked_and_has_no_ratio(tmp_path: Path) -> None:
    """A time that the profiler contradicts stands in the table with a `!`, and no ratio refers to it."""
    contradicted = msgspec.structs.replace(speed(50.0), agreement=Agreement(valid=False, reason="profiler 60 us"))
    for name, other in (("confirmed", speed(50.0)), ("contradicted", contradicted)):
        times = {"mine": speed(40.0), "other": other}
        saved = [record(variant, case=f"{SHAPE}-seed0", kind="speed", speed=each) for variant, each in times.items()]
        save_records(saved, tmp_path / name)
        words = f"profiles={name}/cpu cases={SHAPE} variants=mine,other against=other columns=rates,ratios"
        row = rewrite(f"<!-- fa-shapes {words} -->\n<!-- /fa-shapes -->\n", tmp_path).splitlines()[-5]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2:] == [
            "40.00",
            cells[3],
            *{"confirmed": ["50.00", "0.800"], "contradicted": ["50.00!", "-"]}[name],
        ]


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    """For a kind, a list or a file that does not exist, the message says which ones do."""
    for kind, words, message in (
        (
            "speeds",
            "all",
            "fa-<kind>, is 'speeds' (allowed: variants, shapes, findings, screen, file, accuracy, claims, gates, list",
        ),
        (
            "list",
            "all",
            "the list of fa-list is 'all' (allowed: options, tokens, conventions, judged, exploits, twins)",
        ),
        ("file", "profiles/cpu/all.json", "the file of fa-file is 'all.json' (allowed: noise.json, pipes.json)"),
    ):
        with pytest.raises(TableProblem) as raised:
            rewrite(f"<!-- fa-{kind} {words} -->\n<!-- /fa-{kind} -->\n", tmp_path)
        assert message in str(raised.value)
