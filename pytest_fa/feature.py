"""A feature: one folder of `features/`, whose `plugin.py` declares what it adds to a run.

`plugin.py` is imported by every run of pytest, because `--help` lists its options, and so it imports little.  The
feature's own code is imported while pytest is configured, and only if one of its options is used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import argparse


# In the order in which `--help` lists them.  A feature whose folder is absent, or that requires one, is left out.
FEATURES = (
    "new",
    "doctor",
    "judge_command",
    "bundle",
    "compare",
    "export",
    "ceilings",
    "workload",
    "gate",
    "hunt",
    "sweep",
    "truth",
    "watch",
    "ncu",
    "sanitize",
    "selftest",
    "html",
    "shards",
    "github",
    "api",
)


@dataclasses.dataclass(frozen=True)
class OptionRow:
    """A command-line flag and the ini key of the same name.  A row without a metavar is a switch.

    `in_rerun` marks an option that decides how a variant is selected, built or checked: a rerun command repeats it.
    `in_selection` marks one that selects cases: the command that a run proposes repeats it.  `why_once` says why a run
    with this option is not repeated after each save.  `configures` marks one that asks for no test: it says where files
    are, how kernels are built, or how long a test may take.  `everyday` marks those that `--help` shows first, and
    `writes_records` one that writes what was judged.  `bare` is the value of one that is typed without a value.
    `not_with` names options with which it makes no sense, each with the reason: a run with both is refused at once.
    """

    flag: str
    help: str
    metavar: str | None = None
    ini_default: str = ""
    repeats: bool = False
    in_rerun: bool = False
    in_selection: bool = False
    why_once: str = ""
    configures: bool = False
    everyday: bool = False
    writes_records: bool = False
    bare: str = ""
    not_with: tuple[tuple[str, str], ...] = ()

    @property
    def dest(self) -> str:
        """The ini key and the attribute of pytest's config: `--fa-suite` is `fa_suite`."""
        return self.flag.removeprefix("--").replace("-", "_")


ONLY_COMPILES = ("--fa-static", "it runs kernels, and --fa-static only compiles")  # for `not_with`


@dataclasses.dataclass(frozen=True)
class SuiteTest:
    """A test function of the shipped suite, in the module `suite_tests` of the feature's folder.

    It runs before the test `before`, or last.  `kind` is the kind of its records.  `times` marks a test that times
    kernels.  If `is_pair`, its id has a second part behind the variant's name.  `file` is the file of the suite.
    """

    name: str
    kind: str
    before: str = ""
    times: bool = False
    is_pair: bool = False
    file: str = "test_attention.py"


class Reader(Protocol):
    """The command line, the ini file and the environment of a run."""

    rootdir: Path
    environment: Mapping[str, str]

    def text(self, dest: str) -> str:
        """The value of an option: as typed, else that of the ini file."""

    def base_of(self, dest: str) -> Path:
        """The folder to which the path of an option is relative: the working folder, or pytest's root folder."""

    def is_on(self, dest: str) -> bool:
        """Whether a switch is on."""

    def is_typed(self, dest: str) -> bool:
        """Whether an option was typed, of pytest-fa or of another plugin."""

    def is_used(self, dest: str) -> bool:
        """Whether an option has a value, typed or in the ini file."""

    @property
    def benchmark_words(self) -> list[str]:
        """The options of pytest-benchmark that were given, without those that only switch timings off."""

    @property
    def rows(self) -> tuple[OptionRow, ...]:
        """The options of pytest-fa and of its features."""


@dataclasses.dataclass(frozen=True)
class CaseRules:
    """How a run's cases differ from those of other runs.  None means that the usual rule holds."""

    confirms_times: bool = True  # by the profiler, in a process of its own
    repeats: int | None = None  # of a judged call
    cross_checks: bool = True  # whether a wrong output is compared with SDPA's on the same inputs
    watchdog_seconds: Callable[[Any, str], float | None] | None = None  # of a variant and a device
    always_own_work: bool = False  # each variant is judged without torch's attention
    excuses_neighbours: bool = True  # other processes on the GPU excuse a time that its clocks do not confirm
    locks_cpu: bool = True  # a timing on the CPU has the machine to itself


