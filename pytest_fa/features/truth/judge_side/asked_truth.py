"""`AskedTruth`: the judge asks the process of the user's functions, and uses their results only if they can be right.

A result that is no truth ends the test without a verdict, in one sentence.
"""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple

import msgspec
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.grouped_heads import repeated
from pytest_fa.attention.rows import RowTruth
from pytest_fa.catalog.own_truth import OwnTruth
from pytest_fa.catalog.variant import Rounding
from pytest_fa.errors import NoTruth
from pytest_fa.features.truth.judge_side.messages import TruthAnswer, TruthQuestion, memory_of, read_tensors
from pytest_fa.gpu.inputs import Inputs
from pytest_fa.gpu.quantised import E4M3
from pytest_fa.judge.float32_error import Float32Error
from pytest_fa.judge.policies import READS_SPREAD, rms
from pytest_fa.judge.truth import Truth
from pytest_fa.wire.channel import Channel, Garbage

# Factors of V: float32 sees neither; float64 sees both, the second one also in an output that is rounded to float32.
NUDGE, FLOAT32_NUDGE = 1 + 2.0**-40, 1 + 2.0**-27
# The relative error of one rounding: of the output's dtype, and of P in e4m3 for inputs in e4m3.
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
TF32_UNIT, E4M3_UNIT = 2.0**-11, 2.0**-4
FLOAT32_UNIT = UNITS[torch.float32]
MAX_ROUNDINGS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 16}  # of P and the output; of sums, too
LOST_P = {torch.float16: 2.0**-25}  # what is lost of a weight that the dtype cannot hold, relative to the largest one
LSE_DEVIATIONS = 6  # as in `attention/lse.py`: of the reference's error, which a right kernel stays below


class _UsersResult(NamedTuple):
    out: torch.Tensor  # [batch, heads, seq_q, head_dim] float64
    lse: torch.Tensor | None  # [batch, heads, seq_q] float64


class AskedTruth:
    """The truth from the user's functions, which run in the process `pid` behind a channel."""

    def __init__(self, channel: Channel, pid: int) -> None:
        self._channel, self._pid = channel, pid
        self._computes: set[tuple[str, str, str, float]] = set()  # (path, sha256, function, factor of V)

    def truth_of(self, own: OwnTruth, inputs: Inputs, rounds: tuple[Rounding, ...], policy: str) -> Truth:
        """The truth, and what the reference says about the allowed error.  Raises `NoTruth`.

        `rounds` are the roundings besides those of P and the output that the manifest declares.
        """
        if policy in READS_SPREAD and own.max_error is None:
            raise _no_verdict(own, f"cannot be judged by policy {policy}, which needs P; use same_precision")
        call = _ExactCall(own, inputs, time.monotonic() + own.seconds)
        truth = self._ask(call, own.function, call.v, is_exact=True)
        if call.has_finite_inputs:
            _require_finite(own, own.function, truth)
            self._require_float64(call, own.function, truth.out)
        if own.reference is None:
            rows = () if truth.lse is None else (("lse", RowTruth(truth.lse, _constant(truth.lse, own.max_error))),)
            return call.truth(truth.out, truth.out, rows)
        reference = self._ask(call, own.reference, call.v, is_exact=False)
        if call.has_finite_inputs:
            _require_finite(own, own.reference, reference)
            _require_roundings(call, rounds, truth.out, reference.out)
            if call.dtype == torch.float32:
                self._require_float32(call, own.reference, reference.out)
        lse = _row_truth(call, truth.lse, reference.lse)
        return call.truth(truth.out, reference.out, () if lse is None else (("lse", lse),))

    def _require_float64(self, call: _ExactCall, function: str, out: torch.Tensor) -> None:
        """Require that a function computes in float64: the output of a kernel is not the truth."""
        if self._nudged_differs(call, function, out, NUDGE) is False:
            reason = "does not compute in float64: V times 1 + 1e-12 gives the same output, as a kernel's would be"
            raise _no_verdict(call.own, reason)

    def _require_float32(self, call: _ExactCall, function: str, out: torch.Tensor) -> None:
        """Require that a reference computes in float32: with exact sums it would have less error than any kernel."""
        if self._nudged_differs(call, function, out, FLOAT32_NUDGE):
            reason = (
                "does not compute in float32: V times 1 + 7e-9, which float32 rounds to V, changes its output; call "
                "q.float(), k.float() and v.float() first"
            )
            raise _no_verdict(call.own, reason, function)

    def _nudged_differs(self, call: _ExactCall, function: str, out: torch.Tensor, factor: float) -> bool | None:
        """Whether the output for V times a factor differs from `out`; None if that was asked before, or all are 0."""
        key = (call.own.path, call.own.sha256, function, factor)
        if key in self._computes or not bool(out.any()):
            return None
        nudged = self._ask(call, function, call.v * factor, is_exact=factor == NUDGE)
        self._computes.add(key)
        return not torch.equal(nudged.out, out)

    def _ask(self, call: _ExactCall, function: str, v: torch.Tensor, *, is_exact: bool) -> _UsersResult:
        """What a function returns.  Raises `NoTruth`."""
        own, tensors = call.own, [tensor.cpu() for tensor in (call.q, call.k, v, *call.extra.values())]
        question = call.question(function, is_exact=is_exact)
        try:
            memory = memory_of(tensors)
            try:
                self._channel.send(msgspec.json.encode(question), memory)
            finally:
                os.close(memory)
            if not self._channel.wait(call.deadline - time.monotonic()):
                os.kill(self._pid, signal.SIGKILL)
                limit = f"did not return within {own.seconds:g} s; --fa-watchdog=SECONDS allows it more"
                raise _no_verdict(own, limit, function)
            answer = msgspec.json.decode(self._channel.receive(), type=TruthAnswer)
            descriptor = self._channel.take_descriptor()
        except (OSError, EOFError):
            raise _no_verdict(own, "ended its process", function) from None
        except (Garbage, msgspec.MsgspecError, ValueError):
            raise _no_verdict(own, "sent what cannot be read", function) from None
        if answer.problem:
            raise _no_verdict(own, answer.problem, function, answer.details)
        try:
            out, *more = (tensor.to(call.q.device) for tensor in read_tensors(descriptor, answer.shapes))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return _UsersResult(out, more[0] if more else None)


