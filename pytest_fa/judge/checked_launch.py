"""A call whose output is judged: NaN-filled shared memory, output and workspace, and guard bands around each tensor."""

from __future__ import annotations

from typing import Self

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.guards import guard, guard_output
from pytest_fa.gpu.inputs import (
    Inputs,
    Output,
    as_kernels_have,
    clone,
    empty_more,
    make_inputs,
    poison,
    poisoned_output,
)
from pytest_fa.gpu.packed import memories_of, with_memories
from pytest_fa.judge.call_memory import CallMemory
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.changed_inputs import require_only_written
from pytest_fa.judge.forward_results import with_results
from pytest_fa.wire.commands import Disturbance

MATRIX_DIMS = 4  # of a gradient


class CheckedLaunch:
    """Calls a candidate on guarded copies of a case's inputs.

    Before each call, the shared memory of the GPU, the outputs and the workspaces are filled with NaN, and so is
    what a call must write into its inputs.  The further outputs in `more` are requested in each call that has them.
    """

    def __init__(
        self, candidate: Candidate, inputs: Inputs, computes: Computes = "attention", more: tuple[str, ...] = ()
    ) -> None:
        self.candidate = candidate
        self.original_inputs = clone(inputs)  # no call sees these
        placed = inputs.placed()
        self._before = self.original_inputs if placed is inputs else clone(placed)
        self._guarded = {name: guard(tensor) for name, tensor in memories_of(placed).items()}
        self.inputs = with_memories(placed, {name: guarded.tensor for name, guarded in self._guarded.items()})
        self._guarded["out"] = guard_output(poisoned_output(placed, computes))
        likes = {name: empty_more(name, placed) for name in placed.asked(more)}
        self._guarded |= {name: guard_output(_dense(like)) for name, like in likes.items()}
        # Which every call writes, too, and lies as `out` does: [batch, heads, seq_q] float32, or a gradient.
        self.more_buffers = {
            name: as_kernels_have(name, self._guarded[name].tensor.view(like.shape), inputs.conventions)
            for name, like in likes.items()
        }

    @classmethod
    def of_case(cls, candidate: Candidate, case: Case, device: torch.device, variant: Variant) -> Self:
        """A launch on the inputs of a case, which asks for all outputs of a variant."""
        inputs = with_results(make_inputs(case, device, variant.conventions))
        return cls(candidate, inputs, case.computes, variant.returns[1:])

    @property
    def why_no_smem_poison(self) -> str | None:
        """Why shared memory is not filled with NaN; None if it is."""
        return self.candidate.why_no_tools

    @property
    def out_buffer(self) -> torch.Tensor:
        """The tensor that every call of `call_and_wait` writes, as it lies in memory."""
        return self._guarded["out"].tensor

    def dense(self, output: Output) -> Output:
        """An output of a call as it is judged, [batch, heads, seq_q, ...]."""
        return self.inputs.dense_output(output)

    def call_and_wait(self, range_name: str | None = None) -> torch.Tensor:
        """Call the variant once, in an NVTX range if it is named, and return `out_buffer`.

        Raises what the variant raises, and `DeviceLost` for an error on the device.
        """
        for buffer in (self.out_buffer, *self.more_buffers.values()):
            poison(buffer)
        parts.renew(self.inputs)
        with self.candidate.workspaces.guarded():
            self.candidate.call(self.inputs, self.out_buffer, ("poison_smem",), range_name, self.more_buffers)
        return self.out_buffer

    def operators(self) -> tuple[str, ...]:
        """Call the variant once and return the names of torch's operators that ran in it."""
        return self.candidate.operators_of(self.inputs, self.out_buffer, self.more_buffers)

    def memory(self) -> CallMemory:
        """Call the variant once and return the memory of that call."""
        return self.candidate.memory_of(self.inputs, self.out_buffer, self.more_buffers)

    def repeat(
        self,
        outs: Output,  # [calls, batch, heads, seq_q, head_dim or seq_k], and [calls, batch, heads, seq_q]
        before: tuple[tuple[Disturbance, ...], ...],
    ) -> None:
        """Call the variant once for each output, which the candidate sees; `before` says what precedes each call."""
        parts.renew(self.inputs)
        with self.candidate.workspaces.guarded():
            self.candidate.repeat(self.inputs, outs.out, before, outs.more)

    def require_untouched(self) -> None:
        """Raise `WrongResult` if a call changed an input that it must not write, or wrote into a guard band."""
        require_only_written(self._before, self.inputs)
        workspaces = {
            f"a workspace of {size} bytes": guarded
            for size, guarded in self.candidate.workspaces.guarded_by_size.items()
        }
        for name, guarded in (*self._guarded.items(), *workspaces.items()):
            if damage := guarded.damage:
                raise WrongResult("guard bands", f"the kernel wrote out of bounds of {name}: {damage}")


def _dense(like: torch.Tensor) -> torch.Tensor:
    """A further output as a vector; a gradient as it is."""
    return like if like.dim() == MATRIX_DIMS else like.flatten()
