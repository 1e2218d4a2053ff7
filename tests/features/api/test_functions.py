"""`check` and `time` of variants and of functions, on the CPU or on the GPU of this machine."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import pytest_fa
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import UnsupportedCase, UsageProblem
from pytest_fa.features.api.kept_workers import _KEPT
from pytest_fa.features.api.rerun_text import rerun_text
from pytest_fa.features.api.this_process import ThisProcess, variant_for
from pytest_fa.records.record import Record, to_json
from pytest_fa.session.refusals import CannotRun, Refused
from pytest_fa.wire.jobs import CaseJob
from tests.factories import CUDA_SOURCE, MANIFEST, PYTHON_SOURCE, WriteVariant

CASE = "b1h2s64d64-fp16"
WRONG_SOURCE = PYTHON_SOURCE.replace("* scale", "* scale * 1.5")


def right(q: Any, k: Any, v: Any, *, scale: float) -> Any:
    """Attention in float32."""
    return (torch.softmax(q.float() @ k.float().mT * scale, -1) @ v.float()).to(q.dtype)


class Namespace:
    """A class with a function, whose objects can be called."""

    @staticmethod
    def wrong(q: Any, k: Any, v: Any) -> Any:
        """Return attention with another scale."""
        return right(q, k, v, scale=0.2)

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Return the same."""
        return self.wrong(q, k, v)


# -- variants ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_a_right_variant() -> None:
    """The record of a correct variant is ok, has the check and the repeats of `test_correct`, and no times."""
    record = pytest_fa.check("mine", CASE, repeats=3)
    assert (record.ok, record.kind, record.id, record.speed) == (True, "correct", f"mine-{CASE}-seed0", None)
    assert record.check is not None
    assert record.repeats is not None
    assert (record.check.passed, record.repeats.count) == (True, 3)


@pytest.mark.usefixtures("folder")
def test_what_is_returned_is_a_record() -> None:
    """The returned value is a `Record`, and its JSON line is read back as the same record."""
    record = pytest_fa.check("mine", CASE)
    plain = msgspec.json.decode(to_json(record), type=Record)
    assert isinstance(record, Record)
    assert msgspec.structs.astuple(plain) == msgspec.structs.astuple(record)


def test_a_wrong_variant_is_no_exception(folder: Path) -> None:
    """A wrong variant gives a record with the outcome `wrong` and the diagnosis; it is not timed."""
    (folder / "kernels" / "mine" / "entry.py").write_text(WRONG_SOURCE, encoding="utf-8")
    checked, timed = pytest_fa.check("mine", CASE), pytest_fa.time("mine", CASE)
    assert [(record.ok, record.outcome, record.speed) for record in (checked, timed)] == [(False, "wrong", None)] * 2
    assert checked.diagnosis is not None
    assert "likely cause: " in str(checked)


def test_a_crash_ends_only_its_worker(folder: Path) -> None:
    """A variant that crashes gives a record with the outcome `crashed`, and the next call works."""
    crash = PYTHON_SOURCE.replace("    scores =", "    import os; os.abort()\n    scores =", 1)
    (folder / "kernels" / "mine" / "entry.py").write_text(crash, encoding="utf-8")
    assert ["crashed", "ok"] == [pytest_fa.check(name, CASE).outcome for name in ("mine", "other")]


def test_an_edit_between_calls_is_seen(folder: Path) -> None:
    """A call sees edits of the source and of the manifest, and it uses the server of the call before."""
    source = folder / "kernels" / "mine" / "entry.py"
    outcomes, pids = [], []
    for text in (PYTHON_SOURCE, WRONG_SOURCE, PYTHON_SOURCE):
        source.write_text(text, encoding="utf-8")
        outcomes.append(pytest_fa.check("mine", CASE).outcome)
        pids.append({workers._server.pid for pair in _KEPT.values() for workers in pair if workers._server})
    assert (["ok", "wrong", "ok"], pids[:1] * 3) == (outcomes, pids)
    with (folder / "kernels" / "mine" / "variant.yaml").open("a", encoding="utf-8") as manifest:
        manifest.write("tolerance: absolute\n")
    record = pytest_fa.check("mine", CASE)
    assert record.check is not None
    assert record.check.policy == "absolute"


