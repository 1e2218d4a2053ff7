"""Write `choices.json` from saved records: `python kernels/auto/choices.py profiles/nvidia-h200 ...`.

The table has the measured cases of each GPU, dtype, head_dim and mask; those with few queries are listed separately.
Each case lists its fastest candidates, fastest first, without the candidates whose newest result of any test is a
failure.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.discover import discover
from pytest_fa.records.files import UnreadableRecords
from pytest_fa.records.log import read_records
from pytest_fa.records.record import JUDGED_KINDS, Record
from pytest_fa.records.standing import standing_results

KERNELS = Path(__file__).resolve().parents[1]
CANDIDATES = 3  # listed per case
OPTIONAL = ("flash_attention_3", "flash_attention_3_fp8")  # baselines that are no SDPA backends
TIMES_OF = {"candidate": "device_us", "baseline": "sdpa_us"}  # the key of a row


def main(folders: list[str]) -> int:
    """Read all `*.jsonl` files of the folders, and write the table to `choices.json` in the folder of this file.

    Returns 0, or 2 after one line on stderr if a line of a file is no record.
    """
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.jsonl"))]
    try:
        records = standing_results(record for path in paths for record in read_records(path)).records
    except UnreadableRecords as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    path = Path(__file__).parent / "choices.json"
    path.write_text(json.dumps(choices(records), indent=1) + "\n", encoding="utf-8")
    return 0


def choices(records: Iterable[Record]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the rows of all cases, by GPU and then by `<dtype>-d<head_dim>-<causal>`, with `-few` for few queries."""
    records = list(records)
    failed = {record.variant for record in records if record.kind in JUDGED_KINDS and record.outcome.defect}
    timed: dict[str, dict[str, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        case, gpu = record.case, record.environment.gpu
        if record.kind != "speed" or record.speed is None or case is None or gpu is None:
            continue
        if record.role not in TIMES_OF or record.variant in failed or record.variant in OPTIONAL:
            continue
        if record.variant == "auto" or "@" in record.variant or case.layout != "bhsd":
            continue
        if case.heads != case.kv_heads and not case.has_few_queries:
            continue
        rows = timed[gpu][f"{case.dtype}-d{case.head_dim}-{case.causal}{'-few' * case.has_few_queries}"]
        row = rows.setdefault(case.shape_id, _new_row(case))
        row[TIMES_OF[record.role]][record.variant] = round(record.speed.device.median_us, 2)
    return {
        gpu: {key: [_fastest_first(row) for row in listed] for key, rows in keys.items() if (listed := _listed(rows))}
        for gpu, keys in timed.items()
    }


def _new_row(case: Case) -> dict[str, Any]:
    rows = case.batch * case.heads * case.seq_q
    return {"case": case.shape_id, "rows": rows, "seq_k": case.seq_k, "device_us": {}, "sdpa_us": {}}


def _listed(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases that show which variant is fastest.

    On most of them, more than half as many sources were timed as on the case with most sources. Variants of one source
    count once: the steps of one rung, timed alone, say nothing about the other kernels.  A case with fewer sources is
    listed if its fastest variant is faster, compared with SDPA, than that of the nearest of these cases.
    """
    timed = [row for row in rows.values() if row["device_us"]]
    most = max((_sources(row) for row in timed), default=0)
    compared = [row for row in timed if 2 * _sources(row) > most]
    return [row for row in timed if row in compared or _of_sdpa(row) < _of_sdpa(_nearest(row, compared))]


def _of_sdpa(row: dict[str, Any]) -> float:
    """Return the ratio of the fastest variant's time to the fastest SDPA backend's; infinity if none was timed."""
    if not row["sdpa_us"]:
        return math.inf
    return float(min(row["device_us"].values()) / min(row["sdpa_us"].values()))


def _nearest(row: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    def distance(other: dict[str, Any]) -> float:
        return sum(abs(math.log2(other[key] / max(1, row[key]))) for key in ("rows", "seq_k") if other[key])

    return min(others, key=distance)


def _sources(row: dict[str, Any]) -> int:
    """Return from how many folders the variants are that were timed on the case."""
    return len({_folders().get(name, name) for name in row["device_us"]})


@functools.cache
def _folders() -> dict[str, str]:
    """Return the folder of each variant."""
    return {name: variant.folder for name, variant in discover((KERNELS,)).variants.items()}


def _fastest_first(row: dict[str, Any]) -> dict[str, Any]:
    ranked = sorted(row["device_us"].items(), key=lambda item: item[1])[:CANDIDATES]
    return {"case": row["case"], "rows": row["rows"], "seq_k": row["seq_k"], "device_us": dict(ranked)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
