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
BASELINES = ("needed", "near", "all")
MAX_SEEDS = 100_000
MAX_REPEATS = 1_000_000
MANIFEST = "variant.yaml"  # of a variant, in its folder
MAX_WATCHDOG_SECONDS = 86_400.0
MAX_ERROR = 1e6


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
        if not is_whole_number(word):
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
    if not (is_whole_number(text) and 1 <= int(text) <= MAX_REPEATS):
        raise UsageProblem(f"--fa-soak: {text!r} repeats; give 1 to {MAX_REPEATS}")
    return int(text)


def watchdog_seconds(text: str) -> float | None:
    """The seconds of --fa-watchdog; None without a text."""
    if not text:
        return None
    seconds = number(text)
    if not 0 < seconds <= MAX_WATCHDOG_SECONDS:  # also false for NaN
        raise UsageProblem(f"--fa-watchdog: {text!r} seconds; give a number above 0, at most {MAX_WATCHDOG_SECONDS:g}")
    return seconds


def policy(text: str) -> str | None:
    """The policy of --fa-tolerance; None without a text."""
    return one_of("--fa-tolerance", text, TOLERANCES) if text else None


def max_error(text: str) -> float | None:
    """The largest error of --fa-tolerance=absolute:MAX; None for a text without a number."""
    name, separator, largest = text.partition(":")
    if name != "absolute" or not separator:
        return None
    value = number(largest)
    if not 0 < value <= MAX_ERROR:  # also false for NaN
        raise UsageProblem(
            f"--fa-tolerance={text}: {largest!r} is no largest error; give a number above 0 and up to {MAX_ERROR:g}, "
            f"such as 0.01"
        )
    return value


def default_folders(here: Path, root: Path) -> tuple[Path, ...]:
    """Where variants are looked for without `--fa-kernels`: `kernels` in the working folder, then at pytest's root."""
    return tuple(dict.fromkeys((here / "kernels", root / "kernels")))


def default_folder(here: Path, root: Path) -> Path:
    """The first of these folders that has a variant, else the first that exists, else the first."""
    folders = default_folders(here, root)
    found = [folder for folder in folders if any(folder.glob(f"*/{MANIFEST}"))]
    return next(iter((*found, *filter(Path.is_dir, folders), *folders)))


def folder(base: Path, text: str) -> Path | None:
    """A path, relative to the folder `base`; None without a text."""
    return base / Path(text).expanduser() if text else None


def is_whole_number(text: str) -> bool:
    """Whether a text is a number in ASCII digits."""
    return text.isascii() and text.isdigit()


def number(text: str) -> float:
    """The number, or NaN for a text that is not a number."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
