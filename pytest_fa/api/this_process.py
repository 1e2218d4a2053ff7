"""Judge and time a function in this process: a function of a notebook cannot be sent to another one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Entry, Limits, Supports, Variant
from pytest_fa.errors import DeviceLost, UsageProblem
from pytest_fa.worker.client import LostWorker, Workers, result_without_worker
from pytest_fa.worker.jobs import CaseJob, CaseResult, ProfilerJob, ProfilerResult, Progress, decode_answer, encode

if TYPE_CHECKING:
    from pytest_fa.run.forward import Forward

Function = Callable[..., Any]
OPTIONAL = ("scale", "causal", "out")  # passed by keyword, if the function takes them
NOT_PROFILED = "a function of this process is not profiled; only a variant is"


class ThisProcess(Workers):
    """Runs the jobs of one function in this process.  Nothing ends a call that hangs."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def start(self) -> None:
        """Start nothing: there is no other process."""

    def run(self, job: CaseJob) -> CaseResult:
        """Run one job.  A call of `sys.exit` in the function counts as a crash.

        Raises `DeviceLost` if an earlier call has lost the CUDA context of this process.
        """
        from pytest_fa.run.device import is_alive, open_device  # noqa: PLC0415  # torch: only for a function
        from pytest_fa.worker.pipeline import run_case  # noqa: PLC0415

        if not is_alive(open_device(job.device)):
            raise DeviceLost("this process can no longer use the GPU, because its CUDA context was lost; restart it")
        reports = [Progress(job.wanted_stages[0], 0.0)]
        try:
            result = run_case(job, reports.append, lambda *_: nullcontext(self._forward))
        except SystemExit as end:  # a kernel must not end the script that checks it
            message = f"crashed: {_exit_status(end)} in stage {reports[-1].stage}; the function called sys.exit"
            result = result_without_worker(job, LostWorker("crashed", message, reports[-1]))
        received = decode_answer(encode(result))  # the same values as from a worker
        assert isinstance(received, CaseResult)  # noqa: S101  # it was encoded above
        return received

    def run_profiler(self, job: ProfilerJob) -> ProfilerResult:  # noqa: ARG002  # not profiled, whatever the job
        """The reason why there is no profiler time: times of this process are measured after this."""
        return ProfilerResult(None, NOT_PROFILED)


def _exit_status(end: SystemExit) -> str:
    """The exit status that a process has if nothing catches this exception."""
    status = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    return f"exit status {status}"


def variant_for(function: Function, case: Case) -> Variant:
    """A candidate that stands for a function: it supports the case, and nothing of it is built."""
    return Variant(
        name=name_of(function),
        folder=str(Path.cwd()),
        root=str(Path.cwd()),
        role="candidate",
        entry=Entry(kind="python", target=f"{getattr(function, '__module__', None)}:{name_of(function)}"),
        arch=(),
        supports=Supports(
            dtype=(case.dtype,),
            head_dim=(case.head_dim,),
            causal=(case.causal,),
            layout=(case.layout,),
            device=("cuda", "cpu"),
            grouped_heads=True,
            seq_k_min=0,
        ),
        instantiations=((case.dtype, case.head_dim),),
        defines={},
        flags=(),
        rounds=(),
        limits=Limits(),
        tolerance="same_precision",
        step="",
        parent=None,
        because="",
        expect="",
        computes=case.computes,
    )


def name_of(function: Function) -> str:
    """The name of a function, in characters that the name of a variant may have."""
    return re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "function"


def forward_of(function: Function, case: Case) -> Forward:
    """The function as `f(q, k, v, *, scale, causal, out)`.

    It gets those of the three keywords that it takes.  A function that takes `out` may return None; then it has written
    into `out`.  Raises `UsageProblem` for a causal case if it does not take `causal`.
    """
    taken = _taken_keywords(function)
    if case.causal != "none" and "causal" not in taken:
        name = name_of(function)
        raise UsageProblem(f"case: {case.id} is causal, but {name} takes no keyword `causal`; add it, or drop -causal")

    def forward(q: Any, k: Any, v: Any, **keywords: Any) -> Any:  # noqa: ANN401  # tensors; this module imports no torch
        returned = function(q, k, v, **{name: keywords[name] for name in taken})
        return keywords["out"] if returned is None and "out" in taken else returned

    return forward


def _taken_keywords(function: Function) -> tuple[str, ...]:
    """The optional keywords that a function takes; none of them if its signature is not known."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # such as that of a function in C
        return ()
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return OPTIONAL
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name in OPTIONAL if name in parameters and parameters[name].kind in by_keyword)