class FeatureOptions:
    """What the options of one feature ask of a run: a subclass in its `plugin.py` overrides what they change."""

    suite_file = "test_attention.py"  # the file of the shipped suite that runs
    only_tests: tuple[str, ...] = ()  # the only tests of that file
    kernels: Path | None = None  # where variants are looked for instead of --fa-kernels
    variants: tuple[str, ...] = ()  # the variants that are chosen if --fa-variant names none
    variants_flag = "--fa-variant"  # the option that named them
    cases_flag = "--fa-case"  # the option that named `cases`
    judges_named_cases = True  # whether cases in the test ids of the command line join the run's cases
    needs_all_times = False  # whether every baseline is timed
    needs_new_times = False  # whether no earlier time stands for a new one
    keeps_servers = False  # whether the processes go on after the last test
    header = ""  # the end of the first line of pytest's header
    why_nothing = "nothing ran"  # what a run without a result is told
    case_rules = CaseRules()

    def __new__(cls, *_args: object, **_values: object) -> Self:
        """Refuse an instance of this class itself, which would belong to no feature."""
        if cls is FeatureOptions:
            raise TypeError("FeatureOptions belongs to no feature; define a subclass in the feature's plugin.py")
        return super().__new__(cls)

    @property
    def feature(self) -> str:
        """The name of the feature: that of the folder in which the class is."""
        return type(self).__module__.split(".")[-2]

    @property
    def cases(self) -> tuple[str, ...]:
        """The ids of cases that are chosen in place of those of --fa-case; none if the feature chooses none.

        Raises `UsageProblem`.
        """
        return ()

    def own_truth(self, variant: Any) -> Any:  # noqa: ANN401, ARG002  # a `Variant`; an `OwnTruth` or None
        """The user's functions with which a variant is compared in place of attention; None if there are none."""
        return None

    def refusal(self, variants: Sequence[Any], policy: str | None) -> str | None:  # noqa: ARG002  # of `Variant`s
        """Why these variants cannot be judged by this policy, or those of their manifests; None if they can."""
        return None

    def rerun_words(self, kind: str, tool: str | None) -> list[str]:  # noqa: ARG002  # for features that override it
        """The options without which the suite has no test of this kind, or tests something else."""
        return []


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """A command of `python -m pytest_fa`.

    `add_arguments` adds its arguments, and the function `run` of the module `module` in the feature's folder gets them.
    Without `add_arguments`, the function `main` of that module gets the words behind the command.  A command that
    `forgets_folder` imports nothing from the current folder.
    """

    name: str
    help: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    forgets_folder: bool = False


@dataclasses.dataclass(frozen=True)
class Feature:
    """What a feature adds.  Its `name` is that of its folder.

    `read` returns its part of `Options`, or None if the feature is not used; it raises `UsageProblem`.  If it is used,
    the class `Hooks` of the module `hooks` in its folder becomes a plugin of pytest.  `run_methods` are the methods
    that it adds to the fixture `fa_run`, `fixtures` those that the module `fixtures` defines.  `added` names the type
    of what it adds to a record, a `records.added.Added`: `gated:Gate` is `Gate` in the module `gated` of its folder.
    `manifest_key` names in the same way the type of its key in a manifest, a `catalog.feature_keys.FeatureKey`.
    `truth_source` names in the same way the class, in `judge_side`, that gives the judge the truth of a variant with an
    `own_truth`, and `truth_process` the function that serves it in a process of its own.
    `judges_functions` ends the answer about attention that no part judges and that one function computes.
    `early_hooks` is a module of its folder with hooks of pytest that come before the options are read; every pytest run
    imports it, so it imports little.
    """

    name: str
    title: str = ""
    options: tuple[OptionRow, ...] = ()
    read: Callable[[Reader], FeatureOptions | None] = lambda _: None
    tests: tuple[SuiteTest, ...] = ()
    run_methods: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    fixtures: tuple[str, ...] = ()
    has_hooks: bool = True
    added: str = ""
    manifest_key: str = ""
    early_hooks: str = ""
    truth_source: str = ""
    truth_process: str = ""
    judges_functions: str = ""
    requires: tuple[str, ...] = ()
    commands: tuple[Subcommand, ...] = ()

    def module(self, name: str) -> Any:  # noqa: ANN401  # a module
        """A module of the feature's folder, imported."""
        return importlib.import_module(f"{FOLDER}.{self.name}.{name}")

    def named(self, place: str) -> Any:  # noqa: ANN401  # a type
        """What `module:name` names in the feature's folder."""
        module, _, name = place.partition(":")
        return getattr(self.module(module), name)


FOLDER = "pytest_fa.features"


@functools.cache
def features() -> tuple[Feature, ...]:
    """Every feature whose folder is there, with those that it requires."""
    found = {name: importlib.import_module(f"{FOLDER}.{name}.plugin").FEATURE for name in FEATURES if _is_there(name)}
    while incomplete := [name for name, feature in found.items() if not set(feature.requires) <= set(found)]:
        for name in incomplete:
            del found[name]
    return tuple(found.values())


def _is_there(name: str) -> bool:
    return find_spec(f"{FOLDER}.{name}") is not None


@functools.cache
def suite_tests() -> dict[str, tuple[Feature, SuiteTest]]:
    """The tests that features add to the shipped suite, by name."""
    return {test.name: (feature, test) for feature in features() for test in feature.tests}
