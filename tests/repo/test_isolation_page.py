"""The table of `docs/isolation.md` about earlier versions says what the self-test requires."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_fa.catalog.exploits import EXPLOITS

PAGE = (Path(__file__).parents[2] / "docs" / "isolation.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## What earlier versions missed")[2].partition("\n## ")[0]


def test_each_row_says_what_the_self_test_requires() -> None:
    """Outcome and check of each planted variant are those that the self-test requires of it."""
    rows = [line.split("|")[3] for line in TABLE.splitlines() if "`cheat_" in line]
    assert len(rows) == 8
    for row in rows:
        for name in re.findall(r"`(cheat_\w+)`", row):
            exploit = EXPLOITS[name]
            said = re.match(r" `(\w+)`, by `([\w ]+)`", row)
            expected = (exploit.outcome, *exploit.caught_by[:1]) if said else ("ok",)
            assert expected == (said.groups() if said else ("ok",)), name
            assert said or "gains nothing" in row
