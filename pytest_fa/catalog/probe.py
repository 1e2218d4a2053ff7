"""Check that the keys of a probe's manifest are consistent; each problem is one sentence.

A probe tests a part of attention: it has its own shapes, and may compute only scores.  Wrong kernels may do the same,
so the self-test also covers the checks of probes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from pytest_fa.attention import parts
from pytest_fa.attention.part import Part, shown
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.variant import Role, Variant
from pytest_fa.errors import UsageProblem

ROLES: tuple[Role, ...] = ("probe", "wrong")
EXAMPLE = "[b1h1s32d64-fp16-sk64]"


@functools.lru_cache  # members of a folder often share their cases
def read_cases(texts: tuple[str, ...], computes: Computes) -> tuple[Case, ...]:
    """Parse the shapes of a manifest's `cases` as cases with seed 0.  Raises `UsageProblem` for a malformed shape."""
    for text in texts:
        if "-seed" in text:
            raise UsageProblem(f"cases has {text!r}; write shapes without a seed, such as {EXAMPLE}")
    try:
        cases = [parse_case(f"{text}-seed0") for text in texts]
    except UsageProblem as problem:
        raise UsageProblem(f"cases: {str(problem).replace('-seed0', '').replace('-seed<N>', '')}") from None
    for case in cases:
        if case.computes not in ("attention", computes):
            raise UsageProblem(
                f"cases has {case.shape_id!r}, but computes is {computes!r}; write computes: {case.computes}"
            )
    return tuple(case.computing(computes) for case in cases)


def probe_problem(variant: Variant) -> str | None:
    """Return the first problem (the key, the value found and what is allowed), or None."""
    return next(_problems(variant), None)


def _problems(variant: Variant) -> Iterator[str]:
    role, computes, is_partial = variant.role, variant.computes, variant.computes == "scores"
    allowed = " or ".join(repr(allowed_role) for allowed_role in ROLES)
    if is_partial and role not in ROLES:
        yield f"computes is {computes!r}, but role is {role!r}; it needs role {allowed}"
    if variant.cases and role not in ROLES:
        yield f"cases is only for role {allowed}; role is {role!r}, which runs on the shapes of a suite"
    if not variant.cases and (is_partial or role == "probe"):
        reason = f"computes is {computes!r}" if is_partial else f"role is {role!r}"
        yield f"cases is missing, but {reason}; list the shapes to run, such as {EXAMPLE}"
    for case in variant.cases:
        if refusal := variant.refuses(case):
            yield f"cases: {refusal}"
    if is_partial:
        yield from _score_problems(variant)


def _score_problems(variant: Variant) -> Iterator[str]:
    """Scores are one product that is rounded once: they have no mask, no P, one policy, and at least one key."""
    supports = variant.supports
    plain = [(f"supports.{part.supports}", part.supported(supports), part.claims[:1]) for part in _masks()]
    for key, value, required in (
        *plain,
        ("rounds", variant.rounds, ()),
        ("tolerance", variant.tolerance, "same_precision"),
    ):
        if value != required:
            yield f"{key} is {_shown(value)}, but computes is 'scores'; {key} must be {_shown(required)}"
    if supports.seq_k_min < 1:
        yield f"supports.seq_k_min is {supports.seq_k_min}, but computes is 'scores'; it must be at least 1"


def _masks() -> list[Part]:
    """The parts of attention that scores do not have."""
    return [part for part in parts.claimed_parts() if part.is_after_scores]


def _shown(value: str | Sequence[object]) -> str:
    return value if isinstance(value, str) else f"[{', '.join(map(shown, value))}]"
