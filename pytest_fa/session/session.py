"""`Session` creates the parts of one run from its options."""

from __future__ import annotations

import functools

from pytest_fa.build.outcomes import BuildFailure, explain
from pytest_fa.build.resources import broken_limits
from pytest_fa.build.units import Say
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import BrokenVariant, Variant
from pytest_fa.host.client import Workers
from pytest_fa.host.fork_server import servers_of_run
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.options.options import Options
from pytest_fa.records.built import Build
from pytest_fa.records.environment import find_gpu, find_other_gpu_processes, may_open_gpu_early
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record, Stage
from pytest_fa.session.baseline_choice import LeftOut, left_out_baselines
from pytest_fa.session.builds import Builds
from pytest_fa.session.case_runner import CaseRunner, failed_build
from pytest_fa.session.record_factory import Asker, RecordFactory
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import CaseResult


class Session:
    """The plan, the builds, the record factory and the case runner of one run.

    Each feature uses the parts that it needs.
    """

    def __init__(
        self, options: Options, workers: Workers | None = None, profiler_workers: ProfilerWorkers | None = None
    ) -> None:
        self.options = options
        self._is_started = False
        self.run_plan = RunPlan(options)
        self.builds = Builds(options, self.run_plan)
        self.records = RecordFactory(options)
        self.runner = CaseRunner(
            options,
            self.builds,
            self.records,
            workers or Workers(options.cache),
            profiler_workers or ProfilerWorkers(options.cache),
        )

    def renewed(self) -> Session:
        """A session that reads manifests and sources anew, with the servers, judge and environment of this one."""
        session = Session(self.options, self.runner.workers, self.runner.profiler_workers)
        session._is_started = self._is_started
        session.records = session.runner.records = self.records
        session.records.forget_sources()
        session.asked_by(self.records.asker.other_plugins)
        session.runner.other_gpu_processes = self.runner.other_gpu_processes
        session.runner.has_timings = self.runner.has_timings
        return session

    def asked_by(self, other_plugins: tuple[str, ...] = (), own_test: str = "") -> None:
        """Make records for a test from now on: see `Asker`."""
        self.records.asker = Asker(
            other_plugins,
            own_test,
            self.runner.output,
            self._is_claim,
        )

    def start(self, say: Say) -> None:
        """Start the worker servers, then build everything that the selected tests need, in one batch."""
        self.builds.say = say
        if self.builds.anything_runs():
            self.start_servers()
        if title := self.builds.report.title:
            say(title)

    def start_servers(self) -> None:
        """Start the worker servers that do not run yet.  They import torch while this process goes on."""
        if self._is_started or self.options.static:
            return
        self._is_started = True
        # Before the first process of this run opens the GPU.  A judge of an earlier call may have opened it already.
        self.runner.other_gpu_processes = find_other_gpu_processes(servers_of_run())
        has_gpu = find_gpu() is not None
        self.runner.workers.start(on_gpu=has_gpu, with_candidate=may_open_gpu_early())
        if has_gpu and self.options.timing and self.options.case_rules.confirms_times:
            self.runner.profiler_workers.start()

    def require_servers(self) -> None:
        """End the servers that were started early if the selected tests turn out not to need them."""
        if self._is_started and not self.builds.anything_runs():
            self.close()

    def let_go(self) -> None:
        """Let the worker processes end while this process goes on; `close` waits for them."""
        self.runner.workers.let_go()
        self.runner.profiler_workers.let_go()

    def close(self) -> None:
        """End the worker processes."""
        self._is_started = False
        self.runner.workers.close()
        self.runner.profiler_workers.close()

    def build_record(self, variant: Variant | BrokenVariant, instead: str = "") -> Record:
        """The record of `test_build`: whether every selected architecture compiled within the manifest's limits.

        `instead` is its message, if it is not that of the compiler.
        """
        if isinstance(variant, BrokenVariant):
            return self.records.make("build", variant, None, failed_build(variant.problem))
        outcomes = self.builds.of(variant)
        builds = tuple(build for build in outcomes if isinstance(build, Build))
        problems = explain([failure for failure in outcomes if isinstance(failure, BuildFailure)])
        problems += [] if outcomes else [f"{variant.name}: nothing was built"]
        exceeded = [text for build in builds for text in broken_limits(build, variant.limits)]
        stage = Stage(
            "build", "failed" if problems or exceeded else "ok", sum(build.counted_seconds for build in builds)
        )
        outcome = Outcome.NOT_BUILT if problems else Outcome.OVER_LIMIT if exceeded else Outcome.OK
        message = instead or "\n".join([*problems, *exceeded])
        return self.records.make("build", variant, None, CaseResult(outcome, message, (stage,)), builds)

    def _is_claim(self, variant: Variant, case: Case) -> bool:
        return self.run_plan.plan.is_claim(variant, case)

    @functools.cached_property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The baselines that this run does not time, because earlier records have their times."""
        return left_out_baselines(self.options, self.run_plan.plan, self.records.environment, self.records.machine)

    @property
    def machine_info(self) -> dict[str, str | None]:
        """GPU, driver, CUDA and torch, which pytest-benchmark saves with its times."""
        environment = self.records.environment
        return {
            "gpu": environment.gpu,
            "driver": environment.driver,
            "cuda": environment.cuda,
            "torch": environment.torch,
        }
