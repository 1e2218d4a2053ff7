"""With what and where a gate compares, and the error for each wrong name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.opponents import Opponents
from pytest_fa.features.gate.plugin import GateOptions
from pytest_fa.options import options as options_module
from pytest_fa.session.run_plan import RunPlan
from tests.factories import options


@pytest.mark.parametrize(
    ("baseline", "problem"),
    [
        ("sdpa_*", "--fa-gate-baseline: 'sdpa_*' must name exactly one variant with a readable manifest"),
        ("key:abc", "--fa-gate-baseline: 'key:abc' must name one cached build; it matches none"),
    ],
    ids=["a glob", "an unknown key"],
)
def test_a_baseline_that_is_not_there_is_named(tmp_path: Path, baseline: str, problem: str) -> None:
    """A baseline must be one variant or one cached build; the error is one sentence."""
    run_plan = RunPlan(options(tmp_path, kernels=(), parts=(GateOptions(0.95, baseline),)))
    with pytest.raises(UsageProblem) as caught:
        Opponents.of(run_plan)
    assert str(caught.value) == problem


@pytest.mark.parametrize("word", ["--fa-gate-baseline=mine", "--fa-gate-gpus=2"])
def test_options_of_the_gate_need_a_gate(pytester: pytest.Pytester, word: str) -> None:
    """Without --fa-gate, the other options would have no effect."""
    with pytest.raises(UsageProblem, match=f"{word.partition('=')[0]}: there is no gate; give --fa-gate=RATIO too"):
        options_module.read(pytester.parseconfig(word))
