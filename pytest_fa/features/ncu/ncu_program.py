"""Runs one job under Nsight Compute: the command, the files it writes, and a status for every kind of failure."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.features.ncu.ncu_status import SENTENCES, last_error, read_status, unknown_metrics
from pytest_fa.features.ncu.nsight_report import CountedKernel, NsightReport, NsightStatus
from pytest_fa.features.ncu.presets import STALLS, Preset, stall_samples
from pytest_fa.features.ncu.raw_table import read_raw_table
from pytest_fa.host.programs import ProgramRun, run_tool
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.nvtx_range import NVTX_DOMAIN

LIMIT_SECONDS = 300.0
READ_SECONDS = 120.0


# Where the report module `ncu_report` may be if it is not near the program, which may be a wrapper script elsewhere.
MODULE_PLACES = (
    "opt/nvidia/nsight-compute/*/extras/python",
    "usr/local/cuda*/nsight-compute*/extras/python",
    "usr/local/NVIDIA-Nsight-Compute*/extras/python",
)


@dataclasses.dataclass(frozen=True)
class NcuProgram:
    """An installed `ncu`; with `sudo` it is run as root."""

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
        """The folder of the module `ncu_report`; empty if it is not found.

        It is searched near the program, then in the places where Nsight Compute is installed, the program's own
        version first.
        """
        near = [folder / "extras" / "python" for folder in self.program.resolve().parents[:3]]
        installed = [path for place in MODULE_PLACES for path in sorted(Path("/").glob(place), reverse=True)]
        installed.sort(key=lambda path: not self.version.startswith(path.parts[-3].rpartition("-")[2]))
        return next((str(folder) for folder in (*near, *installed) if (folder / "ncu_report.py").is_file()), "")


class NcuTarget(NamedTuple):
    """What to profile: the arguments of a Python process, the NVTX range, and the report's path without its suffix.

    `sources` are the folders in which Nsight looks for source files.  The staged copies that the kernel was compiled
    from no longer exist.
    """

    arguments: tuple[str, ...]
    range_name: str
    stem: Path
    sources: tuple[Path, ...] = ()

    @property
    def report(self) -> Path:
        """The report.  Its suffix is given explicitly because the default differs between versions of ncu."""
        return self.stem.with_name(f"{self.stem.name}.ncu-rep")

    @property
    def table(self) -> Path:
        """The same figures as CSV."""
        return self.stem.with_name(f"{self.stem.name}.csv")

    @property
    def log(self) -> Path:
        """The output of ncu."""
        return self.stem.with_name(f"{self.stem.name}.log")


def profile(tool: NcuProgram, target: NcuTarget, preset_name: str, preset: Preset) -> NsightReport:
    """Run the target under ncu and read its report.  A failure of ncu is not raised: it becomes the status."""
    target.stem.parent.mkdir(parents=True, exist_ok=True)
    status, log, program_run, rejected = _run(tool, target, preset)
    requested = _without(preset, rejected)
    kernels: tuple[CountedKernel, ...] = ()
    read_by = ""
    if status == "ok":
        status, kernels, read_by = _read(tool, target)
    return NsightReport(
        status=status,
        message=_message(status, log, program_run),
        preset=preset_name,
        tool=tool.title,
        seconds=program_run.seconds,
        command=tuple(_command(tool, target, requested)),
        kernels=_trimmed(kernels, preset),
        dropped=(*rejected, *_not_counted(kernels, requested)),
        read_by=read_by,
        report=_if_exists(target.report),
        table=_if_exists(target.table),
        log=_if_exists(target.log),
    )


def _run(tool: NcuProgram, target: NcuTarget, preset: Preset) -> tuple[NsightStatus, str, ProgramRun, tuple[str, ...]]:
    """Run ncu, with at most two retries: its status, its output, the run, and the counters that it rejected.

    One retry is without the counters that ncu does not know.  The other is for a failed connection: it disables other
    libraries that inject themselves into CUDA.
    """
    rejected: tuple[str, ...] = ()
    environment = tool.environment
    program_run, log = _attempt(tool, target, preset, environment)
    status = _status(program_run, log)
    if status == "bad-metric" and (rejected := unknown_metrics(log, preset.metrics)):
        program_run, log = _attempt(tool, target, _without(preset, rejected), environment)
        status = _status(program_run, log)
    if status == "no-connection":
        without_injection = {**environment, "CUDA_INJECTION64_PATH": "none"}
        program_run, log = _attempt(tool, target, _without(preset, rejected), without_injection)
        status = _status(program_run, log)
    return status, log, program_run, rejected


def _if_exists(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def _without(preset: Preset, dropped: tuple[str, ...]) -> Preset:
    return preset._replace(metrics=tuple(name for name in preset.metrics if name not in dropped))


def _attempt(
    tool: NcuProgram, target: NcuTarget, preset: Preset, environment: dict[str, str]
) -> tuple[ProgramRun, str]:
    """One run of ncu, with the contents of its log file and its error output."""
    for path in (target.report, target.table, target.log):
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:  # ncu has a lock file in TMPDIR, which another user may own
        ncu_variables = {"TMPDIR": scratch, "NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"}
        program_run = run_tool(_command(tool, target, preset), {**environment, **ncu_variables}, LIMIT_SECONDS)
    log = target.log.read_text(encoding="utf-8", errors="replace") if target.log.is_file() else ""
    return program_run, f"{log}\n{program_run.stderr}"


def _command(tool: NcuProgram, target: NcuTarget, preset: Preset) -> list[str]:
    """The command, to be run without a shell.  Clocks are not locked; caches stay warm, as when a period is timed."""
    variables = (f"{name}={value}" for name, value in _variables_for_sudo(tool.environment).items())
    return [
        *(("sudo", "-n", "env", *variables) if tool.sudo else ()),
        str(tool.program),
        "--config-file",
        "off",
        "--nvtx",
        "--nvtx-include",
        f"{NVTX_DOMAIN}@{target.range_name}",
        *preset.flags,
        *(_source_folders(target) if "--import-source" in preset.flags else ()),
        "--metrics",
        ",".join(preset.metrics),
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


def _variables_for_sudo(environment: dict[str, str]) -> dict[str, str]:
    """The variables that the child process needs and that sudo would drop."""
    prefixes = ("CUDA_", "LD_LIBRARY_PATH", "PATH", "PYTHON", "VIRTUAL_ENV", "XDG_")
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


def _status(program_run: ProgramRun, log: str) -> NsightStatus:
    if program_run.timed_out:
        return "timeout"
    status = read_status(log, program_run.return_code)
    return "launch-failed" if status in ("failed", "no-kernels") and _launch_problem(program_run) else status


def _launch_problem(program_run: ProgramRun) -> str:
    """Why the profiled call failed, from the result that its process printed; empty if it succeeded."""
    for line in program_run.stdout.splitlines():
        try:
            result = msgspec.json.decode(line)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            continue
        if isinstance(result, dict) and result.get("outcome", Outcome.OK) != Outcome.OK:
            return f"{result['outcome']}: {result.get('message', '')}"
    return ""


def _message(status: NsightStatus, log: str, program_run: ProgramRun) -> str:
    if status == "launch-failed":
        return f"{SENTENCES[status]}: {_launch_problem(program_run)}"
    if status == "timeout":
        return f"{SENTENCES[status]} within {LIMIT_SECONDS:.0f} s and was killed"
    if status in ("failed", "bad-metric"):
        return f"{SENTENCES[status]}: {last_error(log)} (exit status {program_run.return_code})"
    return SENTENCES[status]


def _read(tool: NcuProgram, target: NcuTarget) -> tuple[NsightStatus, tuple[CountedKernel, ...], str]:
    """Write the report as CSV and read its kernels: with Nsight's own module if it is installed, else from the CSV."""
    if not target.report.is_file():
        return "no-report", (), ""
    command = [str(tool.program), "--import", str(target.report), "--csv", "--page", "raw", "--print-units", "base"]
    import_run = run_tool(command, {**os.environ}, READ_SECONDS)
    target.table.write_text(import_run.stdout, encoding="utf-8")
    kernels, read_by = read_by_module(target.report, tool.report_folder) or (), "ncu_report"
    if not kernels:
        kernels, read_by = read_raw_table(import_run.stdout), "CSV"
    return ("ok" if kernels else "empty"), kernels, read_by


