"""What the user asks `python -m pytest_fa judge`: the variant, the ratio, and the options of the run."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path

from pytest_fa.catalog.own_tolerance import DEFAULT
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.gate import gate_question
from pytest_fa.features.gate.opponents import require_gated
from pytest_fa.features.gate.plugin import GateOptions, ratio_of
from pytest_fa.features.ncu.plugin import NcuOptions
from pytest_fa.options import values
from pytest_fa.options.command_line import SUITE
from pytest_fa.options.options import Options, defaults, require_variants
from pytest_fa.session.refusals import Refused
from pytest_fa.session.run_plan import RunPlan

COMMAND = ("python", "-P", "-m", "pytest_fa", "judge")  # without -P, Python could run a pytest_fa/ of this folder
MANIFEST = "variant.yaml"


@dataclasses.dataclass(frozen=True)
class Question:
    """The words of the command line.  `target` is a variant's name, or a folder with a manifest.

    `words` are all of them as they were typed, for the rerun command.
    """

    target: str
    words: tuple[str, ...]
    gate: str = "1.0"
    kernels: str | None = None
    suite: str | None = None
    case: str | None = None
    gate_baseline: str | None = None
    tolerance: str | None = None
    watchdog: str | None = None
    cache: str | None = None
    artifacts: str | None = None
    profiles: str | None = None
    no_build: bool = False
    ncu: bool = False

    @property
    def ratio(self) -> float:
        """The ratio that every shape must stay below.  Raises `UsageProblem`."""
        return ratio_of(self.gate)

    @property
    def policy(self) -> str:
        """The tolerance policy: the caller's, never the manifest's.  Raises `UsageProblem`."""
        return values.policy(self.tolerance or "") or DEFAULT

    @property
    def folder(self) -> Path | None:
        """The variant's folder if the target is one; a name of a folder without a manifest is a variant's name."""
        path = Path(self.target)
        is_folder = (path / MANIFEST).is_file() or (os.sep in self.target and path.is_dir())
        return path if is_folder else None

    @property
    def kernels_word(self) -> str | None:
        """The kernels folders of the run; None for the default."""
        if self.folder is None or self.kernels is not None:
            return self.kernels
        return os.path.relpath(self.folder.resolve().parent)

    def rerun_command(self, case_id: str = "") -> str:
        """The command that judges again; with a case's id, only that case."""
        words = [*self.words, *([f"--case={case_id}"] if case_id and not self.case else [])]
        return shlex.join([*COMMAND, *words])

    def options(self, rootdir: Path) -> Options:
        """The options of the run, still without the variant's name.  Raises `UsageProblem`."""
        plain, words = defaults(rootdir), values.words_of(self.kernels_word or "")
        kernels = tuple(path for word in words if (path := values.folder(rootdir, word)))
        require_variants(kernels)
        return dataclasses.replace(
            plain,
            kernels=kernels or plain.kernels,
            suites=values.words_of(self.suite or "") or plain.suites,
            cases=values.words_of(self.case or ""),
            # without the truth of a manifest: a kernel must not bring what it is compared with
            parts=(GateOptions(self.ratio, self.gate_baseline), *((NcuOptions(),) if self.ncu else ())),
            tolerance=self.policy,
            watchdog_seconds=values.watchdog_seconds(self.watchdog or ""),
            no_build=self.no_build,
            cache=values.folder(rootdir, self.cache or "") or plain.cache,
            artifacts=values.folder(rootdir, self.artifacts or "") or plain.artifacts,
            records_folder=values.folder(rootdir, self.profiles or "") or plain.records_folder,
            rerun=("pytest", "--pyargs", SUITE, *self._rerun_words()),
        )

    def _rerun_words(self) -> list[str]:
        """The options with which plain pytest repeats one test."""
        used = {
            "--fa-kernels": self.kernels_word,
            "--fa-tolerance": self.policy,
            "--fa-watchdog": self.watchdog,
            "--fa-gate": self.gate,
            "--fa-gate-baseline": self.gate_baseline,
            "--fa-cache": self.cache,
        }
        words = [f"{flag}={value}" for flag, value in used.items() if value is not None]
        return [*words, *(["--fa-no-build"] if self.no_build else [])]


def selected_variant(question: Question, rootdir: Path) -> tuple[Variant, RunPlan]:
    """The variant that is asked about, and the plan of its run.

    Raises `UsageProblem` if it cannot be judged: an unknown name, several variants, an unreadable manifest, or a role
    that is never gated.
    """
    if not question.target:
        raise UsageProblem("judge: name a variant, or the folder of one")
    if os.sep in question.target and question.folder is None:
        raise UsageProblem(f"judge: there is no folder {question.target!r}; give a variant's name, or its folder")
    options = question.options(rootdir)
    names = (question.target,) if question.folder is None else _names_in(question, options)
    run_plan = RunPlan(dataclasses.replace(options, variants=names))
    run_plan.require_usable(needs_variant=True)
    chosen = run_plan.plan.chosen
    if len(chosen) != 1 or isinstance(chosen[0], BrokenVariant):
        listed = ", ".join(variant.name for variant in chosen)
        raise UsageProblem(f"judge: {question.target!r} names {len(chosen)} variants ({listed}); name one of them")
    require_gated(run_plan.plan)
    try:
        gate_question(run_plan, chosen[0], question.ratio)
    except Refused as reason:
        raise UsageProblem(f"judge: {reason}; name a variant and cases that it supports") from None
    return chosen[0], run_plan


def _names_in(question: Question, options: Options) -> tuple[str, ...]:
    """The name of the one variant in the folder.  Raises `UsageProblem` if there are several, or none."""
    place = question.folder.resolve() if question.folder else Path()
    catalog = RunPlan(options).catalog
    for path, broken in catalog.broken.items():
        if Path(path).parent == place:
            raise UsageProblem(f"judge: {broken.problem}")
    names = [name for name, variant in catalog.variants.items() if Path(variant.folder) == place]
    if len(names) > 1:
        command = f"{shlex.join(COMMAND)} {names[0]} --kernels={shlex.quote(str(question.kernels_word))}"
        raise UsageProblem(
            f"judge: {question.target} has {len(names)} variants ({', '.join(names)}); name one: {command}"
        )
    if not names:
        clashes = "; ".join(catalog.clashes.values())
        raise UsageProblem(f"judge: {question.target} has no variant: {clashes or f'there is no {MANIFEST} in it'}")
    return (names[0],)
