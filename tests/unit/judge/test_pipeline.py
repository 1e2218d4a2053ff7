"""`run_case` on correct and wrong kernels: the outcome, the stages and the figures of the result."""

from __future__ import annotations

import json
import pkgutil
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.candidate import agent
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import DeviceLost, Tampering
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge import pipeline
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.clocks.device_time import NothingLaunched
from pytest_fa.judge.clocks.measure import measure
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.wire import jobs
from pytest_fa.wire.jobs import CaseJob, CaseResult, Progress
from pytest_fa.wire.stages import JUDGE_SECONDS, WORK_LIMIT_SECONDS
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant, cpu_job

CASE = "b1h2s64d64-fp16-seed0"
ELEMENTS = 2 * 64 * 64
JobOf = Callable[..., CaseJob]


def right_but(*, before: str = "pass", after: str = "return out") -> str:
    """The source of a correct kernel that writes into `out`, with additional lines before and after it."""
    body = PYTHON_SOURCE.replace("def forward", "def right")
    head = "\n\nCALLS = 0\n\n\ndef forward(q, k, v, *, scale, causal='none', out=None):\n    global CALLS\n"
    inner = textwrap.indent(
        f"CALLS += 1\n{before}\nright(q, k, v, scale=scale, causal=causal, out=out)\n{after}\n", "    "
    )
    return f"from pytest_fa.errors import LaunchError, UnsupportedCase\n{body}{head}{inner}"


