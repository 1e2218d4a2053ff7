"""What the selected tests of a run need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pytest_fa.plugin.items import has_timings

SUITE = "pytest_fa.suite.test_attention"


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
    item = SimpleNamespace(name=name, module=SimpleNamespace(__name__=module))
    assert has_timings([cast("pytest.Item", item)]) is expected
