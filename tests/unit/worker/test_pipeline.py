"""`run_case`: what becomes of right and wrong kernels, how far each came, and which figures it carries."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import DeviceLost
from pytest_fa.run import checked
from pytest_fa.worker import jobs, pipeline
from pytest_fa.worker.jobs import CaseJob, CaseResult, Progress
from pytest_fa.worker.pipeline import run_case
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

CASE = "b1h2s64d64-fp16-seed0"
ELEMENTS = 2 * 64 * 64
JobOf = Callable[..., CaseJob]


def right_but(*, before: str = "pass", after: str = "return out") -> str:
    """The right kernel, writing into `out`, with lines before and after."""
    body = PYTHON_SOURCE.replace("def forward", "def right")
    head = "\n\nCALLS = 0\n\n\ndef forward(q, k, v, *, scale, causal='none', out=None):\n    global CALLS\n"
    inner = textwrap.indent(
        f"CALLS += 1\n{before}\nright(q, k, v, scale=scale, causal=causal, out=out)\n{after}\n", "    "
    )
    return f"from pytest_fa.errors import LaunchError, UnsupportedCase\n{body}{head}{inner}"


@pytest.fixture
def job_of(write_variant: WriteVariant, tmp_path: Path) -> JobOf:
    """`job_of(source)`: a job for the CPU that judges the kernel of `source`."""

    def make(source: str = PYTHON_SOURCE, *, more: str = "", case: str = CASE, **fields: Any) -> CaseJob:
        folder = write_variant("entry_of_a_test", manifest=PYTHON_MANIFEST + more, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        plain = CaseJob(
            variant=variant,
            case=parse_case(case),
            library=None,
            device="cpu",
            policy="same_precision",
            judge=True,
            time=False,
        )
        return msgspec.structs.replace(plain, **fields)

    return make


def stages_of(result: CaseResult) -> dict[str, str]:
    """Stage to state, in order."""
    return {stage.name: stage.state for stage in result.stages}


# -- right ------------------------------------------------------------------------------------------------------------


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
    """A kernel that computes once and returns its result again is right once and wrong when it is timed."""
    result = run_case(job_of(KEEPS_ITS_RESULT, time=True))

    assert (result.outcome, stages_of(result)["correct"], stages_of(result)["speed"]) == ("wrong", "ok", "failed")
    assert result.speed is None


@pytest.mark.parametrize(
    "case", [CASE, "b1h2s64d64-bf16-seed1", "b2h2s48d64-fp16-causal-seed2", "b1h2s40d64-fp16-bshd-seed0"]
)
def test_right_kernel(job_of: JobOf, case: str) -> None:
    """A right kernel is ok at every stage and carries its check, every bound of it held."""
    result = run_case(job_of(case=case))

    assert (result.outcome, result.message, result.speed, result.context_lost) == ("ok", "", None, False)
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok"}
    assert result.check is not None
    assert (result.check.passed, result.check.bad_count, result.check.nonfinite_count) == (True, 0, 0)


@pytest.mark.parametrize(("policy", "dtype"), [("fp8", "fp16"), ("fp8", "bf16"), ("absolute", "fp16")])
def test_right_kernel_by_another_policy(job_of: JobOf, policy: str, dtype: str) -> None:
    """A right kernel is ok by every policy that judges its dtype, and by the one that was asked for."""
    result = run_case(job_of(case=f"b1h2s64d64-{dtype}-seed0", policy=policy))

    assert (result.outcome, result.message) == ("ok", "")
    assert result.check is not None
    assert result.check.policy == policy


def test_wrong_result_by_the_fp8_policy(job_of: JobOf) -> None:
    """The message of a wrong result names the bound, the value and what is allowed, as by the other policies."""
    result = run_case(job_of(right_but(before="scale *= 1.5"), policy="fp8"))

    assert result.check is not None
    bound = result.check.tightest
    assert result.message == f"max error is {bound.value:.3g}, allowed is {bound.allowed:.3g}"


def test_right_kernel_is_timed(job_of: JobOf) -> None:
    """A right kernel that is to be timed carries its samples beside its check."""
    result = run_case(job_of(time=True))

    assert result.outcome == "ok"
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok", "speed": "ok"}
    assert result.check is not None
    assert result.speed is not None
    assert (result.check.passed, result.speed.device.method) == (True, "wall clock of one call")
    assert min(result.speed.device.samples_us) > 0


def test_output_of_its_own(job_of: JobOf) -> None:
    """A kernel that allocates its output and leaves the given one alone is judged by what it returns."""
    source = right_but(before="return right(q, k, v, scale=scale, causal=causal)")

    assert run_case(job_of(source)).outcome == "ok"


def test_floor_is_not_judged(job_of: JobOf) -> None:
    """A floor does no work: nothing is judged, and it is timed all the same."""
    job = job_of("def forward(q, k, v, *, scale, causal, out):\n    return out\n", more="role: overhead\n", time=True)

    result = run_case(msgspec.structs.replace(job, judge=job.variant.is_judged))

    assert (result.outcome, result.check) == ("ok", None)
    assert stages_of(result) == {"launch": "ok", "speed": "ok"}
    assert result.speed is not None


def test_context_is_entered_once(job_of: JobOf) -> None:
    """The manifest's context surrounds every call of a job, and is entered and left once."""
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

