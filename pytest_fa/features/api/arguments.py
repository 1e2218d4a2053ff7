"""The arguments of the functions: turned into the options of a run, and named in the messages of errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytest_fa.catalog.case import GRAMMAR, Case, parse_case
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.options import options, values
from pytest_fa.options.options import Options
from pytest_fa.session.run_plan import RunPlan

Folders = str | Path | Sequence[str | Path]

# The argument with the meaning of each option that a message may name.
ARGUMENTS = {
    "--fa-case": "case",
    "--fa-kernels": "kernels",
    "--fa-cache": "cache",
    "--fa-tolerance": "tolerance",
    "--fa-soak": "repeats",
    "--fa-gate-baseline": "baseline",
}
SEE_LIST = "(see --fa-list)"
FORM = GRAMMAR.replace("-seed<N>", "[-seed<N>]")  # of an id whose seed may be omitted
EXAMPLE = "b1h8s512d64-fp16"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments that all functions have; None means the default."""

    kernels: Folders | None = None
    cache: str | Path | None = None
    tolerance: str | None = None

    def options(self, **changes: Any) -> Options:  # noqa: ANN401  # fields of any type
        """The options of a run in the current folder; `changes` are other fields of `Options`."""
        plain = options.defaults(Path.cwd())
        cache = Path(self.cache).expanduser().absolute() if self.cache else plain.cache
        folders = self.folders()
        used = (
            ("--fa-kernels", ",".join(map(str, folders)) if self.kernels else None),
            ("--fa-tolerance", self.tolerance),
            ("--fa-soak", changes.get("soak")),
            ("--fa-cache", cache if self.cache else None),
        )
        words = (f"{flag}={value}" for flag, value in used if value)
        return dataclasses.replace(
            plain,
            kernels=folders,
            cache=cache,
            tolerance=values.policy(str(self.tolerance or "")),
            rerun=("pytest", "--pyargs", "pytest_fa.suite", *words),
            **changes,
        )

    def folders(self) -> tuple[Path, ...]:
        """The kernels folders.  The default, `kernels` in the current folder, may be missing."""
        if not self.kernels:
            return (_default_folder(),) if _default_folder().is_dir() else ()
        paths = [self.kernels] if isinstance(self.kernels, str | Path) else self.kernels
        try:
            folders = tuple(Path(path).expanduser().absolute() for path in paths)
        except TypeError:
            raise UsageProblem(f"kernels: {self.kernels!r} is neither a folder nor a list of folders") from None
        options.require_variants(folders)
        return folders

    @property
    def places(self) -> str:
        """Where variants are looked for, in words."""
        if not self.kernels and not _default_folder().is_dir():
            return f"there is no folder {_default_folder()}; give kernels=FOLDER"
        return f"looked in {', '.join(map(str, self.folders()))} and in installed packages"


def _default_folder() -> Path:
    return Path.cwd() / "kernels"


@contextmanager
def named_arguments(settings: Settings, variant: str = "name", gate: str = "name") -> Iterator[None]:
    """Within this context, a `UsageProblem` names arguments where its message names options of the command line.

    `variant` is the argument that names a variant, and `gate` the one that a message about `--fa-gate` is about.
    """
    names = {**ARGUMENTS, "--fa-variant": variant, "--fa-gate": gate}
    try:
        yield
    except UsageProblem as problem:
        text = re.sub(r"--fa-[a-z-]*[a-z]\b", lambda flag: names.get(flag[0], flag[0]), _places(problem, settings))
        raise UsageProblem(text) from None


def _places(problem: UsageProblem, settings: Settings) -> str:
    """The message without the hint of the command line to list variants.

    If it does not say where they were looked for, it says that instead.
    """
    text = str(problem)
    if text.endswith(SEE_LIST):
        return text.replace(SEE_LIST, f"({settings.places})")
    return text.replace(f" {SEE_LIST}", "")


def case_of(case: str | Case, argument: str = "case") -> Case:
    """The case with this id; without a seed, that with seed 0.  Raises `UsageProblem`, which names the argument."""
    if isinstance(case, Case):
        return case
    if not isinstance(case, str):
        raise UsageProblem(f"{argument}: {case!r} is not the id of a case; the form is {FORM}, as in {EXAMPLE}")
    full = case if re.search(r"-seed\d+$", case) else f"{case}-seed0"
    try:
        return parse_case(full)
    except UsageProblem as problem:
        text = str(problem).replace(f"case {full!r}", f"{argument}: {case!r}", 1)
        raise UsageProblem(text.replace(GRAMMAR, FORM).replace(f"{EXAMPLE}-seed0", EXAMPLE)) from None


def cases_of(cases: str | Case | Sequence[str | Case]) -> tuple[Case, ...]:
    """One case or several.  Raises `UsageProblem` for a malformed id and if there is none."""
    if isinstance(cases, str) or not isinstance(cases, Sequence):
        return (case_of(cases, "cases"),)
    parsed = tuple(dict.fromkeys(case_of(case, "cases") for case in cases))
    if not parsed:
        raise UsageProblem("cases: there is none; give the id of a case, such as 'b1h2s64d64-fp16', or a list of ids")
    return parsed


def variant_of(run_plan: RunPlan, name: str, argument: str = "name") -> Variant:
    """The variant with this name.  Raises `UsageProblem` for an unknown name, a glob, and a broken manifest.

    `argument` is the one that has the name.
    """
    variants = run_plan.plan.chosen
    if len(variants) != 1:
        names = ", ".join([variant.name for variant in variants[:3]] + ["..."] * (len(variants) > 3))  # noqa: PLR2004
        raise UsageProblem(f"{argument}: {name!r} selects {len(variants)} variants ({names}); give the name of one")
    if isinstance(variants[0], BrokenVariant):
        raise UsageProblem(f"{argument}: {name} cannot be used: {variants[0].problem}")
    return variants[0]
