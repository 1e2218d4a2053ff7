"""Runs one call under compute-sanitizer: the command, and the verdict that follows from the tool's log."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.features.sanitize.sanitized import Sanitized, ToolStatus
from pytest_fa.host.programs import ProgramRun, find_program, run_tool, version_of
from pytest_fa.records.built import Build

FOUND_EXIT_CODE = 86  # the exit status if the tool finds something; its default is 0
LIMIT_SECONDS = 60.0
MAX_FINDINGS = 20
PADDING_BYTES = 65536  # after each allocation, so that an access past its end does not reach the next allocation

_SUMMARIES = (
    r"ERROR SUMMARY: (\d+) errors?",
    r"RACECHECK SUMMARY: (\d+) hazards? displayed",
)
_FINDING = re.compile(
    r"^=+ (Invalid |Error: |Warning: |ERROR: |WARNING: |Uninitialized |Barrier error|Host API |Program hit )"
)
_REFUSALS = (
    r"Device not supported",
    r"LibraryNotLoaded",
    r"Unable to find injection library",
    r"Failed to initialize",
    r"No attachable process",
    r"terminated before first instrumented API call",
    r"Insufficient driver|driver version is insufficient",
)
_TMA_OPCODES = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
_CLUSTER_OPCODES = ("UCGABAR_ARV", "UCGABAR_WAIT", "STAS")
# What a tool does not track.  initcheck takes memory that the TMA unit wrote for uninitialised, and does not see what
# the unit reads.
_UNTRACKED = {
    "racecheck": ("TMA copies and clusters", (*_TMA_OPCODES, *_CLUSTER_OPCODES)),
    "initcheck": ("TMA copies", _TMA_OPCODES),
}

EXTRA_FLAGS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", str(PADDING_BYTES)),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
    "initcheck": (),
}


class SanitizedChild(NamedTuple):
    """The process that runs under the tool: Python's arguments, the environment, and the path of the tool's log."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: Path


@functools.cache
def find_sanitizer() -> tuple[Path, str] | None:
    """The path of compute-sanitizer and its version; None if it is not installed."""
    program = find_program("compute-sanitizer")
    return (program, version_of(program)) if program else None


def not_covered(tool: str, build: Build | None) -> str | None:
    """The reason why the findings of a run would not show whether this build is correct; None if they would."""
    if tool not in _UNTRACKED or build is None:
        return None
    what, opcodes = _UNTRACKED[tool]
    used = {opcode for kernel in build.kernels for opcode in kernel.instructions}
    listed = ", ".join(opcode for opcode in opcodes if opcode in used)
    return f"not covered by {tool}, which does not track {what} ({listed} in the machine code)" if listed else None


def sanitize(tool: str, child: SanitizedChild) -> Sanitized:
    """Run one tool once.  A failure of the tool or of the kernel is not raised: it becomes the status."""
    installed = find_sanitizer()
    if installed is None:
        reason = (
            "compute-sanitizer was not found on PATH or in a CUDA toolkit; "
            "install it with `pip install nvidia-cuda-sanitizer-api`"
        )
        return Sanitized(tool, "not measured", reason, "", 0.0, ())
    program, version = installed
    child.log.parent.mkdir(parents=True, exist_ok=True)
    child.log.unlink(missing_ok=True)
    command = _command(program, tool, child)
    program_run = run_tool(command, {**os.environ, **child.environment}, LIMIT_SECONDS)
    log = child.log.read_text(encoding="utf-8", errors="replace") if child.log.is_file() else program_run.text
    status, message, count = read_log(log, program_run)
    return Sanitized(
        tool=tool,
        status=status,
        message=message,
        version=version,
        seconds=program_run.seconds,
        command=tuple(command),
        count=count,
        findings=findings(log),
        log=str(child.log) if child.log.is_file() else None,
    )


def _command(program: Path, tool: str, child: SanitizedChild) -> list[str]:
    return [
        str(program),
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND_EXIT_CODE),
        "--target-processes",
        "application-only",
        "--print-limit",
        "100",
        "--log-file",
        str(child.log),
        *EXTRA_FLAGS[tool],
        sys.executable,
        *child.arguments,
    ]


def read_log(log: str, program_run: ProgramRun) -> tuple[ToolStatus, str, int | None]:
    """The status, the message and the count of one run.

    The status is `clean` only if the log's summary says zero and the process succeeded.
    """
    count = summary_count(log)
    refusal = next((line for line in log.splitlines() if any(re.search(sign, line) for sign in _REFUSALS)), None)
    if count:
        return "found", f"{count} error{'s' * (count != 1)} or hazard{'s' * (count != 1)}", count
    if program_run.timed_out:
        return "incomplete", f"the process did not end within {LIMIT_SECONDS:.0f} s and was killed", count
    if count is None and refusal is not None:
        return "not measured", f"the container or driver does not support the tool: {refusal.strip('= ')}", None
    if count is None:
        last_line = _last_line(program_run.text)
        return "incomplete", f"there is no summary line (exit status {program_run.return_code}): {last_line}", None
    if program_run.return_code != 0:
        return "incomplete", f"the call itself failed: {_printed_result(program_run)}", count
    return "clean", "", 0


def summary_count(log: str) -> int | None:
    """The number of errors or hazards according to the summary lines; None if there is no such line."""
    counts = [int(match[1]) for pattern in _SUMMARIES for match in re.finditer(pattern, log)]
    return sum(counts) if counts else None


def findings(log: str) -> tuple[str, ...]:
    """The first line of each distinct finding, with the line below it, which gives the place."""
    lines = log.splitlines()
    heads = [number for number, line in enumerate(lines) if _FINDING.match(line)]
    texts = [" ".join(line.strip("= ") for line in lines[number : number + 2]) for number in heads]
    return tuple(dict.fromkeys(texts))[:MAX_FINDINGS]


def _printed_result(program_run: ProgramRun) -> str:
    """The outcome and the message of the result that the process printed, or its last line of output."""
    for line in program_run.stdout.splitlines():
        try:
            result = msgspec.json.decode(line)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            continue
        if isinstance(result, dict) and "outcome" in result:
            return f"{result['outcome']}: {result.get('message', '')}"
    return _last_line(program_run.text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
