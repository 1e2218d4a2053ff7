"""Tables in Markdown files, made from committed records and kept up to date by a command.

    python -m pytest_fa.report.markdown FILE...            rewrite every table in these files
    python -m pytest_fa.report.markdown --check FILE...    1 if a table is not what the records say

A table stands between two comments; the first says what it shows:

    <!-- fa-table profiles=profiles/nvidia-h200 case=b1h8s512d64-fp16 variants=minimal,ws_p2 against=sdpa_cudnn -->
    <!-- /fa-table -->
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from pytest_fa.errors import FaError
from pytest_fa.report.log import read_records
from pytest_fa.report.record import Record
from pytest_fa.report.table import launched_kernels

BLOCK = re.compile(r"(<!-- fa-table (?P<words>[^\n]*?) -->\n)(?:(?!<!-- fa-table).)*?(<!-- /fa-table -->)", re.DOTALL)


class TableProblem(FaError):
    """A table's comment that cannot be read, or records that are not there."""


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one table shows: one shape's records, a row for each variant, a ratio for each of `against`."""

    profiles: str
    case: str
    variants: str
    against: str = ""


def rewrite(text: str, root: Path) -> str:
    """The text with every table made anew; `root` is where the comments' paths begin.

    Raises `TableProblem` for a comment that cannot be read, a table that is not closed, or records that are not there.
    """
    whole = len(BLOCK.findall(text))
    if not (whole == text.count("<!-- fa-table") == text.count("<!-- /fa-table")):
        opened = text.count("<!-- fa-table")
        raise TableProblem(f"{opened} tables are opened, {whole} are whole; close each on a line of its own")
    return BLOCK.sub(lambda found: f"{found[1]}\n{_table(_spec(found['words']), root)}\n\n{found[3]}", text)


def main(arguments: list[str]) -> int:
    """Rewrite or check files; 0 if all is well, 1 where a checked table is out of date, 2 for what cannot be read."""
    check, paths = "--check" in arguments, [Path(word) for word in arguments if word != "--check"]
    if not paths or any(str(path).startswith("-") for path in paths):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    old = 0
    for path in paths:
        try:
            before = path.read_text(encoding="utf-8")
            after = rewrite(before, Path.cwd())
        except (OSError, UnicodeDecodeError, TableProblem) as problem:
            sys.stderr.write(f"{path}: {problem}\n")
            return 2
        if check and before != after:
            sys.stderr.write(f"{path}: its tables are not what the records say\n")
            old = 1
        elif before != after:
            path.write_text(after, encoding="utf-8")
    return old


def _spec(words: str) -> Spec:
    try:
        return msgspec.convert(dict(word.split("=", 1) for word in words.split()), Spec)
    except (ValueError, msgspec.ValidationError) as problem:
        raise TableProblem(f"fa-table {words}: {problem}") from None


def _table(spec: Spec, root: Path) -> str:
    """One shape's rows, in the order that was asked for."""
    against = [name for name in spec.against.split(",") if name]
    us = {name: _device_us(_shape_records(spec, root, name), name) for name in against}
    heads = [
        "variant",
        "right",
        "device_us",
        "call_us",
        "TFLOP/s",
        *(f"x {name}" for name in against),
        "regs",
        "spill B",
    ]
    rows = [_row(_shape_records(spec, root, name), name, list(us.values())) for name in spec.variants.split(",")]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def _shape_records(spec: Spec, root: Path, variant: str) -> list[Record]:
    path = root / spec.profiles / f"{variant}.jsonl"
    found = [each for each in read_records(path) if each.case is not None and each.case.shape_id == spec.case]
    if not found:
        raise TableProblem(f"no record of {variant} at {spec.case} in {spec.profiles}")
    return found


def _row(records: list[Record], variant: str, against_us: list[float]) -> list[str]:
    device_us = _device_us(records, variant)
    first = records[0]
    speed = next(each.speed for each in records if each.speed)
    judged = [each for each in records if each.check is not None or each.outcome != "ok"]
    is_floor = first.role == "floor"
    kernels = launched_kernels([each for each in records if each.leaves] or records)
    assert first.case is not None  # noqa: S101  # _shape_records gives only those
    return [
        f"`{variant}`",
        f"{sum(each.outcome == 'ok' for each in judged)}/{len(judged)}" if judged else "not judged",
        f"{device_us:.2f}",
        f"{speed.call.median_us:.2f}" if speed else "-",
        "-" if is_floor else f"{first.case.flops_per_call / device_us / 1e6:.2f}",
        *("-" if is_floor else f"{device_us / each:.3f}" for each in against_us),
        str(max(kernel.registers_per_thread for kernel in kernels)) if kernels else "-",
        str(sum(kernel.spill_bytes for kernel in kernels)) if kernels else "-",
    ]


def _device_us(records: list[Record], variant: str) -> float:
    for record in records:
        if record.speed is not None:
            return record.speed.device.median_us
    raise TableProblem(f"{variant} was not timed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
