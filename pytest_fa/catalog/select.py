"""Select variants and cases by the names, globs and definitions of the command line."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase

import msgspec

from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.discover import Catalog
from pytest_fa.catalog.grammar import define_problem
from pytest_fa.catalog.suites import SUITES
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.errors import UnknownVariant, UnusableRun, UsageProblem, suggestion

_GLOB = frozenset("*?[")
# A case id, with or without its seed, alone or in a test id such as test_attention.py::test_correct[ws_p2-<case id>].
_PRINTED_ID = re.compile(
    r"(?:(?:[^\[]*::)?\w+\[)?(?:[a-z][a-z0-9_]*(?:@[^@]*)*?-)?"
    r"(?P<case>b\d+h\d+s\d+d\d+-[a-z0-9_-]+?(?P<seed>-seed\d+)?)(?:-(?:memcheck|racecheck|synccheck|initcheck))?\]?"
)


def select_variants(
    catalog: Catalog, patterns: tuple[str, ...], flag: str = "--fa-variant"
) -> tuple[Variant | BrokenVariant, ...]:
    """Return the variants that match `patterns`; without patterns, all candidates and all broken manifests.

    A pattern is a name, a glob, or one of these with definitions, as in `ws_p2@BLOCK_M=64@BLOCK_N=32`.  Raises
    `UsageProblem` for a pattern that matches nothing, or a name that several manifests declare.  The message names
    `flag`, the option that was typed.
    """
    if not patterns:
        candidates = [variant for variant in catalog.variants.values() if variant.role == "candidate"]
        return (*candidates, *catalog.broken.values())
    chosen: dict[str, Variant | BrokenVariant] = {}
    for pattern in patterns:
        for variant in _matching(catalog, pattern, flag):
            chosen.setdefault(variant.name, variant)
    return tuple(chosen.values())


def _matching(catalog: Catalog, pattern: str, flag: str) -> list[Variant | BrokenVariant]:
    name, *definitions = pattern.split("@")
    broken_names: dict[str, Variant | BrokenVariant] = {}
    for broken in catalog.broken.values():
        broken_names.setdefault(broken.name, broken)
    # A folder whose manifest cannot be read keeps its name: another folder with a variant of this name is not chosen.
    known = {**catalog.variants, **broken_names}
    is_glob = not _GLOB.isdisjoint(name)
    for clash in (text for key, text in catalog.clashes.items() if _matches(key, name, is_glob=is_glob)):
        raise UnusableRun(clash)
    matches = [known[key] for key in known if _matches(key, name, is_glob=is_glob)]
    if not matches:
        raise UnknownVariant(name, f"{flag}: no variant {name!r}{suggestion(name, known)} (see --fa-list)")
    if not definitions:
        return matches
    pairs = dict(_pair(text, f"{flag}={pattern}") for text in definitions)
    return [with_defines(variant, pairs) if isinstance(variant, Variant) else variant for variant in matches]


def _matches(key: str, name: str, *, is_glob: bool) -> bool:
    return fnmatchcase(key, name) if is_glob else key == name


def expand_defines(
    variants: tuple[Variant | BrokenVariant, ...], definitions: tuple[str, ...]
) -> tuple[Variant | BrokenVariant, ...]:
    """Replace each variant that has a definition's name by one variant per value.

    `BLOCK_M=64,128` replaces `ws_p2` by `ws_p2@BLOCK_M=64` and `ws_p2@BLOCK_M=128`.  Several definitions give all
    combinations of their values.  Raises `UsageProblem` if no variant has a definition of that name.
    """
    axes = [_axis(text) for text in definitions]
    for name, _ in axes:
        known = {key for variant in variants if isinstance(variant, Variant) for key in variant.defines}
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageProblem(
                f"--fa-define: no selected variant has {name!r}{suggestion(name, known)} (they have: {listed})"
            )
    expanded: list[Variant | BrokenVariant] = []
    for variant in variants:
        variant_axes = [axis for axis in axes if isinstance(variant, Variant) and axis[0] in variant.defines]
        if not variant_axes or isinstance(variant, BrokenVariant):
            expanded.append(variant)
            continue
        names = [name for name, _ in variant_axes]
        combinations = itertools.product(*(values for _, values in variant_axes))
        expanded += [with_defines(variant, dict(zip(names, values, strict=True))) for values in combinations]
    return tuple(expanded)


def with_defines(variant: Variant, pairs: dict[str, int | str]) -> Variant:
    """Return a copy of `variant` with these definitions, which are appended to its name.

    Raises `UsageProblem` for a definition that the variant does not have.
    """
    for name, value in pairs.items():
        if name not in variant.defines:
            listed = ", ".join(variant.defines) or "none"
            raise UsageProblem(
                f"{variant.name} has no definition {name!r}{suggestion(name, variant.defines)} (it has: {listed})"
            )
        if problem := define_problem(name, value):
            raise UsageProblem(f"{variant.name}: {problem}")
    base, *earlier = variant.name.split("@")
    named = {**dict(text.split("=", 1) for text in earlier), **pairs}
    suffix = "".join(f"@{name}={value}" for name, value in named.items())
    return msgspec.structs.replace(variant, name=base + suffix, defines={**variant.defines, **pairs})


def _axis(text: str) -> tuple[str, list[int | str]]:
    name, joined = _pair(text, "--fa-define")
    values = str(joined).split(",")
    if "" in values:
        raise UsageProblem(f"--fa-define: {text!r} has an empty value; the form is NAME=VALUE[,VALUE...]")
    return name, [_number(value) for value in values]


def _pair(text: str, option: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise UsageProblem(f"{option}: {text!r} is malformed; the form is NAME=VALUE")
    return name, _number(value)


def _number(text: str | int) -> int | str:
    digits = str(text)
    return int(digits) if re.fullmatch(r"-?[0-9]+", digits) else digits


# -- cases ------------------------------------------------------------------------------------------------------------


def select_cases(
    suites: tuple[str, ...], patterns: tuple[str, ...], dtypes: tuple[str, ...], seeds: tuple[int, ...] | None
) -> tuple[Case, ...]:
    """Return the cases of `suites` with these dtypes and seeds, filtered by `patterns`.

    A pattern is a case id, which need not be in a suite, or a glob, which must match at least one case.  An id without
    a seed stands for every seed of that shape in the suites, or for `seeds`, or for seed 0.  An id may be inside a test
    id, as pytest prints it.  Raises `UsageProblem` for an unknown suite or dtype, a malformed id, or a glob without a
    match.
    """
    for name in suites:
        if name not in SUITES:
            raise UsageProblem(
                f"--fa-suite: no suite {name!r}{suggestion(name, SUITES)} (allowed: {', '.join(SUITES)})"
            )
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UsageProblem(
                f"--fa-dtype: no dtype {dtype!r}{suggestion(dtype, DTYPES)} (allowed: {', '.join(DTYPES)})"
            )
    cases = _varied([case for name in suites for case in SUITES[name]], dtypes, seeds)
    if patterns:
        cases = [case for pattern in patterns for case in _cases_of(pattern, cases, suites, seeds)]
    return tuple(dict.fromkeys(cases))


def exact_shapes(patterns: tuple[str, ...], dtypes: tuple[str, ...]) -> frozenset[str]:
    """The shapes of the cases that patterns name exactly, not by a glob.  Raises as `select_cases` does."""
    exact = tuple(each for each in patterns if _PRINTED_ID.fullmatch(each) or _GLOB.isdisjoint(each))
    return frozenset(case.shape_id for case in select_cases((), exact, dtypes, (0,)) if exact)


def _varied(cases: list[Case], dtypes: tuple[str, ...], seeds: tuple[int, ...] | None) -> list[Case]:
    """Return each case with each of these dtypes and seeds."""
    cases = [case.with_dtype(dtype) for case in cases for dtype in dtypes] if dtypes else cases  # type: ignore[arg-type]
    return [case.with_seed(seed) for case in cases for seed in seeds] if seeds is not None else cases


def parse_id(text: str) -> Case:
    """The case of an id; without a seed, that with seed 0.  Raises `UsageProblem` as `parse_case` does."""
    return parse_case(text) if re.search(r"-seed\d+$", text) else _parse_shape(text)


def _parse_shape(shape_id: str) -> Case:
    try:
        return parse_case(f"{shape_id}-seed0")
    except UsageProblem as problem:
        raise UsageProblem(str(problem).replace(f"case '{shape_id}-seed0'", f"case {shape_id!r}")) from None


def _cases_of(
    pattern: str, cases: list[Case], suites: tuple[str, ...], seeds: tuple[int, ...] | None = None
) -> list[Case]:
    printed = _PRINTED_ID.fullmatch(pattern)
    case_id = printed["case"] if printed else pattern
    if printed and not printed["seed"]:  # the id of a shape, as in tables: every seed of the run
        shape = _parse_shape(case_id)
        return [case for case in cases if case.shape_id == case_id] or [shape.with_seed(seed) for seed in seeds or (0,)]
    if printed or _GLOB.isdisjoint(pattern):
        return [parse_case(case_id)]
    matches = [case for case in cases if fnmatchcase(case.id, pattern)]
    if not matches:
        found = [name for name, suite in SUITES.items() if any(fnmatchcase(case.id, pattern) for case in suite)]
        advice = f"suite {found[0]} has some: add --fa-suite={found[0]}" if found else "see --collect-only -q"
        raise UsageProblem(f"--fa-case: {pattern!r} matches no case of suite {','.join(suites)} ({advice})")
    return matches
