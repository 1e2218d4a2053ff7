"""Lines about kernels that are judged by what their own manifests declare."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fa.catalog.variant import COMPANION_ROLES
from pytest_fa.records.added import added_kinds
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import JUDGED_KINDS, Record

# Of what was compared, if the record has no check: a property, a gate.
VERDICTS = (Outcome.OK, Outcome.WRONG, Outcome.GATE_FAILED)


def own_tolerances(records: Iterable[Record]) -> dict[str, str]:
    """Return what the manifest of each candidate declares, if that made its checks less strict."""
    judged = (*JUDGED_KINDS, *added_kinds(spans_cases=True))
    declared: dict[str, dict[str, None]] = {}
    for record in records:
        if record.own_tolerance and record.kind in judged and record.role not in COMPANION_ROLES:
            declared.setdefault(record.variant, {})[record.own_tolerance] = None
    return {variant: max(texts, key=len) for variant, texts in declared.items()}


def tolerance_lines(records: Iterable[Record]) -> list[str]:
    """Return one line for each such variant, for the lines below the table."""
    return [f"{variant}: judged by its own manifest's {text}" for variant, text in own_tolerances(records).items()]


def reference_lines(records: Iterable[Record]) -> list[str]:
    """Return one line for each variant that was compared with the user's functions, for the lines below the table."""
    return [
        f"{variant}: judged against your reference {functions}, not against attention"
        for variant, functions in references(records).items()
    ]


def reference_part(records: Iterable[Record]) -> list[str]:
    """Return the part of an answer that says so; nothing if all variants were compared with attention."""
    functions = references(records)
    if not functions:
        return []
    if len(functions) == 1 and len({record.variant for record in records}) == 1:
        return [f"judged against your reference {next(iter(functions.values()))}"]
    return [f"judged against your reference: {', '.join(functions)}"]


def references(records: Iterable[Record]) -> dict[str, str]:
    """Return the user's functions by which there is a verdict on a variant."""
    judged = (record for record in records if record.check is not None or record.outcome in VERDICTS)
    return {record.variant: record.reference.functions for record in judged if record.reference}


def tolerance_part(records: Iterable[Record]) -> list[str]:
    """Return the part of an answer that says so; nothing if no manifest of these records does."""
    declared = own_tolerances(records)
    if not declared:
        return []
    if len(declared) == 1 and len({record.variant for record in records}) == 1:
        return [f"judged by its own manifest's {next(iter(declared.values()))}"]
    return [f"judged by their own manifests' tolerance or rounds: {', '.join(declared)}"]
