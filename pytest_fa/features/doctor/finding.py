"""One line of the doctor, and the guard around each of its probes.

This module imports only the standard library: the doctor must also work if a dependency of pytest-fa is missing.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warning", "missing"]

LIMIT_SECONDS = 90.0  # importing torch from a cold disk takes up to a minute
MAX_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: what was probed, what it is, and what to do next.

    `missing` means that no run can work.  `warning` means that a run works, but with less than it could have.
    """

    level: Level
    name: str
    text: str
    advice: str = ""

    @property
    def line(self) -> str:
        """The finding as one printable line."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.level:8} {one_line(f'{self.name}: {self.text}{advice}')}"


@dataclasses.dataclass(frozen=True)
class Places:
    """The folders that a run would use; `root` is the folder in which pytest is started."""

    root: Path
    kernels: Path
    cache: Path
    records: Path


Probe = Callable[[Places], Iterator[Finding]]


def one_line(text: str) -> str:
    """The text on one line, at most 400 characters long, with an escape for each character that is not printable."""
    words = " ".join(text.split())
    shown = "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in words)
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[: MAX_CHARACTERS - 3]}..."


def run_guarded(name: str, probe: Probe, places: Places, limit_seconds: float = LIMIT_SECONDS) -> list[Finding]:
    """Every finding of a probe.  An exception or a probe that does not end in time becomes a finding as well.

    The probe runs in a thread, because a broken driver or file system can block a call for ever.
    """
    findings: list[Finding] = []

    def work() -> None:
        try:
            findings.extend(probe(places))
        except Exception as problem:  # noqa: BLE001  # whatever is broken, the other probes still run
            text = f"could not be checked: {type(problem).__name__}: {problem}"
            findings.append(Finding("warning", name, text))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    if thread.is_alive():
        return [Finding("warning", name, f"could not be checked: no answer within {limit_seconds:g} s")]
    return findings