@pytest.fixture
def job_of(write_variant: WriteVariant, tmp_path: Path) -> JobOf:
    """`job_of(source)`: a job for the CPU that judges the kernel in `source`."""

    def make(source: str = PYTHON_SOURCE, *, more: str = "", case: str = CASE, **fields: Any) -> CaseJob:
        folder = write_variant("entry_of_a_test", manifest=PYTHON_MANIFEST + more, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return cpu_job(variant, case, **fields)

    return make


def stages_of(result: CaseResult) -> dict[str, str]:
    """The state of each stage by its name, in order."""
    return {stage.name: stage.state for stage in result.stages}


# -- the log-sum-exp --------------------------------------------------------------------------------------------------

# A right kernel that writes the log-sum-exp, and one that returns it.
WRITES_LSE = PYTHON_SOURCE.replace("out=None)", "out=None, lse=None)").replace(
    "    return result", "    if lse is not None:\n        lse.copy_(torch.logsumexp(scores, -1))\n    return result"
)
RETURNS_LSE = PYTHON_SOURCE.replace("out=None)", "out=None, lse=None)").replace(
    "return result if out is None else out.copy_(result)", "return result, torch.logsumexp(scores, -1)"
)
LSE = "returns: [out, lse]\n"
LOG2 = "lse.copy_(torch.logsumexp(scores, -1) * 1.4426950408889634)"


@pytest.mark.parametrize("source", [WRITES_LSE, RETURNS_LSE], ids=["written", "returned"])
@pytest.mark.parametrize("case", [CASE, "b2h2s48d64-fp16-causal-seed2"])
def test_right_lse(job_of: JobOf, source: str, case: str) -> None:
    """A right log-sum-exp is judged, in the repeats, too; timed calls do not ask for it."""
    result = run_case(job_of(source, more=LSE, case=case, repeats=5, time=True))

    assert (result.outcome, result.message) == ("ok", "")
    assert result.check is not None
    assert result.check.lse is not None
    assert (result.check.bounds[-1].name, result.check.lse.bad_count) == ("lse", 0)
    assert result.speed is not None


@pytest.mark.parametrize(
    ("mistake", "message", "cause"),
    [
        (LOG2, "lse error 2.0e+00, allowed ", "the log-sum-exp is in base 2"),
        ("pass", "lse error not finite, allowed ", "the log-sum-exp of 128 of 128 rows is not written"),
        (
            "lse[:, :, 3:].copy_(scores.logsumexp(-1)[:, :, 3:])",
            "lse error not finite",
            "of 6 of 128 rows is not written",
        ),
        ("lse.copy_(scores.logsumexp(-1)).neg_()", "lse error 9.2e+00, allowed ", "no known mistake"),
    ],
    ids=["log2", "nothing", "some rows", "sign"],
)
def test_wrong_lse(job_of: JobOf, mistake: str, message: str, cause: str) -> None:
    """A wrong log-sum-exp beside a right output is wrong, is caught by `lse` alone, and has a likely cause."""
    source = WRITES_LSE.replace("lse.copy_(torch.logsumexp(scores, -1))", mistake)
    result = run_case(job_of(source, more=LSE))

    assert (result.outcome, result.caught_by) == ("wrong", ("lse",))
    assert result.message.startswith(message)
    assert result.diagnosis is not None
    assert cause in result.diagnosis.cause
    assert result.check is not None
    assert result.check.bad_count == 0


def test_lse_of_another_kind(job_of: JobOf, snapshot: SnapshotAssertion) -> None:
    """A returned log-sum-exp of another shape or dtype is wrong, with both in the message."""
    result = run_case(job_of(RETURNS_LSE.replace("logsumexp(scores, -1)", "logsumexp(scores, -1).half()"), more=LSE))

    assert (result.outcome, result.caught_by) == ("wrong", ("lse",))
    assert snapshot == result.message.splitlines()[0]


def test_lse_that_changes(job_of: JobOf, snapshot: SnapshotAssertion) -> None:
    """A log-sum-exp that differs in a repeat is wrong, even if it is within its bound."""
    flickers = "lse.copy_(torch.logsumexp(scores, -1)); lse[0, 0, 0] += CALLS.append(0) or 1e-6 * (len(CALLS) % 3 == 0)"
    source = WRITES_LSE.replace("lse.copy_(torch.logsumexp(scores, -1))", flickers) + "\n\nCALLS = []\n"
    result = run_case(job_of(source, more=LSE, repeats=8))

    assert (result.outcome, result.caught_by) == ("wrong", ("repeats",))
    assert snapshot == result.message


def test_lse_past_its_end(job_of: JobOf) -> None:
    """A write past the end of the log-sum-exp is found by its guard band."""
    past = (
        "lse.copy_(torch.logsumexp(scores, -1)); lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel()).zero_()"
    )
    result = run_case(job_of(WRITES_LSE.replace("lse.copy_(torch.logsumexp(scores, -1))", past), more=LSE))

    assert (result.outcome, result.caught_by) == ("wrong", ("guard bands",))
    assert result.message.startswith("the kernel wrote out of bounds of lse: 4 bytes past its end")


@pytest.mark.parametrize("name", ["hard_data", "new_data", "new_shape", "contained_nan", "padded_rows"])
def test_properties_judge_the_lse(job_of: JobOf, name: str) -> None:
    """A right log-sum-exp passes the properties."""
    result = run_case(job_of(WRITES_LSE, more=LSE, case="b2h3s70d64-fp16-seed0", property_name=name))
    assert (result.outcome, result.message) == ("ok", "")


@pytest.mark.parametrize("name", ["hard_data", "new_data"])
def test_an_lse_that_is_one_call_late(job_of: JobOf, name: str) -> None:
    """The log-sum-exp of the previous call is found by the properties that change the data."""
    late = "lse.copy_(KEPT[-1] if KEPT else torch.logsumexp(scores, -1)); KEPT.append(torch.logsumexp(scores, -1))"
    source = WRITES_LSE.replace("lse.copy_(torch.logsumexp(scores, -1))", late) + "\n\nKEPT = []\n"
    result = run_case(job_of(source, more=LSE, case="b2h3s70d64-fp16-seed0", property_name=name))
    assert (result.outcome, result.caught_by) == ("wrong", (name,))
    assert "lse error" in result.message


# -- correct ----------------------------------------------------------------------------------------------------------


KEEPS_ITS_RESULT = (
    PYTHON_SOURCE.replace("def forward", "def right")
    + """

kept = {}


def forward(q, k, v, *, scale, causal="none", out=None):
    if q.shape not in kept:
        kept[q.shape] = right(q, k, v, scale=scale, causal=causal)
    return kept[q.shape]
"""
)


def test_kept_result_is_no_time(job_of: JobOf) -> None:
    """A kernel that computes once and then returns the same result passes `correct` and fails in `speed`."""
    result = run_case(job_of(KEEPS_ITS_RESULT, time=True))

    assert (result.outcome, stages_of(result)["correct"], stages_of(result)["speed"]) == ("wrong", "ok", "failed")
    assert result.speed is None


@pytest.mark.parametrize(
    "case", [CASE, "b1h2s64d64-bf16-seed1", "b2h2s48d64-fp16-causal-seed2", "b1h2s40d64-fp16-bshd-seed0"]
)
def test_right_kernel(job_of: JobOf, case: str) -> None:
    """A correct kernel is ok at every stage, and its check holds every bound."""
    result = run_case(job_of(case=case))

    assert (result.outcome, result.message, result.speed, result.context_lost) == ("ok", "", None, False)
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok"}
    assert result.check is not None
    assert (result.check.passed, result.check.bad_count, result.check.nonfinite_count) == (True, 0, 0)


@pytest.mark.parametrize(("policy", "dtype"), [("fp8", "fp16"), ("fp8", "bf16"), ("absolute", "fp16")])
def test_right_kernel_by_another_policy(job_of: JobOf, policy: str, dtype: str) -> None:
    """A correct kernel passes every policy that supports its dtype, and the check names the selected policy."""
    result = run_case(job_of(case=f"b1h2s64d64-{dtype}-seed0", policy=policy))

    assert (result.outcome, result.message) == ("ok", "")
    assert result.check is not None
    assert result.check.policy == policy


def test_wrong_result_by_the_fp8_policy(job_of: JobOf) -> None:
    """With policy `fp8` too, the message of a wrong result names the bound, its value and what is allowed."""
    result = run_case(job_of(right_but(before="scale *= 1.5"), policy="fp8"))

    assert result.check is not None
    bound = result.check.tightest
    assert result.message == f"max error {bound.value:.1e}, allowed {bound.allowed:.1e}"


def test_right_kernel_is_timed(job_of: JobOf) -> None:
    """The result of a correct kernel that is timed contains both its check and its samples."""
    result = run_case(job_of(time=True))

    assert result.outcome == "ok"
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok", "speed": "ok"}
    assert result.check is not None
    assert result.speed is not None
    calls = result.speed.device.calls_per_sample
    assert (result.check.passed, result.speed.device.method) == (
        True,
        f"wall clock of {calls} calls, each on its own data",
    )
    assert min(result.speed.device.samples_us) > 0


@pytest.mark.parametrize(
    ("needed", "times"), [("judge.checked_launch.make_inputs", 1), ("judge.truth_store.truth_of", 2)]
)
def test_a_full_gpu_ends_no_job_that_the_store_filled(
    job_of: JobOf, monkeypatch: pytest.MonkeyPatch, needed: str, times: int
) -> None:
    """Inputs and truth, of judged and of timed calls, get the memory that earlier truths have filled."""
    store, job, real, failed = TruthStore(), job_of(time=True), pkgutil.resolve_name(f"pytest_fa.{needed}"), list[int]()
    other = make_inputs(parse_case(CASE).with_seed(7), torch.device("cpu"))
    store.truth_of("attention", other, (), "same_precision")

    def needs_memory(*arguments: object) -> object:
        if store._kept:
            failed.append(len(store._kept))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(f"pytest_fa.{needed}", needs_memory)
    result = run_case(job, truths=store)
    assert (result.outcome, len(failed)) == ("ok", times), result.message


def test_output_of_its_own(job_of: JobOf) -> None:
    """A kernel that ignores `out` and returns a tensor of its own is judged by that tensor."""
    source = right_but(before="return right(q, k, v, scale=scale, causal=causal)")

    assert run_case(job_of(source)).outcome == "ok"


def test_overhead_is_not_judged(job_of: JobOf) -> None:
    """A variant of role `overhead` computes nothing: it is timed without being judged."""
    job = job_of("def forward(q, k, v, *, scale, causal, out):\n    return out\n", more="role: overhead\n", time=True)

    result = run_case(msgspec.structs.replace(job, checks_output=job.variant.is_judged))

    assert (result.outcome, result.check) == ("ok", None)
    assert stages_of(result) == {"launch": "ok", "speed": "ok"}
    assert result.speed is not None


def test_context_is_entered_once(job_of: JobOf) -> None:
    """The manifest's context is entered once before the first call of a job and exited once after the last."""
    source = PYTHON_SOURCE.replace(
        "    scores =", "    assert EVENTS == ['enter'], EVENTS\n    scores =", 1
    ) + textwrap.dedent("""

        import contextlib, json, pathlib

        EVENTS = []
        LOG = pathlib.Path(__file__).with_name("events.json")


        @contextlib.contextmanager
        def pin():
            EVENTS.append("enter")
            yield
            EVENTS.append("leave")
            LOG.write_text(json.dumps(EVENTS))
        """)
    job = job_of(source, time=True)
    entry = msgspec.structs.replace(job.variant.entry, context="entry:pin")

    result = run_case(msgspec.structs.replace(job, variant=msgspec.structs.replace(job.variant, entry=entry)))

    events = json.loads((Path(job.variant.folder) / "events.json").read_text(encoding="utf-8"))
    assert (result.message, result.outcome) == ("", "ok")
    assert events == ["enter", "leave"]


# -- wrong ------------------------------------------------------------------------------------------------------------

OK, FAILED, NOT_REACHED = "ok", "failed", "not reached"


@pytest.mark.parametrize(
    ("source", "message", "stages"),
    [
        (
            "def forward(q, k, v, *, scale, causal, out):\n    return out\n",
            f"{ELEMENTS} of {ELEMENTS} elements are NaN or Inf (the output was full of NaN before the call)",
            (OK, FAILED, NOT_REACHED, NOT_REACHED),
        ),
        (
            right_but(after="out[:, :, -1] = float('nan'); return out"),
            f"128 of {ELEMENTS} elements are NaN or Inf (the output was full of NaN before the call)",
            (OK, FAILED, NOT_REACHED, NOT_REACHED),
        ),
        (right_but(before="scale *= 1.5"), "max error ", (OK, OK, FAILED, NOT_REACHED)),
        (right_but(before="v = v.roll(1, 2)"), "max error ", (OK, OK, FAILED, NOT_REACHED)),
        (right_but(after="out[:, 1] = out[:, 0]; return out"), "max error ", (OK, OK, FAILED, NOT_REACHED)),
    ],
    ids=["writes nothing", "omits a row", "scale", "values", "heads"],
)
def test_wrong_result(job_of: JobOf, source: str, message: str, stages: tuple[str, ...]) -> None:
    """A wrong output has outcome `wrong` and fails in the expected stage; its result has a check and no timing."""
    result = run_case(job_of(source, time=True))

    assert (result.outcome, result.message[: len(message)]) == ("wrong", message)
    assert tuple(stages_of(result).values()) == stages
    assert result.speed is None
    assert result.check is not None
    assert not result.check.passed


def test_wrong_result_says_value_and_bound(job_of: JobOf) -> None:
    """The message of a wrong result names the broken bound, its value and the allowed value."""
    result = run_case(job_of(right_but(before="scale *= 1.5")))

    assert result.check is not None
    bound = result.check.tightest
    assert result.message == f"max error {bound.value:.1e}, allowed {bound.allowed:.1e}"


@pytest.mark.parametrize(
    "source",
    [
        right_but(after="return out if CALLS < 3 else out.mul_(1.01)"),
        right_but(before="if CALLS > 2: return out"),
        right_but(before="scale = scale if CALLS < 3 else scale * 1.5"),
    ],
    ids=["late factor", "stops writing", "late scale"],
)
def test_timed_calls_are_judged(job_of: JobOf, source: str) -> None:
    """A kernel that passes `correct` but gives a wrong output while it is timed is `wrong`, without timing."""
    result = run_case(job_of(source, time=True))

    assert result.outcome == "wrong"
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok", "speed": "failed"}
    assert "in an output of the timed calls" in result.message
    assert result.speed is None
    assert result.check is not None
    assert not result.check.passed


@pytest.mark.parametrize(
    ("after", "outcome"), [("return out if CALLS < 3 else out.mul_(1.01)", "wrong"), ("", "failed")]
)
def test_calls_that_launch_nothing_are_judged(
    job_of: JobOf, monkeypatch: pytest.MonkeyPatch, after: str, outcome: str
) -> None:
    """Wrong outputs say more than that the calls take no time."""

    def takes_no_time(*arguments: Any) -> None:
        _, written = measure(*arguments)
        raise NothingLaunched(written)

    monkeypatch.setattr(pipeline, "measure", takes_no_time)
    progress: list[Progress] = []
    result = run_case(job_of(right_but(after=after or "return out"), time=True), progress.append)

    assert (result.outcome, result.speed) == (outcome, None)
    assert result.caught_by == (("timed outputs",) if outcome == "wrong" else ("exception",))
    assert ("launches nothing" in result.message) == (outcome == "failed")
    assert progress[-1].seconds == WORK_LIMIT_SECONDS  # truth takes longer than a launch


@pytest.mark.parametrize(
    "before",
    [
        "v.zero_(); out.zero_(); return out",
        "q.zero_(); out.copy_(v.float().mean(2, keepdim=True).expand_as(v)); return out",
        "k.mul_(0.5)",
    ],
    ids=["zero values", "zero queries", "smaller keys"],
)
def test_changed_inputs_are_caught(job_of: JobOf, before: str) -> None:
    """A kernel that changes its inputs fails, even if its output is correct for the changed inputs."""
    result = run_case(job_of(right_but(before=before)))

    assert result.outcome != "ok"


@pytest.mark.parametrize(
    "after",
    [
        "return out.float()",
        "return out.bfloat16()",
        "return out[0]",
        "return out[..., :1]",
        "return None",
        "return 1.0",
    ],
    ids=["fp32", "bf16", "three dimensions", "one column", "nothing", "a number"],
)
def test_output_of_another_kind(job_of: JobOf, after: str) -> None:
    """An output of another type, dtype or shape fails; the message is not that of an exception in the judge's code."""
    result = run_case(job_of(right_but(after=after)))

    assert result.outcome != "ok"
    assert ".py:" not in result.message


# One element at offset {1} past the end of tensor {0}, accessed through its storage as a kernel would by pointer.
PAST = "torch.as_strided({0}, (1,), (1,), {0}.storage_offset() + {0}.numel() + {1})"


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("out", 0, "out of bounds of out: 2 bytes past its end, the nearest 0 bytes from it"),
        ("out", 100, "out of bounds of out: 2 bytes past its end, the nearest 200 bytes from it"),
        ("out", -ELEMENTS - 1, "out of bounds of out: 2 bytes before its start, the nearest 0 bytes from it"),
        ("k", 7, "out of bounds of k: 2 bytes past its end, the nearest 14 bytes from it"),
    ],
    ids=["out", "farther", "before", "key"],
)
def test_write_out_of_bounds(job_of: JobOf, name: str, where: int, message: str) -> None:
    """A write outside a tensor fails even if the output is correct; the message gives its place and distance."""
    result = run_case(job_of(right_but(before=f"{PAST.format(name, where)}.fill_(1.0)")))

    assert (result.outcome, result.message) == ("wrong", f"the kernel wrote {message}")


