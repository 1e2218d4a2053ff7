"""What the selected tests of a run need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.plan import Plan
from pytest_fa.options.command_line import SUITE_FOLDER
from pytest_fa.plugin import items
from pytest_fa.plugin.items import has_timings
from pytest_fa.session.baseline_choice import LeftOut
from tests.factories import SHAPE, record, speed, variant

SUITE = "pytest_fa.suite.test_attention"
PATHS = {SUITE: SUITE_FOLDER / "test_attention.py", "test_own": Path("test_own.py")}


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("test_speed[mine-b1h8s512d64-fp16-seed0]", SUITE, True),
        ("test_gate[mine]", SUITE, True),
        ("test_correct[mine-b1h8s512d64-fp16-seed0]", SUITE, False),
        ("test_gate[mine]", "test_own", False),
    ],
)
def test_the_profiler_is_prepared_for_tests_that_time(name: str, module: str, *, expected: bool) -> None:
    """Timings follow if a `test_speed` or a `test_gate` of the suite is selected; a gate's pilot times variants."""
    item = SimpleNamespace(name=name, path=PATHS[module])
    assert has_timings([cast("pytest.Item", item)]) is expected


CASE = parse_case(f"{SHAPE}-seed0")
CANDIDATE = variant("mine")
BACKENDS = {name: variant(name, role="baseline") for name in ("sdpa_cudnn", "sdpa_flash", "sdpa_math")}


class OneTest:
    """A test of a variant or a backend at one shape."""

    def __init__(self, name: str, module: str) -> None:
        params = {"fa_variant": BACKENDS.get(name, CANDIDATE), "fa_case": CASE}
        self.names = (name, module)
        self.path, self.callspec = PATHS[module], SimpleNamespace(params=params)


def test_a_recent_time_replaces_no_test_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with a recent time is not timed again by the suite; a slow one runs nowhere."""
    earlier = record("sdpa_cudnn", kind="speed", role="baseline", speed=speed(10.0))
    left_out = (
        LeftOut("sdpa_cudnn", SHAPE, speed(10.0), "", 1.0, earlier, 60.0),
        LeftOut("sdpa_math", SHAPE, speed(80.0), "", 8.0),
    )
    monkeypatch.setattr(items, "left_out_of", lambda _: left_out)
    deselected: list[OneTest] = []
    hook = SimpleNamespace(pytest_deselected=lambda **keywords: deselected.extend(keywords["items"]))
    tests = [OneTest(name, module) for module in (SUITE, "test_own") for name in ("mine", *BACKENDS)]
    plan = Plan(chosen=(CANDIDATE,), companions=tuple(BACKENDS.values()), cases=(CASE,), gpu=True)
    kept = tests.copy()
    items.deselect(cast("pytest.Config", SimpleNamespace(hook=hook)), cast("list[pytest.Item]", kept), plan)
    assert [test.names for test in kept] == [
        ("mine", SUITE),
        ("sdpa_flash", SUITE),
        ("mine", "test_own"),
        ("sdpa_cudnn", "test_own"),
        ("sdpa_flash", "test_own"),
    ]
    assert deselected == [test for test in tests if test not in kept]