@pytest.mark.needs_nvcc
def test_a_compiler_error_is_in_the_message(
    folder: Path, write_variant: WriteVariant, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variant that does not compile gives a record with the compiler's message; after an edit it is built anew."""
    files = {"kernel.cu": CUDA_SOURCE.replace("FA_EXPORT int", "FA_EXPORT itn", 1)}
    write_variant("zero", manifest=f"{MANIFEST}defines: {{BLOCK: 64}}\n", **files)
    record = pytest_fa.check("zero", CASE)
    assert (record.ok, record.outcome) == (False, "not_built")
    assert 'identifier "itn" is undefined' in record.message
    assert "failed, 0 compiled, 0 cached" in capsys.readouterr().err
    (folder / "kernels" / "zero" / "kernel.cu").write_text(CUDA_SOURCE, encoding="utf-8")
    try:
        outcome: str = pytest_fa.check("zero", CASE).outcome
    except CannotRun as reason:  # without a GPU it is only built
        outcome = str(reason)
    assert outcome in ("wrong", "zero needs a GPU, and this machine has none")
    assert " failed" not in capsys.readouterr().err


@pytest.mark.alone
@pytest.mark.usefixtures("folder")
def test_a_variant_is_timed() -> None:
    """The record of `time` has the check of the timed outputs, the samples and the time per call."""
    record = pytest_fa.time("mine", CASE)
    assert (record.ok, record.kind) == (True, "speed")
    assert record.speed is not None
    assert record.speed.device.median_us > 0
    assert "device_us" in str(record)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.usefixtures("folder")
def test_a_baseline_is_timed() -> None:
    """A shipped SDPA backend can be checked and timed by its name."""
    record = pytest_fa.time("sdpa_math", CASE)
    assert (record.ok, record.role, record.speed is not None) == (True, "baseline", True)


def test_an_interrupt_ends_the_job(folder: Path) -> None:
    """Ctrl-C ends the worker and its server at once, and the next call works."""
    waiting = PYTHON_SOURCE.replace(
        "    scores =",
        f"    import os, pathlib, time\n    pathlib.Path({str(folder / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(120)\n    scores =",
        1,
    )
    (folder / "kernels" / "mine" / "entry.py").write_text(waiting, encoding="utf-8")

    def interrupt() -> None:
        while not ((folder / "pid").exists() and (folder / "pid").read_text(encoding="utf-8")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pytest_fa.check("mine", CASE)
    thread.join()
    worker = Path("/proc") / (folder / "pid").read_text(encoding="utf-8")
    assert (worker.exists(), time.monotonic() - start < 60) == (False, True)
    assert pytest_fa.check("other", CASE).ok


# -- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_a_right_function() -> None:
    """A correct function is judged in this process; its record names it and the call that repeats it."""
    record = pytest_fa.check(right, CASE)
    assert (record.ok, record.variant) == (True, "right")
    line = f"import pytest_fa; from {__name__} import right; pytest_fa.check(right, '{CASE}-seed0')"
    assert line == record.rerun_command


def test_the_rerun_line_can_be_pasted() -> None:
    """The rerun line of a function runs as it is, and has the repeats and the policy that were given."""
    record = pytest_fa.check(Namespace.wrong, CASE, repeats=3, tolerance="absolute")
    arguments = f"Namespace.wrong, '{CASE}-seed0', repeats=3, tolerance='absolute'"
    *imports, call = record.rerun_command.split("; ")
    assert ["import pytest_fa", f"from {__name__} import Namespace"] == imports
    assert f"pytest_fa.check({arguments})" == call
    names: dict[str, Any] = {}
    exec("\n".join((*imports, f"again = {call}")), names)  # noqa: S102  # the line above
    assert names["again"].rerun_command == record.rerun_command
    assert f"  rerun: {record.rerun_command}" in str(record).splitlines()


def test_a_function_of_a_notebook_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of `__main__` needs no import: its notebook or script has the name."""
    monkeypatch.setattr(sys.modules["__main__"], "right", right, raising=False)
    monkeypatch.setattr(right, "__module__", "__main__")
    case = parse_case(f"{CASE}-seed0")
    assert f"pytest_fa.time(right, '{CASE}-seed0')" == rerun_text("time", right, case, {"repeats": None})


@pytest.mark.parametrize(
    "function",
    [lambda *inputs: inputs[0], functools.partial(right, scale=1.0), Namespace()],
    ids=["lambda", "partial", "object"],
)
def test_a_function_without_a_name_has_no_rerun_line(function: Any, snapshot: SnapshotAssertion) -> None:
    """What cannot be named in Python gets a sentence, not a line that is a syntax error."""
    case, sentence = parse_case(f"{CASE}-seed0"), "call pytest_fa.check again with this function and case"
    assert f"{sentence} '{CASE}-seed0'" == rerun_text("check", function, case, {"repeats": None, "tolerance": None})
    keywords = {"repeats": 7, "tolerance": "fp8"}
    assert snapshot == rerun_text("check", function, case, keywords)


@pytest.mark.alone
@pytest.mark.usefixtures("folder")
def test_a_function_is_timed() -> None:
    """`time` times a function in this process, and says that the profiler does not confirm it."""
    record = pytest_fa.time(right, CASE)
    assert record.ok
    assert record.speed is not None
    assert record.speed.device.median_us > 0
    assert record.speed.agreement is not None
    assert record.speed.agreement.valid is None


def test_a_function_may_write_its_output() -> None:
    """A function that takes `out` may write into it and return nothing."""

    def writes(q: Any, k: Any, v: Any, scale: float, out: Any) -> None:
        out.copy_(right(q, k, v, scale=scale))

    assert pytest_fa.check(writes, CASE).ok


def test_a_function_gets_the_mask() -> None:
    """A function that takes `causal` gets its name; so does one that takes any keyword."""
    masks = []

    def masked(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        masks.append(keywords["causal"])
        scores = q.float() @ k.float().mT * keywords["scale"]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return (torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.float()).to(q.dtype)

    assert pytest_fa.check(masked, f"{CASE}-causal").ok
    assert set(masks) == {"top_left"}


@pytest.mark.parametrize(
    ("function", "outcome", "message"),
    [
        (lambda q, k, v: right(q, k, v, scale=0.2), "wrong", "max error 9."),
        (lambda q, k, v: None, "failed", "the output is None"),  # noqa: ARG005  # returns nothing on purpose
        (lambda q, k, v: q.float(), "wrong", "the output is torch.float32"),  # noqa: ARG005
        (lambda q, k, v: q.missing, "failed", "AttributeError: 'Tensor' object has no attribute 'missing'"),  # noqa: ARG005
        (lambda q, k: q, "failed", "TypeError: "),  # noqa: ARG005
        (lambda q, k, v: q.zero_(), "wrong", "changed its input q"),  # noqa: ARG005
        (torch.nn.functional.scaled_dot_product_attention, "wrong", "calls torch's own attention operator"),
    ],
)
def test_a_wrong_function(function: Any, outcome: str, message: str) -> None:
    """A wrong function gives a record with the outcome and the reason, and raises nothing."""
    record = pytest_fa.check(function, CASE)
    assert (record.ok, record.outcome, message in record.message) == (False, outcome, True), record.message


def test_a_tuple_is_answered_in_python(snapshot: SnapshotAssertion) -> None:
    """For a function that returns a tuple, the message says what to write in Python, and nothing of a manifest."""
    record = pytest_fa.check(lambda q, k, v, *, scale: (right(q, k, v, scale=scale), None), CASE)
    first_line = record.message.splitlines()[0]
    assert snapshot == first_line
    assert ("failed", ("entry",)) == (record.outcome, record.caught_by)
    assert "manifest" not in str(record)


def test_other_parameters_are_answered_in_python() -> None:
    """For a function with other parameters, the message has the call that it got, and nothing of a manifest."""

    def other(q: Any, k: Any, v: Any, softmax_scale: float, *, causal: str) -> Any:  # noqa: ARG001  # never called
        return q

    record = pytest_fa.check(other, f"{CASE}-causal")
    call = "it is called as f(q, k, v, causal=causal); wrap it: `lambda q, k, v, *, scale, causal: f(...)`"
    assert record.message.startswith("TypeError: ")
    assert record.message.splitlines()[0].endswith(f"missing 1 required positional argument: 'softmax_scale'; {call}")
    assert "manifest" not in str(record)


@pytest.mark.usefixtures("folder")
def test_a_refusal_of_a_function(snapshot: SnapshotAssertion) -> None:
    """A function that raises `UnsupportedCase` is refused: no manifest says that it supports the case."""

    def refuses(q: Any, k: Any, v: Any) -> Any:  # noqa: ARG001  # never used
        raise UnsupportedCase("head_dim must be 128")

    with pytest.raises(Refused) as caught:
        pytest_fa.check(refuses, CASE)
    assert snapshot == str(caught.value)


class Attention(torch.nn.Module):
    """A module without `causal`, whose parameter needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones((), device="cuda" if torch.cuda.is_available() else "cpu"))

    def forward(self, q: Any, k: Any, v: Any, *, scale: float) -> Any:
        """Attention in float32."""
        return right(q, k, v, scale=scale * self.factor)  # type: ignore[arg-type]  # a number on the device


def test_a_module_is_a_function(snapshot: SnapshotAssertion) -> None:
    """An instance of a torch module gets the keywords that its `forward` takes; its class is an error."""
    record = pytest_fa.check(Attention(), CASE)
    assert (record.ok, record.variant) == (True, "Attention"), record.message
    with pytest.raises(UsageProblem) as error:
        pytest_fa.check(Attention(), f"{CASE}-causal")
    assert snapshot == str(error.value)
    with pytest.raises(UsageProblem) as error:
        pytest_fa.check(Attention, CASE)
    assert snapshot == str(error.value)


@pytest.mark.parametrize(("code", "status"), [(0, 0), (None, 0), (3, 3), ("no GPU", 1)])
def test_an_exit_is_a_crash(code: Any, status: int) -> None:
    """A function that calls `sys.exit` gives a record with the outcome `crashed`; the calling script goes on."""

    def exits(q: Any, k: Any, v: Any) -> Any:  # noqa: ARG001  # never used
        sys.exit(code)

    record = pytest_fa.check(exits, CASE)
    assert (record.ok, record.outcome) == (False, "crashed")
    assert f"crashed: exit status {status} in stage launch; the function called sys.exit" == record.message


def test_a_late_exit_is_a_crash(snapshot: SnapshotAssertion) -> None:
    """A function that calls `sys.exit` in a repeat has passed the stage `launch`."""
    calls = []

    def leaves_later(q: Any, k: Any, v: Any, *, scale: float) -> Any:
        calls.append(1)
        return sys.exit(0) if len(calls) > 1 else right(q, k, v, scale=scale)

    record = pytest_fa.check(leaves_later, CASE, repeats=3)
    assert snapshot == record.message
    assert {"launch": "ok", "sanity": "failed"}.items() <= {stage.name: stage.state for stage in record.stages}.items()


def test_an_interrupt_of_a_function_goes_through() -> None:
    """Ctrl-C in a function is not made a record."""

    def interrupted(q: Any, k: Any, v: Any) -> Any:  # noqa: ARG001  # never used
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pytest_fa.check(interrupted, CASE)


def test_a_write_out_of_bounds_is_found() -> None:
    """A function of this process gets tensors with guard bands."""

    def writes_far(q: Any, k: Any, v: Any, *, scale: float, out: Any) -> Any:
        out.copy_(right(q, k, v, scale=scale))
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel())[0] = 1.0
        return out

    record = pytest_fa.check(writes_far, CASE)
    assert (record.outcome, record.caught_by) == ("wrong", ("guard bands",))


def test_a_function_has_no_processes_to_start() -> None:
    """Its timed job on a GPU runs in this process."""
    case = parse_case(f"{CASE}-seed0")
    workers = ThisProcess(right, case)
    workers.start_processes(
        CaseJob(
            variant=variant_for(right, case),
            case=case,
            library=None,
            device="cuda",
            policy="same_precision",
            checks_output=True,
            time=True,
        )
    )
    assert workers._server is None
