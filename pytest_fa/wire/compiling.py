"""First calls of variants that compile when they are called, such as those of Triton and torch.compile.

Such a call has a time limit of its own, and its seconds are counted apart from those of the check that makes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_fa.wire.commands import (
    CallViews,
    Capture,
    CaptureCall,
    Cold,
    Command,
    Delegates,
    Launch,
    Load,
    MakeCall,
    MakeMalformedCall,
    PeakBytes,
    Prepare,
    Profile,
    Repeat,
    ReplaySeries,
    Run,
    Script,
    View,
    ViewDtype,
)

COMPILE_SECONDS = 290.0  # less than the 300 s after which the judge's caller ends the job
ALIGNED_BYTES = 16  # compilers make other code for tensors that begin at no multiple of this
# Packages that compile at the first call, as `sys.modules` names them once a variant has imported them.
COMPILERS = ("triton", "torch._dynamo", "torch._inductor", "numba", "cutlass", "tilelang", "cupy", "taichi", "jax")
_ITEM_BYTES: dict[ViewDtype, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
}

Signature = tuple[object, ...]


def loaded_compilers() -> frozenset[str]:
    """Which packages that compile at the first call this process has imported."""
    return frozenset(name for name in COMPILERS if name in sys.modules)


class CompilingCalls:
    """Tells which commands may compile: the first call with arguments of a kind, if the variant has loaded a compiler.

    The variant's process says whether it has.  A wrong answer changes a time limit and how seconds are counted, and no
    verdict.  `seconds` is how long such calls took in the current job, by this process's clock.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._variant, self._compiles = "", False
        self._seen: set[Signature] = set()
        self._series: dict[str, CallViews] = {}

    def opened(self, variant: str, *, compiles: bool) -> None:
        """Take note of the variant that is open now."""
        self._variant, self._compiles = variant, compiles

    def new_in(self, command: Command) -> frozenset[Signature]:
        """The kinds of arguments that a command is the first to call the variant with."""
        if isinstance(command, Prepare):
            self._series[command.name] = command.series.first
        if not self._compiles:
            return frozenset()
        observed = isinstance(command, Delegates)  # compiled code has guards on the modes in which it is called
        calls = (self._variant, observed)
        return frozenset((*calls, *_signature(call)) for call in self._calls_of(command)) - self._seen

    @contextmanager
    def clocked(self, signatures: frozenset[Signature]) -> Iterator[None]:
        """Count the seconds of a first call, after which its arguments are known."""
        start = time.perf_counter()
        try:
            yield
            self._seen |= signatures
        finally:
            self.seconds += time.perf_counter() - start

    def _calls_of(self, command: Command) -> list[CallViews]:
        if isinstance(command, Script):
            return [step.call for steps in command.threads for step in steps if isinstance(step, Launch)]
        if isinstance(command, MakeCall | MakeMalformedCall | Repeat | CaptureCall | Delegates | PeakBytes):
            return [command.call]
        if isinstance(command, Run | Capture | ReplaySeries | Cold | Load | Profile):
            return [self._series[command.name]]
        return []


def _signature(call: CallViews) -> Signature:
    """What compilers make code for: shapes, strides, dtypes and alignment, and the other arguments."""
    views = (call.q, call.k, call.v, *call.written)
    return (*map(_kind, views), call.scale, *call.words.values())


def _kind(view: View) -> Signature:
    offset_bytes = view.offset * _ITEM_BYTES[view.dtype]
    return view.shape, view.strides, view.dtype, offset_bytes % ALIGNED_BYTES == 0
