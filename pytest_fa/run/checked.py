"""A call whose output is judged: NaN-filled shared memory, output and workspace, and guard bands around each tensor."""

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
from pytest_fa.run.inputs import Inputs, clone, poison, poisoned_output
from pytest_fa.run.nvtx_range import nvtx_range

# `DeviceTools` methods that run before a repeat.  Repeats cycle through these four conditions: undisturbed, with most
# multiprocessors occupied, with a cold L2, and with both.
PERTURBATIONS = ((), ("occupy",), ("clean_l2",), ("clean_l2", "occupy"))


class CheckedLaunch:
    """Calls `forward` on guarded copies of a case's inputs.

    Before each call, the shared memory of the GPU, the output and the workspaces are filled with NaN.
    """

    def __init__(
        self, forward: Forward, inputs: Inputs, workspaces: Workspaces, computes: Computes = "attention"
    ) -> None:
        self._forward = forward
        self.original_inputs = clone(inputs)  # no call sees these
        self._guarded = {name: guard(getattr(inputs, name)) for name in ("q", "k", "v")}
        self._guarded["out"] = guard_output(poisoned_output(inputs, computes))
        self._workspaces = workspaces
        q, k, v = (self._guarded[name].tensor for name in ("q", "k", "v"))
        self.inputs = inputs._replace(q=q, k=k, v=v)
        self.device = inputs.q.device
        self._tools, self.why_no_smem_poison = _find_tools(self.device)
        self._repeats = 0

    @property
    def out_buffer(self) -> torch.Tensor:
        """The tensor that every call gets as `out`."""
        return self._guarded["out"].tensor

    def __call__(
        self, context: AbstractContextManager[None] | None = None, *, perturb: tuple[str, ...] = ()
    ) -> torch.Tensor:
        """Call the variant once, without synchronization.

        `context` is entered around the variant's own launches only, not around those that prepare the call.  The
        returned tensor may be `out_buffer`, which the next call fills with NaN again.
        """
        q, k, v, scale, causal = self.inputs
        out = self.out_buffer
        poison(out)
        with self._workspaces.guarded():
            for tool in ("poison_smem", *perturb) if self._tools else ():
                getattr(self._tools, tool)()
            with context or nullcontext():
                result = self._forward(q, k, v, scale=scale, causal=causal, out=out)
        return result

    def call_and_wait(self, *, range_name: str) -> torch.Tensor:
        """Call the variant once in the NVTX range `range_name` and synchronize.

        Raises what the variant raises, and `DeviceLost` for an error on the device.
        """
        out = self(nvtx_range(range_name))
        synchronize(self.device)
        return out

    def call_perturbed(self) -> torch.Tensor:
        """Call the variant once under the next of `PERTURBATIONS`, without synchronization."""
        self._repeats += 1
        return self(perturb=PERTURBATIONS[self._repeats % len(PERTURBATIONS)])

    def require_untouched(self) -> None:
        """Raise `WrongResult` if a call changed an input or wrote into a guard band."""
        for name in ("q", "k", "v"):
            if not torch.equal(getattr(self.inputs, name), getattr(self.original_inputs, name)):
                raise WrongResult("inputs", f"the kernel changed its input {name}")
        workspaces = {
            f"a workspace of {size} bytes": guarded for size, guarded in self._workspaces.guarded_by_size.items()
        }
        for name, guarded in (*self._guarded.items(), *workspaces.items()):
            if damage := guarded.damage:
                raise WrongResult("guard bands", f"the kernel wrote out of bounds of {name}: {damage}")


def _find_tools(device: torch.device) -> tuple[DeviceTools | None, str | None]:
    """The device's tools and None, or None and the reason why they cannot be used."""
    if device.type == "cpu":
        return None, ON_CPU
    try:
        return device_tools(device.index or 0), None
    except NoDeviceTools as problem:
        return None, str(problem)
