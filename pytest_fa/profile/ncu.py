"""Nsight Compute around one job: the command, what it wrote, and a status for every way to fail."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.profile.ncu_status import SENTENCES, last_error, read_status, unknown_metrics
from pytest_fa.profile.presets import STALLS, Preset, stall_samples
from pytest_fa.profile.programs import ProgramRun, run_tool
from pytest_fa.profile.raw_table import read_raw_table
from pytest_fa.records.tool_results import CountedKernel, NsightReport, NsightStatus
from pytest_fa.run.nvtx_range import NVTX_DOMAIN

LIMIT_SECONDS = 300.0
READ_SECONDS = 120.0


# Where the report module lies when it does not lie beside the program, which may be a script elsewhere.
MODULE_PLACES = (
    "opt/nvidia/nsight-compute/*/extras/python",
    "usr/local/cuda*/nsight-compute*/extras/python",
    "usr/local/NVIDIA-Nsight-Compute*/extras/python",
)


@dataclasses.dataclass(frozen=True)
class NcuProgram:
    """An `ncu` that was found; `sudo` runs it as root."""

    program: Path
    version: str
    sudo: bool
    environment: dict[str, str] = dataclasses.field(repr=False)

    @property
    def title(self) -> str:
        """Name and version."""
        return f"ncu {self.version}".strip()

    @property
    def report_folder(self) -> str:
        """Where `ncu_report` lies: near the program, or where Nsight Compute is installed to; empty where nowhere.

        Of several the one of the program's own version.
        """
        near = [folder / "extras" / "python" for folder in self.program.resolve().parents[:3]]
        far = [path for place in MODULE_PLACES for path in sorted(Path("/").glob(place), reverse=True)]
        far.sort(key=lambda path: not self.version.startswith(path.parts[-3].rpartition("-")[2]))
        return next((str(folder) for folder in (*near, *far) if (folder / "ncu_report.py").is_file()), "")


class NcuTarget(NamedTuple):
    """What to profile: a child's arguments, the NVTX range, where the report goes (without its suffix).

    `sources` are folders in which Nsight may look for source files: those that a kernel was compiled from are gone.
    """

    arguments: tuple[str, ...]
    range_name: str
    stem: Path
    sources: tuple[Path, ...] = ()

    @property
    def report(self) -> Path:
        """The report; its suffix is written out, since newer versions have another by default."""
        return self.stem.with_name(f"{self.stem.name}.ncu-rep")

    @property
    def table(self) -> Path:
        """The same figures as CSV."""
        return self.stem.with_name(f"{self.stem.name}.csv")

    @property
    def log(self) -> Path:
        """What ncu said."""
        return self.stem.with_name(f"{self.stem.name}.log")


def profile(tool: NcuProgram, target: NcuTarget, preset_name: str, wanted: Preset) -> NsightReport:
    """Run the target under ncu and read its report.  Never raises for what ncu does."""
    target.stem.parent.mkdir(parents=True, exist_ok=True)
    status, log, ran, refused = _run(tool, target, wanted)
    asked = _without(wanted, refused)
    kernels: tuple[CountedKernel, ...] = ()
    read_by = ""
    if status == "ok":
        status, kernels, read_by = _read(tool, target)
    return NsightReport(
        status=status,
        message=_message(status, log, ran),
        preset=preset_name,
        tool=tool.title,
        seconds=ran.seconds,
        command=tuple(_command(tool, target, asked)),
        kernels=_trimmed(kernels, wanted),
        dropped=(*refused, *_not_counted(kernels, asked)),
        read_by=read_by,
        report=_if_there(target.report),
        table=_if_there(target.table),
        log=_if_there(target.log),
    )


def _run(tool: NcuProgram, target: NcuTarget, wanted: Preset) -> tuple[NsightStatus, str, ProgramRun, tuple[str, ...]]:
    """The status, ncu's words, the run, and the counters that ncu refused to look for.

    Run again without counters that ncu does not know, and without other libraries where it could not connect.
    """
    refused: tuple[str, ...] = ()
    environment = tool.environment
    ran, log = _attempt(tool, target, wanted, environment)
    status = _status(ran, log)
    if status == "bad-metric" and (refused := unknown_metrics(log, wanted.metrics)):
        ran, log = _attempt(tool, target, _without(wanted, refused), environment)
        status = _status(ran, log)
    if status == "no-connection":
        without = {**environment, "CUDA_INJECTION64_PATH": "none"}
        ran, log = _attempt(tool, target, _without(wanted, refused), without)
        status = _status(ran, log)
    return status, log, ran, refused


def _if_there(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _without(wanted: Preset, dropped: tuple[str, ...]) -> Preset:
    return wanted._replace(metrics=tuple(name for name in wanted.metrics if name not in dropped))


def _attempt(
    tool: NcuProgram, target: NcuTarget, wanted: Preset, environment: dict[str, str]
) -> tuple[ProgramRun, str]:
    """One run, and what ncu said in its log file and on both streams."""
    for path in (target.report, target.table, target.log):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:  # ncu keeps a lock there, which may be another user's
        mine = {"TMPDIR": scratch, "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"}
        ran = run_tool(_command(tool, target, wanted), {**environment, **mine}, LIMIT_SECONDS)
    log = target.log.read_text(encoding="utf-8", errors="replace") if target.log.is_file() else ""
    return ran, f"{log}\n{ran.stderr}"


def _command(tool: NcuProgram, target: NcuTarget, wanted: Preset) -> list[str]:
    """A list, no shell.  Clocks are left alone, caches stay warm as they are when a period is timed."""
    given = ["sudo", "-n", "env", *(f"{name}={value}" for name, value in _kept(tool.environment).items())]
    return [
        *(given if tool.sudo else ()),
        str(tool.program),
        "--config-file",
        "off",
        "--nvtx",
        "--nvtx-include",
        f"{NVTX_DOMAIN}@{target.range_name}",
        *wanted.flags,
        *(_source_folders(target) if "--import-source" in wanted.flags else ()),
        "--metrics",
        ",".join(wanted.metrics),
        "--clock-control",
        "none",
        "--cache-control",
        "none",
        "--log-file",
        str(target.log),
        "-f",
        "-o",
        str(target.report),
        sys.executable,
        *target.arguments,
    ]


def _source_folders(target: NcuTarget) -> tuple[str, ...]:
    return ("--source-folders", ",".join(map(str, target.sources))) if target.sources else ()


def _kept(environment: dict[str, str]) -> dict[str, str]:
    """What sudo would drop and the child needs."""
    prefixes = ("CUDA_", "LD_LIBRARY_PATH", "PATH", "PYTHON", "VIRTUAL_ENV", "XDG_")
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


def _status(ran: ProgramRun, log: str) -> NsightStatus:
    if ran.timed_out:
        return "timeout"
    status = read_status(log, ran.return_code)
    return "launch-failed" if status in ("failed", "no-kernels") and _launch_problem(ran) else status


def _launch_problem(ran: ProgramRun) -> str:
    """Why the job's own call failed, from the result that the child printed."""
    for line in ran.stdout.splitlines():
        try:
            said = msgspec.json.decode(line)
        except msgspec.MsgspecError:
            continue
        if isinstance(said, dict) and said.get("outcome", "ok") != "ok":
            return f"{said['outcome']}: {said.get('message', '')}"
    return ""


