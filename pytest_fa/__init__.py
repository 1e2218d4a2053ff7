"""pytest-fa: a pytest plugin that builds, checks, times and profiles CUDA attention kernels.

From Python: `load` a kernel, `check` it, `time` it, and `gate` it against a baseline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any

    from pytest_fa.candidate.forward import Forward
    from pytest_fa.catalog.case import Case
    from pytest_fa.features.api.shown_record import ShownRecord

__version__ = "0.1.0"
__all__ = ["__version__", "check", "gate", "load", "time"]

# The functions import what they need when they are called: `import pytest_fa` imports neither torch nor msgspec.


def load(
    name: str,
    *,
    kernels: str | Path | Sequence[str | Path] | None = None,
    cache: str | Path | None = None,
) -> Forward:
    """Build the variant `name` if needed and return its `f(q, k, v, *, scale, causal, out)`, loaded into this process.

    `kernels` is the folder or the folders of variants; by default `kernels` in the current folder.  `cache` is the
    folder of built libraries.

    Raises `UsageProblem` unless the name selects exactly one variant, `ManifestError` for a broken manifest,
    `ToolchainError` if the compiler is missing, and `BuildError` if the build fails.
    """
    from pytest_fa.features.api.arguments import Settings  # noqa: PLC0415  # importing pytest_fa imports nothing else
    from pytest_fa.features.api.functions import load_function  # noqa: PLC0415  # as above

    return load_function(name, Settings(kernels, cache))


def check(
    function: str | Callable[..., Any],
    case: str | Case,
    *,
    repeats: int | None = None,
    tolerance: str | None = None,
    kernels: str | Path | Sequence[str | Path] | None = None,
    cache: str | Path | None = None,
) -> ShownRecord:
    """Check whether a kernel is correct on a case, and return the record, which prints as a table.

    `function` is the name of a variant, which runs in a worker process as in a pytest run, or a function
    `f(q, k, v, *, scale, causal, out)` or an instance of a torch module, which runs in this process without protection.
    `case` is an id such as `b1h8s512d64-fp16-causal`; the seed is 0 unless the id has one.  The call is repeated
    `repeats` times; by default as often as `--fa-soak` says.  `tolerance` is a policy: same_precision, absolute or
    fp8.  `kernels` and `cache` are those of `load`.

    A wrong result is not an exception: the record has `ok` False, and an outcome such as `wrong`, `crashed` or
    `not_built`.  Raises `UsageProblem` for a wrong argument, `CannotRun` if this machine cannot run the variant, and
    its subclass `Refused` if the variant or the function does not support the case.
    """
    from pytest_fa.features.api.arguments import Settings  # noqa: PLC0415  # as above
    from pytest_fa.features.api.functions import check_or_time  # noqa: PLC0415  # as above

    return check_or_time("correct", function, case, Settings(kernels, cache, tolerance), repeats)


def time(
    function: str | Callable[..., Any],
    case: str | Case,
    *,
    tolerance: str | None = None,
    kernels: str | Path | Sequence[str | Path] | None = None,
    cache: str | Path | None = None,
) -> ShownRecord:
    """Check and time a kernel on a case, and return the record, which prints as a table.

    `record.speed` has the times in microseconds per call: on a GPU `device`, `cold` and `call`; on a CPU `device` is
    the wall-clock time of a call.  It is None if the output is wrong.  The arguments and errors are those of `check`.
    """
    from pytest_fa.features.api.arguments import Settings  # noqa: PLC0415  # as above
    from pytest_fa.features.api.functions import check_or_time  # noqa: PLC0415  # as above

    return check_or_time("speed", function, case, Settings(kernels, cache, tolerance))


def gate(
    name: str,
    ratio: float,
    cases: str | Case | Sequence[str | Case],
    *,
    baseline: str | None = None,
    tolerance: str | None = None,
    kernels: str | Path | Sequence[str | Path] | None = None,
    cache: str | Path | None = None,
) -> ShownRecord:
    """Decide whether a variant takes less than `ratio` times its baselines' time on every case.

    The baselines are the SDPA backends, or `baseline`: the name of a variant, or `key:KEY` for a build in the cache.
    `record.gate` has the verdict (PASS, FAIL or INCONCLUSIVE) and the ratio of each pair with its interval; `ok` is
    True for PASS.  A gate takes about 20 s per case.  The other arguments and errors are those of `check`.
    """
    from pytest_fa.features.api.arguments import Settings  # noqa: PLC0415  # as above
    from pytest_fa.features.api.functions import decide  # noqa: PLC0415  # as above

    return decide(name, ratio, cases, baseline, Settings(kernels, cache, tolerance))
