"""Variants that compile at their first call: the compilation is no part of a test's limit, nor of its seconds."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_fa.catalog.plan import Plan
from pytest_fa.plugin import items
from tests.factories import PYTHON_SOURCE, record
from tests.projects import CASE, ONE_CASE, Project

# Its first call in a process takes 2 s, as if the package that it has imported compiled it.
COMPILES = PYTHON_SOURCE.replace(
    "import torch\n",
    "import sys, time, types\nimport torch\nsys.modules['triton'] = types.ModuleType('triton')\ncalls = []\n",
).replace("    scores = ", "    time.sleep(0 if calls else 2)\n    calls.append(1)\n    scores = ", 1)


@pytest.mark.nightly
def test_a_compilation_is_reported_beside_the_check(project: Project) -> None:
    """A first call that takes longer than a launch may take passes; a line below the table says how long it took."""
    project.python_variant("jit", COMPILES)
    run = project.suite(ONE_CASE, "--fa-variant=jit", "--fa-watchdog=1", "-k", "test_correct and jit")
    assert run.outcomes == {f"test_correct[jit-{CASE}]": "passed"}
    (line,) = [line for line in run.outlines if line.startswith("first calls, which compile")]
    seconds = re.fullmatch(r"first calls, which compile and count in no test's seconds: jit (\d+\.\d) s", line)
    assert seconds is not None
    (saved,) = [each for each in project.records if each.kind == "correct"]
    assert saved.compile_seconds >= 4.0  # the judged call, and one in the process without torch's attention
    assert f"{saved.compile_seconds:.1f}" == seconds[1]


@pytest.mark.parametrize(("compile_seconds", "seconds"), [(0.0, 5.0), (3.0, 2.0), (6.0, 0.0)])
def test_a_tests_duration_is_without_the_compilation(compile_seconds: float, seconds: float) -> None:
    """The duration of a report, which `--durations` and JUnit show, is that of the check."""
    report = SimpleNamespace(duration=5.0)
    hook = SimpleNamespace(pytest_fa_properties=lambda **_: [], pytest_fa_extras=lambda **_: [])
    item = SimpleNamespace(user_properties=[], config=SimpleNamespace(hook=hook), callspec=None)
    items.attach(report, cast("pytest.Item", item), record(compile_seconds=compile_seconds), cast("Plan", None))
    assert report.duration == seconds
