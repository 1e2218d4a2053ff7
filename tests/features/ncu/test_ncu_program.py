"""A job under Nsight Compute: the command, the retries, the report, and the messages of failures."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from pytest_fa.features.ncu import ncu_program as ncu
from pytest_fa.features.ncu import presets
from pytest_fa.features.ncu.index import add_entry, read_index
from pytest_fa.features.ncu.ncu_program import NcuProgram, NcuTarget, profile
from pytest_fa.features.ncu.nsight import Nsight, base_name, foreign_kernels
from pytest_fa.features.ncu.nsight_report import DURATION, CountedKernel, NsightReport
from pytest_fa.features.ncu.presets import preset
from tests.factories import BUILD


@pytest.fixture
def target(tmp_path: Path) -> NcuTarget:
    """A target that is never started, because the fake ncu starts nothing."""
    return NcuTarget(("-m", "pytest_fa.server", "job.json"), "ws_p2-case", tmp_path / "out" / "ws_p2-case.verdict")


def run(fakes: Path, target: NcuTarget, capability: tuple[int, int] = (9, 0), **environment: str) -> NsightReport:
    """Profile once with the fake ncu, which replays recorded output."""
    tool = NcuProgram(fakes / "ncu", "2025.3.1", sudo=False, environment={**os.environ, **environment})
    return profile(tool, target, "verdict", preset("verdict", capability))


def test_a_report_is_written_and_read(fakes: Path, target: NcuTarget) -> None:
    """Report, CSV and log have fixed names, and the kernel has the requested counters and no others."""
    report = run(fakes, target)
    assert ("ok", "", "ncu 2025.3.1") == (report.status, report.message, report.tool)
    assert [report.report, report.table, report.log] == [
        str(target.stem.with_name(f"ws_p2-case.verdict.{suffix}")) for suffix in ("ncu-rep", "csv", "log")
    ]
    assert all(Path(path or "").is_file() for path in (report.report, report.table, report.log))
    (kernel,) = report.kernels
    assert kernel.counters[DURATION] == 9056.0
    assert "dram__cycles_active.avg" not in kernel.counters


def test_the_command_touches_no_setting(fakes: Path, target: NcuTarget) -> None:
    """The command ignores ncu's config file, filters by NVTX range, and changes neither clocks nor caches."""
    command = run(fakes, target).command
    expected = ["--config-file", "off", "--nvtx", "--nvtx-include", "pytest-fa@ws_p2-case"]
    assert expected == list(command[1:6])
    assert [command[command.index(flag) + 1] for flag in ("--clock-control", "--cache-control")] == ["none", "none"]
    assert command[command.index("-o") + 1].endswith(".ncu-rep")


@pytest.mark.parametrize(
    ("happening", "words"),
    [
        ("permission", "--ncu-sudo"),
        ("no-kernels", "the range filter did not match"),
        ("unsupported-runtime", "container runtime"),
        ("no-connection", "could not connect"),
        ("busy", "dcgmi profile --pause"),
        ("failed", "Unknown Error on device 0. (exit status 1)"),
        ("no-report", "wrote no report"),
        ("empty", "contains no kernel"),
    ],
)
def test_each_failure_has_a_sentence(fakes: Path, target: NcuTarget, happening: str, words: str) -> None:
    """A failure has its status, a message of one line, and no kernels."""
    report = run(fakes, target, FAKE_NCU=happening)
    assert (happening, ()) == (report.status, report.kernels)
    assert words in report.message
    assert "\n" not in report.message


def test_a_counter_that_the_chip_lacks_is_dropped_and_named(fakes: Path, target: NcuTarget) -> None:
    """If ncu rejects a counter, it runs again without that counter, which is then listed in `dropped`."""
    report = run(fakes, target, (8, 6), FAKE_NCU="bad-metric")
    assert ("ok", presets.TENSOR_HMMA) == (report.status, report.dropped[0])
    assert presets.TENSOR_HMMA not in " ".join(report.command)


def test_a_counter_that_ncu_omits_is_named(fakes: Path, target: NcuTarget) -> None:
    """Every requested counter is either in the report or in `dropped`."""
    report = run(fakes, target)
    requested = presets.preset("verdict", (9, 0)).metrics
    counted = {name for kernel in report.kernels for name in kernel.counters}
    assert report.dropped
    assert {*requested} == {*report.dropped, *counted} & {*requested}
    assert not counted & {*report.dropped}


def test_without_a_rejected_counter_nothing_is_dropped(fakes: Path, target: NcuTarget) -> None:
    """If ncu fails without naming a requested counter, `dropped` is empty."""
    report = run(fakes, target, (9, 0), FAKE_NCU="permission")
    assert report.dropped == ()


def test_a_lost_connection_is_tried_again_without_injection(fakes: Path, target: NcuTarget) -> None:
    """If ncu cannot connect, it runs once more with other injected libraries disabled."""
    assert run(fakes, target, FAKE_NCU="no-connection-once").status == "ok"


