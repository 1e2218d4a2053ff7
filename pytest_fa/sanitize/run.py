"""`--fa-sanitize`: one variant under one tool of compute-sanitizer, on one case."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.build.builder import BuildFailure
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.records.record import Outcome, Record
from pytest_fa.records.tool_results import Sanitized, ToolStatus
from pytest_fa.sanitize.sanitizer import SanitizedChild, not_covered, sanitize
from pytest_fa.session.builds import device_of
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import CannotRun, Refused
from pytest_fa.worker.client import child_environment
from pytest_fa.worker.jobs import CaseJob, CaseResult, encode

OUTCOMES: dict[ToolStatus, Outcome] = {
    "clean": "ok",
    "suppressed": "ok",
    "found": "hazard",
    "incomplete": "hazard",
    "not covered": "not_measured",
    "not measured": "not_measured",
}


def sanitize_variant(runner: CaseRunner, variant: Variant, case: Case, tool: str) -> Record:
    """The record of `test_sanitize`: one process, one call.

    Raises `Refused` where the variant does not take the case, `CannotRun` where it was not built or has no GPU.
    """
    if reason := variant.refuses(case):
        raise Refused(reason)
    if device_of(variant) == "cpu":
        raise CannotRun(f"{variant.name} runs on the CPU here: compute-sanitizer watches GPUs")
    build = runner.builds.runnable(variant)
    if isinstance(build, BuildFailure):
        raise CannotRun(f"build of {variant.name} failed (see test_build[{variant.name}])")
    if reason := not_covered(tool, build):
        found = Sanitized(tool, "not covered", reason, "", 0.0, ())
    else:
        runner.rest()
        found = suppressed(sanitize(tool, _child(runner, variant, case, tool)), variant)
        found = _shortened(found, runner.options.rootdir)
    result = CaseResult(OUTCOMES[found.status], _message(found), ())
    record = runner.records.make("sanitize", variant, case, result, (build,) if build else ())
    return msgspec.structs.replace(record, id=f"{record.id}-{tool}", sanitized=found)


def suppressed(found: Sanitized, variant: Variant) -> Sanitized:
    """Findings that the manifest explains, as many as it says and no more; what is to be wrong explains nothing."""
    why = next((reason for tool, reason in variant.suppressions.items() if tool == found.tool), None)
    if why is None or found.status != "found" or variant.role == "wrong" or (found.count or 0) > why.most:
        return found
    message = f"({found.count}, none of them real: {why.because})"
    return msgspec.structs.replace(found, status="suppressed", message=message)


def _child(runner: CaseRunner, variant: Variant, case: Case, tool: str) -> SanitizedChild:
    """A `cuda` entry is called without torch; any other through the worker, without torch's own allocator."""
    arm = runner.builds.arm(variant)
    job = CaseJob(variant, case, arm.library, "cuda", runner.policy_of(variant), judge=False, time=False)
    folder = runner.options.artifacts / "sanitizer"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.slug}.job.json"
    path.write_bytes(msgspec.json.format(encode(job)) + b"\n")
    program = "pytest_fa.sanitize.plain_call" if variant.entry.kind == "cuda" else "pytest_fa.worker"
    environment = {**child_environment(runner.options.cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return SanitizedChild(("-m", program, str(path)), environment, folder / f"{job.slug}.{tool}.log")


def _message(found: Sanitized) -> str:
    if found.status in ("clean", "suppressed"):
        return ""
    return f"{found.tool}: {found.message}"


def _shortened(found: Sanitized, root: Path) -> Sanitized:
    """The log's path from the run's root."""
    if found.log is None or not Path(found.log).is_relative_to(root):
        return found
    return msgspec.structs.replace(found, log=str(Path(found.log).relative_to(root)))