OK, FAILED, NOT = "ok", "failed", "not reached"


@pytest.mark.parametrize(
    ("source", "message", "stages"),
    [
        (
            "def forward(q, k, v, *, scale, causal, out):\n    return out\n",
            f"{ELEMENTS} of {ELEMENTS} elements are NaN or Inf (the output was full of NaN before the call)",
            (OK, FAILED, NOT, NOT),
        ),
        (
            right_but(after="out[:, :, -1] = float('nan'); return out"),
            f"128 of {ELEMENTS} elements are NaN or Inf (the output was full of NaN before the call)",
            (OK, FAILED, NOT, NOT),
        ),
        (right_but(before="scale *= 1.5"), "max error is ", (OK, OK, FAILED, NOT)),
        (right_but(before="v = v.roll(1, 2)"), "max error is ", (OK, OK, FAILED, NOT)),
        (right_but(after="out[:, 1] = out[:, 0]; return out"), "max error is ", (OK, OK, FAILED, NOT)),
    ],
    ids=["writes nothing", "leaves a row", "scale", "values", "heads"],
)
def test_wrong_result(job_of: JobOf, source: str, message: str, stages: tuple[str, ...]) -> None:
    """A wrong output is `wrong` at the stage that caught it; it carries its check and no timing."""
    result = run_case(job_of(source, time=True))

    assert (result.outcome, result.message[: len(message)]) == ("wrong", message)
    assert tuple(stages_of(result).values()) == stages
    assert result.speed is None
    assert result.check is not None
    assert not result.check.passed


def test_wrong_result_says_value_and_bound(job_of: JobOf) -> None:
    """The message of a wrong result names the broken bound, the value found and the value allowed."""
    result = run_case(job_of(right_but(before="scale *= 1.5")))

    assert result.check is not None
    bound = result.check.tightest
    assert result.message == f"max error is {bound.value:.3g}, allowed is {bound.allowed:.3g}"


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
    """A kernel that is right when it is judged and wrong while it is timed is wrong, and carries no timing."""
    result = run_case(job_of(source, time=True))

    assert result.outcome == "wrong"
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok", "speed": "failed"}
    assert "in an output of the timed calls" in result.message
    assert result.speed is None
    assert result.check is not None
    assert not result.check.passed


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
    """A kernel that changes its inputs is not ok, however well its output fits to what it left behind."""
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
    """An output of another type, dtype or shape is not ok; the message speaks of it, not of a line of the judge's."""
    result = run_case(job_of(right_but(after=after)))

    assert result.outcome != "ok"
    assert ".py:" not in result.message


# One element past the end of each tensor, reached through its storage as a kernel reaches through a pointer.
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
    """A write beside a tensor is caught, with how far from which end, though the output itself is right."""
    result = run_case(job_of(right_but(before=f"{PAST.format(name, where)}.fill_(1.0)")))

    assert (result.outcome, result.message) == ("wrong", f"the kernel wrote {message}")


def test_read_out_of_bounds(job_of: JobOf) -> None:
    """What is read past the end of an input is NaN, and so is the output that it enters."""
    result = run_case(job_of(right_but(after=f"out += {PAST.format('v', 0)} * 1e-6; return out")))

    assert result.outcome == "wrong"
    assert "are NaN or Inf" in result.message


# -- repeats ----------------------------------------------------------------------------------------------------------

FLICKERS = right_but(after="out[0, 1, 5, 2] += (CALLS % 4 == 3) * 2**-11; return out")


def test_repeats_are_equal(job_of: JobOf) -> None:
    """A right kernel's repeats are counted and equal."""
    result = run_case(job_of(repeats=12))

    assert result.outcome == "ok"
    assert result.repeats is not None
    assert msgspec.structs.astuple(result.repeats) == (12, 0, 0, None, "runs on the CPU")


