"""The hooks of the hunt: its test, and what the terminal shows of it."""

from __future__ import annotations

import os

import pytest

from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.case_strategy import require_hunted, why_not_hunted
from pytest_fa.features.hunt.example import read_example
from pytest_fa.features.hunt.hunted import Hunt
from pytest_fa.features.hunt.ledger import LEDGER_NAME, read_ledger
from pytest_fa.features.hunt.run_hunt import options_of
from pytest_fa.plugin.keys import OPTIONS_KEY
from pytest_fa.plugin.state import session_of
from pytest_fa.plugin.terminal import Results
from pytest_fa.table.layout import TextLine

WORKER_COUNT = "PYTEST_XDIST_WORKER_COUNT"


class Hooks:
    """The hunt in one run."""

    def __init__(self, config: pytest.Config) -> None:
        del config

    def pytest_fa_check(self, config: pytest.Config) -> None:
        """Refuse a variant that cannot be hunted, and an example that is none."""
        plan, asked = session_of(config).run_plan.plan, options_of(config.stash[OPTIONS_KEY])
        has_any = bool(_hunted(plan))
        for variant in plan.judged:
            if variant.name in asked.names or not has_any:  # others of a glob are left out
                require_hunted(variant, plan.dtypes)
        for text in asked.again:
            read_example(text)
        for folder in config.stash[OPTIONS_KEY].kernels:
            read_ledger(folder / LEDGER_NAME)

    def pytest_fa_parametrize(self, metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
        """Run `test_hunt` over the variants, with several hunters of each if pytest-xdist has more workers."""
        if "hunter" not in metafunc.fixturenames:
            return None
        hunted = _hunted(plan)
        count = max(1, int(os.environ.get(WORKER_COUNT, "1")) // max(1, len(hunted)))
        params = [
            pytest.param(variant, number, id=f"{variant.name}:{number}" if count > 1 else variant.name)
            for number in range(count)
            for variant in hunted
        ]
        metafunc.parametrize(("fa_variant", "hunter"), params, indirect=["fa_variant"])
        return True

    def pytest_fa_lines(self, results: Results) -> list[TextLine]:
        """A line for each hunt, and those of the faults that are known, which fail no test."""
        lines: list[TextLine] = []
        for record in results.records:
            if (hunt := Hunt.of(record)) is not None:
                is_good = not hunt.new_finds and not hunt.unexpected
                lines.append(TextLine(f"{record.variant}: {hunt.summary}", "green" if is_good else "red"))
                known = (find for find in hunt.finds if find.reference)
                lines += [TextLine(f"  known: {find.example}: {find.reference}", "") for find in known]
        return lines


def _hunted(plan: Plan) -> list[Variant]:
    """The variants that have random cases."""
    return [variant for variant in plan.judged if not why_not_hunted(variant, plan.dtypes)]
