"""`fa-claims`: published speeds beside those that were measured on one GPU, with a verdict on each."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import get_args

import msgspec

from pytest_fa.features.gate.noise import NAME as NOISE
from pytest_fa.records.record import Record
from tools.claims.audit import ClaimAudit, ClaimVerdict, audit_claims, is_of_gpu
from tools.claims.published import ClaimSource, PublishedClaim, claimed_us, read_claims
from tools.docs.block import NOTHING, Shown, figure, read_words, table, with_origin

HEADS = ["kernel", "case", "claimed", "us", "of the claim", "verdict", "source"]
CONVENTIONS = {"half": "a causal mask halves them", "full": "a causal mask does not count", "unknown": "not said"}


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The words of the comment: the file of claims, and the records of the GPU that they are compared with."""

    claims: str
    profiles: str


def block(words: str, root: Path) -> str:
    """The table, and a list of its sources.  Raises `TableProblem` or `ClaimProblem` for what cannot be read."""
    spec = read_words(words, Spec)
    sources = read_claims(root / spec.claims)
    audits = audit_claims(sources, root / spec.profiles)
    counts = Counter(each.verdict for each in audits)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(ClaimVerdict) if counts[verdict])
    rows = [HEADS, *(_row(each, sources.index(each.source) + 1) for each in audits)]
    text = with_origin(table(rows), (record for each in audits for record in each.records))
    items = "\n".join(f"{number}. {_item(source)}" for number, source in enumerate(sources, 1))
    return f"Verdicts: {counted}.\n\n{text}\n\n{items}"


def contents(words: str, root: Path) -> Shown:
    """What the table shows that was measured: the claims about this GPU."""
    spec = read_words(words, Spec)
    sources = [each for each in read_claims(root / spec.claims) if is_of_gpu(each, root / spec.profiles)]
    claims = [claim for source in sources for claim in source.claims]
    results = [(name, claim.case) for claim in claims for name in (claim.variant, claim.rival) if name]
    variants, shapes = (tuple(dict.fromkeys(column)) for column in zip(*results, strict=True)) if results else ((), ())
    return Shown(spec.profiles, variants, shapes, ("speed",), files=(NOISE,), pairs=frozenset(results))


def _row(audit: ClaimAudit, number: int) -> list[str]:
    claim, verdict = audit.claim, audit.verdict + (f": {audit.reason}" if audit.reason else "")
    measured = " / ".join(figure(us) for us in _times(audit.records)) or NOTHING
    cells = [f"`{claim.variant}`", f"`{claim.case}`", _claimed(audit.source, claim), measured]
    return [*cells, _share(audit), verdict, str(number)]


def _claimed(source: ClaimSource, claim: PublishedClaim) -> str:
    """The claimed figure; beside a rate the time that it means."""
    if claim.times_as_fast is not None:
        return f"{claim.times_as_fast:g} x `{claim.rival}`"
    us = claimed_us(source, claim)
    if claim.tflops is None:
        return f"{claim.us:g} us"
    return f"{claim.tflops:g} TFLOP/s" + (f", {us:.1f} us" if us is not None else "")


def _times(records: tuple[Record, ...]) -> list[float]:
    return [each.speed.device.median_us for each in records if each.speed]


def _share(audit: ClaimAudit) -> str:
    """The measured speed divided by the claimed one, with its interval."""
    if audit.share is None:
        return NOTHING
    mean, low, high = (math.exp(each) for each in msgspec.structs.astuple(audit.share))
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _item(source: ClaimSource) -> str:
    """A source: who, what, when, on which GPU, how, and what its TFLOP/s count."""
    parts = [source.version, source.date, source.gpu]
    parts += [f"SM clock locked at {source.sm_mhz} MHz"] if source.sm_mhz else []
    parts += [source.settings] if source.settings else []
    parts += [f"operations: {CONVENTIONS[source.flops]}"] if source.flops else []
    return f"[{source.by}]({source.source}): {'; '.join(parts)}"
