"""`load`, `check`, `time` and `gate`.  `pytest_fa` offers them, with the signatures and docstrings that users read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import UsageProblem
from pytest_fa.features.api.arguments import Settings, case_of, cases_of, named_arguments, variant_of
from pytest_fa.features.api.kept_workers import open_session
from pytest_fa.features.api.rerun_text import rerun_text
from pytest_fa.features.api.shown_record import ShownRecord, shown
from pytest_fa.features.api.this_process import Function, ThisProcess, name_of, variant_for
from pytest_fa.features.gate.gate import decide_gate, gate_question
from pytest_fa.features.gate.opponents import prepare_opponents, require_gated
from pytest_fa.features.gate.plugin import GateOptions, ratio_of
from pytest_fa.host.fork_server import servers_of_run
from pytest_fa.options import values
from pytest_fa.records.environment import find_other_gpu_processes
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.text import printable
from pytest_fa.session.refusals import Refused
from pytest_fa.session.session import Session

if TYPE_CHECKING:
    from pytest_fa.candidate.forward import Forward

Kind = Literal["correct", "speed"]
CALLS: dict[Kind, str] = {"correct": "check", "speed": "time"}
GATE_NEEDS_NAME = (
    "a gate starts fresh processes, and a function of this process is not in them; "
    "`python -m pytest_fa new NAME --kind python` writes a folder with a manifest for it"
)


def load_function(name: str, settings: Settings) -> Forward:
    """The callable of a variant, loaded into this process."""
    from pytest_fa.candidate.module import load  # noqa: PLC0415  # torch: only for a variant of this process

    _require_name(name, "a function needs no loading: call it, or give it to check or time")
    with named_arguments(settings):
        plain = settings.options()
        return load(name, kernels=plain.kernels, cache=plain.cache)


def check_or_time(
    kind: Kind, function: str | Function, case: str | Case, settings: Settings, repeats: int | None = None
) -> ShownRecord:
    """Check a variant or a function on a case; with kind `speed`, time it, too."""
    with named_arguments(settings, variant="function"):
        soak = None if repeats is None else values.repeats(str(repeats))
        if isinstance(function, str):
            return shown(_record_of_variant(kind, function, case_of(case), settings, soak))
        if isinstance(function, type):
            name = function.__name__
            raise UsageProblem(f"function: {name} is a class; give an instance, such as {name}(), or a function")
        if callable(function):
            return shown(_record_of_function(kind, function, case_of(case), settings, soak))
    raise UsageProblem(f"function: {function!r} is neither the name of a variant nor a function f(q, k, v, ...)")


def decide(
    name: str | Function,
    ratio: float,
    cases: str | Case | Sequence[str | Case],
    baseline: str | None,
    settings: Settings,
) -> ShownRecord:
    """Run the gate of a variant."""
    _require_name(name, GATE_NEEDS_NAME)
    with named_arguments(settings):
        ids = tuple(case.id for case in cases_of(cases))
        with named_arguments(settings, gate="ratio"):
            limit = ratio_of(str(ratio))
        gate = GateOptions(limit, baseline)
        options = settings.options(variants=(name,), cases=ids, parts=(gate,))
        with open_session(options) as session:
            with named_arguments(settings, variant="baseline"):
                prepare_opponents(session)  # an unknown name is an error
                require_gated(session.run_plan.plan)
            variant = variant_of(session.run_plan, str(name))
            start(session, variant)
            question = gate_question(session.run_plan, variant, limit)
            return shown(decide_gate(session.runner, variant, question, say))


def _record_of_variant(kind: Kind, name: str, case: Case, settings: Settings, soak: int | None) -> Record:
    """Judge a variant in a worker process.  If it does not compile, the record has the compiler's messages."""
    options = settings.options(variants=(name,), cases=(case.id,), soak=soak, timing=kind == "speed")
    with open_session(options) as session:
        variant = variant_of(session.run_plan, name, "function")
        if not variant.is_judged and kind == "correct":
            reason = "it omits a phase" if variant.omits else "it computes nothing"
            raise UsageProblem(f"function: the output of {name} cannot be checked: {reason} (role {variant.role})")
        start(session, variant)
        record = session.runner.run(variant, case, kind)
        if record.outcome == Outcome.NOT_BUILT:
            record = msgspec.structs.replace(record, message=session.build_record(variant).message)
        return record


def _record_of_function(kind: Kind, function: Function, case: Case, settings: Settings, soak: int | None) -> Record:
    """Judge a function in this process."""
    if settings.kernels or settings.cache:
        raise UsageProblem("kernels, cache: a function is called as it is; these go with the name of a variant")
    process, options = ThisProcess(function, case), settings.options(soak=soak)
    _require_policy_fits(options.tolerance, case)
    session = Session(options, process, process)
    session.builds.say = say
    session.runner.other_gpu_processes = find_other_gpu_processes(servers_of_run())
    record = session.runner.run(variant_for(function, case), case, kind)
    if record.outcome == Outcome.UNSUPPORTED:  # no manifest says that the function supports the case
        reason = record.message.partition("\n")[0]  # without a traceback
        raise Refused(f"{name_of(function)} does not support {case.id}: {reason}")
    keywords = {"repeats": soak, "tolerance": settings.tolerance}
    return msgspec.structs.replace(record, rerun_command=rerun_text(CALLS[kind], function, case, keywords))


def start(session: Session, variant: Variant) -> None:
    """Start the worker servers, and build the variant."""
    session.builds.needed = {variant.name: variant}
    session.start(say)


def say(text: str) -> None:
    """Write a line about the run to standard error."""
    sys.stderr.write(printable(f"fa: {text}\n"))


def _require_name(name: object, why_no_function: str) -> None:
    """Raise `UsageProblem` unless this is a text; for a function, with the reason why it is not accepted."""
    if callable(name):
        raise UsageProblem(f"name: {name_of(name)} is not the name of a variant; {why_no_function}")
    if not isinstance(name, str):
        raise UsageProblem(f"name: {name!r} is not the name of a variant; give a text, such as 'mine'")


def _require_policy_fits(policy: str | None, case: Case) -> None:
    """Raise `UsageProblem` for a case that a tolerance policy does not judge."""
    fits = policy == "same_precision" or case.computes == "attention"
    if policy and not (fits and (policy != "absolute" or case.dtype == "fp16")):
        what = f"{case.dtype} {case.computes}"
        raise UsageProblem(f"tolerance: {policy!r} does not judge {what}, as in {case.id} (use 'same_precision')")
