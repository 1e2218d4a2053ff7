"""Load what judging needs on a GPU: torch and cuBLAS load their kernels at the first use, which takes half a second.

The judge does it before its first job if none has come yet, for example because a variant is being compiled.  Otherwise
it does it while the candidate's process opens the GPU and loads its variant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from pytest_fa.attention import parts
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.gpu.inputs import make_inputs, poisoned_more, poisoned_output
from pytest_fa.judge.fingerprints import fingerprints
from pytest_fa.judge.forward_results import with_results
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import check_output, with_more
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.records.checks import Check

LENGTH = 16  # queries and keys of the case that is judged for that
OTHER_SEED = 0x5EED_0000  # with which data differ from those of any case that somebody runs
USUAL_CASE = parse_case("b1h8s512d64-fp16-seed0")
USUAL_POLICY = "same_precision"


def warm_up_of(truths: TruthStore, case: Case, policy: str, device: torch.device) -> Callable[[], None] | None:
    """What the judge does while its first variant is loaded; None afterwards, and on a CPU.

    It is also None in a process in which variants run: there, nothing runs meanwhile.
    """
    if truths.is_warm or device.type == "cpu":
        return None
    truths.is_warm = True
    return partial(warm_up, case, policy, device)


def warm_up(case: Case, policy: str, device: torch.device) -> None:
    """Judge a tiny case.  What fails here fails again, and is reported, when a variant is judged."""
    with contextlib.suppress(Exception):
        judge_tiny_case(case, policy, device)


def judge_tiny_case(case: Case, policy: str, device: torch.device) -> Check:
    """Judge an output of NaN for a tiny case like `case`, with random data of its own."""
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "seq_q": LENGTH, "seq_k": LENGTH}
    inputs = with_results(make_inputs(msgspec.structs.replace(case, seed=case.seed ^ OTHER_SEED, **sizes), device))
    out = poisoned_output(inputs, case.computes)
    check = check_output(out, truth_of(case.computes, inputs, (), policy), policy)
    fingerprints(inputs, out)
    if case.computes == "attention":
        for name, part in parts.outputs().items():
            check = with_more(
                check, name, poisoned_more(name, inputs), make_row_truth(part, inputs, (), policy), policy
            )
    return check
