"""What the answer of a sweep depends on.  A study has these facts; other facts make another study.

The hashes of the files are compared again during the sweep, so that no study mixes two versions of a source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ToolchainError, UsageProblem
from pytest_fa.features.gate.opponents import may_be_gated
from pytest_fa.features.sweep.suggest import Space
from pytest_fa.features.sweep.sweep_space import Sweep
from pytest_fa.options.options import Options
from pytest_fa.records.source import folder_hash
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.session.session import Session

HEADERS = "the headers in include/ of the kernels folder"


def study_facts(session: Session, parent: Variant) -> dict[str, Any]:
    """What the trials and the end of a sweep depend on: files, values, cases, options, machine and versions."""
    sweep, options, environment = sweep_of(parent), session.options, session.records.environment
    searched, unsearched = split_cases(session.run_plan, parent, sweep)
    return {
        "variant": parent.name,
        "files": file_hashes(parent),
        "values": {name: list(values) for name, values in sweep.values.items()},
        "where": list(sweep.where),
        "fitness": list(sweep.fitness),
        "defines": dict(parent.defines),
        "cases": [case.id for case in searched],
        "unsearched": hashlib.sha256(json.dumps([case.id for case in unsearched]).encode()).hexdigest(),
        "options": {
            "--fa-suite": list(options.suites),
            "--fa-tolerance": options.tolerance,
            "--fa-soak": options.soak,
            "--fa-arch": list(options.arches),
            "--fa-dtype": list(options.dtypes),
        },
        "gpu": environment.gpu,
        "driver": environment.driver,
        "toolkit": _compilers(options, parent),
        "torch": environment.torch,
        "pytest_fa": environment.pytest_fa,
        "feasible": len(feasible_space(parent).points),
    }


def file_hashes(parent: Variant) -> dict[str, str]:
    """A hash of each folder or file that the manifest names, and of the headers that all variants share.

    The keys are the words of the manifest, so that they are the same on every machine.
    """
    folder, entry = Path(parent.folder), parent.entry
    flags = [flag.removeprefix("-I") for flag in (*parent.flags, *entry.cflags) if flag.startswith("-I")]
    sources = (entry.source, *entry.sources)
    named = {name: folder / name for name in (*entry.include, *flags, *sources) if name}
    places = {"the folder": folder, HEADERS: Path(parent.root) / "include", **named}
    return {name: _hash(path) for name, path in places.items()}


def changed_files(facts: dict[str, Any], parent: Variant) -> list[str]:
    """What is no longer as it was when the facts were read."""
    return [name for name, value in file_hashes(parent).items() if value != facts["files"].get(name)]


def _hash(path: Path) -> str:
    """A hash of a file or of a folder, which need not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else folder_hash(path)


def _compilers(options: Options, parent: Variant) -> list[str]:
    """What the compilers of a compiled variant print as their versions; empty without a compiler."""
    if parent.is_built:
        with contextlib.suppress(ToolchainError):
            return list(find_toolchain(options.cache).versions)
    return []


def sweep_of(parent: Variant) -> Sweep:
    """The `sweep` of a variant's manifest.  Raises `UsageProblem` if it has none, or if it is never gated."""
    sweep = Sweep.of(parent)
    if sweep is None:
        raise UsageProblem(
            f"--fa-sweep: the manifest of {parent.name} has no `sweep`; write for example "
            f"`sweep: {{values: {{{next(iter(parent.defines), 'BLOCK_M')}: [32, 64]}}}}` (see docs/how-to/sweep.md)"
        )
    if not may_be_gated(parent):
        raise UsageProblem(f"--fa-sweep: {parent.name} is never gated: role {parent.role}, computes {parent.computes}")
    return sweep


def feasible_space(parent: Variant) -> Space:
    """The feasible configurations of a variant.  Raises `UsageProblem` if there is none."""
    space = Space(sweep_of(parent), parent.defines)
    if not space.points:
        raise UsageProblem(
            f"--fa-sweep: no combination of the values of {parent.name} satisfies all conditions of `sweep.where`"
        )
    return space


def split_cases(run_plan: RunPlan, parent: Variant, sweep: Sweep) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """The cases that are searched, and the other ones of the run's suites, at which only the best one is judged.

    Searched are the first seeds of `--fa-case`; without it, those of the manifest's `sweep.cases`; else of the suites.
    """
    plan = run_plan.plan_of(run_plan.options.suites)
    of_suites = tuple(case for case in plan.cases_of(parent) if parent.refuses(case) is None)
    named = run_plan.plan.cases_of(parent) if run_plan.options.chosen_cases else sweep.searched_cases
    searched = {case.shape_id: case for case in reversed(named or of_suites)}
    cases = tuple(reversed(searched.values()))
    if problem := next((reason for case in cases if (reason := parent.refuses(case))), None):
        raise UsageProblem(f"--fa-sweep: {problem}")
    return cases, tuple(case for case in of_suites if case not in cases)
