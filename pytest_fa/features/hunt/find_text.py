"""A fault as a record has it: texts, and the command that judges its smallest example again."""

from __future__ import annotations

import shlex

from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.hunted import Find
from pytest_fa.features.hunt.hunting import FoundFault
from pytest_fa.features.hunt.ledger import Ledger
from pytest_fa.features.hunt.plugin import DEFAULT_SECONDS, HuntOptions
from pytest_fa.options.options import Options
from pytest_fa.session.rerun import rerun_command


def find_of(fault: FoundFault, options: Options, variant: Variant, ledger: Ledger) -> Find:
    """The fault of a hunt, in words."""
    record, example = fault.verdict.record, fault.example
    assert record  # noqa: S101  # a fault has a record
    if example.property_name or variant.refuses(example.case):
        command = shlex.join([*options.rerun, *hunt_words(options, variant), f"--fa-hunt-again={example}"])
    else:
        command = rerun_command(options, "correct", variant.name, example.case)
    return Find(
        example=str(example),
        first=str(fault.first),
        outcome=record.outcome,
        message=record.message.partition("\n")[0],
        cause=record.diagnosis.cause if record.diagnosis else "",
        matters=tuple(rule.words for rule in fault.rules),
        failed=fault.failed,
        judged=fault.judged,
        after=fault.after,
        shrinking=fault.shrinking,
        command=command,
        note=fault.note,
        reference=ledger.reference_of(example, record.outcome),
    )


def hunt_words(options: Options, variant: Variant) -> list[str]:
    """The options that repeat a hunt of a variant, but for its seed."""
    part = options.part(HuntOptions)
    seconds = part.seconds if part else DEFAULT_SECONDS
    words = [f"--fa-hunt={variant.name}"]
    words += [f"--fa-hunt-seconds={seconds:.0f}"] if seconds != DEFAULT_SECONDS else []
    words += ["--fa-hunt-unclaimed"] if part and part.unclaimed else []
    return [*words, *([f"--fa-dtype={','.join(options.dtypes)}"] if options.dtypes else [])]