def test_read_out_of_bounds(job_of: JobOf) -> None:
    """A read past the end of an input gives NaN, which makes the output NaN."""
    result = run_case(job_of(right_but(after=f"out += {PAST.format('v', 0)} * 1e-6; return out")))

    assert result.outcome == "wrong"
    assert "are NaN or Inf" in result.message


# -- repeats ----------------------------------------------------------------------------------------------------------

FLICKERS = right_but(after="out[0, 1, 5, 2] += (CALLS % 4 == 3) * 2**-11; return out")


def test_repeats_are_equal(job_of: JobOf) -> None:
    """The repeats of a correct kernel are counted and equal."""
    result = run_case(job_of(repeats=12))

    assert result.outcome == "ok"
    assert result.repeats is not None
    assert msgspec.structs.astuple(result.repeats) == (12, 0, 0, None, "runs on the CPU", 0, False, False, {})


def test_repeats_fill_their_time(job_of: JobOf) -> None:
    """With `repeats=None`, a fast kernel is repeated 100 times."""
    result = run_case(job_of(case="b1h1s1d64-fp16-seed0", repeats=None))

    assert result.repeats is not None
    assert result.repeats.count == 100


def test_a_further_seed_is_repeated_less(job_of: JobOf) -> None:
    """Another seed of a shape is repeated 10 times by default, and as often as `repeats` says."""
    for requested, made in ((None, 10), (12, 12)):
        result = run_case(job_of(case="b1h1s1d64-fp16-seed1", repeats=requested, is_further_seed=True))
        assert result.repeats is not None
        assert result.repeats.count == made


