"""A launch whose output is to be judged: NaN-filled shared memory, poisoned output and workspace, guard bands all around."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from pytest_fa.catalog.case import Computes
from pytest_fa.errors import WrongResult
from pytest_fa.records.timing import ON_CPU
from pytest_fa.run.device import synchronize
from pytest_fa.run.device_tools import DeviceTools, NoDeviceTools, device_tools
from pytest_fa.run.forward import Forward
from pytest_fa.run.guards import Workspaces, guard, guard_output
from pytest_fa.run.inputs import Inputs, clone, poisoned_output
from pytest_fa.run.nvtx_range import nvtx_range

# What disturbs one repeat and the next: company on the multiprocessors, a cold L2.
PERTURBATIONS = ((), ("occupy",), ("clean_l2",), ("clean_l2", "occupy"))


class CheckedLaunch:
    """Calls `forward` on guarded copies of a case's inputs; each call starts from the same dirt and poison."""

    def __init__(
        self, forward: Forward, inputs: Inputs, workspaces: Workspaces, computes: Computes = "attention"
    ) -> None:
        self._forward = forward
        self.untouched = clone(inputs)  # the inputs as they were before any call
        self._guarded = {name: guard(getattr(inputs, name)) for name in ("q", "k", "v")}
        self._guarded["out"] = guard_output(poisoned_output(inputs, computes))
        self._workspaces = workspaces
        q, k, v = (self._guarded[name].tensor for name in ("q", "k", "v"))
        self.inputs = inputs._replace(q=q, k=k, v=v)
        self.device = inputs.q.device
        self._tools, self.smem_poison_missing = _find_tools(self.device)
        self._repeats = 0

    @property
    def given(self) -> torch.Tensor:
        """The output that every call is given."""
        return self._guarded["out"].tensor

    def __call__(
        self, around: AbstractContextManager[None] | None = None, *, perturb: tuple[str, ...] = ()
    ) -> torch.Tensor:
        """One call, not waited for; `around` is entered for the kernel's own launches and none of ours.

        The output may be the given one, which the next call poisons again.
        """
        q, k, v, scale, causal = self.inputs
        out = self.given
        out.fill_(float("nan"))
        with self._workspaces.guarded():
            for tool in ("poison_smem", *perturb) if self._tools else ():
                getattr(self._tools, tool)()
            with around or nullcontext():
                result = self._forward(q, k, v, scale=scale, causal=causal, out=out)
        return result

    def once(self, name: str) -> torch.Tensor:
        """One call in an NVTX range of this name, waited for.  Raises what the kernel or the device raises."""
        out = self(nvtx_range(name))
        synchronize(self.device)
        return out

    def again(self) -> torch.Tensor:
        """One more call, not waited for, each time disturbed in another way."""
        self._repeats += 1
        return self(perturb=PERTURBATIONS[self._repeats % len(PERTURBATIONS)])

    def require_untouched(self) -> None:
        """Raise `WrongResult` where a kernel changed an input or wrote past the end of anything."""
        for name in ("q", "k", "v"):
            if not torch.equal(getattr(self.inputs, name), getattr(self.untouched, name)):
                raise WrongResult("inputs", f"the kernel changed its input {name}")
        workspaces = {f"a workspace of {size} bytes": each for size, each in self._workspaces.kept.items()}
        for name, each in (*self._guarded.items(), *workspaces.items()):
            if damage := each.damage:
                raise WrongResult("guard bands", f"the kernel wrote out of bounds of {name}: {damage}")


def _find_tools(device: torch.device) -> tuple[DeviceTools | None, str | None]:
    """What disturbs launches on this device, or nothing and the reason."""
    if device.type == "cpu":
        return None, ON_CPU
    try:
        return device_tools(device.index or 0), None
    except NoDeviceTools as problem:
        return None, str(problem)
