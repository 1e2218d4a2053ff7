"""`--fa-sanitize`: runs one variant under one tool of compute-sanitizer, on one case."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sanitize.sanitized import Sanitized, ToolStatus
from pytest_fa.features.sanitize.sanitizer import SanitizedChild, not_covered, sanitize
from pytest_fa.host.fork_server import child_environment
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.session.builds import device_of
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import CannotRun, Refused
from pytest_fa.wire.jobs import CaseJob, CaseResult, encode

OUTCOMES: dict[ToolStatus, Outcome] = {
    "clean": Outcome.OK,
    "suppressed": Outcome.OK,
    "found": Outcome.HAZARD,
    "incomplete": Outcome.HAZARD,
    "not covered": Outcome.NOT_MEASURED,
    "not measured": Outcome.NOT_MEASURED,
}


def sanitize_variant(runner: CaseRunner, variant: Variant, case: Case, tool: str) -> Record:
    """Run one call under the tool in a separate process and return the record of `test_sanitize`.

    Raises `Refused` if the variant does not support the case, `CannotRun` if its build failed or it has no GPU.
    """
    if reason := variant.refuses(case):
        raise Refused(reason)
    if device_of(variant) == "cpu":
        raise CannotRun(f"{variant.name} runs on the CPU here, and compute-sanitizer checks only GPU code")
    build = runner.builds.build_for_this_machine(variant)
    if isinstance(build, BuildFailure):
        raise CannotRun(f"build of {variant.name} failed (see test_build[{variant.name}])")
    if reason := not_covered(tool, build):
        sanitized = Sanitized(tool, "not covered", reason, "", 0.0, ())
    else:
        runner.end_workers()
        sanitized = suppressed(sanitize(tool, _child(runner, variant, case, tool)), variant)
        sanitized = _with_relative_log(sanitized, runner.options.rootdir)
    result = CaseResult(OUTCOMES[sanitized.status], _message(sanitized), ())
    builds = (build,) if build else ()
    return runner.records.make("sanitize", variant, case, result, builds, tool=tool, added=sanitized)


def suppressed(sanitized: Sanitized, variant: Variant) -> Sanitized:
    """The same result with status `suppressed`, if the manifest suppresses at least as many findings of this tool.

    Findings in a variant of role `wrong` are never suppressed.
    """
    suppression = next((each for tool, each in variant.suppressions.items() if tool == sanitized.tool), None)
    if suppression is None or sanitized.status != "found" or variant.role == "wrong":
        return sanitized
    if (sanitized.count or 0) > suppression.most:
        return sanitized
    message = f"({sanitized.count} false positives: {suppression.because})"
    return msgspec.structs.replace(sanitized, status="suppressed", message=message)


def _child(runner: CaseRunner, variant: Variant, case: Case, tool: str) -> SanitizedChild:
    """The process to check.  A `cuda` entry is called without torch, any other entry by the worker program.

    The worker program runs with torch's caching allocator switched off.
    """
    arm = runner.builds.arm(variant)
    job = CaseJob(
        variant,
        case,
        arm.library,
        "cuda",
        runner.policy_of(variant, case),
        checks_output=False,
        time=False,
        file_hashes=arm.file_hashes,
    )
    folder = runner.options.artifacts / "sanitizer"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.slug}.job.json"
    path.write_bytes(msgspec.json.format(encode(job)) + b"\n")
    program = "pytest_fa.features.sanitize.plain_call" if variant.entry.kind == "cuda" else "pytest_fa.server"
    environment = {**child_environment(runner.options.cache), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return SanitizedChild(("-m", program, str(path)), environment, folder / f"{job.slug}.{tool}.log")


def _message(sanitized: Sanitized) -> str:
    if sanitized.status in ("clean", "suppressed"):
        return ""
    return f"{sanitized.tool}: {sanitized.message}"


def _with_relative_log(sanitized: Sanitized, root: Path) -> Sanitized:
    """The same result with the path of the log relative to the root."""
    if sanitized.log is None or not Path(sanitized.log).is_relative_to(root):
        return sanitized
    return msgspec.structs.replace(sanitized, log=str(Path(sanitized.log).relative_to(root)))