class _ExactCall:
    """The arguments of a call in float64, K and V with a head for each head of Q."""

    def __init__(self, own: OwnTruth, inputs: Inputs, deadline: float) -> None:
        exact = inputs.exact().meant()
        self.own, self.deadline, self.dtype = own, deadline, inputs.output_dtype
        heads = exact.q.shape[1]
        self.q, self.k, self.v = exact.q.double(), repeated(exact.k.double(), heads), repeated(exact.v.double(), heads)
        self.scale, self.words = exact.scale, exact.words
        self.extra = {name: tensor.double() for name, tensor in exact.extra.items() if not parts.is_table(name)}
        self.keys = max(1, self.k.shape[2])
        self.has_finite_inputs = all(bool(tensor.isfinite().all()) for tensor in (self.q, self.k, self.v))
        self.is_e4m3 = inputs.q.dtype == E4M3

    def question(self, function: str, *, is_exact: bool) -> TruthQuestion:
        """The message that asks for one function."""
        needed = [name for name, value in self.words.items() if value != "none" and name not in parts.hints()]
        return TruthQuestion(
            files=self.own.files,
            sha256=self.own.sha256,
            function=function,
            device=self.q.device.type,
            dtype=str(self.dtype).removeprefix("torch."),
            shapes=tuple(tuple(tensor.shape) for tensor in (self.q, self.k, self.v, *self.extra.values())),
            out_shape=(*self.q.shape[:3], self.v.shape[3]),
            keywords={"scale": self.scale, **self.words},
            needed=(*(["scale"] if self.scale != self.q.shape[3] ** -0.5 else []), *needed, *self.extra),
            is_exact=is_exact,
            tensors=tuple(self.extra),
        )

    @property
    def largest_score(self) -> float:
        """No product of a query and a key is larger."""
        norms = (float(tensor.norm(dim=-1).max()) if tensor.numel() else 0.0 for tensor in (self.q, self.k))
        return abs(self.scale) * next(norms) * next(norms)

    def largest_errors(self, rounds: tuple[Rounding, ...]) -> tuple[float, float]:
        """The largest relative error (RMS) that a kernel's roundings cause, and that if it rounds scores, too."""
        unit = E4M3_UNIT if self.is_e4m3 else TF32_UNIT if "tf32" in rounds else UNITS[self.dtype]
        count = MAX_ROUNDINGS[self.dtype] + (self.keys**0.5 if self.dtype == torch.float32 else 0)
        plain = unit * count + LOST_P.get(self.dtype, 0.0) * self.keys
        with_scores = plain + unit * self.largest_score
        rounds_scores = self.dtype == torch.float32 or not {"q", "s"}.isdisjoint(rounds)
        return with_scores if rounds_scores else plain, with_scores

    def truth(self, out: torch.Tensor, reference: torch.Tensor, rows: tuple[tuple[str, RowTruth], ...]) -> Truth:
        """What outputs are compared with; the reference is rounded to the output's dtype if it is not yet."""
        same_precision = reference.to(self.dtype).double()
        row_size = out.square().mean(-1).sqrt()
        error = _float32_error(out, same_precision, row_size) if self.dtype == torch.float32 else None
        against, max_error = self.own.against, self.own.max_error
        # P is not known: one key may outweigh all others.
        sizes = (self.k.shape[2], row_size, None, error, row_size)
        return Truth(out, same_precision, *sizes, rows=rows, against=against, max_error=max_error)