def test_sudo_only_where_asked(fakes: Path, target: NcuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `sudo`, ncu is started by `sudo -n env NAME=VALUE...` with only the variables that the process needs."""
    monkeypatch.setenv("A_SECRET", "x")
    tool = NcuProgram(fakes / "ncu", "1", sudo=True, environment={**os.environ, "PYTHONPATH": "/here"})
    command = profile(tool, target, "verdict", preset("verdict", (9, 0))).command
    assert command[:3] == ("sudo", "-n", "env")
    assert "PYTHONPATH=/here" in command
    assert not any("A_SECRET" in word for word in command)


# -- the trial ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fakes")
def test_the_trial_reads_a_counter_back(tmp_path: Path) -> None:
    """The trial is ok if the counters of its empty kernel, one block, can be read."""
    trial = Nsight(tmp_path, tmp_path, (9, 0), sudo=False).trial
    assert ("ok", 1.0) == (trial.status, trial.kernels[0].counters[presets.GRID])


@pytest.mark.usefixtures("fakes")
def test_after_a_failed_trial_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed trial, every profile has the trial's status and ncu is not started again."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("FAKE_NCU", "permission")
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    profiler = Nsight(tmp_path, tmp_path, (9, 0), sudo=False)
    reports = [profiler.run(None, "verdict", None) for _ in range(2)]  # type: ignore[arg-type]  # the job is not used
    assert ["permission"] * 2 == [report.status for report in reports]
    assert len(calls.read_text(encoding="utf-8").splitlines()) == 1


def test_without_ncu_the_trial_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ncu is not installed, the status of the trial is `not-installed`."""
    monkeypatch.setattr("pytest_fa.features.ncu.nsight.find_program", lambda _: None)
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
    """Kernel names are compared without types, because ptxas, c++filt and Nsight print types differently."""
    assert expected == base_name(name)


def test_a_foreign_kernel_is_named() -> None:
    """A kernel that is not in the variant's build is reported; without a build every kernel is allowed."""
    report = NsightReport(
        "ok", "", "verdict", "", 0.0, (), (CountedKernel("void kernel<int>(int)", {}), CountedKernel("gemm()", {}))
    )
    assert (["gemm"], []) == (foreign_kernels(report, BUILD), foreign_kernels(report, None))


# -- the index --------------------------------------------------------------------------------------------------------


def test_the_index_keeps_the_newest_of_each(tmp_path: Path) -> None:
    """The index has one entry for each id and preset, sorted, with the hash of the newest report."""
    (tmp_path / "x.ncu-rep").write_bytes(b"report")
    first = NsightReport("permission", "no", "verdict", "ncu 1", 1.0, ())
    second = NsightReport("ok", "", "verdict", "ncu 1", 2.0, (), report="x.ncu-rep")
    for item, report in (("b", first), ("a", first), ("b", second)):
        path = add_entry(tmp_path / "ncu", tmp_path, item, report, "2026-01-01T00:00:00+00:00")
    entries = read_index(path)
    sha256 = hashlib.sha256(b"report").hexdigest()
    assert [("a", "permission", None), ("b", "ok", sha256)] == [
        (entry.id, entry.status, entry.report_sha256) for entry in entries
    ]


def test_an_index_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    """An index that cannot be read is replaced by a new one."""
    (tmp_path / "index.json").write_text("{", encoding="utf-8")
    add_entry(tmp_path, tmp_path, "a", NsightReport("ok", "", "verdict", "", 0.0, ()), "")
    assert [each.id for each in read_index(tmp_path / "index.json")] == ["a"]


def test_the_report_module_is_found_where_nsight_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several installations, the report module of the program's own version is used, else that of the newest."""
    monkeypatch.setattr(ncu, "MODULE_PLACES", (f"{str(tmp_path).removeprefix('/')}/*/extras/python",))
    for version in ("2024.1.0", "2025.3.1", "2026.1.0"):
        folder = tmp_path / version / "extras" / "python"
        folder.mkdir(parents=True)
        (folder / "ncu_report.py").write_text("", encoding="utf-8")
    programs = [
        NcuProgram(Path("/nowhere/bin/ncu"), version, sudo=False, environment={})
        for version in ("2025.3.1.0", "2023.2")
    ]
    assert [program.report_folder for program in programs] == [
        str(tmp_path / version / "extras" / "python") for version in ("2025.3.1", "2026.1.0")
    ]


def test_a_tool_is_shown_without_its_environment() -> None:
    """The repr of a tool, which may appear in messages and logs, does not contain the user's environment."""
    assert "A_SECRET" not in repr(NcuProgram(Path("ncu"), "1", sudo=False, environment={"A_SECRET": "x"}))


NOTHING_READ = NsightReport("permission", "no", "verdict", "ncu 1", 1.0, ())


def test_an_index_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    """Entries that were written before `bottlenecks` had its name are read and stay in the file."""
    path = add_entry(tmp_path, tmp_path, "old", NOTHING_READ, "2026-11-21T00:00:00+00:00")
    path.write_text(path.read_text(encoding="utf-8").replace('"bottlenecks"', '"verdicts"'), encoding="utf-8")
    add_entry(tmp_path, tmp_path, "new", NOTHING_READ, "2026-11-22T00:00:00+00:00")
    assert [entry.id for entry in read_index(path)] == ["new", "old"]


def test_an_index_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    """An index of another program or a later version is renamed, not overwritten."""
    (tmp_path / "index.json").write_text("{}", encoding="utf-8")
    path = add_entry(tmp_path, tmp_path, "new", NOTHING_READ, "2026-11-22T00:00:00+00:00")
    assert [entry.id for entry in read_index(path)] == ["new"]
    assert (tmp_path / "index.unreadable.json").read_text(encoding="utf-8") == "{}"
