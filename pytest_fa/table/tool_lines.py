"""The lines of ablations in the terminal, and the short name of a kernel."""

from __future__ import annotations

import re

from pytest_fa.records.record import Record


def ablation_lines(records: list[Record]) -> list[str]:
    """The time of each omitted phase: the difference between a variant's time and its ablation's, at the same shape."""
    timed = [(each, each.case, each.speed) for each in records]
    times = {(each.variant, case.shape_id): speed.device.median_us for each, case, speed in timed if case and speed}
    lines = []
    for record, case, speed in timed:
        ablation = record.ablation
        whole_us = times.get((ablation.parent, case.shape_id)) if ablation and case else None
        if ablation and case and speed and whole_us is not None:
            ablated_us = speed.device.median_us
            difference = f"{whole_us - ablated_us:+.2f} us, {100 * (whole_us - ablated_us) / whole_us:.0f} %"
            lines.append(
                f"{case.shape_id}: {ablation.parent} {whole_us:.2f} us, without {ablation.phase} "
                f"{ablated_us:.2f} us ({record.variant}): {difference}, measured by ablation"
            )
    return [*lines, *(["phases overlap, so their differences need not add up to the whole time"] if lines else [])]


def short_name(name: str) -> str:
    """A kernel's name without types, arguments and namespaces."""
    plain = name.replace("(anonymous namespace)", "anonymous").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].split("::")[-1]
