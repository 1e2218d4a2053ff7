"""The HTML report: its sections in order, nothing that a record can inject, nothing that is loaded, and its size."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main
from pytest_fa.features.compare.sides import read_side
from pytest_fa.features.gate.gated import Gate, GatePair
from pytest_fa.features.html import failures, hierarchy
from pytest_fa.features.html.machine import PageFacts
from pytest_fa.features.html.render import content_policy, html_report
from pytest_fa.features.html.shape_tables import MAX_OPEN_ROWS, gate_table
from pytest_fa.features.ncu.nsight_report import DURATION, Bottleneck, CountedKernel, CounterDifference, NsightReport
from pytest_fa.features.sanitize.sanitized import Sanitized
from pytest_fa.records.checks import CrossCheck, Diagnosis
from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.record import Ablation, Record, Source, to_json
from pytest_fa.records.timing import Agreement, Clocks
from pytest_fa.table.answer import RunFacts
from tests.factories import BUILD, RECORD, SHAPE, SMALL_SHAPE, SPEED, record, speed

REPOSITORY = Path(__file__).parents[3]
H200 = REPOSITORY / "profiles" / "nvidia-h200"
ON_H200 = RECORD.environment
DIAGNOSIS = Diagnosis(
    ("error by head", "batch 0 head  0  .19N", "and 3 more heads"),
    "a tail",
    (CrossCheck("sdpa_math", None, None, "not here"),),
    "only the candidate is wrong",
)
NSIGHT = NsightReport(
    status="ok",
    message="",
    preset="verdict",
    tool="ncu",
    seconds=1.0,
    command=("ncu",),
    kernels=(
        CountedKernel(
            "kernel<fp16>(int)",
            {DURATION: 4000.0},
            Bottleneck("latency", "it waits", {}),
            phases={"softmax": 3, "P.V": 1},
        ),
    ),
    baseline="sdpa_cudnn",
    differences=(CounterDifference("blocks", 128.0, 32.0, 4.0),),
    expect="4 us",
)
PAIR = GatePair(PairSamples(SHAPE, "sdpa_cudnn", ((-0.9, -0.9),), ((0.0, 0.0),)), 0.4, 0.39, 0.41, 0.39, 0.41)
GATE = Gate(0.95, "PASS", "it is below", 6, 1, 0, 0.01, 0.004, 60.0, {}, (PAIR,))


class Page(HTMLParser):
    """What a browser would find in a page: its tags with their attributes, its texts, and the order of its ids."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(content.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep a tag."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep a text."""
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All texts."""
        return "".join(self.texts)

    @property
    def ids(self) -> list[str]:
        """The ids of the sections in their order."""
        return [str(attributes["id"]) for _, attributes in self.tags if "id" in attributes]


def page_of(records: list[Record], folder: Path = REPOSITORY / "profiles", **more: Any) -> Page:
    """The page of a run with these records."""
    return Page(html_report(records, PageFacts("a run", folder, **{"run": RunFacts(), **more})))


def on_h200(variant: str, device_us: float, role: str = "candidate", shape: str = SHAPE, **changes: Any) -> Record:
    """A time on an H200."""
    times = changes.pop("speed", speed(device_us))
    return record(variant, f"{shape}-seed0", "speed", role=role, speed=times, environment=ON_H200, **changes)


def small_run() -> list[Record]:
    """Records with everything that the page can show."""
    clocks = Clocks(1980, 2619, 700.5, 40, 0)
    timed = msgspec.structs.replace(speed(3.5), clocks_during=clocks, agreement=Agreement(None, "not profiled"))
    return [
        on_h200("minimal", 350.0),
        on_h200("fast", 3.5, speed=timed),
        on_h200("fast", 2.0, shape=SMALL_SHAPE, speed=timed),
        on_h200("without_pv", 3.0, "ablation", ablation=Ablation("P.V", "fast")),
        on_h200("sdpa_cudnn", 7.0, "baseline"),
        record("fast", f"{SHAPE}-seed1", "gate", added={"gate": GATE}, environment=ON_H200),
        record("fast", kind="profile", added={"ncu": NSIGHT}, environment=ON_H200),
        msgspec.structs.replace(RECORD, diagnosis=DIAGNOSIS),
        record(
            "tool",
            kind="sanitize",
            outcome=Outcome.HAZARD,
            added={"sanitize": Sanitized("racecheck", "found", "1", "", 1.0, (), 1)},
        ),
    ]