def test_repeats_fill_their_time(job_of: JobOf) -> None:
    """Without a number, a fast kernel is repeated a hundred times."""
    result = run_case(job_of(case="b1h1s1d64-fp16-seed0", repeats=None))

    assert result.repeats is not None
    assert result.repeats.count == 100


def test_output_that_changes(job_of: JobOf) -> None:
    """An output within its bounds that differs from call to call is wrong, and the first place is kept."""
    result = run_case(job_of(FLICKERS, repeats=12))

    assert (result.outcome, result.message) == (
        "wrong",
        "3 of 12 repeats differ from the first call bit by bit",
    )
    assert result.repeats is not None
    assert (result.repeats.differing, result.repeats.element_count, result.repeats.first) == (3, 1, (0, 1, 5, 2))


def test_output_that_may_change(job_of: JobOf) -> None:
    """A variant that does not claim to be deterministic is right; the differences are kept."""
    result = run_case(job_of(FLICKERS, more="deterministic: false\n", repeats=12))

    assert result.outcome == "ok"
    assert result.repeats is not None
    assert result.repeats.differing == 3


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ("return out if CALLS == 1 else out.fill_(float('nan'))", "finite error is "),
        ("return out if CALLS % 2 else out.zero_()", "max error is "),
    ],
    ids=["NaN from the second call on", "zero at every second call"],
)
def test_what_may_change_must_be_right(job_of: JobOf, after: str, message: str) -> None:
    """A variant that does not claim to be deterministic is wrong where one of its repeats is."""
    result = run_case(job_of(right_but(after=after), more="deterministic: false\n", repeats=12))

    assert (result.outcome, result.caught_by) == ("wrong", ("repeats",))
    assert result.message.startswith(message)
    assert result.message.endswith(" in a repeat")


@pytest.mark.parametrize("after", ["return None if CALLS > 1 else out", "return out.float() if CALLS > 1 else out"])
def test_a_later_output_of_another_kind(job_of: JobOf, after: str) -> None:
    """A repeat that gives no tensor of the right kind is wrong in the same words as a first call."""
    result = run_case(job_of(right_but(after=after), repeats=3))

    assert (result.outcome, result.caught_by) == ("wrong", ("output",))
    assert result.message.startswith("the output is ")


CALLS_SDPA = """\
from torch.nn.functional import scaled_dot_product_attention as sdpa


def forward(q, k, v, *, scale, causal="none", out=None):
    return sdpa(q, k, v, scale=scale)
"""


def test_sdpa_is_not_own_work(job_of: JobOf) -> None:
    """A candidate that calls the backend it is compared with is wrong; a baseline that does so is what it should be."""
    source = CALLS_SDPA

    candidate = run_case(job_of(source))
    baseline = run_case(job_of(source, more="role: baseline\n"))

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


@pytest.mark.filterwarnings("default")  # torch's compiler has warnings of its own
def test_what_torch_compiles_is_watched_and_works_afterwards(job_of: JobOf) -> None:
    """FlexAttention, which a dispatch mode would break, is right, and right again in the same process."""
    assert [run_case(job_of(FLEX)).outcome for _ in range(2)] == ["ok", "ok"]


def test_witnesses_are_heard_when_it_is_wrong(job_of: JobOf) -> None:
    """SDPA is judged on the same inputs beside a wrong candidate; one that refuses is absent with its reason."""
    baselines = discover(()).variants
    cross_checks = tuple(baselines[name] for name in ("sdpa_math", "sdpa_flash"))

    result = run_case(job_of(right_but(before="scale *= 1.5"), cross_checks=cross_checks))

    assert result.diagnosis is not None
    assert [(each.name, each.passed) for each in result.diagnosis.cross_checks] == [
        ("sdpa_math", True),
        ("sdpa_flash", True),
    ]
    assert result.diagnosis.conclusion.startswith("the candidate is off: sdpa_math, sdpa_flash right")


def test_a_witness_that_raises_is_absent(job_of: JobOf) -> None:
    """Whatever a cross-check raises, the candidate's verdict and bounds stay."""
    (cross_check,) = [job_of("def forward(*_, **__):\n    raise KeyError('x')\n", more="role: baseline\n").variant]
    result = run_case(job_of(right_but(before="scale *= 1.5"), cross_checks=(cross_check,)))
    assert (result.outcome, result.check is not None) == ("wrong", True)
    assert result.diagnosis is not None
    assert [(each.passed, bool(each.absent)) for each in result.diagnosis.cross_checks] == [(None, True)]


