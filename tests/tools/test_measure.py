"""Measuring what pages show, and the check of what they show, in small repositories with made-up records."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.variant import Variant
from pytest_fa.records.costs import Costs
from pytest_fa.records.environment import Gpu
from pytest_fa.records.log import read_records, save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import SCHEMA, MachineIdentity, Record, Source
from pytest_fa.records.source import read_source
from tests.factories import BUILD, ENVIRONMENT, MANIFEST, OK, SHAPE, SMALL_SHAPE, WriteVariant, record, speed
from tools.measure import measure
from tools.measure.__main__ import main
from tools.measure.faults import check_lines, file_faults
from tools.measure.json_files import FILES, FileOrigin, MeasuredFile
from tools.measure.machine_code import compare_builds
from tools.measure.plan import TablePlan, make_plan
from tools.measure.sources import essence
from tools.measure.tables import ShownPages

REPOSITORY = Path(__file__).parents[2]
FAKE = (sys.executable, str(Path(__file__).with_name("fake_measuring.py")))
SOURCE = '#include "own.h"\n__global__ void kernel() {}\n'
WORDS = "profiles=profiles/nvidia-h200"


def block(variants: str, cases: str = SHAPE, columns: str = "variant,device_us") -> str:
    """A table of these variants at these shapes."""
    return f"<!-- fa-variants {WORDS} cases={cases} variants={variants} columns={columns} -->\n<!-- /fa-variants -->\n"


@pytest.fixture
def root(tmp_path: Path, write_variant: WriteVariant, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with three variants, of which the first two are in one table, and with an H200 of card `one`."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    root = tmp_path / "repository"
    for name in ("first", "second", "third"):
        files = {"kernel.cu": SOURCE, "own.h": "int x = 1;  // one\n"}
        write_variant(name, manifest=MANIFEST, root=root / "kernels", **files)
    (root / "README.md").write_text(f"{block('first,second')}\n{block('third')}", encoding="utf-8")
    (root / ".gitignore").write_text("artifacts/\n", encoding="utf-8")
    git(root, "init", "-q")
    commit(root)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    gpu = Gpu("NVIDIA H200", "GPU-1", (9, 0), "580", "13.0")
    monkeypatch.setattr(measure, "find_gpus", lambda: [gpu])
    use_card(monkeypatch, "one")
    return root


def use_card(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the GPU be this card, also in the fake pytest."""
    monkeypatch.setattr(measure, "hash_of_gpu", lambda _cache, _gpu: name)
    monkeypatch.setenv("FAKE_CARD", name)


def git(root: Path, *words: str) -> str:
    """Run git with a fixed user, and return its output."""
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    """Commit everything, and return the commit."""
    git(root, "add", ".")
    git(root, "commit", "-q", "--allow-empty", "-m", "more")
    read_source.cache_clear()
    return git(root, "rev-parse", "HEAD")


def processes(root: Path) -> list[str]:
    """The tests of each process that was run, and forget them."""
    log = root.parent / "log"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def timed(root: Path, variant: str, shape: str = SHAPE, **changes: Any) -> Record:
    """A time of the commit that is checked out, on card `one`."""
    plain = record(
        variant,
        f"{shape}-seed0",
        "speed",
        check=OK,
        speed=speed(2.0),
        environment=ENVIRONMENT,
        source=Source(git(root, "rev-parse", "HEAD"), dirty=False, origin="git"),
        measured_at="2026-11-29T00:00:00+00:00",
        machine=MachineIdentity("host", "one"),
    )
    return msgspec.structs.replace(plain, **changes)


def save(root: Path, *records: Record) -> None:
    """Save records where the tables read them."""
    save_records(list(records), root / "profiles")


def saved(root: Path, variant: str) -> list[Record]:
    """The saved records of a variant."""
    return list(read_records(root / "profiles" / "nvidia-h200" / f"{variant}.jsonl"))


