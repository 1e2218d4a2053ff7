"""A call whose output is judged: NaN-filled shared memory, output and workspace, and guard bands around each tensor."""

from __future__ import annotations

from typing import Self

import torch

from pytest_fa.catalog.case import Case, Computes
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.guards import guard, guard_output
from pytest_fa.gpu.inputs import Inputs, bits_of, clone, make_inputs, poison, poisoned_lse, poisoned_output
from pytest_fa.gpu.quantised import Descales
from pytest_fa.judge.candidate import Candidate
from pytest_fa.wire.commands import Disturbance


class CheckedLaunch:
    """Calls a candidate on guarded copies of a case's inputs.

    Before each call, the shared memory of the GPU, the output and the workspaces are filled with NaN.  With
    `wants_lse`, the log-sum-exp is requested in each call, and filled with NaN as well.
    """

    def __init__(
        self, candidate: Candidate, inputs: Inputs, computes: Computes = "attention", *, wants_lse: bool = False
    ) -> None:
        self.candidate = candidate
        self.original_inputs = clone(inputs)  # no call sees these
        self._guarded = {name: guard(tensor) for name, tensor in inputs.parts.items()}
        self._guarded["out"] = guard_output(poisoned_output(inputs, computes))
        self.lse_buffer: torch.Tensor | None = None  # [batch, heads, seq_q] float32, which every call writes
        if wants_lse:
            self._guarded["lse"] = guard_output(poisoned_lse(inputs).flatten())
            self.lse_buffer = self._guarded["lse"].tensor.view(inputs.q.shape[:3])
        q, k, v, *descales = (self._guarded[name].tensor for name in inputs.parts)
        self.inputs = inputs._replace(q=q, k=k, v=v, descales=Descales(*descales) if descales else None)

    @classmethod
    def of_case(cls, candidate: Candidate, case: Case, device: torch.device, *, wants_lse: bool) -> Self:
        """A launch on the inputs of a case."""
        return cls(candidate, make_inputs(case, device), case.computes, wants_lse=wants_lse)

    @property
    def why_no_smem_poison(self) -> str | None:
        """Why shared memory is not filled with NaN; None if it is."""
        return self.candidate.why_no_tools

    @property
    def out_buffer(self) -> torch.Tensor:
        """The tensor that every call of `call_and_wait` writes."""
        return self._guarded["out"].tensor

    def call_and_wait(self, range_name: str | None = None) -> torch.Tensor:
        """Call the variant once, in an NVTX range if it is named, and return `out_buffer`.

        Raises what the variant raises, and `DeviceLost` for an error on the device.
        """
        for buffer in (self.out_buffer, *([] if self.lse_buffer is None else [self.lse_buffer])):
            poison(buffer)
        with self.candidate.workspaces.guarded():
            self.candidate.call(self.inputs, self.out_buffer, ("poison_smem",), range_name, self.lse_buffer)
        return self.out_buffer

    def operators(self) -> tuple[str, ...]:
        """Call the variant once and return the names of torch's operators that ran in it."""
        return self.candidate.operators_of(self.inputs, self.out_buffer)

    def repeat(
        self,
        outs: torch.Tensor,  # [calls, batch, heads, seq_q, head_dim or seq_k]
        before: tuple[tuple[Disturbance, ...], ...],
        lses: torch.Tensor | None = None,  # [calls, batch, heads, seq_q]
    ) -> None:
        """Call the variant once for each output, which the candidate sees; `before` says what precedes each call."""
        with self.candidate.workspaces.guarded():
            self.candidate.repeat(self.inputs, outs, before, lses)

    def require_untouched(self) -> None:
        """Raise `WrongResult` if a call changed an input or wrote into a guard band."""
        for name, before in self.original_inputs.parts.items():
            if not torch.equal(bits_of(self.inputs.parts[name]), bits_of(before)):
                raise WrongResult("inputs", f"the kernel changed its input {name}")
        workspaces = {
            f"a workspace of {size} bytes": guarded
            for size, guarded in self.candidate.workspaces.guarded_by_size.items()
        }
        for name, guarded in (*self._guarded.items(), *workspaces.items()):
            if damage := guarded.damage:
                raise WrongResult("guard bands", f"the kernel wrote out of bounds of {name}: {damage}")
