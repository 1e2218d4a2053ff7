"""`python -m pytest_fa doctor`: prints one line for each finding."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_fa.features.doctor.doctor import examine, verdict_of
from pytest_fa.features.doctor.finding import Places
from pytest_fa.options.options import default_cache


def run(options: argparse.Namespace) -> int:
    """Print the findings as they come; return the exit status of the whole."""
    places = Places(Path(), options.kernels, options.cache or default_cache(), options.profiles)
    findings = []
    for finding in examine(places):
        findings.append(finding)
        sys.stdout.write(f"{finding.line}\n")
        sys.stdout.flush()
    status, sentence = verdict_of(findings)
    sys.stdout.write(f"{sentence}\n")
    return status
