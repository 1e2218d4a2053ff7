"""In place of pytest: saves a result of each test on its command line, as `FAKE_CARD` and `FAKE_OUTCOME` say.

Without `FAKE_CARD`, the card is named like the visible GPU.

A test of the variant `FAKE_SLOW` saves nothing until the process is interrupted.  `FAKE_LOG` gets a line per process;
each waits until it has `FAKE_TOGETHER` lines.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import msgspec

from pytest_fa.records.log import save_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import MachineIdentity, Record, RecordKind
from pytest_fa.records.source import read_source
from tests.factories import ENVIRONMENT, OK, record, speed

OUTCOMES = {str(outcome): outcome for outcome in Outcome}


def main(arguments: list[str]) -> int:
    """Save the results; return 1 if they are failures."""
    options = dict(word.split("=", 1) for word in arguments if word.startswith("--fa-") and "=" in word)
    tests = [re.fullmatch(r"pytest_fa\.suite\.test_attention::test_(\w+)\[(\w+)-(.+)\]", word) for word in arguments]
    results = [_result(*test.groups()) for test in tests if test]
    slow = os.environ.get("FAKE_SLOW")
    save_records([result for result in results if result.variant != slow], Path(options["--fa-profiles"]))
    try:
        with Path(os.environ["FAKE_LOG"]).open("a", encoding="utf-8") as stream:
            stream.write(" ".join(f"{result.kind}:{result.variant}" for result in results) + "\n")
        _wait_for_others(int(os.environ.get("FAKE_TOGETHER", "1")))
        if any(result.variant == slow for result in results):
            time.sleep(60)
    except KeyboardInterrupt:
        save_records([result for result in results if result.variant == slow], Path(options["--fa-profiles"]))
        return 2
    return int(os.environ.get("FAKE_OUTCOME", "ok") != "ok")


def _wait_for_others(number: int) -> None:
    """Wait until so many processes have written their line; fail after a minute."""
    end = time.monotonic() + 60
    while len(Path(os.environ["FAKE_LOG"]).read_text(encoding="utf-8").splitlines()) < number:
        if time.monotonic() > end:
            sys.exit("no other process")
        time.sleep(0.02)


def _result(kind: str, variant: str, case: str) -> Record:
    outcome = OUTCOMES[os.environ.get("FAKE_OUTCOME", "ok")]
    is_timed = kind == "speed" and outcome == Outcome.OK
    kinds: dict[str, RecordKind] = {"profile": "profile", "speed": "speed"}
    plain = record(variant, f"{case.removesuffix('-seed0')}-seed0", kinds.get(kind, "correct"), check=OK)
    if kind == "profile":
        plain = msgspec.structs.replace(plain, id=f"{plain.id}-verdict")
    return msgspec.structs.replace(
        plain,
        outcome=outcome,
        speed=speed(2.0) if is_timed else None,
        environment=ENVIRONMENT,
        source=read_source(Path.cwd()),
        machine=MachineIdentity("host", os.environ.get("FAKE_CARD", os.environ["CUDA_VISIBLE_DEVICES"])),
        measured_at=f"2026-11-30T00:00:{time.monotonic() % 60:09.6f}+00:00",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
