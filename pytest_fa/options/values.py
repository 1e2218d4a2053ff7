"""The value of each option, parsed from its text.

A text that is not allowed raises `UsageProblem`, with the option, the text and what is allowed.
"""

from __future__ import annotations

import re
from pathlib import Path

from pytest_fa.errors import UsageProblem, suggestion

# The catalog has the same lists.  They are repeated here because importing the catalog costs a pytest run that does not
# use this plugin several milliseconds.  A test compares the lists.
ARCH = r"sm_[1-9][0-9]{1,2}[af]?"
TOLERANCES = ("same_precision", "absolute", "fp8")
NCU_SETS = ("verdict", "occupancy", "tensor", "memory", "stalls", "full")
BASELINES = ("needed", "near", "all")
SAMPLERS = ("tpe", "nsga2")
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
MAX_SEEDS = 100_000
MAX_REPEATS = 1_000_000
MAX_GPUS = 1024
ALL_GPUS = None  # the value of --fa-gate-gpus=all
MAX_WATCHDOG_SECONDS = 86_400.0
MAX_SHARDS = 10_000
# Options that --fa-watch refuses, by their names in pytest's config: the flag, and why.
NOT_WATCHED = {
    "numprocesses": ("-n", "one process at a time builds, checks and times"),
    "fa_gate": ("--fa-gate", "it builds, checks and times, and decides no gate"),
    "fa_sweep": ("--fa-sweep", "it builds, checks and times, and searches nothing"),
    "ncu": ("--ncu", "it builds, checks and times, and profiles nothing"),
    "fa_sanitize": ("--fa-sanitize", "it builds, checks and times, and runs no sanitizer"),
    "fa_static": ("--fa-static", "it runs kernels, and --fa-static only compiles"),
    "fa_selftest": ("--fa-selftest", "the kernels of the self-test are not edited"),
    "fa_no_build": ("--fa-no-build", "a source that was saved must be compiled"),
    "fa_save": ("--fa-save", "records are saved from a run that ends"),
    "fa_html": ("--fa-html", "a report is written from a run that ends"),
    "fa_shard": ("--fa-shard", "the parts of a run on several machines must end"),
}
MAX_TRIALS = 100_000
MIN_GATE, MAX_GATE = 0.01, 100.0


def words_of(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def one_of(flag: str, word: str, allowed: tuple[str, ...]) -> str:
    """The word, which must be one of `allowed`."""
    if word not in allowed:
        raise UsageProblem(f"{flag}: no {word!r}{suggestion(word, allowed)} (allowed: {', '.join(allowed)})")
    return word


def each_of(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a comma-separated list, each of which must be one of `allowed`."""
    return tuple(one_of(flag, word, allowed) for word in words_of(text))


def arches(text: str) -> tuple[str, ...]:
    """The architectures of --fa-arch, each once; the compiler decides later which of them exist."""
    words = words_of(text)
    for word in words:
        if not re.fullmatch(ARCH, word):
            raise UsageProblem(
                f"--fa-arch: {word!r} is not an architecture; write sm_ and a number, then perhaps a or f, such as "
                f"sm_80, sm_90a or sm_120f"
            )
    return tuple(dict.fromkeys(words))


def seeds(text: str) -> tuple[int, ...] | None:
    """Seeds 0 to N-1 for a count N, or the listed seeds; None without a text."""
    words = words_of(text)
    if not words:
        return None
    for word in words:
        if not _is_whole_number(word):
            raise UsageProblem(f"--fa-seeds: {word!r} is not a seed; give a count such as 5, or a list such as 3,7")
    if "," in text:
        return tuple(int(word) for word in words)
    if not 1 <= int(text) <= MAX_SEEDS:
        raise UsageProblem(f"--fa-seeds: {text} seeds; give 1 to {MAX_SEEDS}, or a list such as 0,")
    return tuple(range(int(text)))


def repeats(text: str) -> int | None:
    """The number of repeats of --fa-soak; None without a text."""
    if not text:
        return None
    if not (_is_whole_number(text) and 1 <= int(text) <= MAX_REPEATS):
        raise UsageProblem(f"--fa-soak: {text!r} repeats; give 1 to {MAX_REPEATS}")
    return int(text)


def gate_ratio(text: str) -> float:
    """The ratio of --fa-gate."""
    ratio = _number(text)
    if not MIN_GATE <= ratio <= MAX_GATE:  # also false for NaN
        raise UsageProblem(f"--fa-gate: {text!r} is not a ratio; give {MIN_GATE:g} to {MAX_GATE:g}, such as 0.95")
    return ratio


def gate_gpus(text: str) -> int | None:
    """The number of GPUs of --fa-gate-gpus; `ALL_GPUS` for all that are visible, 1 without a text."""
    if text in ("", "all"):
        return ALL_GPUS if text else 1
    if not (_is_whole_number(text) and 1 <= int(text) <= MAX_GPUS):
        raise UsageProblem(f"--fa-gate-gpus: {text!r} GPUs; give 1 to {MAX_GPUS}, or all")
    return int(text)


def trials(text: str) -> int:
    """The number of --fa-trials."""
    if not (_is_whole_number(text) and 1 <= int(text) <= MAX_TRIALS):
        raise UsageProblem(f"--fa-trials: {text!r} trials; give 1 to {MAX_TRIALS}, such as 100")
    return int(text)


def watchdog_seconds(text: str) -> float | None:
    """The seconds of --fa-watchdog; None without a text."""
    if not text:
        return None
    seconds = _number(text)
    if not 0 < seconds <= MAX_WATCHDOG_SECONDS:  # also false for NaN
        raise UsageProblem(f"--fa-watchdog: {text!r} seconds; give a number above 0, at most {MAX_WATCHDOG_SECONDS:g}")
    return seconds


def policy(text: str) -> str | None:
    """The policy of --fa-tolerance; None without a text."""
    return one_of("--fa-tolerance", text, TOLERANCES) if text else None


def sanitizers(text: str) -> tuple[str, ...]:
    """The tools of --fa-sanitize, each once."""
    return tuple(dict.fromkeys(each_of("--fa-sanitize", text, SANITIZERS)))


def folder(rootdir: Path, text: str) -> Path | None:
    """A folder, relative to pytest's root folder; None without a text."""
    return rootdir / Path(text).expanduser() if text else None


def html_file(rootdir: Path, text: str) -> Path | None:
    """The file of --fa-html, relative to pytest's root folder; None without a text."""
    path = folder(rootdir, text)
    if path is not None and path.is_dir():
        raise UsageProblem(f"--fa-html: {text!r} is a folder; give a file, such as {text.rstrip('/')}/report.html")
    return path


def shard(text: str) -> tuple[int, int] | None:
    """The part and the number of parts of --fa-shard; None without a text."""
    if not text:
        return None
    number, _, count = text.partition("/")
    if not (_is_whole_number(number) and _is_whole_number(count) and 1 <= int(number) <= int(count) <= MAX_SHARDS):
        raise UsageProblem(
            f"--fa-shard: {text!r} is not a part; give I/N with 1 <= I <= N <= {MAX_SHARDS}, such as 2/7"
        )
    return int(number), int(count)


def _is_whole_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _number(text: str) -> float:
    """The number, or NaN for a text that is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
