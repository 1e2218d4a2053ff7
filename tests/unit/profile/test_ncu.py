"""Nsight Compute around a job: the command, the retries, what is read, what is said when it fails."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pytest_fa.profile import ncu, presets
from pytest_fa.profile.index import add_entry, read_index
from pytest_fa.profile.ncu import NcuProgram, NcuTarget, profile
from pytest_fa.profile.nsight import Nsight, base_name, foreign_kernels
from pytest_fa.profile.presets import preset
from pytest_fa.records.tool_results import DURATION, CountedKernel, NsightReport
from tests.factories import BUILD


@pytest.fixture
def target(tmp_path: Path) -> NcuTarget:
    """A job that is never started: the program that plays ncu starts nothing."""
    return NcuTarget(("-m", "pytest_fa.worker", "job.json"), "ws_p2-case", tmp_path / "out" / "ws_p2-case.verdict")


def run(fakes: Path, target: NcuTarget, capability: tuple[int, int] = (9, 0), **environment: str) -> NsightReport:
    """One profile under the program that plays ncu."""
    tool = NcuProgram(fakes / "ncu", "2025.3.1", sudo=False, environment={**os.environ, **environment})
    return profile(tool, target, "verdict", preset("verdict", capability))


def test_a_report_is_written_and_read(fakes: Path, target: NcuTarget) -> None:
    """Report, CSV and log under fixed names; the counters that were asked for and no others; the tool."""
    found = run(fakes, target)
    assert ("ok", "", "ncu 2025.3.1") == (found.status, found.message, found.tool)
    assert [found.report, found.table, found.log] == [
        str(target.stem.with_name(f"ws_p2-case.verdict.{suffix}")) for suffix in ("ncu-rep", "csv", "log")
    ]
    assert all(Path(path or "").is_file() for path in (found.report, found.table, found.log))
    (kernel,) = found.kernels
    assert kernel.counters[DURATION] == 9056.0
    assert "dram__cycles_active.avg" not in kernel.counters


def test_the_command_touches_no_setting(fakes: Path, target: NcuTarget) -> None:
    """Own config off, our NVTX range, clocks and caches left alone, a suffix that is written out."""
    command = run(fakes, target).command
    expected = ["--config-file", "off", "--nvtx", "--nvtx-include", "pytest-fa@ws_p2-case"]
    assert expected == list(command[1:6])
    assert [command[command.index(flag) + 1] for flag in ("--clock-control", "--cache-control")] == ["none", "none"]
    assert command[command.index("-o") + 1].endswith(".ncu-rep")


@pytest.mark.parametrize(
    ("happening", "words"),
    [
        ("permission", "--ncu-sudo"),
        ("no-kernels", "the filter missed it"),
        ("unsupported-runtime", "container's runtime"),
        ("no-connection", "could not connect"),
        ("busy", "dcgmi profile --pause"),
        ("failed", "Unknown Error on device 0. (exit status 1)"),
        ("no-report", "wrote no report"),
        ("empty", "holds no kernel"),
    ],
)
def test_each_failure_is_said_in_a_sentence(fakes: Path, target: NcuTarget, happening: str, words: str) -> None:
    """The status, its words, and no figure."""
    found = run(fakes, target, FAKE_NCU=happening)
    assert (happening, ()) == (found.status, found.kernels)
    assert words in found.message
    assert "\n" not in found.message


def test_a_counter_that_the_chip_lacks_is_dropped_and_named(fakes: Path, target: NcuTarget) -> None:
    """The run is repeated without it."""
    found = run(fakes, target, (8, 6), FAKE_NCU="bad-metric")
    assert ("ok", presets.TENSOR_HMMA) == (found.status, found.dropped[0])
    assert presets.TENSOR_HMMA not in " ".join(found.command)


def test_a_counter_left_out_in_silence_is_named(fakes: Path, target: NcuTarget) -> None:
    """Each that was asked for is in the report or among the dropped, and none is both."""
    found = run(fakes, target)
    asked = presets.preset("verdict", (9, 0)).metrics
    counted = {name for each in found.kernels for name in each.counters}
    assert found.dropped
    assert {*asked} == {*found.dropped, *counted} & {*asked}
    assert not counted & {*found.dropped}


def test_a_bad_counter_that_nobody_names_ends_it(fakes: Path, target: NcuTarget) -> None:
    """Where the name is none of ours, nothing is dropped."""
    found = run(fakes, target, (9, 0), FAKE_NCU="permission")
    assert found.dropped == ()


def test_a_lost_connection_is_tried_again_without_injection(fakes: Path, target: NcuTarget) -> None:
    """Another library that injects itself may be in the way: once more without."""
    assert run(fakes, target, FAKE_NCU="no-connection-once").status == "ok"


def test_sudo_only_where_asked(fakes: Path, target: NcuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo -n env NAME=VALUE... ncu`, with what the child needs and nothing that is secret."""
    monkeypatch.setenv("A_SECRET", "x")
    tool = NcuProgram(fakes / "ncu", "1", sudo=True, environment={**os.environ, "PYTHONPATH": "/here"})
    command = profile(tool, target, "verdict", preset("verdict", (9, 0))).command
    assert command[:3] == ("sudo", "-n", "env")
    assert "PYTHONPATH=/here" in command
    assert not any("A_SECRET" in word for word in command)


