"""What stands in for pytest-benchmark if it is switched off with `-p no:benchmark`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


class SilentBenchmark:
    """A `benchmark` fixture that calls a function once and keeps no time, as with --benchmark-disable."""

    disabled = True

    def __call__(self, function: Callable[[], None]) -> None:
        """Call the function."""
        function()


class WithoutBenchmark:
    """A plugin with the fixture `benchmark` for tests with `fa_benchmark`, whose times are then only in the records."""

    @pytest.fixture
    def benchmark(self, request: pytest.FixtureRequest) -> SilentBenchmark:
        """A benchmark without times.  A test that uses it without `fa_benchmark` needs pytest-benchmark itself."""
        if "fa_benchmark" not in request.fixturenames:
            pytest.fail(
                "fixture 'benchmark' not found: pytest-benchmark is switched off (-p no:benchmark)", pytrace=False
            )
        return SilentBenchmark()