def test_the_sections_have_their_order() -> None:
    """Verdict, times, hierarchy, why, failures, samples, environment and commands follow each other."""
    page = page_of([each for each in small_run() if each.environment.gpu])
    sections = ["times", "hierarchy", "why", "failures", "samples", "environment", "commands"]
    assert page.ids == [f"{name}1" for name in sections]
    assert page.text.index("fastest correct: fast") < page.text.index("Times and checks")


def test_many_gates_are_folded() -> None:
    """The line of the gates counts the verdicts; more than a few ratios are folded, those of failed gates first."""
    failed = msgspec.structs.replace(GATE, verdict="FAIL", reason="it is above")
    many = msgspec.structs.replace(GATE, pairs=(PAIR,) * MAX_OPEN_ROWS)
    gates = [record(name, kind="gate", added={"gate": gate}) for name, gate in (("good", GATE), ("bad", failed))]
    few = gate_table(gates)
    assert few is not None
    assert [row.cells[0].text for row in few.rows] == ["bad", "good"]
    assert few.finding.startswith("1 PASS, 1 FAIL; ")
    folded = gate_table([*gates, record("wide", kind="gate", added={"gate": many})])
    assert folded is not None
    assert (few.is_open, folded.is_open) == (True, False)


def test_a_failed_gate_of_saved_records_stands_in_its_table() -> None:
    """A run with a failed gate has failed; saved records say what was judged, and the gate in its table."""
    failed = msgspec.structs.replace(GATE, verdict="FAIL", reason="it is above")
    gate = record("fast", kind="gate", outcome=Outcome.FAILED, added={"gate": failed}, environment=ON_H200)
    records = [on_h200("fast", 3.5), on_h200("slow", 7.0), gate]
    of_run, saved = page_of(records), page_of(records, run=None)
    assert [page.text.count("1 FAIL (fast)") for page in (of_run, saved)] == [1, 0]
    assert ["verdict red" in str(page.tags) for page in (of_run, saved)] == [True, False]
    assert "1 FAIL; both kernels" in saved.text


def test_the_page_says_what_the_records_say() -> None:
    """The page has the ratio with its interval, the gate, the hierarchy, counters, phases, the map and the command."""
    text = page_of(small_run()).text
    assert "fastest: fast, 3.50 us, 0.500 x sdpa_cudnn" in text
    assert re.search(r"0\.500\s*0\.4\d\d to 0\.5\d\d", text)
    assert "0.3900 to 0.4100" in text
    assert "fast takes 3.50 us, 100 x as fast as minimal, 2 x as fast as sdpa_cudnn, " in text
    assert "-0.50 us, -14 %" in text
    assert "it waits" in text
    assert "softmax75 %" in re.sub(r"\s", "", text).replace("75%", "75 %")
    assert "likely cause: a tail" in text
    assert "pytest --fa-variant=ws_p2" in text
    assert "1980 MHz, 700 W, 40 °C" in text


def test_each_gpu_has_its_own_part() -> None:
    """Records of a GPU and of a CPU have two parts, each with its own verdict."""
    page = page_of(small_run())
    assert [name for name in page.ids if name.startswith("times")] == ["times1", "times2"]
    assert "NVIDIA H200: " in page.text
    assert "a CPU: " in page.text


def test_the_limit_is_that_of_the_gpu(tmp_path: Path) -> None:
    """With ceilings, the gap to the limit is shown; without, the column is missing, and nothing stands in for it."""
    assert "time / limit" in page_of(small_run()).text
    assert "time / limit" not in page_of(small_run(), tmp_path).text


def test_ceilings_that_cannot_be_read_are_a_note(tmp_path: Path) -> None:
    """With an unreadable ceilings.json the page is written, and a note names the file."""
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "ceilings.json").write_text("{", encoding="utf-8")
    assert "ceilings.json cannot be read" in page_of(small_run(), tmp_path).text


def test_a_selftest_has_its_table() -> None:
    """Of a self-test, the page shows each kernel with the checks that rejected it, and how many were unexpected."""
    records = [
        record("zeros", kind="selftest", caught_by=("max",)),
        record("slips", kind="selftest", outcome=Outcome.FAILED, message="no check"),
    ]
    text = page_of(records).text
    assert "self-test: 1 of 2 kernels with an unexpected result" in text
    assert "zeros" in text


