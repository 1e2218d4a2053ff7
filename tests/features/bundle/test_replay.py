"""Replaying a bundle: what is run, and when a build, a case or a gate counts as reproduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.features.bundle.bundle_manifest import BuildFacts, BundleManifest
from pytest_fa.features.bundle.commands import main
from pytest_fa.features.bundle.make import make_bundle
from pytest_fa.features.bundle.questions import REPLAY_LEVELS, ReplayLevel, ReplaySelection, commands_of, levels_of
from pytest_fa.features.bundle.replay import Replay, Replayed, _compare, replay_text
from pytest_fa.features.gate.gated import Gate
from pytest_fa.records.checks import Fingerprints
from pytest_fa.records.environment import read_environment
from pytest_fa.records.files import read_record_file
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, Source
from pytest_fa.records.source import read_source
from pytest_fa.records.written import WrittenRecords
from tests.factories import BUILD, record, right_record
from tests.written_runs import end_run

GATES = [
    each
    for each in read_record_file(Path(__file__).parents[3] / "profiles/nvidia-h200/cluster_latency.jsonl").records
    if Gate.of(each)
]
BUILT = msgspec.structs.replace(BUILD, code_identity="code")
MANIFEST = BundleManifest(
    schema=3,
    created="",
    source=Source(None, None, ""),
    source_tree="",
    left_out=(),
    environment=record().environment,
    versions={},
    differences_from_constraints=(),
    compilers=(BUILT.compiler,),
    builds={"ws_p2@BLOCK_M=64/sm_90a": BuildFacts("key", "code", "a host", "today")},
    records="artifacts/records/run.jsonl",
    written=WrittenRecords(1, "", 0, 0),
    pytest_exit_status=0,
    outcomes={},
)


def _answers(level: ReplayLevel, claimed: list[Record], new: list[Record]) -> list[tuple[str, str]]:
    return [(item.answer, item.reason) for item in _compare(level, MANIFEST, claimed, new)]


# -- what is run ------------------------------------------------------------------------------------------------------


def test_commands_of_builds() -> None:
    """All variants are compiled in one run, for the architectures of the bundle."""
    assert list(commands_of("build", [record(builds=(BUILT,))])) == [
        ["--fa-variant=ws_p2@BLOCK_M=64", "--fa-arch=sm_90a", "--fa-static"]
    ]
    assert list(commands_of("build", [record()])) == []


def test_commands_of_cases() -> None:
    """Variants with the same cases are judged in one run."""
    records = [
        record(variant, f"b1h1s{size}d64-fp16-seed0")
        for variant, sizes in {"a": (1, 2), "b": (2, 1), "c": (1,)}.items()
        for size in sizes
    ]
    assert [command[:2] for command in commands_of("right", records)] == [
        ["--fa-variant=a,b", "--fa-case=b1h1s1d64-fp16-seed0,b1h1s2d64-fp16-seed0"],
        ["--fa-variant=c", "--fa-case=b1h1s1d64-fp16-seed0"],
    ]


def test_commands_of_gates() -> None:
    """A gate is asked again with its ratio and shapes; the words of its rerun command are not executed."""
    record, gate = msgspec.structs.replace(GATES[0], rerun_command="rm -rf /"), Gate.of(GATES[0])
    assert gate is not None
    (command,) = commands_of("fast", [record])
    assert command[:2] == ["--fa-variant=cluster_latency", f"--fa-gate={gate.ratio:g}"]
    assert command[-2:] == ["-k", "test_gate"]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (ReplaySelection(), ["a 1", "a 2", "b 1", "gate"]),
        (ReplaySelection(variants=("a",)), ["a 1", "a 2"]),
        (ReplaySelection(cases=("*s1d64*",)), ["a 1", "b 1", "gate"]),
        (ReplaySelection(variants=("b", "cluster_*"), cases=("b1h1s2*",)), ["gate"]),
    ],
)
def test_a_selection(selection: ReplaySelection, expected: list[str]) -> None:
    """Globs select variants at every level; those of cases select judged cases only."""
    records = {
        "a 1": record("a", "b1h1s1d64-fp16-seed0"),
        "a 2": record("a", "b1h1s2d64-fp16-seed0"),
        "b 1": record("b", "b1h1s1d64-fp16-seed0"),
        "gate": GATES[0],
    }
    assert [name for name, each in records.items() if selection.has_record(each)] == expected


def test_all_levels() -> None:
    """`all` is every level for which the records have something; without a compiler that is not `build`."""
    everything = [record(builds=(BUILT,)), GATES[0]]
    assert levels_of("all", everything, use_libraries=False) == ["build", "right", "fast"]
    assert levels_of("all", everything, use_libraries=True) == ["right", "fast"]
    assert levels_of("all", [record()], use_libraries=False) == ["right"]
    assert levels_of("fast", [record()], use_libraries=False) == ["fast"]


# -- when something is reproduced -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({}, "REPRODUCED"),
        ({"code_identity": "other"}, "NOT REPRODUCED"),
        ({"code_identity": "other", "compiler": "13.1"}, "NOT COMPARABLE"),
        ({"code_identity": "code", "compiler": "13.1"}, "REPRODUCED"),
        ({"code_identity": None}, "NOT COMPARABLE"),
        ({"variant": "another"}, "NOT REPRODUCED"),
    ],
)
def test_builds(changes: dict[str, Any], answer: str) -> None:
    """Equal machine code is reproduced; other machine code only counts if the compiler is the same."""
    new = record(kind="build", builds=(msgspec.structs.replace(BUILT, **changes),))
    assert [each for each, _ in _answers("build", [], [new])] == [answer]


def _judged(outcome: Outcome = Outcome.OK, inputs: str = "in", output: str = "out") -> Record:
    return record(outcome=outcome, fingerprints=Fingerprints(inputs, output))


CASES = {
    "the same bits": (_judged(), ("REPRODUCED", "ok, the same output bit by bit")),
    "another output in bounds": (_judged(output="x"), ("REPRODUCED", "ok")),
    "another outcome": (_judged(Outcome.WRONG), ("NOT REPRODUCED", "the outcome was ok, here it is wrong")),
    "other inputs": (
        _judged(inputs="x"),
        ("NOT COMPARABLE", "the random numbers of this machine's torch give other inputs"),
    ),
    "not measured": (
        _judged(Outcome.NOT_MEASURED),
        ("NOT COMPARABLE", "it did not run here (no such device, or skipped)"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    """A case is reproduced if its outcome is the same on the same inputs."""
    result, expected = CASES[name]
    assert _answers("right", [_judged()], [result]) == [expected]


def test_a_case_that_is_missing_here() -> None:
    """A case that has no record here is not comparable: it is never counted as reproduced."""
    assert [each for each, _ in _answers("right", [_judged()], [])] == ["NOT COMPARABLE"]


def _gate_with(**changes: Any) -> Record:
    gate = Gate.of(GATES[0])
    assert gate is not None
    return msgspec.structs.replace(gate, **changes).to(GATES[0])


def test_gates() -> None:
    """The same verdict on the same GPU is reproduced, with both ratios; another one is not."""
    (answer,) = _answers("fast", [GATES[0]], [GATES[0]])
    assert answer[0] == "REPRODUCED"
    assert answer[1].startswith("PASS, here PASS; ")
    assert answer[1].endswith(", the intervals overlap")
    assert [each for each, _ in _answers("fast", [GATES[0]], [_gate_with(verdict="FAIL")])] == ["NOT REPRODUCED"]
    assert [each for each, _ in _answers("fast", [GATES[0]], [_gate_with(verdict="INCONCLUSIVE")])] == ["INCONCLUSIVE"]
    h100 = msgspec.structs.replace(GATES[0].environment, gpu="NVIDIA H100")
    other = msgspec.structs.replace(GATES[0], environment=h100)
    assert _answers("fast", [GATES[0]], [other]) == [("NOT COMPARABLE", "other GPUs: NVIDIA H200 and NVIDIA H100")]


def test_a_gate_that_ends_without_a_verdict_here() -> None:
    """A candidate that is wrong here contradicts the bundle; a machine on which the gate cannot run says nothing."""
    failed = msgspec.structs.replace(GATES[0], added={}, outcome=Outcome.WRONG, message="wrong: too slow\nmore")
    expected = ("NOT REPRODUCED", "the verdict was PASS, here the gate ended as wrong: too slow")
    assert _answers("fast", [GATES[0]], [failed]) == [expected]
    undecided = msgspec.structs.replace(failed, outcome=Outcome.INCONCLUSIVE, message="clocks changed")
    expected = ("INCONCLUSIVE", "the verdict was PASS, here there is none: clocks changed")
    assert _answers("fast", [GATES[0]], [undecided]) == [expected]
    skipped = msgspec.structs.replace(failed, outcome=Outcome.NOT_MEASURED)
    assert [each for each, _ in _answers("fast", [GATES[0]], [skipped])] == ["NOT COMPARABLE"]


@pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
def test_a_gate_without_a_verdict_in_the_bundle(verdict: str) -> None:
    """A verdict here neither repeats nor contradicts that of a gate which had none."""
    ((answer, reason),) = _answers("fast", [_gate_with(verdict="INCONCLUSIVE")], [_gate_with(verdict=verdict)])
    assert answer == "INCONCLUSIVE"
    assert reason.startswith(f"the bundle has no verdict, here it is {verdict}; ")


def test_text(snapshot: SnapshotAssertion) -> None:
    """Each item that was not reproduced has a line; the last line is the answer with the counts."""
    items = (Replayed("a", "REPRODUCED", "ok"), Replayed("b", "NOT COMPARABLE", "no GPU"))
    text = replay_text(Replay("x.tar.gz", "d", "right", "NOT COMPARABLE", items, None))
    assert snapshot == text


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return a bundle without builds, whose only record is a case of a variant that is not in it."""
    records = tmp_path / "tree/artifacts/records/run.jsonl"
    records.parent.mkdir(parents=True)
    read_source.cache_clear()
    line = right_record(environment=read_environment(), source=read_source(tmp_path / "tree"))
    records.write_bytes(msgspec.json.encode(line) + b"\n")
    return make_bundle(tmp_path / "tree", tmp_path / "tree/artifacts", end_run(records, 0), 0).archive


@pytest.mark.parametrize("level", [level for level in REPLAY_LEVELS if level != "right"])
def test_nothing_to_replay(archive: Path, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A level for which the bundle has nothing is an error, not a success."""
    assert main(["replay", str(archive), f"--level={level}"]) == 2
    assert f"has nothing to replay at level {level}" in capsys.readouterr().err


def test_a_selection_without_anything(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A selection that nothing fits is an error that names it."""
    assert main(["replay", str(archive), "--variant=nothing,none*"]) == 2
    assert "has nothing to replay at level right with --variant=nothing,none*" in capsys.readouterr().err


def test_a_bundle_without_kernels(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle that does not contain the variants of its records cannot be replayed."""
    assert main(["replay", str(archive)]) == 2
    assert "the bundle has no <folder>/<variant>/variant.yaml" in capsys.readouterr().err