def test_signs_of_life_name_the_stage(job_of: JobOf) -> None:
    """Each stage is announced, a launch with the watchdog's time, work of our own with more."""
    signs: list[Progress] = []

    run_case(job_of(repeats=3, time=True, watchdog_seconds=2.5), signs.append)

    assert list(dict.fromkeys(each.stage for each in signs)) == ["launch", "sanity", "correct", "speed"]
    assert {each.seconds for each in signs if each.stage == "launch"} == {300.0, 2.5}


def test_nan_may_repeat(job_of: JobOf) -> None:
    """A NaN that is there every time is not a difference; it is wrong for itself."""
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
    """A kernel that gives no output fails at launch, by the name of what happened and with its own words."""
    result = run_case(job_of(right_but(before=before), time=True))

    found = re.sub(r":\d+\)$", ":LINE)", result.message)
    assert (result.outcome, found, result.check, result.speed) == (outcome, message, None, None)
    assert tuple(stages_of(result).values()) == (FAILED, NOT, NOT, NOT)
    assert not result.context_lost


def test_refusal_of_a_kind_of_its_own(job_of: JobOf) -> None:
    """A kernel's own subclass of our refusal is a refusal."""
    source = right_but(before="class Refusal(UnsupportedCase): pass\nraise Refusal('not today')")

    assert run_case(job_of(source)).outcome == "unsupported"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import no_such_module\n",
            "entry_of_a_test: entry.target 'entry:forward' cannot be imported: No module named 'no_such_module'",
        ),
        ("forwards = None\n", "entry_of_a_test: entry.target 'entry:forward': the module has no 'forward'"),
    ],
)
def test_entry_that_cannot_be_had(job_of: JobOf, source: str, message: str) -> None:
    """A module that does not import or lacks the function fails with the manifest's words."""
    result = run_case(job_of(source))

    assert (result.outcome, result.message) == ("failed", message)
    assert stages_of(result)["launch"] == "failed"


def test_raises_while_timed(job_of: JobOf) -> None:
    """A kernel that fails while it is timed keeps the check that it passed and has no timing."""
    result = run_case(job_of(right_but(before="assert CALLS < 3, 'worn out'"), time=True))

    assert (result.outcome, "AssertionError: worn out" in result.message) == ("failed", True)
    assert stages_of(result) == {"launch": "ok", "sanity": "ok", "correct": "ok", "speed": "failed"}
    assert result.speed is None
    assert result.check is not None
    assert result.check.passed


def test_library_that_does_not_load(job_of: JobOf, tmp_path: Path) -> None:
    """A damaged library fails at launch, not with a crash."""
    (tmp_path / "kernel.so").write_bytes(b"not a library")
    job = job_of()
    entry = msgspec.structs.replace(job.variant.entry, kind="cuda")
    variant = msgspec.structs.replace(job.variant, entry=entry)

    result = run_case(msgspec.structs.replace(job, variant=variant, library=str(tmp_path / "kernel.so")))

    assert (result.outcome, stages_of(result)["launch"]) == ("failed", "failed")
    assert "kernel.so" in result.message


# -- the device -------------------------------------------------------------------------------------------------------


def test_lost_device(job_of: JobOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that came while the kernel ran takes the context with it: the result says so."""

    def lose(_: object) -> None:
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(pipeline, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(checked, "synchronize", lose)

    result = run_case(job_of(device="cuda"))

    assert (result.outcome, result.context_lost) == ("device_error", True)
    assert result.message == "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("alive", [True, False])
def test_context_is_asked_after_a_failure(job_of: JobOf, monkeypatch: pytest.MonkeyPatch, *, alive: bool) -> None:
    """After any failure on a GPU the context is asked whether it still takes work."""
    monkeypatch.setattr(pipeline, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(pipeline, "is_alive", lambda _: alive)

    result = run_case(job_of(right_but(before="raise ValueError('a hole')"), device="cuda"))

    assert (result.outcome, result.context_lost) == ("failed" if alive else "device_error", not alive)


def test_result_of_every_kind_survives_json(job_of: JobOf) -> None:
    """What comes out of a run, NaN and Inf included, reads back from JSON as it was."""
    source = right_but(after="out[0, 0, 0, 0] = float('inf'); out[0, 1] = float('nan'); return out")

    result = run_case(job_of(source))

    assert result.check is not None
    assert (result.check.max_abs_error, result.check.nonfinite_count) == (None, 1 + 64 * 64)
    assert jobs.decode_answer(jobs.encode(result)) == result
