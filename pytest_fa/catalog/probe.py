"""What does not go together in the manifest of a probe, in one sentence.

A probe answers a question about a part: it brings its own shapes, and may compute less than attention.  Wrong kernels
may do the same, so that a probe's judge can be judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fa.catalog.case import Case, Computes, parse_case
from pytest_fa.catalog.variant import Role, Variant
from pytest_fa.errors import UsageProblem

ROLES: tuple[Role, ...] = ("probe", "wrong")
EXAMPLE = "[b1h1s32d64-fp16-sk64]"


def read_cases(texts: tuple[str, ...], computes: Computes) -> tuple[Case, ...]:
    """The shapes that a manifest's `cases` names, with seed 0.  Raises `UsageProblem` for one that cannot be read."""
    for text in texts:
        if "-seed" in text:
            raise UsageProblem(f"cases has {text!r}; it names shapes, such as {EXAMPLE}, and seeds are the suite's")
    try:
        cases = [parse_case(f"{text}-seed0") for text in texts]
    except UsageProblem as problem:
        raise UsageProblem(f"cases: {str(problem).replace('-seed0', '').replace('-seed<N>', '')}") from None
    for case in cases:
        if case.computes not in ("attention", computes):
            raise UsageProblem(
                f"cases has {case.shape_id!r}, and computes is {computes!r}; say computes: {case.computes}"
            )
    return tuple(case.computing(computes) for case in cases)


def probe_problem(variant: Variant) -> str | None:
    """The first thing that is wrong: the key, the value found, what is allowed.  None where all is well."""
    return next(_problems(variant), None)


def _problems(variant: Variant) -> Iterator[str]:
    role, computes, is_partial = variant.role, variant.computes, variant.computes != "attention"
    allowed = " or ".join(repr(each) for each in ROLES)
    if is_partial and role not in ROLES:
        yield f"computes is {computes!r}, role is {role!r}; what computes no attention has role {allowed}"
    if variant.cases and role not in ROLES:
        yield f"cases is for role {allowed}, this one is {role!r}: it is judged on a suite's shapes"
    if not variant.cases and (is_partial or role == "probe"):
        why = f"computes is {computes!r}" if is_partial else f"role is {role!r}"
        yield f"cases is missing, and {why}; it names its own shapes, such as {EXAMPLE}"
    for case in variant.cases:
        if reason := variant.refuses(case):
            yield f"cases: {reason}"
    if is_partial:
        yield from _of_scores(variant)


def _of_scores(variant: Variant) -> Iterator[str]:
    """Scores are one product, rounded once: no mask, no P, no other policy, and a key at least."""
    supports = variant.supports
    for key, found, only in (
        ("supports.causal", supports.causal, ("none",)),
        ("rounds", variant.rounds, ()),
        ("tolerance", variant.tolerance, "same_precision"),
    ):
        if found != only:
            yield f"{key} is {_shown(found)}, and computes is 'scores', whose {key} is {_shown(only)}"
    if supports.seq_k_min < 1:
        yield f"supports.seq_k_min is {supports.seq_k_min}, and computes is 'scores': without keys there are none"


def _shown(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else f"[{', '.join(value)}]"