# -- the run's profiler ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fakes")
def test_the_probe_reads_a_counter_back(tmp_path: Path) -> None:
    """The probe is fine once its one block and its time came back."""
    probe = Nsight(tmp_path, tmp_path, (9, 0), sudo=False).trial
    assert ("ok", 1.0) == (probe.status, probe.kernels[0].counters[presets.GRID])


@pytest.mark.usefixtures("fakes")
def test_a_failed_probe_ends_all_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started once it is known that nothing can be counted."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("FAKE_NCU", "permission")
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    profiler = Nsight(tmp_path, tmp_path, (9, 0), sudo=False)
    found = [profiler.run(None, "verdict", None) for _ in range(2)]  # type: ignore[arg-type]  # the job is not looked at
    assert ["permission"] * 2 == [each.status for each in found]
    assert len(calls.read_text(encoding="utf-8").splitlines()) == 1


def test_without_ncu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program, no promise."""
    monkeypatch.setattr("pytest_fa.profile.nsight.find_program", lambda _: None)
    assert Nsight(tmp_path, tmp_path, (9, 0), sudo=False).trial.status == "not-installed"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void flash::attention_kernel<__half, (int)64>(FaForwardArgs)", "attention_kernel"),
        ("attention_kernel(FaForwardArgs)", "attention_kernel"),
        ("void (anonymous namespace)::k<1>(int)", "k"),
        ("kernel<fp16, 64>", "kernel"),
    ],
)
def test_names_are_compared_without_their_types(name: str, expected: str) -> None:
    """ptxas, c++filt and Nsight print types each in their own way."""
    assert expected == base_name(name)


def test_a_kernel_of_another_is_named() -> None:
    """A build's report holds the build's kernels; a Python entry may launch whose it likes."""
    found = NsightReport(
        "ok", "", "verdict", "", 0.0, (), (CountedKernel("void kernel<int>(int)", {}), CountedKernel("gemm()", {}))
    )
    assert (["gemm"], []) == (foreign_kernels(found, BUILD), foreign_kernels(found, None))


# -- the index --------------------------------------------------------------------------------------------------------


def test_the_index_keeps_the_newest_of_each(tmp_path: Path) -> None:
    """One entry for each id and preset, sorted, with the report's hash."""
    (tmp_path / "x.ncu-rep").write_bytes(b"report")
    first = NsightReport("permission", "no", "verdict", "ncu 1", 1.0, ())
    second = NsightReport("ok", "", "verdict", "ncu 1", 2.0, (), report="x.ncu-rep")
    for item, found in (("b", first), ("a", first), ("b", second)):
        path = add_entry(tmp_path / "ncu", tmp_path, item, found, "2026-01-01T00:00:00+00:00")
    entries = read_index(path)
    sha256 = hashlib.sha256(b"report").hexdigest()
    assert [("a", "permission", None), ("b", "ok", sha256)] == [
        (each.id, each.status, each.report_sha256) for each in entries
    ]


def test_an_index_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    """A broken file costs its entries, not the run."""
    (tmp_path / "index.json").write_text("{", encoding="utf-8")
    add_entry(tmp_path, tmp_path, "a", NsightReport("ok", "", "verdict", "", 0.0, ()), "")
    assert [each.id for each in read_index(tmp_path / "index.json")] == ["a"]


def test_the_report_module_is_found_where_nsight_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may be a script elsewhere: of several installations the one of its version, else the newest."""
    monkeypatch.setattr(ncu, "MODULE_PLACES", (f"{str(tmp_path).removeprefix('/')}/*/extras/python",))
    for version in ("2024.1.0", "2025.3.1", "2026.1.0"):
        folder = tmp_path / version / "extras" / "python"
        folder.mkdir(parents=True)
        (folder / "ncu_report.py").write_text("", encoding="utf-8")
    found = [
        NcuProgram(Path("/nowhere/bin/ncu"), version, sudo=False, environment={})
        for version in ("2025.3.1.0", "2023.2")
    ]
    assert [tool.report_folder for tool in found] == [
        str(tmp_path / version / "extras" / "python") for version in ("2025.3.1", "2026.1.0")
    ]


def test_a_tool_is_shown_without_its_environment() -> None:
    """What a message or a log may hold says nothing of a user's environment."""
    assert "A_SECRET" not in repr(NcuProgram(Path("ncu"), "1", sudo=False, environment={"A_SECRET": "x"}))
