"""Probes: they run the shapes of their manifest, are judged as scores, and are timed beside `noop` but never gated."""

from __future__ import annotations

import pytest

from tests.factories import SCORES_MANIFEST, SCORES_SOURCE
from tests.projects import SHAPE as ATTENTION_SHAPE
from tests.projects import NewProject, Project, Run, cases_of, variants_of

SHAPES = ["b1h1s4d4-fp16-scores", "b1h1s32d64-fp16-sk64-scores"]
ALL = "--fa-variant=probe_*"
NO_GATE = "--fa-gate: no selected variant can be gated"
GATED = "a gated variant must compute all of attention, or its gradients"


@pytest.fixture(scope="module")
def lab(new_project: NewProject) -> Project:
    """A candidate, a correct probe, and one whose scale is wrong."""
    project = new_project("lab")
    project.python_variant("alpha")
    project.python_variant("probe_right", SCORES_SOURCE, SCORES_MANIFEST)
    project.python_variant("probe_scale", SCORES_SOURCE.replace("* scale", "* scale * 1.01"), SCORES_MANIFEST)
    return project


@pytest.fixture(scope="module")
def run(lab: Project) -> Run:
    """A run of both probes on their own shapes with one seed."""
    return lab.suite(ALL, "--fa-seeds=1")


def test_probes_do_not_run_by_default(lab: Project) -> None:
    """Without --fa-variant only the candidates run."""
    assert variants_of(lab.ids(), "test_correct") == ["alpha"]


def test_a_probe_runs_its_own_shapes(lab: Project) -> None:
    """A probe runs its own shapes with the suite's seeds, and only the properties that apply to scores."""
    ids = lab.ids("--fa-variant=probe_right")
    assert cases_of(ids, "test_correct") == [f"{shape}-seed{seed}" for shape in SHAPES for seed in range(3)]
    properties = cases_of(ids, "test_property")
    assert ("hard_data" in properties, "head_independence" in properties) == (False, True)


def test_a_probe_keeps_its_shapes_with_another_dtype(lab: Project) -> None:
    """With `--fa-dtype` a probe keeps its shapes, and `--fa-seeds` applies to it as to a suite."""
    ids = lab.ids("--fa-variant=probe_right", "--fa-dtype=bf16", "--fa-seeds=4,", "-k", "test_correct")
    assert cases_of(ids, "test_correct") == [f"{shape.replace('fp16', 'bf16')}-seed4" for shape in SHAPES]


def test_noop_is_the_only_companion_of_a_probe(lab: Project) -> None:
    """Only `noop` is timed at a probe's shapes, because the SDPA backends compute attention and no scores."""
    timed = [test_id for test_id in lab.ids("--fa-variant=probe_right") if test_id.startswith("test_speed")]
    assert timed == [f"test_speed[{name}-{shape}]" for name in ("probe_right", "noop") for shape in SHAPES]


def test_sdpa_is_timed_only_at_the_candidates_shapes(lab: Project) -> None:
    """If a candidate and a probe are selected, SDPA is timed only at the shapes of the candidate."""
    ids = lab.ids("--fa-variant=alpha,probe_right", "-k", f"test_speed and ({ATTENTION_SHAPE} or scores)")
    noop_shapes = (ATTENTION_SHAPE, *SHAPES)
    assert [test_id for test_id in ids if "sdpa_math" in test_id] == [f"test_speed[sdpa_math-{ATTENTION_SHAPE}]"]
    assert [test_id for test_id in ids if "noop" in test_id] == [f"test_speed[noop-{shape}]" for shape in noop_shapes]


def test_the_header_counts_probes(lab: Project) -> None:
    """The header counts the probes."""
    lines = [line for line in lab.suite("--collect-only", ALL).all_lines if line.startswith("fa: ")]
    assert lines == ["fa: no GPU; 2 of 24 variants"]


@pytest.mark.nightly
def test_right_and_wrong_scores(run: Run) -> None:
    """The correct probe passes checks, properties and timing; the wrong one fails, and is not timed."""
    right = {outcome for name, outcome in run.outcomes.items() if "probe_right" in name}
    wrong = {name: outcome for name, outcome in run.outcomes.items() if "probe_scale" in name}
    assert right == {"passed", "skipped"}
    assert [wrong[f"test_correct[probe_scale-{shape}-seed0]"] for shape in SHAPES] == ["failed", "failed"]
    assert [wrong[f"test_speed[probe_scale-{shape}]"] for shape in SHAPES] == ["skipped", "skipped"]


