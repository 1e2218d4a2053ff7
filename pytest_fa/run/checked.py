"""A launch whose output is to be judged: dirty shared memory, poisoned output and workspace, guard bands all around."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from pytest_fa.errors import WrongResult
from pytest_fa.report.record import ON_CPU
from pytest_fa.run.device import synchronize
from pytest_fa.run.dirty_smem import NoDirtier, smem_dirtier
from pytest_fa.run.guards import Workspaces, guard, guard_output
from pytest_fa.run.inputs import Inputs, clone
from pytest_fa.run.module import Forward
from pytest_fa.run.nvtx_range import nvtx_range


class CheckedLaunch:
    """Calls `forward` on guarded copies of a case's inputs; each call starts from the same dirt and poison."""

    def __init__(self, forward: Forward, inputs: Inputs, workspaces: Workspaces) -> None:
        self._forward = forward
        self._untouched = clone(inputs)
        self._guarded = {name: guard(getattr(inputs, name)) for name in ("q", "k", "v")}
        self._guarded["out"] = guard_output(inputs.q)
        self._workspaces = workspaces
        q, k, v = (self._guarded[name].tensor for name in ("q", "k", "v"))
        self.inputs = inputs._replace(q=q, k=k, v=v)
        self.device = inputs.q.device
        self._dirty, self.dirtier_missing = _find_dirtier(self.device)

    @property
    def untouched(self) -> Inputs:
        """The inputs as they were before any call."""
        return self._untouched

    def __call__(self, around: AbstractContextManager[None] | None = None) -> torch.Tensor:
        """One call, not waited for; `around` is entered for the kernel's own launches and none of ours.

        The output may be the given one, which the next call poisons again.
        """
        q, k, v, scale, causal = self.inputs
        out = self._guarded["out"].tensor
        out.fill_(float("nan"))
        with self._workspaces.guarded() as workspaces:
            self._dirty()
            with around or nullcontext():
                result = self._forward(q, k, v, scale=scale, causal=causal, out=out)
        self._guarded.update({f"workspace {index}": each for index, each in enumerate(workspaces)})
        return result

    def once(self, name: str) -> torch.Tensor:
        """One call in an NVTX range of this name, waited for.  Raises what the kernel or the device raises."""
        out = self(nvtx_range(name))
        synchronize(self.device)
        return out

    def require_untouched(self) -> None:
        """Raise `WrongResult` where a kernel changed an input or wrote past the end of anything."""
        for name in ("q", "k", "v"):
            if not torch.equal(getattr(self.inputs, name), getattr(self._untouched, name)):
                raise WrongResult(f"the kernel changed its input {name}")
        for name, each in self._guarded.items():
            if damage := each.damage:
                raise WrongResult(f"the kernel wrote out of bounds of {name}: {damage}")


def _find_dirtier(device: torch.device) -> tuple[Callable[[], None], str | None]:
    """What dirties shared memory on this device, or nothing and the reason."""
    if device.type == "cpu":
        return _nothing, ON_CPU
    try:
        return smem_dirtier(device.index or 0), None
    except NoDirtier as problem:
        return _nothing, str(problem)


def _nothing() -> None:
    """Where there is no shared memory."""
