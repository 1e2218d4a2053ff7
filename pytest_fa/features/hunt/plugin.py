"""What `--fa-hunt` adds to a run."""

from __future__ import annotations

import dataclasses

from pytest_fa.errors import UsageProblem
from pytest_fa.feature import ONLY_COMPILES, CaseRules, Feature, FeatureOptions, OptionRow, Reader, SuiteTest
from pytest_fa.options.values import is_whole_number, words_of

MAX_SECONDS = 86_400
DEFAULT_SECONDS = 60.0
LARGEST_SEED = 2**32
REPEATS = 3  # of a judged call: a race that shows rarely is left to the suites
HUNT_NEEDED = "there is no hunt; give --fa-hunt=NAME too"

OPTIONS = (
    OptionRow(
        "--fa-hunt",
        "judge random cases of what these variants claim, and shrink one that fails to its smallest form",
        "NAME[,NAME...]",
        why_once="it builds and checks, and hunts nothing",
        not_with=(
            ("--fa-variant", "a hunt names its variants"),
            ("--fa-case", "a hunt chooses its cases; --fa-hunt-again judges one that it found"),
            ("--fa-gate", "a hunt times nothing"),
            ("--fa-soak", "a hunt judges many cases, each with a few repeats"),
            ONLY_COMPILES,
        ),
    ),
    OptionRow(
        "--fa-hunt-seconds",
        "how long --fa-hunt looks for failures of each variant",
        "SECONDS",
        f"{DEFAULT_SECONDS:.0f}",
    ),
    OptionRow("--fa-hunt-seed", "the seed of --fa-hunt's random cases; default: another one in each run", "N"),
    OptionRow(
        "--fa-hunt-unclaimed",
        "judge with --fa-hunt what the manifest does not claim, too: a kernel must refuse that, or compute it",
    ),
    OptionRow(
        "--fa-hunt-again",
        "judge these examples of --fa-hunt, and no others: case ids, or PROPERTY:CASE",
        "EXAMPLE[,EXAMPLE...]",
    ),
)


@dataclasses.dataclass(frozen=True)
class HuntOptions(FeatureOptions):
    """The variants that are hunted, for how long, and with which random cases.

    Without `seed`, each run has another one.  `again` are examples that are judged in place of random ones.  With
    `unclaimed`, cases need not be what the manifest claims.
    """

    names: tuple[str, ...]
    seconds: float = DEFAULT_SECONDS
    seed: int | None = None
    again: tuple[str, ...] = ()
    unclaimed: bool = False

    variants_flag = "--fa-hunt"
    only_tests = ("test_hunt",)
    why_nothing = "nothing was hunted"
    case_rules = CaseRules(repeats=REPEATS, cross_checks=False, confirms_times=False)

    @property
    def variants(self) -> tuple[str, ...]:  # type: ignore[override]  # a value there
        """The hunted variants."""
        return self.names


def read(reader: Reader) -> HuntOptions | None:
    """The options of the hunt; None without `--fa-hunt`.  Raises `UsageProblem`."""
    seconds, seed = seconds_of(reader.text("fa_hunt_seconds")), seed_of(reader.text("fa_hunt_seed"))
    names, again = words_of(reader.text("fa_hunt")), words_of(reader.text("fa_hunt_again"))
    if names:
        return HuntOptions(names, seconds, seed, again, reader.is_on("fa_hunt_unclaimed"))
    if reader.is_typed("fa_hunt"):
        raise UsageProblem("--fa-hunt: no variant is named; give a name, or '*' for all")
    for flag in ("--fa-hunt-seconds", "--fa-hunt-seed", "--fa-hunt-unclaimed", "--fa-hunt-again"):
        if reader.is_typed(flag.removeprefix("--").replace("-", "_")):
            raise UsageProblem(f"{flag}: {HUNT_NEEDED}")
    return None


def seconds_of(text: str) -> float:
    """The seconds of --fa-hunt-seconds."""
    if not (is_whole_number(text) and 1 <= int(text) <= MAX_SECONDS):
        raise UsageProblem(f"--fa-hunt-seconds: {text!r} seconds; give 1 to {MAX_SECONDS}, such as 60")
    return float(text)


def seed_of(text: str) -> int | None:
    """The number of --fa-hunt-seed; None without a text."""
    if text and not (is_whole_number(text) and int(text) <= LARGEST_SEED):
        raise UsageProblem(f"--fa-hunt-seed: {text!r} is no seed; give 0 to {LARGEST_SEED}, such as 1")
    return int(text) if text else None


FEATURE = Feature(
    "hunt",
    title="random cases that find faults",
    options=OPTIONS,
    read=read,
    tests=(SuiteTest("test_hunt", "hunt"),),
    added="hunted:Hunt",
)