def test_output_that_changes(job_of: JobOf, snapshot: SnapshotAssertion) -> None:
    """An output that is within its bounds but differs from call to call is wrong; the first differing place is kept."""
    result = run_case(job_of(FLICKERS, repeats=12))

    assert result.outcome == "wrong"
    assert snapshot == result.message
    assert result.repeats is not None
    assert (result.repeats.differing, result.repeats.element_count, result.repeats.first) == (3, 1, (0, 1, 5, 2))


RACE = (
    "the output changes from call to call: a race, or a read of memory that the kernel never wrote, or dropout, which "
    "is not judged"
)
ZERO = "the wrong output: the output is 0 in head 1 of 2: never written there, or a zero accumulator is written"
TWICE = "the wrong output: the whole output is 2 times what it should be: look at the last division"


@pytest.mark.parametrize(
    ("after", "verdicts", "rest"),
    [
        ("return out if CALLS == 1 else out.mul_(2)", ("the first call is right", "wrong"), TWICE),
        (
            "out[0, 1] *= CALLS < 4; return out",
            ("the first 3 calls are right", "wrong"),
            "the wrong output: the output is 0",
        ),
        ("out *= 1 + (CALLS == 1); return out", ("the first call is wrong", "right"), TWICE),
        ("out[0, 1, 5, 2] += (CALLS > 1) * 2**-11; return out", ("the first call is right", "right, too"), ""),
    ],
    ids=["first right", "first three right", "first wrong", "both right"],
)
def test_state_that_is_kept_is_no_race(job_of: JobOf, after: str, verdicts: tuple[str, str], rest: str) -> None:
    """If the output changes once and never again, the cause is state between calls; then comes what is wrong."""
    result = run_case(job_of(right_but(after=after), repeats=12))

    assert result.outcome == "wrong"
    assert result.diagnosis is not None
    state, _, error = result.diagnosis.cause.partition("; ")
    start = "{}, and all later calls give one other result, which is {}: state is kept".format(*verdicts)
    assert state == f"{start} between calls, look for what a call leaves in memory that the next one uses"
    assert (error.startswith(rest), bool(error)) == (True, bool(rest))


