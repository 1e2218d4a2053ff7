"""The plan of a run: what the options select, and the one sentence for what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fa.errors import UsageProblem
from pytest_fa.session.run_plan import RunPlan
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, options


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A kernels folder with the variants `mine` and `yours`."""
    for name in ("mine", "yours"):
        folder = tmp_path / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "variant.yaml").write_text(PYTHON_MANIFEST, encoding="utf-8")
        (folder / "entry.py").write_text(PYTHON_SOURCE, encoding="utf-8")
    return tmp_path / "kernels"


def plan_with(kernels: Path, **changes: object) -> RunPlan:
    """The plan of a run in the folder of `kernels`, with these options."""
    return RunPlan(options(kernels.parent, kernels=(kernels,), cache=kernels.parent / "cache", **changes))


def test_every_candidate_is_chosen_by_default(kernels: Path) -> None:
    """Without --fa-variant, all candidates run."""
    assert [variant.name for variant in plan_with(kernels).plan.chosen] == ["mine", "yours"]


def test_the_header_counts_what_is_chosen(kernels: Path) -> None:
    """The header gives the chosen variants of all known ones, and no cases: pytest counts the tests."""
    run_plan = plan_with(kernels, variants=("mine",), suites=("smoke",))
    (title,) = run_plan.header
    assert title.endswith(f"; 1 of {len(run_plan.catalog.variants)} variants")


def test_suites_of_a_marker_replace_those_of_the_run(kernels: Path) -> None:
    """`plan_of` has the cases of the given suites; without suites it is the run's own plan."""
    run_plan = plan_with(kernels, suites=("smoke",))
    assert run_plan.plan_of(()) is run_plan.plan
    assert len(run_plan.plan_of(("mission",)).cases) == 100


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"variants": ("mein",)}, "--fa-variant: no variant 'mein'; did you mean 'mine'? (see --fa-list)"),
        (
            {"tolerance": "absolute", "dtypes": ("bf16",)},
            "--fa-tolerance=absolute judges fp16 only; case b1h2s64d64-bf16-seed0 is bf16 (use same_precision)",
        ),
    ],
    ids=["name", "bf16"],
)
def test_contradictions_are_one_sentence(kernels: Path, changes: dict[str, object], problem: str) -> None:
    """An unknown name, or options that contradict each other, give one sentence that names the option."""
    with pytest.raises(UsageProblem) as caught:
        _ = plan_with(kernels, **changes).plan
    assert str(caught.value).startswith(problem)


def test_a_cache_for_everybody_is_refused(kernels: Path) -> None:
    """A cache that every user may write to is refused before anything is collected."""
    (kernels.parent / "cache").mkdir()
    (kernels.parent / "cache").chmod(0o777)
    with pytest.raises(UsageProblem, match="--fa-cache: every user may write to"):
        _ = plan_with(kernels).plan
