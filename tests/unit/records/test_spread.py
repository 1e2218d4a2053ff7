"""Times on the CPU: which are noisy, and which ratios mean something.  The samples are simulated."""

from __future__ import annotations

import random
import statistics
from itertools import permutations

import msgspec
import pytest

from pytest_fa.records.spread import is_clear_ratio, is_noisy, range_us, span_of_ratio, span_of_sums
from pytest_fa.records.timing import ON_CPU, Speed, Timing
from tests.factories import speed

SAMPLES = 40


def timing(samples_us: list[float], on_core_us: float | None = None, calibration_us: float | None = None) -> Timing:
    """The timing of these samples."""
    median_us = statistics.median(samples_us)
    return Timing("wall clock", tuple(samples_us), median_us, 1, on_core_us=on_core_us, calibration_us=calibration_us)


def on_cpu(device: Timing, call: Timing | None = None) -> Speed:
    """A speed on the CPU with these timings; both are the same by default."""
    return msgspec.structs.replace(speed(1.0), device=device, call=call or device, cold_missing=ON_CPU)


def simulated(seed: int, us: float, *, noise: float, load: float = 1.0, slow: float = 1.0) -> Speed:
    """A kernel of `us` microseconds on a machine with noise.

    Each sample is longer by an exponential share with the mean `noise`.  `load` programs share the core, which the
    time on the core does not contain.  `slow` lengthens everything, also the calibration: a lower clock, for example.
    """
    generator = random.Random(seed)  # noqa: S311  # a simulation
    core = [us * slow * (1 + generator.expovariate(1 / noise)) for _ in range(SAMPLES)]
    return on_cpu(timing([each * load for each in core], statistics.median(core), 2.0 * slow))


def worst_shown(speeds: list[Speed]) -> float:
    """The largest ratio of two of these times that is shown, as a distance from 1."""
    pairs = [pair for pair in permutations(speeds, 2) if is_clear_ratio(*pair)]
    ratios = [one.device.median_us / two.device.median_us for one, two in pairs]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03, 0.1, 0.3, 1.0])
def test_twenty_identical_variants_have_no_ratio_far_from_1(noise: float) -> None:
    """Of twenty identical kernels under different loads and clocks, no ratio outside 0.9 to 1.1 is shown."""
    conditions = random.Random(0)  # noqa: S311  # a simulation
    speeds = [
        simulated(seed, 100.0, noise=noise, load=1 + seed / 5, slow=conditions.uniform(1, 1.6)) for seed in range(20)
    ]
    medians = [each.device.median_us for each in speeds]
    assert max(medians) > 3 * min(medians)
    assert worst_shown(speeds) <= 0.1


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.03, 0.1])
def test_a_kernel_that_takes_twice_the_time_has_its_ratio(noise: float) -> None:
    """On a machine with some noise and no load, the ratio of a kernel that is twice as slow is shown."""
    assert is_clear_ratio(simulated(1, 200.0, noise=noise), simulated(2, 100.0, noise=noise))
    assert is_clear_ratio(simulated(1, 100.0, noise=noise), simulated(2, 200.0, noise=noise))


def test_a_ratio_under_a_heavy_load_is_not_shown() -> None:
    """A large ratio is not shown either if the load makes it uncertain: it could be a quarter of what it seems."""
    assert not is_clear_ratio(simulated(1, 1000.0, noise=0.1, load=4.0), simulated(2, 100.0, noise=0.1))


def test_equal_and_steady_times_have_a_ratio() -> None:
    """Two steady times have a ratio although it is close to 1."""
    assert is_clear_ratio(simulated(1, 100.0, noise=0.01), simulated(2, 101.0, noise=0.01))


def test_times_on_the_gpu_are_never_noisy() -> None:
    """The rule is for the CPU only: a time on the GPU is not noisy, and every ratio of two such times is shown."""
    wide = msgspec.structs.replace(speed(10.0), device=timing([1.0, 10.0, 100.0]))
    assert (is_noisy(wide, 0.1), is_clear_ratio(wide, speed(9.0)), span_of_ratio(wide, speed(9.0))) == (
        False,
        True,
        1.0,
    )


@pytest.mark.parametrize(
    ("device", "call", "expected"),
    [
        (timing([10.0, 20.0, 30.0, 40.0, 50.0]), None, (20.0, 40.0)),
        (timing([10.0, 20.0, 30.0, 40.0, 50.0], on_core_us=12.0), None, (12.0, 40.0)),
        (timing([10.0, 20.0, 30.0, 40.0, 50.0], on_core_us=90.0), None, (20.0, 40.0)),
        (timing([10.0, 10.0, 10.0]), timing([15.0, 15.0, 15.0]), (10.0, 15.0)),
        (timing([10.0]), None, (10.0, 10.0)),
        (timing([10.0, 10.0], on_core_us=0.0), None, (0.001, 10.0)),
    ],
)
def test_the_range(device: Timing, call: Timing | None, expected: tuple[float, float]) -> None:
    """The range is from the lower quartile, or the time on a core, to the upper quartile, over both measurements."""
    assert expected == range_us(on_cpu(device, call))


def test_the_span_of_two_sums_is_that_of_their_ranges() -> None:
    """Each end of a sum's range is the sum of the weighted ends; the slowest machine of one term counts for all."""
    wide = on_cpu(timing([8.0, 8.0, 10.0, 12.0, 12.0], calibration_us=2.0))
    slow, steady = on_cpu(timing([50.0], calibration_us=3.0)), on_cpu(timing([10.0], calibration_us=2.0))
    terms = [(3.0, wide, steady), (0.5, steady, slow)]
    assert span_of_sums(terms) == pytest.approx((3 * 12 + 5) / (3 * 8 + 5) * 1.5)
    assert span_of_sums([(7.0, wide, slow)]) == span_of_ratio(wide, slow) == pytest.approx(12 / 8 * 1.5)
    assert span_of_sums([(3.0, speed(7.0), speed(9.0)), (0.1, speed(1.0), speed(2.0))]) == 1.0


@pytest.mark.parametrize(
    ("samples_us", "calibration_us", "least_us", "expected"),
    [
        ([10.0, 10.0, 12.0, 12.0], 2.0, 2.0, False),
        ([10.0, 10.0, 14.0, 14.0], 2.0, 2.0, True),
        ([10.0, 10.0, 10.0, 10.0], 3.0, 2.0, True),
        ([10.0, 10.0, 10.0, 10.0], 3.0, None, False),
        ([10.0, 10.0, 10.0, 10.0], None, 2.0, False),
    ],
)
def test_noisy(
    samples_us: list[float], calibration_us: float | None, least_us: float | None, *, expected: bool
) -> None:
    """A time is noisy if its range is wider than 25 %, or if the calibration took 25 % longer than at another time."""
    assert expected is is_noisy(on_cpu(timing(samples_us, calibration_us=calibration_us)), least_us)