@pytest.mark.parametrize("after", ["out *= 1 + CALLS; return out", "out *= 1 + (CALLS == 5); return out"])
def test_an_output_that_changes_more_than_once_is_a_race(job_of: JobOf, after: str) -> None:
    """If later outputs differ from one another, or the first output returns, the cause is a race."""
    result = run_case(job_of(right_but(after=after), repeats=12))

    assert result.diagnosis is not None
    assert result.diagnosis.cause == RACE


def test_output_that_may_change(job_of: JobOf) -> None:
    """A variant with `deterministic: false` may differ from call to call; the differences are recorded."""
    result = run_case(job_of(FLICKERS, more="deterministic: false\n", repeats=12))

    assert result.outcome == "ok"
    assert result.repeats is not None
    assert result.repeats.differing == 3


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("return out if CALLS == 1 else out.fill_(float('nan'))", "8192 of 8192 elements are NaN or Inf"),
        ("return out if CALLS % 2 else out.zero_()", "max error "),
    ],
    ids=["NaN from the second call on", "zero at every second call"],
)
def test_what_may_change_must_be_right(job_of: JobOf, after: str, message: str) -> None:
    """A variant with `deterministic: false` is wrong if one of its repeats is wrong."""
    result = run_case(job_of(right_but(after=after), more="deterministic: false\n", repeats=12))

    assert (result.outcome, result.caught_by) == ("wrong", ("repeats",))
    assert result.message.startswith(message)
    assert result.message.endswith(" in a repeat")