def _no_verdict(own: OwnTruth, reason: str, function: str | None = None, details: str = "") -> NoTruth:
    sentence = f"your reference {own.shown_path}:{function or own.function} {reason}; nothing was judged"
    return NoTruth(f"{sentence}\n{details}" if details else sentence)


def _require_finite(own: OwnTruth, function: str, returned: _UsersResult) -> None:
    """Require an output without NaN and Inf, and a log-sum-exp without NaN and +Inf."""
    if count := int((~returned.out.isfinite()).sum()):
        place = list((~returned.out.isfinite()).nonzero()[0].tolist())
        value = "NaN" if bool(returned.out[tuple(place)].isnan()) else "Inf"
        where = f"{value} at {place}, not finite in {count} of {returned.out.numel()} elements"
        raise _no_verdict(own, f"returned {where} (the output of a row that sees no key is 0)", function)
    if returned.lse is not None and bool((returned.lse.isnan() | (returned.lse == torch.inf)).any()):
        raise _no_verdict(own, "returned a log-sum-exp with NaN or Inf", function)


def _require_roundings(
    call: _ExactCall, rounds: tuple[Rounding, ...], truth: torch.Tensor, reference: torch.Tensor
) -> None:
    """Require that the reference differs from the truth as roundings of P, the output and what `rounds` has make it.

    An error of a score is a relative error of a weight; rounding a score of size S causes one of up to S roundings.
    """
    own, rounded = call.own, truth.to(call.dtype).double()
    if not bool(rounded.isfinite().all()):
        raise _no_verdict(own, f"returned up to {float(truth.abs().max()):.3g}, which the kernel's dtype cannot hold")
    if torch.equal(reference, truth) and not torch.equal(rounded, truth):
        raise _no_verdict(own, f"rounds nothing: it returns what {own.function} returns", own.reference)
    size = max(rms(truth), rms(call.v) / call.keys**0.5, torch.finfo(torch.float64).tiny)
    relative, (allowed, with_scores) = rms(reference - truth) / size, call.largest_errors(rounds)
    if bool(truth.any()) and not relative <= allowed:
        reason = f"is {relative:.2g} (RMS, relative) away from {own.function}; roundings cause at most {allowed:.2g}"
        remedy = "; a kernel that also rounds Q or the scores declares `rounds: [q]` or `rounds: [s]`"
        so = f", so it computes something else{remedy if relative <= with_scores else ''}"
        raise _no_verdict(own, f"{reason}{so}", own.reference)


def _float32_error(out: torch.Tensor, reference: torch.Tensor, row_size: torch.Tensor) -> Float32Error:
    """The size of the error of a float32 kernel, from that of the reference: by row, and in proportion to the row."""
    error = reference - out
    relative = rms(error) / max(rms(out), torch.finfo(torch.float64).tiny)
    deviation = torch.maximum(error.square().mean(-1).sqrt(), relative * row_size)
    return Float32Error(deviation[..., None].expand_as(out).contiguous(), torch.zeros_like(out))


def _row_truth(call: _ExactCall, lse: torch.Tensor | None, reference: torch.Tensor | None) -> RowTruth | None:
    """The truth of the log-sum-exp; None unless both functions return it, or its allowed error is known."""
    if lse is None or (reference is None and call.own.max_error is None):
        return None
    if call.own.max_error is not None or reference is None:
        return RowTruth(lse, _constant(lse, call.own.max_error))
    has_keys = lse.isfinite()
    ideal = (reference - lse).abs().where(has_keys, 0.0)
    mean = (ideal.square().sum() / has_keys.sum().clamp_min(1)).sqrt()
    size = call.largest_score + lse.abs().where(has_keys, 0.0) + 4
    arithmetic = FLOAT32_UNIT * (16 * size + 4 * call.k.shape[2] ** 0.5)
    return RowTruth(lse, (LSE_DEVIATIONS * ideal.maximum(mean) + arithmetic).where(has_keys, 0.0))


def _constant(rows: torch.Tensor, value: float | None) -> torch.Tensor:
    """The same allowed error in each row that sees a key."""
    return torch.full_like(rows, value or 0.0).where(rows.isfinite(), 0.0)