def test_many_commands_are_counted() -> None:
    """Of many commands the page shows 40 and counts the others; it cuts nothing silently."""
    records = [
        on_h200(f"v{number}", 1.0 + number, rerun_command=f"pytest --fa-variant=v{number}") for number in range(50)
    ]
    text = page_of(records).text
    assert ("--fa-variant=v39\n" in text, "--fa-variant=v40\n" in text, "# and 10 more" in text) == (True, False, True)


def test_the_target_shape_is_first() -> None:
    """The tables and the strips begin with the target shape; then the shapes follow by their work."""
    shapes = ("b1h8s2048d64-fp16", SMALL_SHAPE, SHAPE)
    page = page_of([on_h200("fast", 1.0, shape=shape) for shape in shapes])
    assert re.findall(r"(b1h\ds\d+d64-fp16)\s+(?:fastest|1 time)", page.text) == 2 * [SHAPE, SMALL_SHAPE, shapes[0]]


def test_builds_alone_are_a_page() -> None:
    """A run without a GPU, which only builds, has a table of builds."""
    text = page_of([record("mine", kind="build", builds=(BUILD,))]).text
    assert "1 builds, not run" in text
    assert "built for sm_90a" in text


def test_the_page_opens_with_a_picture() -> None:
    """Below the verdict, bars from 0 on compare the fastest correct variants with the fastest baselines."""
    kinds = [("candidate", each) for each in (3.0, 4.0, 5.0, 6.0, 7.0, 8.0)] + [("baseline", 4.5), ("baseline", 10.0)]
    records = [on_h200(f"{role}_{us:g}", us, role) for role, us in [*kinds, ("baseline", 20.0), ("overhead", 1.0)]]
    result = hierarchy.hierarchy_of([*records, on_h200("wrong", 2.0, outcome=Outcome.WRONG)], None)
    assert result is not None
    assert [(bar.variant, bar.bar) for bar in result.opening] == [
        ("candidate_3", 60),
        ("candidate_4", 80),
        ("baseline_4.5", 90),
        ("candidate_5", 100),
        ("candidate_6", 120),
        ("candidate_7", 140),
        ("baseline_10", 200),
    ]
    text = page_of(small_run()).text
    assert text.index("the fastest correct variants and baselines") < text.index("Times and checks")


def test_the_hierarchy_takes_the_shape_with_most_candidates() -> None:
    """The hierarchy is at the target shape or the one with most candidates; without candidates, there is none."""
    shapes = ("b1h2s64d64-fp16", "b1h8s2048d64-fp16")
    records = [on_h200(name, 5.0, shape=shapes[1]) for name in ("a", "b")] + [on_h200("a", 1.0, shape=shapes[0])]
    result = hierarchy.hierarchy_of(records, None)
    assert result is not None
    assert (result.shape_id, result.first, [step.variant for step in result.steps]) == (shapes[1], "b", ["a", "b"])
    assert hierarchy.hierarchy_of([on_h200("noop", 0.7, "overhead")], None) is None


def test_a_wrong_or_unconfirmed_time_is_not_the_finding(snapshot: SnapshotAssertion) -> None:
    """The sentence of the hierarchy names neither a wrong candidate nor one whose time is not confirmed."""
    denied = msgspec.structs.replace(speed(1.0), agreement=Agreement(False, "the clocks differ"))
    records = [
        on_h200("wrong", 0.5, outcome=Outcome.WRONG),
        on_h200("denied", 1.0, speed=denied),
        on_h200("right", 5.0),
    ]
    result, bad = hierarchy.hierarchy_of(records, None), hierarchy.hierarchy_of(records[:2], None)
    assert result is not None
    assert bad is not None
    assert result.finding == "right takes 5.00 us"
    assert snapshot == bad.finding
    assert [(step.variant, step.device_us, step.is_wrong) for step in result.steps] == [
        ("wrong", "0.50", True),
        ("denied", "1.00!", False),
        ("right", "5.00", False),
    ]


def test_the_run_of_the_plugin_gives_its_own_next_command() -> None:
    """With the facts of a run, the answer has the commands of that run."""
    run = RunFacts(rerun=("pytest", "--fa-kernels=mine"))
    assert (
        "next: pytest --fa-kernels=mine --fa-variant=a --fa-gate=1.0"
        in page_of([on_h200("a", 1.0), on_h200("sdpa_cudnn", 2.0, "baseline")], run=run).text
    )


# -- nothing that a record can inject ---------------------------------------------------------------------------------