def checked(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of `--check` without the last one; its status is 1 if there is a fault, else 0."""
    status = main(["--check"], root)
    lines = capsys.readouterr().out.splitlines()
    assert status == int(any(line.startswith("  ") for line in lines))
    return lines[:-1]


# -- plan -------------------------------------------------------------------------------------------------------------


def plan_of(root: Path, card: str | None = "one") -> TablePlan:
    """What is left to measure of the commit that is checked out."""
    return make_plan(ShownPages(root), read_source(root), (card,))


def test_the_plan_has_what_the_tables_show(root: Path) -> None:
    """Each variant of a table at each shape it supports; with checks also those, and no checks of a baseline."""
    tables = f"{block('first', f'{SHAPE},{SMALL_SHAPE}')}{block('second,sdpa_cudnn', columns='variant,checks')}"
    (root / "README.md").write_text(tables + block("third", f"{SHAPE},b1h8s512d96-fp16"), encoding="utf-8")
    shown = [list(map(str, table.records)) for table in ShownPages(root).tables()]
    assert shown == [
        [f"speed of first at {SHAPE}", f"speed of first at {SMALL_SHAPE}"],
        [f"correct of second at {SHAPE}", f"speed of second at {SHAPE}", f"speed of sdpa_cudnn at {SHAPE}"],
        [f"speed of third at {SHAPE}"],
    ]


def test_published_speeds_are_measured_at_their_cases_only(root: Path) -> None:
    """A kernel is not measured at the cases of claims about other kernels, and a record there is not compared."""
    head = "by: A, source: 'https://example.org', version: v1, date: '2026-01-02', gpu: NVIDIA H200"
    claims = f"{{variant: first, case: {SHAPE}, us: 1.0}}, {{variant: second, case: {SMALL_SHAPE}, us: 1.0}}"
    (root / "claims.yaml").write_text(f"[{{{head}, claims: [{claims}]}}]", encoding="utf-8")
    text = f"<!-- fa-claims claims=claims.yaml {WORDS} -->\n<!-- /fa-claims -->\n"
    (root / "README.md").write_text(text, encoding="utf-8")
    save(root, timed(root, "first", SMALL_SHAPE))
    (table,) = ShownPages(root).tables()
    assert list(map(str, table.records)) == [f"speed of first at {SHAPE}", f"speed of second at {SMALL_SHAPE}"]
    assert table.files == ("profiles/nvidia-h200/noise.json",)


def test_a_piece_names_its_tests(root: Path) -> None:
    """One process measures the results of a shape, and nothing else; the ids are those of the suite."""
    (piece,) = plan_of(root).pieces
    assert piece.command[-3:] == tuple(
        f"pytest_fa.suite.test_attention::test_speed[{name}-{SHAPE}]" for name in ("first", "second", "third")
    )
    assert {"--fa-variant=first,second,third", f"--fa-case={SHAPE}-seed0", "--fa-save"} < {*piece.command}


def test_profiles_and_properties_have_their_own_options(root: Path) -> None:
    """Profiles need `--ncu` and their set of counters; a property that failed needs to run without a case."""
    findings = f"<!-- fa-findings of=bottlenecks {WORDS} cases={SHAPE} variants=first -->\n<!-- /fa-findings -->\n"
    (root / "README.md").write_text(findings + block("second"), encoding="utf-8")
    wrong = timed(root, "second", id="second-many_heads", kind="property", outcome=Outcome.WRONG, speed=None)
    save(root, msgspec.structs.replace(wrong, source=Source("0" * 40, dirty=False, origin="git")))
    commands = {piece.command[-1]: piece.command for piece in plan_of(root).pieces}
    profile, property_, speed = sorted(commands)
    assert profile == f"pytest_fa.suite.test_attention::test_profile[first-{SHAPE}]"
    assert {"--ncu", "--ncu-set=verdict", f"--fa-case={SHAPE}-seed0"} < {*commands[profile]}
    assert property_ == "pytest_fa.suite.test_attention::test_property[second-many_heads]"
    assert [word for word in commands[property_] if word.startswith("--fa-case")] == []
    assert speed == f"pytest_fa.suite.test_attention::test_speed[second-{SHAPE}]"


def gate_block(variant: str, cases: str) -> str:
    """The table of a gate against `second`."""
    return f"<!-- fa-gates {WORDS} variant={variant} baseline=second cases={cases} -->\n<!-- /fa-gates -->\n"


def test_a_gate_has_a_process_of_its_own(root: Path) -> None:
    """It is one test of all its cases, and no other gate has them.  A change of the baseline makes it stale."""
    first, third = gate_block("first", f"{SHAPE},{SMALL_SHAPE}"), gate_block("third", SHAPE)
    (root / "README.md").write_text(first + third + block("first"), encoding="utf-8")
    commit(root)
    save(root, timed(root, "first"))
    pieces = {piece.command[-1]: piece.command for piece in plan_of(root).pieces}
    suite = "pytest_fa.suite.test_attention"
    asked = ["--fa-gate=1", "--fa-gate-baseline=second", f"--fa-case={SHAPE}-seed0,{SMALL_SHAPE}-seed0"]
    assert {*asked, "--fa-variant=first", "--fa-save"} < {*pieces.pop(f"{suite}::test_gate[first]")}
    assert {*asked[:2], "--fa-variant=third", f"--fa-case={SHAPE}-seed0"} < {*pieces.pop(f"{suite}::test_gate[third]")}
    assert pieces == {}
    command = " ".join(["pytest", *asked])
    gated = timed(root, "first", id="first", kind="gate", case=None, speed=None, rerun_command=command)
    old = Source("0" * 40, dirty=False, origin="git")
    earlier = msgspec.structs.replace(
        gated, rerun_command=f"{command} -q", source=old, measured_at="2026-11-28T00:00:00+00:00"
    )
    save(root, earlier, gated)
    assert [*plan_of(root).left.values()] == [0, 1, 0]
    (root / "kernels" / "second" / "own.h").write_text("int changed;\n", encoding="utf-8")
    commit(root)
    assert [*plan_of(root).left.values()] == [1, 1, 0]


def test_long_results_are_in_pieces(root: Path) -> None:
    """The seconds are those of the records, and a piece is not expected to take more than five minutes."""
    earlier = Source("0" * 40, dirty=False, origin="git")
    jobs = {"first": 200.0, "second": 90.0, "third": 100.0}
    save(root, *(timed(root, name, costs=Costs(0.0, job, 5.0), source=earlier) for name, job in jobs.items()))
    assert [(piece.seconds, [each.variant for each in piece.results]) for piece in plan_of(root).pieces] == [
        (220.0, ["first"]),
        (215.0, ["second", "third"]),
    ]


def test_what_this_commit_and_card_measured_is_kept(root: Path) -> None:
    """A table is done on any one card; of a table that is not done, only results of this card are kept."""
    save(root, timed(root, "first"), timed(root, "third", machine=MachineIdentity("host", "two")))
    assert [str(each) for piece in plan_of(root).pieces for each in piece.results] == [f"speed of second at {SHAPE}"]
    lefts = [plan_of(root, card).left for card in ("one", "two", None)]
    assert [list(left.values()) for left in lefts] == [[1, 0], [2, 0], [2, 0]]
    save(root, timed(root, "second", machine=MachineIdentity("host", "two")))
    assert [list(plan_of(root, card).left.values()) for card in ("one", "two")] == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"source": Source("0" * 40, dirty=False, origin="git")},
        {},
        {"machine": None},
        {"speed": msgspec.structs.replace(speed(2.0), outside=None)},
    ],
    ids=["another commit", "dirty", "no card", "no judge's clock"],
)
def test_other_results_are_measured_again(root: Path, changes: dict[str, Any]) -> None:
    """A result of another commit, of changed sources, of no known card or of an older method is not kept."""
    dirty = Source(git(root, "rev-parse", "HEAD"), dirty=True, origin="git")
    save(root, timed(root, "third", **(changes or {"source": dirty})))
    assert [*plan_of(root).left.values()] == [2, 1]


def test_a_commit_that_changes_no_source_keeps_what_is_done(root: Path) -> None:
    """Such as that of the records; a table that is not done yet is measured again, since its rows are of one commit."""
    save(root, *(timed(root, name) for name in ("first", "second", "third")))
    commit(root)
    assert [*plan_of(root).left.values()] == [0, 0]
    save(root, timed(root, "first"))
    assert [*plan_of(root).left.values()] == [1, 0]
    (root / "profiles" / "nvidia-h200" / "first.jsonl").unlink()
    assert [*plan_of(root).left.values()] == [2, 0]


def test_tables_that_share_a_result_are_done_together(root: Path) -> None:
    """Measuring the one on another card would change the other: both are measured there."""
    (root / "README.md").write_text(block("first,second") + block("second,third"), encoding="utf-8")
    save(root, timed(root, "first"), timed(root, "second"))
    assert [list(plan_of(root, card).left.values()) for card in ("one", "two")] == [[0, 1], [2, 2]]


# -- run --------------------------------------------------------------------------------------------------------------


def test_a_run_measures_what_is_missing_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After it, nothing is left, the tree counts as clean, and `--check` finds nothing."""
    assert main(["--run"], root, FAKE) == 0
    assert processes(root) == ["speed:first speed:second speed:third"]
    assert main(["--run"], root, FAKE) == 0
    assert main([], root) == 0
    assert processes(root) == []
    capsys.readouterr()
    assert checked(root, capsys) == [
        "README.md:1: 2 results: 0 missing, 0 other method, 0 stale, 0 dirty, 0 mixed",
        "README.md:4: 1 results: 0 missing, 0 other method, 0 stale, 0 dirty, 0 mixed",
    ]


def test_chosen_pages_are_measured_with_what_shares_their_results(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of another page with one of their results is measured, too; the other tables are not, nor checked."""
    (root / "kernels" / "a.md").write_text(block("first"), encoding="utf-8")
    commit(root)
    assert main(["--run", "kernels/a.md"], root, FAKE) == 0
    assert processes(root) == ["speed:first speed:second"]
    assert main(["--check", "kernels/a.md"], root) == 0
    assert main(["--check"], root) == 1
    capsys.readouterr()
    assert main(["--run", "kernels/b.md"], root, FAKE) == 2
    assert "no page is 'kernels/b.md'; write the path from" in capsys.readouterr().err
    (root / "kernels" / "b.md").write_text("No table.\n", encoding="utf-8")
    assert main(["--check", "kernels/b.md"], root) == 2
    assert capsys.readouterr().err == "kernels/b.md has no table of measured results\n"


def test_a_chosen_table_is_measured_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named by its line, as the check names it; another line than those of tables is refused."""
    assert main(["--run", "README.md:4"], root, FAKE) == 0
    assert processes(root) == ["speed:third"]
    capsys.readouterr()
    assert main(["--check", "README.md:4"], root) == 0
    assert "README.md:1" not in capsys.readouterr().out
    assert main(["--run", "README.md:3"], root, FAKE) == 2
    line = "README.md:3 has no table of measured results; the page has some at the lines 1, 4\n"
    assert capsys.readouterr().err == line
    assert main(["--run", "READ.md:4"], root, FAKE) == 2
    assert "no page is 'READ.md:4'; write the path from" in capsys.readouterr().err


def test_failures_are_results(root: Path) -> None:
    """A wrong output is saved, ends its table, and is not an error of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_OUTCOME", "wrong")
        assert main(["--run"], root, FAKE) == 0
    assert len(processes(root)) == 1
    assert [*plan_of(root).left.values()] == [0, 0]


def use_cards(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    """Let there be these GPUs, whose cards have the same names."""
    gpus = [Gpu("NVIDIA H200", uuid, (9, 0), "580", "13.0") for uuid in uuids]
    monkeypatch.setattr(measure, "find_gpus", lambda: gpus)
    monkeypatch.setattr(measure, "hash_of_gpu", lambda _cache, gpu: gpu.uuid)
    monkeypatch.delenv("FAKE_CARD")


def test_several_gpus_measure_at_the_same_time(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a process of its own, and each table is of one of them."""
    use_cards(monkeypatch, "GPU-1", "GPU-2")
    monkeypatch.setenv("FAKE_TOGETHER", "2")
    assert main(["--run"], root, FAKE) == 0
    assert sorted(processes(root)) == ["speed:first speed:second", "speed:third"]
    cards = {name: {each.machine.gpu_hash for each in saved(root, name) if each.machine} for name in ("first", "third")}
    assert cards == {"first": {"GPU-1"}, "third": {"GPU-2"}}
    assert "2 pieces, about 0 minutes" in capsys.readouterr().out
    assert main(["--check"], root) == 0


def test_a_table_stays_with_the_card_that_began_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another one has measured of it could not be kept."""
    use_cards(monkeypatch, "GPU-1", "GPU-2")
    save(root, timed(root, "first", machine=MachineIdentity("host", "GPU-2")))
    plan = make_plan(ShownPages(root), read_source(root), ("GPU-1", "GPU-2"))
    assert {piece.card: [each.variant for each in piece.results] for piece in plan.pieces} == {
        "GPU-1": ["third"],
        "GPU-2": ["second"],
    }


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_processes(
    root: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    """They save what they have first."""
    use_cards(monkeypatch, "GPU-1", "GPU-2")
    monkeypatch.setenv("FAKE_SLOW", "third")
    log = root.parent / "log"

    def interrupt() -> None:
        while not (log.exists() and "third" in log.read_text(encoding="utf-8")):
            time.sleep(0.05)
        os.kill(os.getpid(), sent)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        main(["--run"], root, FAKE)
    interrupting.join()
    assert len(saved(root, "third")) == 1


def test_after_another_card_a_table_starts_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first card has measured of a table that is not done is measured again; a table that is done stays."""
    save(root, timed(root, "first"), timed(root, "third"))
    use_card(monkeypatch, "two")
    assert main(["--run"], root, FAKE) == 0
    assert processes(root) == ["speed:first speed:second"]


def test_a_piece_is_interrupted_at_its_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It saves what it has; the next run continues there."""
    monkeypatch.setenv("FAKE_SLOW", "second")
    monkeypatch.setattr(measure, "LIMIT_SECONDS", measure.SAVE_SECONDS + 3.0)
    assert main(["--run"], root, FAKE) == 0
    assert "1/1: interrupted after 3 s; what it saved is kept: artifacts/measure/1.log" in capsys.readouterr().out


def test_a_run_ends_in_time(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A piece that is expected to take longer than what is left is not begun; a short one behind it is.

    A later run begins with the long one.
    """
    short = f"<!-- fa-findings of=bottlenecks {WORDS} cases={SHAPE} variants=third -->\n<!-- /fa-findings -->\n"
    (root / "README.md").write_text(block("first") + block("second", SMALL_SHAPE) + short, encoding="utf-8")
    commit(root)
    capsys.readouterr()
    earlier = Source("0" * 40, dirty=False, origin="git")
    costs = Costs(0.0, 250.0, 0.0)
    save(root, timed(root, "first", costs=costs, source=earlier))
    save(root, timed(root, "second", SMALL_SHAPE, costs=costs, source=earlier))
    assert main(["--run", "--seconds=300"], root, FAKE) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 3 pieces are left: run the same command again"
    assert processes(root) == ["speed:first", "profile:third"]
    assert main(["--run"], root, FAKE) == 0
    assert processes(root) == ["speed:second"]


def test_what_could_not_be_measured_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that ends without results is no success."""
    assert main(["--run"], root, (sys.executable, "-c", "raise SystemExit(4)")) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "1/1: exit status 4: artifacts/measure/1.log",
        *(f"not measured: speed of {name} at {SHAPE}" for name in ("first", "second", "third")),
    ]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("dirty", "the tree has uncommitted changes outside of profiles/: commit them"),
        ("no git", "has no commit"),
        ("no GPU", "no GPU: the tables are measured on nvidia-h200"),
        ("another GPU", "this GPU is NVIDIA B200, the tables are of nvidia-h200"),
    ],
)
def test_a_run_that_cannot_count_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil: str, words: str
) -> None:
    """One sentence says why, and nothing is run."""
    if spoil == "dirty":
        (root / "kernels" / "first" / "own.h").write_text("int x = 2;\n", encoding="utf-8")
    elif spoil == "no git":
        shutil.rmtree(root / ".git")
    else:
        gpus = [Gpu("NVIDIA B200", "GPU-2", (10, 0), "580", "13.0")] if spoil == "another GPU" else []
        monkeypatch.setattr(measure, "find_gpus", lambda: gpus)
    read_source.cache_clear()
    assert main(["--run"], root, FAKE) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert words in sentence
    assert processes(root) == []


# -- prune ------------------------------------------------------------------------------------------------------------


def test_old_results_that_no_page_shows_are_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures and results of the sources of today stay, and times that count or that something needs."""
    source = Source(git(root, "rev-parse", "HEAD"), dirty=False, origin="git")
    unconfirmed = msgspec.structs.replace(speed(2.0), outside=None)
    uncommitted = msgspec.structs.replace(source, dirty=True)
    save(root, timed(root, "first"), timed(root, "second", speed=unconfirmed))  # the table shows both
    for name in ("first", "second", "third"):
        save(root, timed(root, name, SMALL_SHAPE, speed=unconfirmed))
        old = record(name, f"{SHAPE}-seed1", "correct", check=OK, environment=ENVIRONMENT, source=source)
        save(root, old, msgspec.structs.replace(old, id=f"{name}-{SHAPE}-seed2"))
    wrong = msgspec.structs.replace(old, id=f"third-{SHAPE}-seed3", outcome=Outcome.WRONG)
    save(root, wrong)
    save(root, timed(root, "gone"), timed(root, "gone", SMALL_SHAPE, source=uncommitted))
    save(root, timed(root, "baseline", SMALL_SHAPE, role="baseline", speed=unconfirmed))
    save(root, timed(root, "long_shapes", SMALL_SHAPE, speed=unconfirmed))  # `auto` is fitted from it
    save(root, timed(root, "gated", kind="gate", speed=None))
    for name in ("second", "third"):
        (root / "kernels" / name / "kernel.cu").write_text("int changed;\n", encoding="utf-8")
    commit(root)
    folder = root / "profiles" / "nvidia-h200"
    assert main(["--prune"], root) == 0
    removed = {"gone": "1 of 2", "second": "3 of 4", "third": "3 of 4"}
    lines = [f"profiles/nvidia-h200/{name}.jsonl: {count} results removed" for name, count in removed.items()]
    assert capsys.readouterr().out.splitlines() == lines
    kept = {path.stem: [saved.kind for saved in read_records(path)] for path in sorted(folder.glob("*.jsonl"))}
    assert kept == {
        "baseline": ["speed"],
        "first": ["correct", "correct", "speed", "speed"],
        "gated": ["gate"],
        "gone": ["speed"],
        "long_shapes": ["speed"],
        "second": ["speed"],
        "third": ["correct"],
    }
    assert main(["--prune"], root) == 0
    assert capsys.readouterr().out.splitlines() == ["nothing to remove"]


def test_a_file_that_cannot_be_read_is_not_pruned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file stays as it is, and the error names it."""
    save(root, timed(root, "third", SMALL_SHAPE, speed=msgspec.structs.replace(speed(2.0), outside=None)))
    path = root / "profiles" / "nvidia-h200" / "third.jsonl"
    path.write_bytes(content := path.read_bytes() + b"no record\n" * 1000)
    assert main(["--prune"], root) == 2
    assert "third.jsonl" in capsys.readouterr().err
    assert path.read_bytes() == content


# -- check ------------------------------------------------------------------------------------------------------------


def faults(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The faults that `--check` names, without the first words of their rows."""
    return [line.strip() for line in checked(root, capsys) if line.startswith("  ")]


def test_missing_results_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each table has its counts, and each result without a record its line."""
    save(root, timed(root, "first"), timed(root, "third"))
    assert checked(root, capsys) == [
        "README.md:1: 2 results: 1 missing, 0 other method, 0 stale, 0 dirty, 0 mixed",
        f"  missing: speed of second at {SHAPE}: no record",
        "README.md:4: 1 results: 0 missing, 0 other method, 0 stale, 0 dirty, 0 mixed",
    ]


@pytest.mark.parametrize(
    ("changes", "fault", "reason"),
    [
        ({"source": ("0" * 40, False)}, "stale", "commit unknown"),
        ({"source": (None, None)}, "stale", "commit unknown"),
        ({"source": ("", True)}, "dirty", "from a tree with uncommitted changes"),
        ({"machine": None}, "mixed", "card unknown"),
        ({"speed": msgspec.structs.replace(speed(2.0), outside=None)}, "other method", "without the judge's clock"),
    ],
)
def test_a_record_that_does_not_count_is_named(
    root: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], fault: str, reason: str
) -> None:
    """Its line has the day and the commit of the record, and the reason."""
    head = git(root, "rev-parse", "HEAD")
    if "source" in changes:
        own, dirty = changes["source"]
        changes = {"source": Source(head if own == "" else own, dirty, "git")}
    record = timed(root, "third", **changes)
    save(root, timed(root, "first"), timed(root, "second"), record)
    day = f"2026-11-29, commit {(record.source.commit or 'unknown')[:8]}"
    assert faults(root, capsys) == [f"{fault}: speed of third at {SHAPE} ({day}): {reason}"]


def test_an_earlier_schema_is_another_method(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its record is not missing, and cannot be read."""
    save(root, timed(root, "first"), timed(root, "second"), timed(root, "third"))
    line = msgspec.json.encode(msgspec.structs.replace(timed(root, "third"), schema=SCHEMA - 1))
    (root / "profiles" / "nvidia-h200" / "third.jsonl").write_bytes(line + b"\n")
    assert faults(root, capsys) == [f"other method: speed of third at {SHAPE}: its record has an earlier schema"]


def test_rows_of_two_cards_or_commits_are_mixed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that differ from most rows of their table are named; tables may differ from each other."""
    (root / "README.md").write_text(f"{block('first,second,third')}{block('third')}", encoding="utf-8")
    first = timed(root, "first")
    second = timed(root, "second")
    save(root, first, second, timed(root, "third", machine=MachineIdentity("host", "two")))
    (fault,) = faults(root, capsys)
    assert fault.endswith("card two, most are of one")
    other = commit(root)
    save(root, timed(root, "third"))
    (fault,) = faults(root, capsys)
    most = str(first.source.commit)[:8]
    assert fault == f"mixed: speed of third at {SHAPE} (2026-11-29, commit {other[:8]}): most are of commit {most}"


@pytest.mark.parametrize(
    ("path", "old", "new", "changed"),
    [
        ("first/kernel.cu", "kernel()", "kernel2()", "kernels/first/kernel.cu changed"),
        ("first/own.h", "x = 1", "x = 2", "kernels/first/own.h changed"),
        ("include/shared.h", "x = 3", "x = 4", "kernels/include/shared.h changed"),
        ("first/variant.yaml", "BLOCK: 1", "BLOCK: 2", "kernels/first/variant.yaml changed"),
        ("first/own.h", "// one", "// two", ""),
        ("first/variant.yaml", "a test's variant", "another step", ""),
        ("first/note.md", "", "a note", ""),
    ],
)
def test_changed_sources_make_a_row_stale(
    root: Path, capsys: pytest.CaptureFixture[str], path: str, old: str, new: str, changed: str
) -> None:
    """Code, headers that it includes, and defines count; comments and prose do not."""
    folder = root / "kernels"
    (folder / "include").mkdir()
    (folder / "include" / "shared.h").write_text("int x = 3;\n", encoding="utf-8")
    (folder / "first" / "own.h").write_text('#include "shared.h"\nint x = 1;  // one\n', encoding="utf-8")
    (folder / "first" / "variant.yaml").write_text(f"{MANIFEST}defines: {{BLOCK: 1}}\n", encoding="utf-8")
    (folder / "first" / "note.md").write_text("", encoding="utf-8")
    commit(root)
    save(root, *(timed(root, name) for name in ("first", "second", "third")))
    text = (folder / path).read_text(encoding="utf-8")
    assert old in text
    (folder / path).write_text(text.replace(old, new) if old else new, encoding="utf-8")
    commit(root)
    assert [fault.partition("): ")[2] for fault in faults(root, capsys)] == ([changed] if changed else [])


@pytest.mark.parametrize(
    ("path", "old", "new", "may_be_same"),
    [
        ("kernels/first/kernel.cu", "kernel()", "kernel2()", True),
        ("kernels/include/shared.h", "x = 3", "x = 4", True),
        ("kernels/first/variant.yaml", "BLOCK: 1", "BLOCK: 2", True),
        ("kernels/first/variant.yaml", "BLOCK: 1}", "BLOCK: 1}\ntolerance: fp8", False),  # another judgement
        ("pytest_fa/include/interface.h", "x = 5", "x = 6", False),  # both are built with that of today
    ],
)
@pytest.mark.parametrize("is_same", [True, False])
def test_changed_sources_with_the_same_code_do_not_count(
    root: Path, path: str, old: str, new: str, *, may_be_same: bool, is_same: bool
) -> None:
    """Both are built, if only sources and defines of the kernels folder changed."""
    files = {
        "kernels/include/shared.h": "int x = 3;\n",
        "pytest_fa/include/interface.h": "int x = 5;\n",
        "kernels/first/own.h": '#include "shared.h"\n#include "interface.h"\n',
        "kernels/first/variant.yaml": f"{MANIFEST}defines: {{BLOCK: 1}}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    before = commit(root)
    build = msgspec.structs.replace(BUILD, variant="first")
    save(root, timed(root, "first", builds=(build,)), timed(root, "second"), timed(root, "third"))
    text = (root / path).read_text(encoding="utf-8")
    assert old in text
    (root / path).write_text(text.replace(old, new), encoding="utf-8")
    commit(root)
    asked: list[tuple[str, str, str]] = []

    def same_code(variant: Variant, since: str, arch: str) -> bool:
        asked.append((variant.name, since, arch))
        return is_same

    _, number = check_lines(ShownPages(root, same_code=same_code))
    assert (number, asked) == (int(not (is_same and may_be_same)), [("first", before, "sm_90a")] * may_be_same)


@pytest.mark.parametrize("is_same", [True, False])
def test_the_variants_of_a_file_may_have_the_same_code(
    root: Path, monkeypatch: pytest.MonkeyPatch, *, is_same: bool
) -> None:
    """A JSON file is not stale if the code of its variants, for the GPU that measured it, is as it was."""
    monkeypatch.setitem(FILES, "unseen.json", MeasuredFile((), 1, (), ("first",)))
    before = commit(root)
    origin = FileOrigin(ENVIRONMENT, Source(before, False, ""))
    (root / "unseen.json").write_bytes(msgspec.json.encode(origin))
    source = root / "kernels" / "first" / "kernel.cu"
    source.write_text(source.read_text(encoding="utf-8").replace("kernel()", "kernel2()"), encoding="utf-8")
    commit(root)
    asked: list[tuple[str, str, str]] = []

    def same_code(variant: Variant, since: str, arch: str) -> bool:
        asked.append((variant.name, since, arch))
        return is_same

    pages = ShownPages(root, same_code=same_code)
    stale = [fault.kind for fault in file_faults("unseen.json", pages.variants, pages.history())]
    assert (stale, asked) == ([] if is_same else ["stale"], [("first", before, "sm_90a")])


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_code_is_compared_with_that_of_a_commit(root: Path, shared_cache: Path) -> None:
    """Another name in a source gives the same code, another factor does not, nor does a commit without the variant."""
    without = git(root, "rev-parse", "HEAD")
    shutil.copytree(REPOSITORY / "kernels" / "minimal", root / "kernels" / "minimal")
    shutil.copytree(REPOSITORY / "kernels" / "include", root / "kernels" / "include")
    since = commit(root)
    same_code = compare_builds(shared_cache)
    source = root / "kernels" / "minimal" / "kernel.cu"
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace("q_scale", "scale_of_q"), encoding="utf-8")
    minimal = ShownPages(root).variants["minimal"]
    assert [same_code(minimal, commit_of, "sm_90a") for commit_of in (since, without)] == [True, False]
    source.write_text(text.replace("args.scale * CUDART_L2E_F", "args.scale * 1.5f"), encoding="utf-8")
    assert not compare_builds(shared_cache)(minimal, since, "sm_90a")


def test_equal_hashes_prove_that_a_source_is_unchanged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the commit may be unknown; with the hash of another file, it may not."""
    paths = [f"kernels/third/{name}" for name in ("kernel.cu", "own.h", "variant.yaml")]
    sources = {path: hashlib.sha256((root / path).read_bytes()).hexdigest() for path in paths}
    unknown = Source(None, dirty=False, origin="none")
    save(
        root,
        *(timed(root, name) for name in ("first", "second")),
        timed(root, "third", sources=sources, source=unknown),
    )
    assert faults(root, capsys) == []
    save(root, timed(root, "third", sources=sources | {paths[0]: "0" * 64}, source=unknown))
    assert [fault.partition(":")[0] for fault in faults(root, capsys)] == ["stale"]


@pytest.mark.parametrize(
    ("name", "old", "new", "is_equal"),
    [
        ("kernel.cu", 'asm("a // b"); // c', 'asm("a // b");', True),
        ("kernel.cu", 'asm("a // b");', 'asm("a // c");', False),
        ("entry.py", '"""One."""\nx = 1', '"""Two."""\nx = 1  # one', True),
        ("entry.py", "x = 1", "x = 2", False),
        ("planted.yaml", "variants: {mine: {omits: a}, other: {omits: b}}", "variants: {mine: {omits: a}}", True),
        ("planted.yaml", "variants: {mine: {omits: a}}", "variants: {mine: {omits: b}}", False),
        ("entry.py", "x = (", "x =  (", False),
        ("variant.yaml", "- a", "-  a", False),
        ("data.txt", "a", "a ", False),
    ],
)
def test_what_of_a_file_counts(name: str, old: str, new: str, *, is_equal: bool) -> None:
    """Comments, docstrings and other variants do not; of a file that cannot be parsed, every character does."""
    assert (essence(name, old, "mine") == essence(name, new, "mine")) is is_equal


def test_files_have_their_origin_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON file that a table shows can be missing, stale or dirty, and is measured by its own command."""
    (root / "README.md").write_text(
        "<!-- fa-file profiles/nvidia-h200/noise.json -->\n<!-- /fa-file -->\n", encoding="utf-8"
    )
    file = "profiles/nvidia-h200/noise.json"
    assert faults(root, capsys) == [f"missing: {file}: no such file"]
    (piece,) = plan_of(root).pieces
    assert piece.command[1:] == ("-m", "pytest_fa", "noise", "--profiles=profiles")
    (root / "profiles" / "nvidia-h200").mkdir(parents=True)
    origin = FileOrigin(ENVIRONMENT, Source(commit(root), dirty=True, origin="git"), "2026-11-29T00:00:00")
    (root / file).write_bytes(msgspec.json.encode(origin))
    (fault,) = faults(root, capsys)
    assert fault.startswith(f"dirty: {file} (2026-11-29, commit ")
    clean = msgspec.structs.replace(origin, source=Source(commit(root), dirty=False, origin="git"))
    (root / file).write_bytes(msgspec.json.encode(clean))
    assert plan_of(root).pieces == ()


def test_a_file_of_this_commit_is_done_without_a_repository(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the tree with a stamp cannot say what changed since a commit, but knows its own."""
    monkeypatch.setitem(FILES, "noise.json", MeasuredFile((), 1, ("README.md",)))
    (root / "README.md").write_text(
        "<!-- fa-file profiles/nvidia-h200/noise.json -->\n<!-- /fa-file -->\n", encoding="utf-8"
    )
    (root / "profiles" / "nvidia-h200").mkdir(parents=True)
    source = Source(commit(root), dirty=False, origin="stamp")
    origin = FileOrigin(ENVIRONMENT, source, "2026-11-29T00:00:00")
    (root / "profiles" / "nvidia-h200" / "noise.json").write_bytes(msgspec.json.encode(origin))
    shutil.rmtree(root / ".git")
    assert make_plan(ShownPages(root), source).pieces == ()
    (piece,) = make_plan(ShownPages(root), msgspec.structs.replace(source, commit="0" * 40)).pieces
    assert piece.file == "profiles/nvidia-h200/noise.json"


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("<!-- fa-variants x -->\n", "README.md: 1 tables are opened, 0 of them are closed"),
        (block("first", columns="variant").replace("cases", "case"), "README.md: profiles=profiles/nvidia-h200 case="),
        (block("nobody"), "README.md: there is no variant nobody"),
        (block("first", "b1"), "README.md: case 'b1-seed0' is malformed"),
    ],
)
@pytest.mark.parametrize("arguments", [["--check"], []])
def test_a_table_that_cannot_be_read_is_no_success(
    root: Path, capsys: pytest.CaptureFixture[str], page: str, words: str, arguments: list[str]
) -> None:
    """The exit status is 2, and one sentence names the page."""
    (root / "README.md").write_text(page, encoding="utf-8")
    assert main(arguments, root) == 2
    assert words in capsys.readouterr().err


def test_a_line_that_is_no_record_is_no_success(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It could be the record of a row."""
    save(root, timed(root, "first"))
    with (root / "profiles" / "nvidia-h200" / "first.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{\n")
    assert main(["--check"], root) == 2
    assert "1 of 2 lines cannot be read" in capsys.readouterr().err


def test_a_folder_without_pages_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside of the repository's root folder, there is nothing that could be current."""
    assert main(["--check"], tmp_path) == 2
    assert "no page in" in capsys.readouterr().err
