"""Judge and time a function in this process: a function of a notebook cannot be sent to another one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_fa.attention import parts
from pytest_fa.attention.layout import PART as LAYOUT
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Entry, Limits, Supports, Variant
from pytest_fa.errors import ENTRY, UsageProblem, WrongResult
from pytest_fa.host.answers import LostWorker, result_without_worker
from pytest_fa.host.profiler_workers import ProfilerWorkers
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.jobs import CaseJob, CaseResult, ProfilerJob, ProfilerResult, Progress, decode_answer, encode
from pytest_fa.wire.user_traceback import CALL_HINT

if TYPE_CHECKING:
    from pytest_fa.candidate.forward import Forward

Function = Callable[..., Any]
NOT_PROFILED = "a function of this process is not profiled; only a variant is"


class ThisProcess(ProfilerWorkers):
    """Runs the jobs of one function in this process.  Nothing ends a call that hangs."""

    def __init__(self, function: Function, case: Case) -> None:
        super().__init__()
        self._forward = forward_of(function, case)
        self._call_hint = f"; it is called as {_call_of(function, case)}; wrap it: `{_wrapped(case)}`"

    def start(self, *, on_gpu: bool = False, with_candidate: bool = False) -> None:
        """Start nothing: there is no other process."""

    def start_processes(self, job: CaseJob) -> None:
        """Start nothing: there is no other process."""

    def run(self, job: CaseJob) -> CaseResult:
        """Run one job.  A call of `sys.exit` in the function counts as a crash.

        Raises `DeviceLost` if an earlier call has lost the CUDA context of this process.
        """
        from pytest_fa.features.api.judge_side.judged_here import judge_here  # noqa: PLC0415  # torch: only for a function

        reports = [Progress(job.wanted_stages[0], 0.0)]
        try:
            result = judge_here(job, self._forward, reports.append)
        except SystemExit as end:  # a kernel must not end the script that checks it
            message = f"crashed: {_exit_status(end)} in stage {reports[-1].stage}; the function called sys.exit"
            result = result_without_worker(job, LostWorker(Outcome.CRASHED, message, reports[-1]))
        result = msgspec.structs.replace(result, message=result.message.replace(CALL_HINT, self._call_hint))
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
        supports=Supports(device=("cuda", "cpu"), seq_k_min=0).for_case(case),
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
    """The function, which gets those of the keywords of a call that it takes.

    A function that takes `out` may return None; then it has written into `out`.  Raises `UsageProblem` for a case with
    a part of attention for which the function takes no keyword.
    """
    if case.computes == "gradients":
        raise UsageProblem(
            f"case: {case.id} asks for gradients, and {name_of(function)} is a function; give the name of a variant "
            f"with `computes: gradients`"
        )
    taken = _taken_keywords(function, case)
    for word, part in parts.words_beyond_plain(case).items():
        if word not in taken and word not in part.hints:
            token = (part.tokens or LAYOUT.tokens)[0]
            lacks, drop = f"{name_of(function)} takes no keyword `{word}`", f"drop -{case.text_of(token)}"
            raise UsageProblem(f"case: {case.id} is {word}, but {lacks}; add it, or {drop}")

    def forward(q: Any, k: Any, v: Any, **keywords: Any) -> Any:  # noqa: ANN401  # tensors; this module imports no torch
        returned = function(q, k, v, **{name: keywords[name] for name in taken})
        if isinstance(returned, tuple | list):
            _require_no_output_in(returned, keywords["out"], case)
        return keywords["out"] if returned is None and "out" in taken else returned

    return forward


def _require_no_output_in(returned: object, out: Any, case: Case) -> None:  # noqa: ANN401  # a tensor
    """Raise `WrongResult` for a tuple or a list with an output in it, with what to write in Python."""
    from pytest_fa.candidate.adapter import output_index  # noqa: PLC0415  # torch: only for a function

    if (index := output_index(returned)) is not None:
        advice = f"return item {index} alone, or wrap it: `{_wrapped(case)}[{index}]`"
        what = f"the output is a {type(returned).__name__} ({advice})"
        raise WrongResult(ENTRY, f"{what}, it must be {out.dtype} {list(out.shape)}")


def _wrapped(case: Case) -> str:
    """What to write for a function that has other parameters, or returns something else."""
    return f"lambda q, k, v, *, {', '.join(('scale', *_needed_words(case)))}: f(...)"


def _needed_words(case: Case) -> tuple[str, ...]:
    """The keywords that a function must take, because the case has parts of attention that they are about."""
    return tuple(parts.words_beyond_plain(case))


def _call_of(function: Function, case: Case) -> str:
    """How a function is called."""
    return f"f({', '.join(('q', 'k', 'v', *(f'{name}={name}' for name in _taken_keywords(function, case))))})"


def _taken_keywords(function: Function, case: Case) -> tuple[str, ...]:
    """The keywords of a call on a case that a function takes; none of them if its signature is not known."""
    passed = tuple(dict.fromkeys((*parts.keywords(), *_needed_words(case))))
    try:
        parameters = _signature(function).parameters
    except (ValueError, TypeError):  # such as that of a function in C
        return ()
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return passed
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name in passed if name in parameters and parameters[name].kind in by_keyword)


def _signature(function: Function) -> inspect.Signature:
    """The signature of a function; for a torch module, whose `__call__` takes any arguments, that of its `forward`.

    Raises `ValueError` or `TypeError` if it is not known.
    """
    signature = inspect.signature(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if hasattr(type(function), "forward") and all(each.kind in variadic for each in signature.parameters.values()):
        return inspect.signature(function.forward)  # type: ignore[attr-defined]  # looked for above
    return signature