@pytest.mark.parametrize("after", ["return None if CALLS > 1 else out", "return out.float() if CALLS > 1 else out"])
def test_a_later_output_of_another_kind(job_of: JobOf, after: str) -> None:
    """A repeat of another dtype is wrong, one that returns nothing fails, with the message of a first call."""
    result = run_case(job_of(right_but(after=after), repeats=3))

    expected = ("failed", ("entry",)) if "None" in after else ("wrong", ("output",))
    assert (result.outcome, result.caught_by) == expected
    assert result.message.startswith("the output is ")


CALLS_SDPA = """\
from torch.nn.functional import scaled_dot_product_attention as sdpa


def forward(q, k, v, *, scale, causal="none", out=None):
    return sdpa(q, k, v, scale=scale)
"""


def test_delegation_to_sdpa_is_wrong(job_of: JobOf) -> None:
    """A candidate that calls SDPA, its own baseline, is wrong; a baseline may call it."""
    candidate = run_case(job_of(CALLS_SDPA))
    baseline = run_case(job_of(CALLS_SDPA, more="role: baseline\n"))

    assert (candidate.outcome, candidate.caught_by) == ("wrong", ("delegation",))
    assert "scaled_dot_product" in candidate.message
    assert baseline.outcome == "ok"


FLEX = """\
import torch
from torch.nn.attention.flex_attention import flex_attention

compiled = torch.compile(flex_attention, dynamic=False)


def forward(q, k, v, *, scale, causal="none", out=None):
    return compiled(q, k, v, scale=scale)
"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # torch's compiler emits warnings
def test_the_delegation_check_keeps_torch_compile_working(job_of: JobOf) -> None:
    """Compiled FlexAttention passes twice in one process; a dispatch mode in the delegation check would break it."""
    assert [run_case(job_of(FLEX)).outcome for _ in range(2)] == ["ok", "ok"]


def test_a_wrong_candidate_is_cross_checked(job_of: JobOf, snapshot: SnapshotAssertion) -> None:
    """If a candidate is wrong, SDPA backends are judged on the same inputs and the diagnosis has their results."""
    baselines = discover(()).variants
    cross_checks = tuple(baselines[name] for name in ("sdpa_math", "sdpa_flash"))

    result = run_case(job_of(right_but(before="scale *= 1.5"), cross_checks=cross_checks))

    assert result.diagnosis is not None
    assert [(each.name, each.passed) for each in result.diagnosis.cross_checks] == [
        ("sdpa_math", True),
        ("sdpa_flash", True),
    ]
    assert snapshot == result.diagnosis.conclusion


def test_a_diagnosis_that_raises_keeps_the_cross_checks(
    job_of: JobOf, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """If the diagnosis raises an exception, its type is named, and the verdict and the cross-checks stay."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "diagnose", fail)
    cross_checks = (discover(()).variants["sdpa_math"],)

    result = run_case(job_of(right_but(before="scale *= 1.5"), cross_checks=cross_checks))

    assert (result.outcome, result.check is not None) == ("wrong", True)
    assert result.diagnosis is not None
    assert result.diagnosis.cause.startswith("not diagnosed: ZeroDivisionError")
    assert [(each.name, each.passed) for each in result.diagnosis.cross_checks] == [("sdpa_math", True)]
    assert snapshot == result.diagnosis.conclusion


