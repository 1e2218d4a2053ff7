"""Judges the examples of one variant as its tests do, in the processes of the run."""

from __future__ import annotations

import msgspec

from pytest_fa.attention.causal import PART as CAUSAL
from pytest_fa.attention.dtypes import Dtype
from pytest_fa.catalog.case import problem_of
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.hunt.case_strategy import is_usable
from pytest_fa.features.hunt.example import Example, can_test
from pytest_fa.features.hunt.judged import ExampleVerdict
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import RecordKind
from pytest_fa.session.case_runner import CaseRunner
from pytest_fa.session.refusals import Refused

HEAD_DIMS = (64, 8, 32, 40, 72, 80, 96, 128, 192, 256)


class RunBench:
    """Judges one variant with the case runner of a run.

    `hunted` is the variant with what cases may have.  Those that its manifest does not claim it may refuse by an error.
    """

    def __init__(self, runner: CaseRunner, variant: Variant, hunted: Variant | None = None) -> None:
        self._runner, self._variant, self._hunted = runner, variant, hunted or variant

    def judge(self, example: Example) -> ExampleVerdict:
        """Judge an example with a few calls."""
        return self._judged(example, is_thorough=False)

    def judge_thoroughly(self, example: Example) -> ExampleVerdict:
        """Judge an example with as many calls as the suites make, in a new process."""
        self._runner.end_workers()
        return self._judged(example, is_thorough=True)

    def why_unusable(self, example: Example) -> str:
        """Why an example cannot be judged; empty if it can."""
        if self.is_usable(example):
            return ""
        reason = problem_of(example.case) or self._hunted.refuses(example.case)
        return reason or f"property {example.property_name} cannot be tested on {example.case.id}"

    def is_usable(self, example: Example) -> bool:
        """Whether the example is possible, and the variant claims to support it."""
        return is_usable(example.case, self._hunted) and can_test(example.property_name, example.case)

    def _judged(self, example: Example, *, is_thorough: bool) -> ExampleVerdict:
        name = example.property_name or None
        kind: RecordKind = "property" if name else "correct"
        is_claimed = self._variant.refuses(example.case) is None
        options = {"is_thorough": is_thorough, "is_claimed": is_claimed}
        try:
            record = self._runner.run(self._variant, example.case, kind, name, **options)
        except Refused:
            return ExampleVerdict(None)
        # A baseline may lack a property.
        may_raise = not is_claimed or (self._variant.role == "baseline" and name is not None)
        is_refusal = may_raise and record.outcome in (Outcome.FAILED, Outcome.UNSUPPORTED)
        return ExampleVerdict(None if is_refusal else record)


def unclaimed(variant: Variant) -> Variant:
    """The variant as if its manifest claimed all that reaches any kernel: dtypes, sizes, masks, orders of axes."""
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16", "fp32")
    supports = msgspec.structs.replace(
        variant.supports,
        dtype=dtypes,
        head_dim=HEAD_DIMS,
        causal=CAUSAL.claims,
        layout=("bhsd", "bshd"),
        grouped_heads=True,
        seq_q_multiple_of=1,
        seq_k_multiple_of=1,
        seq_k_min=0,
        self_attention_only=False,
        fixed_scale=False,
    )
    pairs = tuple((dtype, size) for dtype in dtypes for size in HEAD_DIMS)
    return msgspec.structs.replace(variant, supports=supports, instantiations=pairs, cases=())
