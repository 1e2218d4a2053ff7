"""`PropertySubject`: what a property test needs of a variant: fresh inputs, calls with checks, and the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.ragged import PART as RAGGED
from pytest_fa.attention.rows import RowTruth
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Tolerance, Variant
from pytest_fa.errors import WrongResult
from pytest_fa.gpu.inputs import Inputs, Output, clone, make_inputs, poisoned_outputs
from pytest_fa.gpu.packed import map_memories, packed
from pytest_fa.judge.candidate import Candidate
from pytest_fa.judge.changed_inputs import require_only_written
from pytest_fa.judge.forward_results import with_results
from pytest_fa.judge.output_check import MoreTruth, check_outputs
from pytest_fa.judge.padding import padding_of, rows_of
from pytest_fa.judge.truth import Truth
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.records.checks import Check
from pytest_fa.wire.commands import CallViews


class JudgedOutput(NamedTuple):
    """An output with all that its diagnosis needs."""

    output: Output
    inputs: Inputs  # whose truth it has; of the call if only a further output is wrong
    truth: Truth
    more_truths: Mapping[str, MoreTruth]  # of the further outputs
    check: Check


class PropertySubject:
    """The variant that a property is tested on: makes inputs, calls the variant, judges outputs.

    `wrong` is the output for which `require_right` raised `WrongResult`.
    """

    def __init__(
        self, variant: Variant, case: Case, policy: Tolerance, candidate: Candidate, truths: TruthStore | None = None
    ) -> None:
        self.variant, self.candidate, self.device = variant, candidate, candidate.device
        self._truths = truths or TruthStore(0)
        self.case, self._policy, self.computes = case, policy, case.computes
        self.wrong: JudgedOutput | None = None
        self._last_call: tuple[Inputs, Output] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the weights must sum to one within one ulp of the output dtype.

        They need not under the other policies, where P may be rounded to fewer bits than the output.  Nor must they for
        e4m3, whose descales are rounded, and in fp32, where O and the row sum are rounded as often as they grow, and
        may be added in different orders.
        """
        if not self.is_plain_attention:
            return False
        return self._policy == "same_precision" and self.case.dtype not in ("fp32", "e4m3")

    @property
    def is_plain_attention(self) -> bool:
        """Whether the truth is attention: of functions of the user's, only their results on given inputs are known."""
        return self.variant.own_truth is None and self.computes != "gradients"

    @property
    def has_absolute_bound(self) -> bool:
        """Whether the allowed error does not depend on the size of the output."""
        own = self.variant.own_truth
        return self._policy == "absolute" or (own is not None and own.max_error is not None)

    def inputs(self, seed: int = 0) -> Inputs:
        """The case's inputs, with data from `seed`."""
        return self.inputs_of(self.case.with_seed(seed))

    def inputs_of(self, case: Case) -> Inputs:
        """The inputs of another case."""
        return self._truths.with_memory(lambda: make_inputs(case, self.device, self.variant.conventions))

    def changed(self, inputs: Inputs, change: Callable[[Inputs], Inputs]) -> Inputs:
        """The inputs after `change` of their values, which then are quantised again in e4m3, without NaN of padding."""
        if inputs.descales is None:
            return parts.represented(change(inputs))
        changed: Inputs = RAGGED.call_given(change(RAGGED.call_meant(inputs).exact()).quantised())
        return changed

    def output(self, inputs: Inputs) -> Output:
        """A new output for a call on `inputs`, and the further ones that the variant returns, filled with NaN.

        They lie in memory as the call's tensors do.
        """
        inputs = self._placed(inputs)
        return poisoned_outputs(inputs, self.computes, self.more_outputs)

    def visible(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy with the same strides in memory that the candidate sees directly, at the same address in each call."""
        memory = self.candidate.lending.allocate(tensor.untyped_storage().nbytes() + 16)
        whole = memory[: len(memory) // 16 * 16].view(tensor.dtype)
        copy = whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())
        return copy.copy_(tensor)

    def visible_output(self, inputs: Inputs) -> Output:
        """An output filled with NaN in memory that the candidate sees directly."""
        return self.output(inputs).map(self.visible)

    def visible_call(self, inputs: Inputs) -> tuple[Inputs, Output]:
        """Copies of inputs, and an output filled with NaN, in memory that the candidate sees directly."""
        return map_memories(self.taken(inputs), self.visible), self.visible_output(inputs)

    def views_of(self, inputs: Inputs, output: Output) -> CallViews:
        """The views of a call's arguments."""
        return self.candidate.views_of(inputs, output.out, more=output.more)

    def call(self, inputs: Inputs, output: Output | None = None) -> Output:
        """Call the variant with `output` or with a new one filled with NaN, and wait for it.

        Returns the output as it is judged.  Raises `WrongResult` if the variant changed what it must not write.
        """
        inputs = self.taken(inputs)
        parts.renew(inputs)
        before = clone(inputs)
        buffer = output or self.output(inputs)
        self.candidate.call(inputs, buffer.out, more=buffer.more)
        require_only_written(before, inputs)
        settled = self.settled(inputs, buffer)
        self._last_call = before, settled
        return settled

    def taken(self, inputs: Inputs) -> Inputs:
        """The call as its tensors lie in memory, with one tensor for q, k and v if the variant takes one.

        A backward call has the results of its forward pass.
        """
        return self._placed(with_results(inputs))

    def _placed(self, inputs: Inputs) -> Inputs:
        return (packed(inputs) if self.variant.packs_inputs else inputs).placed()

    def settled(self, inputs: Inputs, output: Output) -> Output:
        """The output as it is judged, [batch, heads, seq_q, ...], with 0 in the rows that may be undefined."""
        inputs = self._placed(inputs)
        for name, tensor in output.named.items():
            padding = padding_of(name, inputs)
            if padding is not None and padding.rule == "any":
                tensor.masked_fill_(rows_of(padding, tensor), 0.0)
        return inputs.dense_output(output)

    @property
    def more_outputs(self) -> tuple[str, ...]:
        """The further outputs that the variant returns."""
        return self.variant.returns[1:]

    def exact(self, inputs: Inputs) -> torch.Tensor:
        """The true output, [batch, heads, seq_q, head_dim or seq_k] float64; of a backward call, dq."""
        return self._truth_of(inputs).out

    def exact_rows(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """The true values of the further outputs that are judged, [batch, heads, seq_q] float64 each."""
        truths = self._more_truths_of(self.more_outputs, inputs)
        return {name: rows.exact for name, rows in truths.items() if isinstance(rows, RowTruth)}

    def require_right(
        self, name: str, output: Output, inputs: Inputs, where: str = "", called: Inputs | None = None
    ) -> None:
        """Raise `WrongResult` in the property's name unless `output` is right for `inputs`; `where` is added to it.

        The further outputs must be right for `called`, the inputs of the call, if these are others.
        """
        judged = self._judge(output, inputs, called or inputs)
        if not judged.check.passed:
            self.wrong = judged
            raise WrongResult(name, f"{name}{where}: {judged.check.complaint}")

    def check(self, output: Output, inputs: Inputs) -> Check:
        """The verdict on an output, as it is judged, by the truth of `inputs`."""
        return self._judge(output, inputs, inputs).check

    def wrong_last_call(self) -> JudgedOutput | None:
        """The last call's output if it is wrong, for properties that compare outputs bit by bit; None with NaN data."""
        if self._last_call is None:
            return None
        inputs, output = self._last_call
        if not all(bool(tensor.isfinite().all()) for tensor in inputs.dense().exact()[:3]):
            return None
        judged = self._judge(output, inputs, inputs)
        return None if judged.check.passed else judged

    def _judge(self, output: Output, inputs: Inputs, called: Inputs) -> JudgedOutput:
        """The verdict on a private copy of an output by the truth of `inputs`, on further ones by that of `called`."""
        output = output.clone()
        truth = self._truth_of(inputs)
        more_truths = self._more_truths_of(output.more, called)
        check = check_outputs(output, truth, more_truths, self._policy)
        return JudgedOutput(output, called if check.only_wrong_rows else inputs, truth, more_truths, check)

    def _truth_of(self, inputs: Inputs) -> Truth:
        variant = self.variant
        return self._truths.truth_of(
            self.computes, _judged(inputs), variant.reference_rounds, self._policy, variant.own_truth
        )

    def _more_truths_of(self, outputs: Iterable[str], inputs: Inputs) -> dict[str, MoreTruth]:
        return self._truths.more_truths_of(outputs, _judged(inputs), self.variant, self._policy)


def _judged(inputs: Inputs) -> Inputs:
    """The call by which outputs are judged."""
    return with_results(parts.represented(inputs))
