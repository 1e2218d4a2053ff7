"""The variant that is held to a property: fresh inputs, calls that are watched, and the judge."""

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
from pytest_fa.run.inputs import Inputs, clone, make_inputs, poisoned_output


class Subject:
    """The variant under test: fresh inputs, calls that are watched, and the judge."""

    def __init__(
        self,
        variant: Variant,
        library: str | None,
        case: Case,
        policy: Tolerance,
        forward: Forward,
        device: torch.device,
        watch: Callable[[], None],
    ) -> None:
        self.variant, self.library, self.device = variant, library, device
        self._case, self._policy, self.computes = case, policy, case.computes
        self._forward, self._watch = forward, watch

    @property
    def is_exact(self) -> bool:
        """Whether weights sum to one but for the last bit: not where P is rounded to fewer bits than the output."""
        return self._policy == "same_precision"

    def inputs(self, seed: int = 0) -> Inputs:
        """The case's inputs with another seed's data."""
        return make_inputs(self._case.with_seed(seed), self.device)

    def output(self, inputs: Inputs) -> torch.Tensor:
        """A new output of a call on `inputs`, full of NaN."""
        return poisoned_output(inputs, self.computes)

    def call(
        self,
        inputs: Inputs,
        out: torch.Tensor | None = None,
        forward: Forward | None = None,
        *,
        is_waited_for: bool = True,
    ) -> torch.Tensor:
        """One call into `out`, or into a new output full of NaN.

        Raises `WrongResult` where it changed an input, unless it is not waited for.
        """
        q, k, v, scale, causal = inputs
        self._watch()
        before = clone(inputs) if is_waited_for else inputs
        given = self.output(inputs) if out is None else out
        result = require_output((forward or self._forward)(q, k, v, scale=scale, causal=causal, out=given), given)
        if is_waited_for:
            synchronize(q.device)
            for name, mine, kept in zip("qkv", inputs[:3], before[:3], strict=True):
                if not torch.equal(mine.view(torch.int16), kept.view(torch.int16)):
                    raise WrongResult("inputs", f"the kernel changed its input {name}")
        return result

    def require_right(self, name: str, out: torch.Tensor, inputs: Inputs, where: str = "") -> None:
        """Judge `out` by the truth of `inputs`."""
        truth = truth_of(self.computes, inputs, self.variant.rounds, self._policy)
        check = judge(out, truth, self._policy)
        if not check.passed:
            raise WrongResult(name, f"{name}{where}: {check.complaint}")