def test_a_failure_speaks_of_scores(run: Run) -> None:
    """A failure of scores gives places by key, the scale as the likely cause, and a rerun command."""
    text = "\n".join(run.failure(f"test_correct[probe_scale-{SHAPES[1]}-seed0]"))
    assert "wrong: max error " in text or "wrong: rms error " in text or "gain error " in text
    assert ", key " in text
    assert "likely cause: the scale is 1 % too large" in text
    assert "no SDPA backend takes this case, so there is no cross-check" in text
    assert f"--fa-case={SHAPES[1]}-seed0" in text


def test_a_row_shows_its_time_and_no_ratio(run: Run) -> None:
    """The row of a probe has its time and no ratio, because it has no baseline."""
    start = run.outlines.index(f"{SHAPES[1]} (CPU, 1 thread)")
    line = next(each for each in run.outlines[start:] if each.split()[:1] == ["probe_right"])
    assert "ok 2/2" in line
    assert not any("x baseline" in each for each in run.outlines)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [f"{SHAPES[0]}-seed7", "b1h2s48d64-fp16-seed7"], ids=["by its id", "by its shape"])
def test_a_named_case_is_taken(lab: Project, case: str) -> None:
    """A probe runs a named case as a case of scores, whether or not its id ends with `-scores`."""
    result = lab.suite("--fa-variant=probe_right", f"--fa-case={case}", "-k", "test_correct")
    shape = case.removesuffix("-seed7").removesuffix("-scores")
    assert result.outcomes == {f"test_correct[probe_right-{shape}-scores-seed7]": "passed"}


def test_the_rerun_command_runs_the_same(lab: Project, run: Run) -> None:
    """The case id in the rerun command of a probe is accepted by --fa-case."""
    assert f"--fa-case={SHAPES[0]}-seed0" in run.text
    result = lab.suite("--fa-variant=probe_scale", f"--fa-case={SHAPES[0]}-seed0", "-k", "test_correct")
    assert result.outcomes == {f"test_correct[probe_scale-{SHAPES[0]}-seed0]": "failed"}


