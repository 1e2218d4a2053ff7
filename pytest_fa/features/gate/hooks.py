"""The hooks of the gate: its test, and its checks of names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_fa.catalog.plan import Plan
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.gate.bisect_status import VERDICTS_KEY
from pytest_fa.features.gate.gate import decide_gate, gate_question
from pytest_fa.features.gate.gate_marker import gate_of
from pytest_fa.features.gate.gate_reports import GateReports
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.opponents import gated_variants, options_of, prepare_opponents, require_gated
from pytest_fa.plugin.fa_run import FaRun
from pytest_fa.plugin.items import parametrize_variants
from pytest_fa.plugin.markers import read_marker
from pytest_fa.plugin.state import SESSION_KEY, progress_line, session_of
from pytest_fa.plugin.terminal import Results
from pytest_fa.records.record import Record


class Hooks(GateReports):
    """The gate in one run."""

    def __init__(self, config: pytest.Config) -> None:
        del config

    def pytest_fa_check(self, config: pytest.Config) -> None:
        """Refuse a baseline that is not there, and a run of which no variant can be gated."""
        session = session_of(config)
        run_plan = session.run_plan
        prepare_opponents(session)
        if options_of(run_plan.options).ratio is not None:
            require_gated(run_plan.plan)

    def pytest_fa_parametrize(self, metafunc: pytest.Metafunc, plan: Plan) -> bool | None:
        """Run `test_gate` over the variants that can be gated."""
        if metafunc.function.__name__ != "test_gate" or "fa_run" not in metafunc.fixturenames:
            return None
        parametrize_variants(metafunc, gated_variants(plan))
        return True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Let the baseline be built with the selected variants."""
        if SESSION_KEY in session.config.stash:
            prepare_opponents(session_of(session.config))

    def pytest_fa_run_methods(self) -> dict[str, Callable[..., Record]]:
        """Add `fa_run.gate`."""
        return {"gate": run_gate}

    def pytest_fa_finish(self, results: Results, config: pytest.Config) -> None:
        """Keep the verdicts for `--fa-bisect`; records that were lost or changed prove none."""
        if not options_of(results.options).bisects:
            return
        gates = Gate.all_of(results.records)
        config.stash[VERDICTS_KEY] = frozenset() if results.file.is_bad else frozenset(gate.verdict for gate in gates)


def run_gate(fa_run: FaRun, variant: Variant) -> Record:
    """Run the gate of the variant.  Fails with the verdict and every interval."""
    session, say = fa_run.session, progress_line(fa_run.node.config)
    ratio = options_of(session.options).ratio or read_marker(gate_of, fa_run.node)
    if ratio is None:
        reason = "fa_run.gate: there is no ratio; give --fa-gate=0.95, or mark the test with fa_gate(0.95)"
        pytest.fail(reason, pytrace=False)

    def decide() -> Record:
        question = gate_question(session.run_plan, variant, ratio)
        fa_run.first_reports.require_right(fa_run.node.nodeid, variant, question.cases, "not gated")
        return decide_gate(session.runner, variant, question, say)

    return fa_run.finish(decide)