HOSTILE = "\"'></td></table></pre></style><script>alert(1)</script><img src=x onerror=y>{{ 7*7 }}&amp;\x1b[2J\u202e"
# Fields whose values are of a fixed list, and the parts of a case, which are read from its id.
FIXED = {"kind", "outcome", "role", "case", "stages", "verdict", "status", "bound_by", "shape_id", "order", "arch"}
TAGS = """
html meta title style header main footer nav a h1 h2 h3 p b div table caption thead tbody tr th td details summary
svg rect circle path pre
"""
ATTRIBUTES = """
lang charset http-equiv content name class href id scope open width height y cx cy r d viewbox preserveaspectratio role
aria-label aria-hidden colspan
"""


def hostile(value: Any, name: str = "") -> Any:
    """The value with `HOSTILE` at the end of every text that is free."""
    if name in FIXED:
        return value
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, msgspec.Struct):
        changes = {field: hostile(getattr(value, field), field) for field in value.__struct_fields__}
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(hostile(part, name) for part in value)
    if isinstance(value, dict):
        return {hostile(key): hostile(part) for key, part in value.items()}
    return value


def test_no_text_of_a_record_becomes_markup() -> None:
    """With hostile texts in every field, the page has only the tags and attributes of the template."""
    plain, attacked = page_of(small_run()), page_of(hostile_run(), complaints=(HOSTILE,))
    assert {tag for tag, _ in attacked.tags} <= set(TAGS.split())
    assert {name for _, attributes in attacked.tags for name in attributes} <= set(ATTRIBUTES.split())
    assert [tag for tag, _ in attacked.tags].count("style") == 1
    assert {tag for tag, _ in plain.tags} == {tag for tag, _ in attacked.tags}
    assert attacked.text.count("<script>alert(1)</script>") > 20
    assert "49" not in re.findall(r"onerror=y>(\d+)", attacked.text)


def hostile_run() -> list[Record]:
    """The small run with hostile texts; every record stays of one machine or the other."""
    return [hostile(each) for each in small_run()]


def test_no_text_of_a_record_changes_the_order_of_the_page() -> None:
    """Control characters and bidirectional controls are shown as escapes."""
    text = page_of(hostile_run(), complaints=(HOSTILE,)).text
    assert ("\x1b" in text, "\u202e" in text, r"\x1b[2J\u202e" in text) == (False, False, True)


@pytest.mark.parametrize("word", ["src", "href", "url(", "@import", "http", "//"])
def test_nothing_is_loaded(word: str) -> None:
    """No attribute and no style refers to a file or a host; links lead to places of the page itself."""
    content = html_report(small_run(), PageFacts("a run", H200.parent)).decode()
    style = content[content.index("<style>") : content.index("</style>")]
    assert word not in style
    attributes = [pair for _, tag in Page(content.encode()).tags for pair in tag.items()]
    assert [value for name, value in attributes if name == "href" and not re.fullmatch(r"#[a-z]+\d", str(value))] == []
    assert [name for name, _ in attributes if name in ("src", "style", "srcset") or name.startswith("on")] == []


def test_the_policy_permits_this_style_and_nothing_else() -> None:
    """The Content-Security-Policy has the hash of the page's style, forbids all else, and stands before the style."""
    content = html_report(small_run(), PageFacts("a run", H200.parent)).decode()
    style = content[content.index("<style>") + len("<style>") : content.index("</style>")]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = [attributes["content"] for tag, attributes in Page(content.encode()).tags if "http-equiv" in attributes]
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert policy == content_policy(style)
    assert content.index("Content-Security-Policy") < content.index("<style>")


# -- size -------------------------------------------------------------------------------------------------------------