ONE_TILE = """\


def forward(q, k, v, **rest):
    from pytest_fa.errors import UnsupportedCase

    if tuple(q.shape[:3]) != (1, 1, %d):
        raise UnsupportedCase("takes one tile")
    return whole(q, k, v, **rest)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "outcome"), [(32, "passed"), (31, "failed")])
def test_a_probe_may_refuse_only_other_shapes(new_project: NewProject, rows: int, outcome: str) -> None:
    """A probe that refuses the larger shape of a property is skipped; one that refuses its own case fails."""
    project = new_project("tile")
    manifest = SCORES_MANIFEST.replace("b1h1s4d4-fp16, ", "")
    source = SCORES_SOURCE.replace("def forward(", "def whole(") + ONE_TILE % rows
    project.python_variant("probe_tile", source, manifest)
    result = project.suite("--fa-variant=probe_tile", "--fa-seeds=1", "-k", "test_correct or head_independence")
    assert sorted(result.outcomes.values()) == sorted([outcome, "skipped"])
    assert any("takes one tile" in reason for reason in result.reasons.values())


def test_a_candidate_refuses_scores(lab: Project) -> None:
    """A candidate skips a case of scores with a reason, and the run fails because nothing ran."""
    result = lab.suite("--fa-variant=alpha", "--fa-case=b1h1s32d64-fp16-scores-seed0", "-k", "test_correct")
    (reason,) = result.reasons.values()
    assert "it computes attention, the case requires scores" in reason
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            [ALL, "--fa-gate=0.95"],
            f"{NO_GATE}: probe_right (probe, computes scores), probe_scale (probe, computes scores); {GATED}",
        ),
        (
            ["--fa-variant=noop", "--fa-gate=0.95"],
            f"{NO_GATE}: noop (overhead, computes attention); {GATED}",
        ),
        (
            ["--fa-variant=alpha", "--fa-gate=0.95", "--fa-gate-baseline=probe_right"],
            "--fa-gate-baseline: probe_right computes scores; it must compute attention or gradients",
        ),
        (
            [ALL, "--fa-tolerance=absolute"],
            "--fa-tolerance=absolute judges attention; probe_right computes scores (use same_precision)",
        ),
        (
            ["--fa-variant=probe_right", "--fa-case=b1h1s4d4-fp16-causal-scores-seed0"],
            "case 'b1h1s4d4-fp16-causal-scores-seed0': scores have no mask; drop -causal",
        ),
    ],
    ids=["gate", "gate of noop", "gate against a probe", "policy", "mask"],
)
def test_options_for_attention_are_usage_errors(lab: Project, arguments: list[str], complaint: str) -> None:
    """Options that apply only to attention are a usage error of one line for a probe."""
    result = lab.collect(*arguments)
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


def test_only_candidates_are_gated(lab: Project) -> None:
    """If a candidate and a probe are selected, only the candidate is gated."""
    assert variants_of(lab.ids("--fa-variant=alpha,probe_right", "--fa-gate=0.95"), "test_gate") == ["alpha"]


def test_the_list_says_what_a_probe_computes(lab: Project) -> None:
    """The column `role` in the list of variants also says what a probe computes."""
    (line,) = [each for each in lab.run_here("--fa-list").outlines if each.split()[:1] == ["probe_right"]]
    assert " ".join(line.split()).startswith("probe_right probe of scores python fp16 64,4")


def test_a_probe_without_shapes_is_a_broken_manifest(project: Project) -> None:
    """Selecting a probe of scores without `cases` is a usage error that names the missing key."""
    project.python_variant("probe", SCORES_SOURCE, SCORES_MANIFEST.replace("cases:", "flags: []  #"))
    result = project.collect("--fa-variant=probe")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "cases is missing, but computes is 'scores'; list the shapes to run" in result.all_lines[0]


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["fp8", "absolute"])
def test_a_marker_selects_no_policy_of_attention(lab: Project, policy: str) -> None:
    """A test of scores that is marked with a policy of attention fails with one sentence, as with `--fa-tolerance`."""
    marked = f"import pytest\n\n\n@pytest.mark.fa_tolerance({policy!r})\n" + MINE.replace("test_mine", "test_marked")
    lab.write("test_marked.py", marked)
    result = lab.run("test_marked.py", "--fa-variant=probe_right", f"--fa-case={SHAPES[0]}-seed0")
    (reason,) = [why for name, why in result.reasons.items() if "probe_right" in name]
    assert f"tolerance policy {policy} judges attention; {SHAPES[0]} is a case of scores (use same_precision)" in reason


MINE = """\
def test_mine(fa_module, fa_case, fa_inputs, fa_check, fa_truth, fa_benchmark):
    q, k, v, scale, causal = fa_inputs
    assert fa_truth.out.shape == fa_case.out_shape
    fa_check(fa_module(q, k, v, scale=scale, causal=causal))
    fa_benchmark(fa_module, fa_case, fa_inputs)
"""


SPY = """\
import pytest_fa.candidate.module as module

opened, real = [], module.open_forward


def spy(variant, library, allocate=None, computes=None):
    opened.append((variant.name, computes))
    return real(variant, library, allocate, computes)


module.open_forward = spy


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"opened: {sorted(set(opened))}")
"""


@pytest.mark.nightly
def test_a_variant_is_opened_for_what_is_computed(new_project: NewProject) -> None:
    """A variant is opened with what its case computes, attention or scores."""
    project = new_project("opened")
    project.python_variant("probe_right", SCORES_SOURCE, SCORES_MANIFEST)
    project.python_variant("alpha")
    project.write("conftest.py", SPY)
    project.write("test_mine.py", MINE.replace("    fa_benchmark(fa_module, fa_case, fa_inputs)\n", ""))
    result = project.run(
        "test_mine.py", "--fa-variant=probe_right,alpha", "--fa-seeds=1", "-k", f"{SHAPES[0]} or {ATTENTION_SHAPE}"
    )
    (line,) = [line for line in result.outlines if line.startswith("opened: ")]
    assert "('alpha', 'attention'), ('probe_right', 'scores')" in line


@pytest.mark.nightly
def test_fixtures_judge_scores(lab: Project) -> None:
    """The fixtures judge a probe in a user's own test by the same rule as the suite."""
    lab.write("test_mine.py", MINE)
    result = lab.run("test_mine.py", "--fa-variant=probe_right,probe_scale", "--fa-seeds=1")
    judged = {name: outcome for name, outcome in result.outcomes.items() if "noop" not in name}
    assert judged == {
        f"test_mine[probe_{name}-{shape}]": outcome
        for name, outcome in (("right", "passed"), ("scale", "failed"))
        for shape in SHAPES
    }
