"""Sampling: when samples have settled, when there are enough, and which are dropped.  No torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from pytest_fa.records.timing import Timing

SETTLED_SPREAD = 0.01  # relative
SETTLING_WINDOW = 3  # samples
SETTLING_LIMIT = 30  # samples

PRECISION = 0.0025  # relative half-width of the mean's 95 % interval
FEWEST_SAMPLES = 7
MAX_SAMPLES = 40
MAX_SECONDS = 1.5
MAX_DROPPED = 0.2  # fraction of the samples

# The 97.5 % quantiles of Student's t-distribution with 1, 2, ... degrees of freedom, by scipy.special.stdtrit.  To
# import it would take 0.2 s of every run.
# fmt: off
T_QUANTILES = (
    12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146,
    2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274,
    2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776,
    2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864,
    2.0796138447276795, 2.0738730679040254, 2.0686576104190486, 2.0638985616280245, 2.0595385527532972,
    2.0555294386428735, 2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378,
    2.039513446396408, 2.0369333434601016, 2.0345152974493383, 2.0322445093177186, 2.030107928250343,
    2.0280940009804502, 2.0261924630291093, 2.0243941639119694, 2.022690920036761, 2.021075390306273,
    2.019540970441376, 2.0180817028184443, 2.016692199227824, 2.0153675744437636, 2.014103388880846,
    2.012895598919429, 2.0117405137297655, 2.010634757624232, 2.0095752371292392, 2.008559112100761,
    2.007583770315836, 2.006646805061688, 2.0057459953178687, 2.0048792881880564, 2.0040447832891455,
    2.003240718847872, 2.002465459291007, 2.0017174841452356, 2.000995378088267, 2.0002978220142604,
)
# fmt: on


def settle(sample_us: Callable[[], float]) -> None:
    """Take and drop samples until three in a row agree within 1 %, at most 30: clocks ramp up and caches fill."""
    window: list[float] = []
    for _ in range(SETTLING_LIMIT):
        window = [*window[1 - SETTLING_WINDOW :], sample_us()]
        if len(window) == SETTLING_WINDOW and max(window) - min(window) <= SETTLED_SPREAD * max(window):
            return


def timing(method: str, samples_us: list[float], calls_per_sample: int) -> Timing:
    """The `Timing` of raw samples, with their median and precision."""
    return Timing(method, tuple(samples_us), statistics.median(samples_us), calls_per_sample, precision(samples_us))


def precision(samples_us: list[float]) -> float | None:
    """The half-width of the mean's 95 % interval, relative to the mean; None for fewer than two samples."""
    count = len(samples_us)
    mean = statistics.fmean(samples_us) if samples_us else 0.0
    if count < 2 or mean <= 0:  # noqa: PLR2004
        return None
    return _t_quantile(count - 1) * statistics.stdev(samples_us) / math.sqrt(count) / mean


def _t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t-distribution."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    from scipy.special import stdtrit  # noqa: PLC0415  # only for records: no time has so many samples

    return float(stdtrit(degrees, 0.975))


def sample_until_precise(
    method: str,
    sample_us: Callable[[], float],
    calls_per_sample: int,
    is_slowed: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
    clocks_agree: Callable[[list[float]], bool] = lambda _: True,
) -> Timing:
    """Take 7 samples and then more until the mean is known to 0.25 %, 40 samples are taken or 1.5 s have passed.

    As long as `clocks_agree`, which gets the samples so far, is false, more follow, too: a busy machine delays some of
    them by the judge's clock.

    Samples during which the GPU was slowed down are dropped.  If more than 20 % are, `is_throttled` is True.
    """
    valid: list[float] = []
    slow: list[float] = []
    start = now()
    while len(valid) < FEWEST_SAMPLES or _needs_more(valid, now() - start, clocks_agree):
        value = sample_us()
        (slow if is_slowed() else valid).append(value)
        if len(slow) > MAX_DROPPED * MAX_SAMPLES:
            break
    throttled = len(slow) > MAX_DROPPED * (len(slow) + len(valid))
    result = timing(method, valid or slow, calls_per_sample)
    return Timing(
        result.method, result.samples_us, result.median_us, calls_per_sample, result.precision, len(slow), throttled
    )


def _needs_more(samples_us: list[float], seconds: float, clocks_agree: Callable[[list[float]], bool]) -> bool:
    """Whether the mean is not precise enough yet or the clocks differ, and samples and time remain."""
    if len(samples_us) >= MAX_SAMPLES or seconds >= MAX_SECONDS:
        return False
    reached = precision(samples_us)
    return reached is None or reached > PRECISION or not clocks_agree(samples_us)