def many(count: int) -> list[Record]:
    """As many records as asked for: those of the H200, with other names from the second round on."""
    saved = read_side(str(H200), REPOSITORY).records
    rounds = range(-(-count // len(saved)))
    varied = [
        msgspec.structs.replace(each, variant=f"{each.variant}{number or ''}", id=f"{each.id}{number or ''}")
        for number in rounds
        for each in saved
    ]
    return varied[:count]


@pytest.mark.parametrize("count", [100, 10_000])
def test_the_page_stays_small(count: int) -> None:
    """A page has at most 300 KB, and 1 KB more for each record."""
    content = html_report(many(count), PageFacts("many", H200.parent))
    assert len(content) <= 300_000 + 1000 * count


def test_the_page_of_many_failures_stays_small() -> None:
    """If every record is the long failure of another variant, as many as fit are shown, and the others are counted."""
    long = msgspec.structs.replace(RECORD, speed=None, message="<" * 20_000, diagnosis=DIAGNOSIS)
    records = [msgspec.structs.replace(long, variant=f"v{number}", id=f"v{number}") for number in range(2000)]
    page = html_report(records, PageFacts("failures", H200.parent))
    assert len(page) <= 300_000 + 1000 * len(records)
    hidden = failures.failures_of(records).hidden
    assert 0 < hidden < len(records)
    assert f"{hidden} more variants or faults are in the records." in page.decode()


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report RECORDS -o FILE` writes the page of a folder, and says how many records; no text names that folder."""
    save_records([each for each in small_run() if each.kind == "speed"], tmp_path)
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(out), "--profiles", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{out}: 6 records, {len(out.read_bytes()) / 1000:.0f} KB\n"
    assert Page(out.read_bytes()).ids[0] == "times1"
    assert f"<title>pytest-fa: {tmp_path.name}</title>" in out.read_text(encoding="utf-8")
    assert str(tmp_path) not in out.read_text(encoding="utf-8")


def test_the_folder_of_the_report_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report -o` into a folder that does not exist is one sentence, and no folder is made."""
    out = tmp_path / "out" / "report.html"
    assert main(["report", str(tmp_path), "-o", str(out)]) == 2
    expected = f"pytest_fa: -o {out}: there is no folder {out.parent}; make it, or name another\n"
    assert (capsys.readouterr().err, out.parent.exists()) == (expected, False)


def test_the_command_names_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that is no record is named on stderr and on the page; a word that names nothing is one error."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(to_json(RECORD) + b"\nno record\n")
    out = tmp_path / "report.html"
    assert main(["report", str(path), "-o", str(out)]) == 0
    assert "1 of 2 lines cannot be read" in capsys.readouterr().err
    assert "not read: " in Page(out.read_bytes()).text
    assert main(["report", "nowhere", "-o", str(out)]) == 2
    assert "'nowhere' is neither a file nor a revision" in capsys.readouterr().err


def test_a_time_on_the_cpu_has_no_limit(snapshot: SnapshotAssertion) -> None:
    """The limit of a GPU is not that of a time on the CPU, and a noisy ratio is no figure."""
    on_cpu = msgspec.structs.replace(SPEED, cold_missing="runs on the CPU", clocks_before=None)
    noisy = msgspec.structs.replace(on_cpu, device=msgspec.structs.replace(SPEED.device, samples_us=(5.0, 10.0, 30.0)))
    records = [record("a", speed=noisy), record("sdpa_math", role="baseline", speed=msgspec.structs.replace(noisy))]
    result = hierarchy.hierarchy_of(records, None)
    assert result is not None
    assert {step.variant: step.versus_baseline for step in result.steps} == {"a": "noisy", "sdpa_math": "1"}
    assert snapshot == result.finding
    assert "fastest: a, 10.25~ us, too noisy to compare with sdpa_math" in page_of(records).text


def test_a_failure_that_was_saved_hides_the_time(tmp_path: Path) -> None:
    """The page of saved records has the failure and its date in place of the time, and says so at its top."""
    saved = [on_h200("fast", 3.5), on_h200("minimal", 350.0), on_h200("sdpa_cudnn", 7.0, "baseline")]
    save_records(saved, tmp_path)
    wrong = record("fast", f"{SHAPE}-seed1", outcome=Outcome.WRONG, environment=ON_H200)
    save_records([msgspec.structs.replace(wrong, measured_at="2026-02-03T00:00:00+00:00")], tmp_path)
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(out)]) == 0
    text = Page(out.read_bytes()).text
    assert f"fast at {SHAPE}: wrong (2026-02-03) and not passed since, so 3.50 us of 2026-01-01 does not count" in text
    assert "wrong (2026-02-03)" in text.partition("so 3.50 us")[2]
    assert text.count("3.50") == 1


def test_every_table_says_where_its_figures_come_from() -> None:
    """The line below a table has the machine, the day and the commit of its rows."""
    source = Source("abcdef0123456789", dirty=True, origin="git")
    page = page_of([msgspec.structs.replace(each, source=source) for each in small_run()])
    line = "measured on an NVIDIA H200, 2026-01-01, commit abcdef01, from a tree with uncommitted changes"
    assert line in page.text
    assert page.text.count("commit abcdef01") >= 5