def _message(status: NsightStatus, log: str, ran: ProgramRun) -> str:
    if status == "launch-failed":
        return f"{SENTENCES[status]}: {_launch_problem(ran)}"
    if status == "timeout":
        return f"{SENTENCES[status]} after {LIMIT_SECONDS:.0f} s; it was killed"
    if status in ("failed", "bad-metric"):
        return f"{SENTENCES[status]}: {last_error(log)} (exit status {ran.return_code})"
    return SENTENCES[status]


def _read(tool: NcuProgram, target: NcuTarget) -> tuple[NsightStatus, tuple[CountedKernel, ...], str]:
    """The report's kernels, by Nsight's module where there is one; its CSV is written in any case."""
    if not target.report.is_file():
        return "no-report", (), ""
    command = [str(tool.program), "--import", str(target.report), "--csv", "--page", "raw", "--print-units", "base"]
    ran = run_tool(command, {**os.environ}, READ_SECONDS)
    target.table.write_text(ran.stdout, encoding="utf-8")
    kernels, read_by = read_by_module(target.report, tool.report_folder) or (), "ncu_report"
    if not kernels:
        kernels, read_by = read_raw_table(ran.stdout), "CSV"
    return ("ok" if kernels else "empty"), kernels, read_by


def read_by_module(report: Path, folder: str) -> tuple[CountedKernel, ...] | None:
    """The kernels by `ncu_report` from `folder`, or where that is empty from this environment; None without it."""
    command = [sys.executable, "-m", "pytest_fa.profile.report_module", str(report), folder]
    ran = run_tool(command, {**os.environ}, READ_SECONDS)
    if ran.return_code != 0:
        return None
    return msgspec.json.decode(ran.stdout, type=tuple[CountedKernel, ...])


def _not_counted(kernels: tuple[CountedKernel, ...], asked: Preset) -> tuple[str, ...]:
    """What the report does not hold: ncu leaves a counter out in silence, or says that it "could not access" it."""
    return tuple(name for name in asked.metrics if kernels and all(name not in each.counters for each in kernels))


def _trimmed(kernels: tuple[CountedKernel, ...], wanted: Preset) -> tuple[CountedKernel, ...]:
    """What was asked for by name: thousands more lie in the report of a full set."""
    names = {*wanted.metrics, *map(stall_samples, STALLS)}
    return tuple(
        msgspec.structs.replace(each, counters={name: each.counters[name] for name in each.counters if name in names})
        for each in kernels
    )