def test_a_cross_check_that_raises_is_absent(job_of: JobOf) -> None:
    """If a cross-check raises an exception, the candidate's verdict and bounds stay."""
    (cross_check,) = [job_of("def forward(*_, **__):\n    raise KeyError('x')\n", more="role: baseline\n").variant]
    result = run_case(job_of(right_but(before="scale *= 1.5"), cross_checks=(cross_check,)))
    assert (result.outcome, result.check is not None) == ("wrong", True)
    assert result.diagnosis is not None
    assert [(each.passed, bool(each.absent)) for each in result.diagnosis.cross_checks] == [(None, True)]


def test_progress_messages_name_the_stage(job_of: JobOf) -> None:
    """Every stage sends progress messages: with the watchdog's limit before a launch, with 300 s before other steps."""
    messages: list[Progress] = []

    run_case(job_of(repeats=3, time=True, watchdog_seconds=2.5), messages.append)

    assert list(dict.fromkeys(message.stage for message in messages)) == ["launch", "sanity", "correct", "speed"]
    assert {message.seconds for message in messages if message.stage == "launch"} == {300.0, 2.5 + JUDGE_SECONDS}


def test_nan_may_repeat(job_of: JobOf) -> None:
    """A NaN that every call produces does not count as a difference between repeats; it fails the finite check."""
    result = run_case(job_of(right_but(after="out[0, 0, 0, 0] = float('nan'); return out"), repeats=5))

    assert "NaN" in result.message
    assert result.repeats is not None
    assert result.repeats.differing == 0


# -- no result --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "outcome", "message"),
    [
        ("raise UnsupportedCase('head_dim 64 is odd')", "unsupported", "head_dim 64 is odd"),
        ("raise LaunchError('launch failed: too many blocks')", "launch_failed", "launch failed: too many blocks"),
        ("raise ValueError('a hole')", "failed", "ValueError: a hole (entry.py:LINE)"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero (entry.py:LINE)"),
    ],
    ids=["refuses", "does not launch", "raises", "divides by zero"],
)
def test_no_output(job_of: JobOf, before: str, outcome: str, message: str) -> None:
    """A kernel that gives no output fails in stage `launch`, with an outcome for the cause and its own message."""
    result = run_case(job_of(right_but(before=before), time=True))

    without_line = re.sub(r":\d+\)$", ":LINE)", result.message.splitlines()[0])
    assert (result.outcome, without_line, result.check, result.speed) == (outcome, message, None, None)
    assert tuple(stages_of(result).values()) == (FAILED, NOT_REACHED, NOT_REACHED, NOT_REACHED)
    assert not result.context_lost


def test_refusal_of_a_kind_of_its_own(job_of: JobOf) -> None:
    """An exception of a kernel's own subclass of `UnsupportedCase` is a refusal."""
    source = right_but(before="class Refusal(UnsupportedCase): pass\nraise Refusal('not today')")

    assert run_case(job_of(source)).outcome == "unsupported"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module\n",
            (
                "No module named 'no_such_module': entry.target 'entry:forward' of entry_of_a_test cannot be imported; "
                "install the package with 'no_such_module' for the Python that runs pytest"
            ),
        ),
        ("forwards = None\n", "entry has no 'forward' (entry.target 'entry:forward' of entry_of_a_test)"),
    ],
)
def test_entry_that_cannot_be_had(job_of: JobOf, source: str, message: str) -> None:
    """A module that cannot be imported or lacks the function fails, and the message names the manifest's key."""
    result = run_case(job_of(source))

    assert (result.outcome, result.message.splitlines()[0]) == ("failed", message)
    assert (stages_of(result)["launch"], result.caught_by) == ("failed", ("entry",))


