"""The replay clock: pytest-benchmark reports exactly the samples that it is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_fa.plugin.replay_clock import ReplayClock, replay

pytestmark = pytest.mark.alone  # pytest-benchmark disables itself under pytest-xdist

# Samples span six orders of magnitude, because the clock adds them up and small ones must not be lost to rounding.
SAMPLES = {"short": [0.61, 0.58, 0.6, 0.59], "long": [251_000.0, 250_000.0, 252_500.0], "one": [17.25]}

INNER = """\
import pytest
from pytest_fa.plugin.replay_clock import ReplayClock, replay

CLOCK = ReplayClock()
SAMPLES = {samples!r}

@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("name", SAMPLES)
def test_speed(benchmark, name):
    replay(CLOCK, benchmark, SAMPLES[name])
"""


def run_benchmark(pytester: pytest.Pytester, *arguments: str) -> list[dict[str, Any]]:
    """The benchmarks that an inner pytest run saved, in order."""
    pytester.makepyfile(INNER.format(samples=SAMPLES))
    run = pytester.runpytest_subprocess("--benchmark-json=saved.json", "-p", "no:cacheprovider", *arguments)
    run.assert_outcomes(passed=len(SAMPLES))
    saved: list[dict[str, Any]] = json.loads((pytester.path / "saved.json").read_text())["benchmarks"]
    return saved


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--benchmark-disable-gc", "--benchmark-warmup=on", "--benchmark-min-rounds=50"),
        ("--benchmark-cprofile=tottime",),
    ],
    ids=["plain", "options of a usual benchmark", "profiled"],
)
def test_saved_data_are_the_samples(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    """pytest-benchmark saves each sample once, in order and in seconds, with any of its own options."""
    saved = run_benchmark(pytester, "--benchmark-save-data", *arguments)

    data = {each["params"]["name"]: each["stats"]["data"] for each in saved}
    assert data == {name: pytest.approx([us / 1e6 for us in samples], rel=1e-7) for name, samples in SAMPLES.items()}


def test_saved_statistics_are_the_samples_own(pytester: pytest.Pytester) -> None:
    """Median, minimum, maximum and number of rounds are those of the samples; the timer's name is `device_us`."""
    saved = run_benchmark(pytester)

    assert [
        (each["stats"]["median"], each["stats"]["min"], each["stats"]["max"], each["stats"]["rounds"]) for each in saved
    ] == [
        pytest.approx((5.95e-7, 5.8e-7, 6.1e-7, 4), rel=1e-7),
        pytest.approx((0.251, 0.25, 0.2525, 3), rel=1e-7),
        pytest.approx((1.725e-5, 1.725e-5, 1.725e-5, 1), rel=1e-7),
    ]
    assert {(each["options"]["timer"], each["stats"]["iterations"]) for each in saved} == {("device_us", 1)}


def test_disabled_benchmark(pytester: pytest.Pytester) -> None:
    """With `--benchmark-disable`, a test that replays samples passes."""
    pytester.makepyfile(INNER.format(samples=SAMPLES))

    run = pytester.runpytest_subprocess("--benchmark-disable")

    run.assert_outcomes(passed=len(SAMPLES))


def test_only_advance_moves_the_clock() -> None:
    """The clock's time changes only by the seconds passed to `advance`."""
    clock = ReplayClock()
    readings = [clock(), clock()]

    clock.advance(0.25)
    clock.advance(1.5)

    assert (readings, clock()) == ([0.0, 0.0], 1.75)


class PedanticBenchmark:
    """The part of a benchmark fixture that `replay` uses; it records the duration of each round."""

    def __init__(self, clock: ReplayClock) -> None:
        self.clock = clock
        self.durations: list[float] = []
        self.options: dict[str, int] = {}

    def pedantic(self, target: Any, *, rounds: int, **options: int) -> None:
        """Call `target` once per round."""
        self.options = options
        for _ in range(rounds):
            start = self.clock()
            target()
            self.durations.append(self.clock() - start)


def test_one_round_per_sample() -> None:
    """Each sample is one round of one iteration, without warm-up; samples may be an iterator."""
    clock = ReplayClock()
    benchmark = PedanticBenchmark(clock)

    replay(clock, benchmark, iter([3.0, 1.0, 2.0]))

    assert benchmark.durations == pytest.approx([3e-6, 1e-6, 2e-6])
    assert benchmark.options == {"iterations": 1, "warmup_rounds": 0}
