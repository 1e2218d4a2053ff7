"""compute-sanitizer around one call: the command, its summary line, and what no summary means."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from pytest_fa.profile.programs import ProgramRun, find_program, run_tool, version_of
from pytest_fa.records.built import Build
from pytest_fa.records.tool_results import Sanitized, ToolStatus

FOUND_EXIT_CODE = 86  # what the tool leaves with when it found something; by default that would be 0
LIMIT_SECONDS = 60.0
MOST_FINDINGS = 20
PADDING_BYTES = 65536  # after each allocation: what misses its own by that much must not land in the next one

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
# What racecheck does not follow: copies by the TMA unit, and shared memory of other blocks of a cluster.
_ASYNC_OPCODES = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED", "UCGABAR_ARV", "UCGABAR_WAIT", "STAS")

EXTRA_FLAGS: dict[str, tuple[str, ...]] = {
    "memcheck": ("--padding", str(PADDING_BYTES)),
    "racecheck": ("--racecheck-report", "analysis"),
    "synccheck": (),
    "initcheck": (),
}


class SanitizedChild(NamedTuple):
    """What runs under the tool: python's arguments, its environment, where the log goes."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: Path


@functools.cache
def find_sanitizer() -> tuple[Path, str] | None:
    """The program and its version."""
    program = find_program("compute-sanitizer")
    return (program, version_of(program)) if program else None


def not_covered(tool: str, build: Build | None) -> str | None:
    """Why a tool's silence about this build would mean nothing."""
    if tool != "racecheck" or build is None:
        return None
    opcodes = {opcode for kernel in build.kernels for opcode in kernel.instructions}
    found = [opcode for opcode in _ASYNC_OPCODES if opcode in opcodes]
    if not found:
        return None
    return f"not covered by racecheck: it does not follow TMA copies and clusters ({', '.join(found)} in the code)"


def sanitize(tool: str, child: SanitizedChild) -> Sanitized:
    """Run one tool once.  Never raises for what the tool or the kernel does."""
    found = find_sanitizer()
    if found is None:
        reason = "compute-sanitizer is neither on PATH nor in a CUDA toolkit; `pip install nvidia-cuda-sanitizer-api`"
        return Sanitized(tool, "not measured", reason, "", 0.0, ())
    program, version = found
    child.log.parent.mkdir(parents=True, exist_ok=True)
    child.log.unlink(missing_ok=True)
    command = _command(program, tool, child)
    ran = run_tool(command, {**os.environ, **child.environment}, LIMIT_SECONDS)
    log = child.log.read_text(encoding="utf-8", errors="replace") if child.log.is_file() else ran.text
    status, message, count = read_log(log, ran)
    return Sanitized(
        tool=tool,
        status=status,
        message=message,
        version=version,
        seconds=ran.seconds,
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


def read_log(log: str, ran: ProgramRun) -> tuple[ToolStatus, str, int | None]:
    """The tool's verdict: clean only with a summary that says zero and a child that ended well."""
    count = summary_count(log)
    refusal = next((line for line in log.splitlines() if any(re.search(sign, line) for sign in _REFUSALS)), None)
    if count:
        return "found", f"{count} error{'s' * (count != 1)} or hazard{'s' * (count != 1)}", count
    if ran.timed_out:
        return "incomplete", f"no end within {LIMIT_SECONDS:.0f} s; it was killed", count
    if count is None and refusal is not None:
        return "not measured", f"the runtime refuses: {refusal.strip('= ')}", None
    if count is None:
        return "incomplete", f"there is no summary line (exit status {ran.return_code}): {_last_line(ran.text)}", None
    if ran.return_code != 0:
        return "incomplete", f"the call itself failed: {_said(ran)}", count
    return "clean", "", 0


def summary_count(log: str) -> int | None:
    """Errors or hazards by the summary line; None where there is none."""
    counts = [int(found[1]) for sign in _SUMMARIES for found in re.finditer(sign, log)]
    return sum(counts) if counts else None


def findings(log: str) -> tuple[str, ...]:
    """The first line of each distinct report with the line below it, which says where."""
    lines = log.splitlines()
    heads = [number for number, line in enumerate(lines) if _FINDING.match(line)]
    texts = [" ".join(each.strip("= ") for each in lines[number : number + 2]) for number in heads]
    return tuple(dict.fromkeys(texts))[:MOST_FINDINGS]


def _said(ran: ProgramRun) -> str:
    """What the child printed of its call."""
    for line in ran.stdout.splitlines():
        try:
            said = msgspec.json.decode(line)
        except msgspec.MsgspecError:
            continue
        if isinstance(said, dict) and "outcome" in said:
            return f"{said['outcome']}: {said.get('message', '')}"
    return _last_line(ran.text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing was said"