def test_raises_while_timed(job_of: JobOf) -> None:
    """A kernel that raises while it is timed fails without timing; the check that it passed is kept."""
    result = run_case(job_of(right_but(before="assert CALLS < 3, 'worn out'"), time=True))

    assert (result.outcome, "AssertionError: worn out" in result.message) == ("failed", True)
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok", "speed": "failed"}
    assert result.speed is None
    assert result.check is not None
    assert result.check.passed


def test_library_that_does_not_load(job_of: JobOf, tmp_path: Path) -> None:
    """A damaged library fails in stage `launch` without a crash."""
    (tmp_path / "kernel.so").write_bytes(b"not a library")
    job = job_of()
    entry = msgspec.structs.replace(job.variant.entry, kind="cuda")
    variant = msgspec.structs.replace(job.variant, entry=entry)

    result = run_case(msgspec.structs.replace(job, variant=variant, library=str(tmp_path / "kernel.so")))

    assert (result.outcome, stages_of(result)["launch"]) == ("failed", "failed")
    assert "kernel.so" in result.message


# -- the device -------------------------------------------------------------------------------------------------------


def test_lost_device(job_of: JobOf, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """After a CUDA error in the kernel, the result says that the context is lost."""

    def lose(_: object) -> None:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(pipeline, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(agent, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(agent, "synchronize", lose)

    result = run_case(job_of(device="cuda"))

    assert (result.outcome, result.context_lost) == ("device_error", True)
    assert snapshot == result.message


@pytest.mark.parametrize("alive", [True, False])
def test_context_is_tested_after_a_failure(job_of: JobOf, monkeypatch: pytest.MonkeyPatch, *, alive: bool) -> None:
    """After any failure on a GPU, `run_case` tests whether the CUDA context still works."""
    monkeypatch.setattr(pipeline, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(agent, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(pipeline, "is_alive", lambda _: alive)

    result = run_case(job_of(right_but(before="raise ValueError('a hole')"), device="cuda"))

    assert (result.outcome, result.context_lost) == ("failed" if alive else "device_error", not alive)


@pytest.mark.parametrize(
    ("statement", "outcome", "lacks_memory"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 8.00 GiB')", "failed", True),
        ("raise RuntimeError('CUDA error: out of memory')", "failed", True),
        ("raise RuntimeError('CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate')", "failed", True),
        ("raise RuntimeError('<CUresult.CUDA_ERROR_OUT_OF_MEMORY: 2>')", "failed", True),
        ("raise LacksMemory('needs 19 GB of free GPU memory, found 3 GB')", "unsupported", True),
        ("raise ValueError('a hole')", "failed", False),
        ("raise WrongResult(('output',), 'out of memory')", "wrong", False),
    ],
)
def test_used_up_memory_of_a_gpu_is_reported(
    job_of: JobOf, monkeypatch: pytest.MonkeyPatch, statement: str, outcome: str, *, lacks_memory: bool
) -> None:
    """The session then repeats the job without other checks; on a CPU nothing is repeated."""
    monkeypatch.setattr(pipeline, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(agent, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(pipeline, "is_alive", lambda _: True)
    source = "from pytest_fa.errors import LacksMemory, WrongResult\n" + right_but(before=statement)

    on_gpu, on_cpu = run_case(job_of(source, device="cuda")), run_case(job_of(source))

    assert (on_gpu.outcome, on_gpu.lacks_memory) == (outcome, lacks_memory)
    assert (on_cpu.outcome, on_cpu.lacks_memory) == (outcome, False)


def test_tampering_is_no_lack_of_memory(job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that tampered gets no second try, whatever it raised before."""

    def tampered(_: object) -> None:
        raise Tampering(("functions",), "it replaced functions of its process: time.perf_counter")

    monkeypatch.setattr(pipeline, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(agent, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(pipeline, "is_alive", lambda _: True)
    monkeypatch.setattr(Candidate, "end_job", tampered)
    source = right_but(before="raise torch.OutOfMemoryError('CUDA out of memory')")

    result = run_case(job_of(source, device="cuda"))

    assert (result.outcome, result.caught_by, result.lacks_memory) == ("cheat", ("functions", "exception"), False)


def test_result_of_every_kind_survives_json(job_of: JobOf) -> None:
    """The result of a run whose output has NaN and Inf equals the original when it is read back from JSON."""
    source = right_but(after="out[0, 0, 0, 0] = float('inf'); out[0, 1] = float('nan'); return out")

    result = run_case(job_of(source))

    assert result.check is not None
    assert (result.check.max_abs_error, result.check.nonfinite_count) == (None, 1 + 64 * 64)
    assert jobs.decode_answer(jobs.encode(result)) == result