def read_by_module(report: Path, folder: str) -> tuple[CountedKernel, ...] | None:
    """The kernels of a report, read by the module `ncu_report`; None if the module or the report cannot be read.

    The module is imported from `folder`; if `folder` is empty, from this Python environment.
    """
    command = [sys.executable, "-m", "pytest_fa.features.ncu.report_module", str(report), folder]
    module_run = run_tool(command, {**os.environ}, READ_SECONDS)
    if module_run.return_code != 0:
        return None
    return msgspec.json.decode(module_run.stdout, type=tuple[CountedKernel, ...])


def _not_counted(kernels: tuple[CountedKernel, ...], requested: Preset) -> tuple[str, ...]:
    """The requested counters that no kernel of the report has.  ncu omits some counters without an error."""
    return tuple(name for name in requested.metrics if kernels and all(name not in each.counters for each in kernels))


def _trimmed(kernels: tuple[CountedKernel, ...], preset: Preset) -> tuple[CountedKernel, ...]:
    """The kernels with the requested counters only; the report of a full set has thousands more."""
    names = {*preset.metrics, *map(stall_samples, STALLS)}
    return tuple(
        msgspec.structs.replace(
            kernel, counters={name: kernel.counters[name] for name in kernel.counters if name in names}
        )
        for kernel in kernels
    )
