"""`PropertySubject`: what a property test needs of a variant: fresh inputs, calls with checks, and the judge."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Tolerance, Variant
from pytest_fa.errors import WrongResult
from pytest_fa.judge.check import judge, require_output
from pytest_fa.judge.oracle import truth_of
from pytest_fa.run.device import synchronize
from pytest_fa.run.forward import Forward
from pytest_fa.run.inputs import Inputs, bits_of, clone, make_inputs, poisoned_output


class PropertySubject:
    """The variant that a property is tested on: makes inputs, calls the variant, judges outputs.

    `before_launch` is called before each call of the variant, because the call may hang.
    """

    def __init__(
        self,
        variant: Variant,
        library: str | None,
        case: Case,
        policy: Tolerance,
        forward: Forward,
        device: torch.device,
        before_launch: Callable[[], None],
    ) -> None:
        self.variant, self.library, self.device = variant, library, device
        self._case, self._policy, self.computes = case, policy, case.computes
        self._forward, self._before_launch = forward, before_launch

    @property
    def is_exact(self) -> bool:
        """Whether the weights must sum to one within one ulp of the output dtype.

        They need not under the other policies, where P may be rounded to fewer bits than the output.  Nor must they in
        fp32, where O and the row sum are rounded as often as they grow, and may be added in different orders.
        """
        return self._policy == "same_precision" and self._case.dtype != "fp32"

    def inputs(self, seed: int = 0) -> Inputs:
        """The case's inputs, with data from `seed`."""
        return make_inputs(self._case.with_seed(seed), self.device)

    def output(self, inputs: Inputs) -> torch.Tensor:
        """A new output for a call on `inputs`, filled with NaN."""
        return poisoned_output(inputs, self.computes)

    def call(
        self,
        inputs: Inputs,
        out: torch.Tensor | None = None,
        forward: Forward | None = None,
        *,
        waits: bool = True,
    ) -> torch.Tensor:
        """Call the variant, or `forward`, with `out` or with a new output filled with NaN.

        With `waits`, synchronize after the call and raise `WrongResult` if it changed an input.  Without it, the call
        is only queued and inputs are not compared.
        """
        q, k, v, scale, causal = inputs
        self._before_launch()
        before = clone(inputs) if waits else inputs
        buffer = self.output(inputs) if out is None else out
        result = require_output((forward or self._forward)(q, k, v, scale=scale, causal=causal, out=buffer), buffer)
        if waits:
            synchronize(q.device)
            for name, after, original in zip("qkv", inputs[:3], before[:3], strict=True):
                if not torch.equal(bits_of(after), bits_of(original)):
                    raise WrongResult("inputs", f"the kernel changed its input {name}")
        return result

    def require_right(self, name: str, out: torch.Tensor, inputs: Inputs, where: str = "") -> None:
        """Raise `WrongResult` in the property's name unless `out` is right for `inputs`; `where` is added to it."""
        truth = truth_of(self.computes, inputs, self.variant.rounds, self._policy)
        check = judge(out, truth, self._policy)
        if not check.passed:
            raise WrongResult(name, f"{name}{where}: {check.complaint}")
