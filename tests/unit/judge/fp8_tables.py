"""The tables of docs/explanation/fp8.md: simulated kernels under the policy `fp8`, and what e4m3 costs.

python -m tests.unit.judge.fp8_tables    write both tables into that page
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, make_inputs
from pytest_fa.gpu.quantised import with_special_heads
from pytest_fa.judge.output_check import check_output
from pytest_fa.judge.policies import rms
from pytest_fa.judge.truth import Truth, make_truth
from pytest_fa.records.checks import Check
from tests.unit.judge.fp8_kernels import RIGHT, TABLE_CASES, WRONG, Fp8Kernel, simulate_fp8, table_inputs

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "fp8.md"
CPU = torch.device("cpu")
SHOWN_CASES = ("512 keys", "512 keys, an outlier in a head", "4096 keys, V full of ones")  # each mistake shows in one
COST_SHAPES = ("b1h8s64d64", "b1h1s2048d64")


@functools.lru_cache(maxsize=len(TABLE_CASES))
def solved(case: str) -> tuple[Inputs, Truth]:
    """The inputs of a case of the table, and their truth."""
    inputs = table_inputs(case)
    return inputs, make_truth(inputs, with_spread=True)


@functools.lru_cache(maxsize=len(TABLE_CASES) * len(RIGHT | WRONG))
def check_of(kernel: Fp8Kernel, case: str) -> Check:
    """The verdict on a simulated kernel at a case of the table."""
    inputs, truth = solved(case)
    return check_output(simulate_fp8(inputs, kernel), truth, "fp8")


def most_used(check: Check) -> float:
    """The largest fraction that is used of any judged bound; infinite for NaN."""
    return max(math.inf if bound.used is None else bound.used for bound in check.bounds if bound.enforced)


def judged_table() -> str:
    """The largest fraction of a bound that the right kernels use at each case, and each wrong one."""
    lines = [f"| simulated kernel | {' | '.join(SHOWN_CASES)} |", f"| --- |{' ---: |' * len(SHOWN_CASES)}"]
    by_right = [max(most_used(check_of(kernel, case)) for kernel in RIGHT.values()) for case in SHOWN_CASES]
    lines.append(_row(f"all {len(RIGHT)} correct kernels", by_right))
    for name, kernel in WRONG.items():
        lines.append(_row(name, [most_used(check_of(kernel, case)) for case in SHOWN_CASES]))
    return "\n".join(lines)


def _row(name: str, used: list[float]) -> str:
    return f"| {name} | {' | '.join(map(_cell, used))} |"


def _cell(used: float) -> str:
    if math.isinf(used):
        return "**NaN**"
    shown = f"{used:.2f}" if used < 10 else f"{used:.0f}"
    return shown if used <= 1 else f"**{shown}**"


def costs_table() -> str:
    """The error that e4m3 causes on N(0, 1) data, by what is rounded to it."""
    lines = ["| shape | Q, K, V | P | all | largest error |", "| --- |" + " ---: |" * 4]
    for shape in COST_SHAPES:
        inputs, p, both, largest = _costs(shape)
        shares = " | ".join(f"{100 * share:.1f} %" for share in (inputs, p, both))
        lines.append(f"| `{shape}` | {shares} | {largest:.3f} |")
    return "\n".join(lines)


def _costs(shape: str) -> tuple[float, float, float, float]:
    """Relative RMS errors from rounding Q, K and V, from rounding P, and from both; the largest error from both."""
    case = parse_case(f"{shape}-e4m3-seed0")
    drawn = make_inputs(case.with_dtype("fp32"), CPU)
    q, k, v = (tensor.double() for tensor in with_special_heads(drawn.q, drawn.k, drawn.v, "normal"))
    unrounded = make_truth(drawn._replace(q=q, k=k, v=v)).out
    quantised = make_truth(make_inputs(case, CPU), with_spread=True)
    size, both = rms(unrounded), quantised.same_precision - unrounded
    of_p = rms(quantised.same_precision - quantised.out)
    of_heads = unrounded.square().mean((2, 3), keepdim=True).sqrt()
    largest = float((both * of_heads[:, :1] / of_heads).abs().max())  # as if V were N(0, 1) in every head
    return rms(quantised.out - unrounded) / size, of_p / size, rms(both) / size, largest


def begin_of(name: str) -> str:
    """The comment that begins a table in the page."""
    return f"<!-- simulated: {name} -->"


def main() -> None:
    """Write the tables into the page."""
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("kernels", judged_table()), ("costs", costs_table())):
        before, _, after = text.partition(begin_of(name))
        text = f"{before}{begin_of(name)}\n\n{table}\n\n<!--{after.partition(chr(10) + chr(10) + '<!--')[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
