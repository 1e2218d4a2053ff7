"""A kernel that hangs or corrupts its CUDA context costs its own job only."""

from __future__ import annotations

import os

from pytest_fa.catalog.case import parse_case
from pytest_fa.host.client import Workers
from pytest_fa.wire.jobs import CaseJob
from tests.device.conftest import HEADER, MANIFEST, BuildSource, Built
from tests.projects import Project

CASE = parse_case("b1h2s64d64-fp16-seed0")

ILLEGAL = """
__global__ void kernel() { *reinterpret_cast<volatile int*>(16) = 1; }
FA_EXPORT int fa_forward(const FaForwardArgs*, cudaStream_t stream) {
  kernel<<<1, 1, 0, stream>>>();
  return static_cast<int>(cudaPeekAtLastError());
}
"""

ENDLESS = """
__global__ void kernel(volatile unsigned short* out) { while (out[0] != 1) {} }
FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  kernel<<<1, 1, 0, stream>>>(static_cast<volatile unsigned short*>(args->out));
  return static_cast<int>(cudaPeekAtLastError());
}
"""


def _job(built: Built, watchdog_seconds: float = 20.0) -> CaseJob:
    variant, library = built
    return CaseJob(
        variant=variant,
        case=CASE,
        library=library,
        device="cuda",
        policy="same_precision",
        checks_output=True,
        time=False,
        watchdog_seconds=watchdog_seconds,
    )


def test_illegal_address_costs_one_job(build_source: BuildSource, minimal: Built) -> None:
    """An illegal address fails its own job with the driver's message; the next job passes in a new worker."""
    illegal = build_source("illegal", ILLEGAL)
    with Workers() as workers:
        results = [workers.run(_job(built)) for built in (minimal, illegal, minimal)]
    assert [result.outcome for result in results] == ["ok", "device_error", "ok"]
    assert (results[1].context_lost, "illegal memory access" in results[1].message) == (True, True)


def test_hang_costs_its_watchdog(build_source: BuildSource, minimal: Built) -> None:
    """A kernel that never ends is killed after the watchdog's time, and its result says so; the next job passes."""
    endless = build_source("endless", ENDLESS)
    with Workers() as workers:
        results = [
            workers.run(_job(minimal)),
            workers.run(_job(endless, watchdog_seconds=5.0)),
            workers.run(_job(minimal)),
        ]
    assert [result.outcome for result in results] == ["ok", "hung", "ok"]
    assert "no progress for 5 s in stage launch" in results[1].message


OWN_TESTS = """\
def test_call(fa_module, fa_inputs, fa_check):
    q, k, v, scale, causal = fa_inputs
    fa_check(fa_module(q, k, v, scale=scale, causal=causal))
"""


def test_a_lost_context_names_the_test_that_lost_it(project: Project) -> None:
    """After an illegal address in the process of a user's tests, later tests are errors that name the first test."""
    project.cuda_variant("illegal", HEADER + ILLEGAL, MANIFEST)
    project.python_variant("later")
    project.write("test_own.py", OWN_TESTS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    options = (f"--fa-case={CASE.id}", "--fa-variant=illegal,later", "-v")
    result = project.run("test_own.py", *options, env={"CUDA_VISIBLE_DEVICES": visible})
    names = [f"test_call[{variant}-{CASE.id}]" for variant in ("illegal", "later")]
    assert [result.outcomes[name] for name in names] == ["failed", "error"]
    assert f"its CUDA context was lost in test_own.py::{names[0]}" in result.reasons[names[1]]
