"""The selection of cases by --fa-suite, --fa-case, --fa-seeds and --fa-dtype, and the resulting test ids."""

from __future__ import annotations

import re

import pytest

from pytest_fa.catalog.case import GRAMMAR
from pytest_fa.catalog.claims import LENGTHS
from pytest_fa.catalog.suites import SUITES
from tests.factories import MANIFEST
from tests.projects import CASE, COMPANIONS, ONE_CASE, SHAPE, NewProject, Project, cases_of
from tests.tiers import nightly_after

# The cases of what `good` claims and the suite `history` does not have.
CLAIMS = [f"b2h4s150{rest}-seed0" for rest in ("d128-bf16-bshd", "d128-fp16", "d64-bf16", "d64-fp16-bshd")]


NARROW = f'{MANIFEST}entry: {{kind: python, target: "entry:forward"}}\nsupports: {{device: [cpu], causal: [none]}}\n'


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """One variant for the CPU that supports all cases of the suites, and one that is compiled."""
    project = new_project("cases")
    everything = "supports: {device: [cpu], dtype: [fp16, bf16], head_dim: [64, 128], layout: [bhsd, bshd]}\n"
    project.python_variant("good", manifest=MANIFEST + 'entry: {kind: python, target: "entry:forward"}\n' + everything)
    project.cuda_variant("zero")
    return project


def checked(project: Project, *arguments: str) -> list[str]:
    """The cases that test_correct runs over."""
    return cases_of(project.ids("--fa-variant=good", *arguments), "test_correct")


def test_ids_name_variant_and_case(pair: Project) -> None:
    """The ids consist of the variant (test_build), variant and case (test_correct), variant and shape (test_speed)."""
    assert pair.ids(ONE_CASE) == [
        "test_build[zero]",
        "test_correct[good-b1h2s64d64-fp16-seed0]",
        "test_correct[zero-b1h2s64d64-fp16-seed0]",
        *(f"test_speed[{name}-b1h2s64d64-fp16]" for name in ("good", "zero", *COMPANIONS)),
    ]


def test_default_is_the_history_suite(pair: Project) -> None:
    """Without options, the four shapes of suite `history` run with three seeds each, and then the variant's claims."""
    shapes = ["b1h2s64d64-fp16", "b1h4s128d64-fp16", "b1h8s512d64-fp16", "b2h2s64d64-fp16"]
    suite = [f"{shape}-seed{seed}" for shape in shapes for seed in range(3)]
    checked_cases = checked(pair)
    assert checked_cases[: len(suite) + len(CLAIMS)] == [*suite, *CLAIMS]
    lengths = [re.match(r"b2h4s(\d+)d\d+-\w+?-sk(\d+)", case) for case in checked_cases[len(suite) + len(CLAIMS) :]]
    assert [tuple(map(int, match.groups())) for match in lengths if match] == list(LENGTHS)


def test_one_seed_is_timed(pair: Project) -> None:
    """test_speed runs once for each shape, however many seeds are selected."""
    ids = pair.ids("--fa-variant=good", "--fa-case=b1h2s64d64-fp16-seed0,b1h2s64d64-fp16-seed1,b2h2s64d64-fp16-seed5")
    assert cases_of(ids, "test_speed") == ["b1h2s64d64-fp16", "b2h2s64d64-fp16"]


@pytest.mark.parametrize(
    ("suites", "count"),
    nightly_after(
        3,
        [
            ("smoke", 3),
            ("history", 12 + len(CLAIMS) + len(LENGTHS)),
            ("mission", 100),
            ("edge", 23),
            ("long", 24),
            ("decode", 20),
            ("smoke,history", 14 + len(CLAIMS) + len(LENGTHS) - 1),
        ],
    ),
)
def test_suite(pair: Project, suites: str, count: int) -> None:
    """--fa-suite selects the cases of the named suites, each case once."""
    assert len(checked(pair, f"--fa-suite={suites}")) == count


@pytest.mark.nightly
def test_a_suite_is_adapted_to_a_variant(project: Project) -> None:
    """A suite is adapted to a variant's dtype, head_dim and layout, also for SDPA; a named case does not change."""
    supports = "supports: {device: [cpu], dtype: [bf16], head_dim: [128], layout: [bshd]}\n"
    project.python_variant("mine", manifest=MANIFEST + 'entry: {kind: python, target: "entry:forward"}\n' + supports)
    run = project.suite("--fa-variant=mine", "--fa-suite=smoke", "-k", "b1h2s64 and (test_correct or test_speed)")
    fitted = "b1h2s64d128-bf16-bshd"
    assert run.outcomes[f"test_correct[mine-{fitted}-seed0]"] == "passed"
    assert {run.outcomes[f"test_speed[{name}-{fitted}]"] for name in ("mine", "sdpa_flash", "sdpa_math")} == {"passed"}
    assert cases_of(project.ids("--fa-variant=mine", ONE_CASE), "test_correct") == [CASE]
    assert f"test_correct[mine-{fitted}-seed0]" not in project.ids("--fa-variant=mine", "--fa-dtype=fp16")


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["--fa-case=b1h2s65d64-fp16-causal-seed0"], ["b1h2s65d64-fp16-causal-seed0"]),
        (["--fa-case=b3h4s7d64-bf16-causal_br-kv2-sk9-bshd-seed11"], ["b3h4s7d64-bf16-causal_br-kv2-sk9-bshd-seed11"]),
        (["--fa-case=b2*"], [f"b2h2s64d64-fp16-seed{seed}" for seed in range(3)]),
        (["--fa-case=b1h*s*-seed1"], [f"{shape}-seed1" for shape in (SHAPE, "b1h4s128d64-fp16", "b1h8s512d64-fp16")]),
        (["--fa-case=*bf16*", "--fa-suite=smoke"], ["b1h2s64d64-bf16-seed0"]),
        ([f"--fa-case={CASE},b2*seed1"], [CASE, "b2h2s64d64-fp16-seed1"]),
    ],
    ids=["id", "id of no suite", "glob", "glob over seeds", "glob over a suite", "id and glob"],
)
def test_case(pair: Project, arguments: list[str], cases: list[str]) -> None:
    """--fa-case accepts ids of cases, also of cases in no suite, and globs over the suite."""
    assert checked(pair, *arguments) == cases


@pytest.mark.parametrize(("value", "seeds"), [("2", [0, 1]), ("3,7", [3, 7]), ("5,", [5])])
def test_seeds(pair: Project, value: str, seeds: list[int]) -> None:
    """--fa-seeds=N selects the first N seeds; a list selects the seeds in it."""
    cases = checked(pair, "--fa-suite=smoke", "--fa-case=*s64d64-fp16*", f"--fa-seeds={value}")
    assert cases == [f"{SHAPE}-seed{seed}" for seed in seeds]


@pytest.mark.parametrize(("value", "dtypes"), [("bf16", ["bf16"]), ("bf16,fp16", ["bf16", "fp16"])])
def test_dtype(pair: Project, value: str, dtypes: list[str]) -> None:
    """--fa-dtype runs every shape in the selected dtypes, each case once."""
    cases = checked(pair, "--fa-suite=smoke", "--fa-case=*s64d64*", f"--fa-dtype={value}")
    assert cases == [f"b1h2s64d64-{dtype}-seed0" for dtype in dtypes]


@pytest.mark.parametrize("words", [(ONE_CASE,), (f"test_attention.py::test_correct[good-{CASE}]",)], ids=["case", "id"])
def test_a_named_case_of_another_dtype(pair: Project, words: tuple[str, ...]) -> None:
    """A case whose dtype is none of a typed --fa-dtype is a usage error; a dtype of the ini file is only a default."""
    result = pair.run_here("--collect-only", "-q", *words, "--fa-dtype=bf16,fp32")
    remedy = "drop --fa-dtype, or name b1h2s64d64-bf16-seed0"
    complaint = f"ERROR: --fa-dtype=bf16,fp32: case {CASE} is fp16; {remedy}"
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])
    assert pair.run_here("--collect-only", "-q", *words, "-o", "fa_dtype=bf16").ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        (
            "--fa-suite=histry",
            f"--fa-suite: no suite 'histry'; did you mean 'history'? (allowed: {', '.join(SUITES)})",
        ),
        ("--fa-dtype=fp8", "--fa-dtype: no dtype 'fp8'; did you mean 'fp32'? (allowed: fp16, bf16, fp32, e4m3)"),
        ("--fa-case=q*", "--fa-case: 'q*' matches no case of suite history (see --collect-only -q)"),
        ("--fa-seeds=x", "--fa-seeds: 'x' is not a seed; give a count such as 5, or a list such as 3,7"),
        ("--fa-seeds=-1", "--fa-seeds: '-1' is not a seed; give a count such as 5, or a list such as 3,7"),
        (
            "--fa-case=b1h2s64d64-fp8-seed0",
            "case 'b1h2s64d64-fp8-seed0': no dtype 'fp8'; allowed: fp16, bf16, fp32, e4m3",
        ),
        ("--fa-case=b0h2s64d64-fp16-seed0", "case 'b0h2s64d64-fp16-seed0': batch is 0; it must be at least 1"),
        (
            "--fa-case=b1h2s64d64",
            f"case 'b1h2s64d64' is malformed; the form is {GRAMMAR}, as in b1h8s512d64-fp16-seed0",
        ),
        (
            "--fa-case=b1h3s64d64-fp16-kv2-seed0",
            "case 'b1h3s64d64-fp16-kv2-seed0': 3 heads cannot share 2 key/value heads evenly",
        ),
        (
            "--fa-case=b1h2s64d64-fp16-kv2-seed0",
            "case 'b1h2s64d64-fp16-kv2-seed0' is not in its shortest form; write 'b1h2s64d64-fp16-seed0'",
        ),
    ],
)
def test_bad_value_is_a_usage_error(pair: Project, argument: str, complaint: str) -> None:
    """An invalid value is a usage error of one line that quotes it and says what is allowed."""
    result = pair.collect(argument)
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


@pytest.mark.parametrize("value", ["0", "²"])
def test_invalid_seeds_are_a_usage_error(pair: Project, value: str) -> None:
    """Zero seeds, and a digit that is no number, are a usage error of one line."""
    result = pair.collect(f"--fa-seeds={value}")
    assert (result.ret, len(result.all_lines)) == (pytest.ExitCode.USAGE_ERROR, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--fa-case=b1h2s64d64-fp16,b1h2s64d64-fp16-causal",),
            (
                "fa: not judged: narrow does not support b1h2s64d64-fp16-causal: causal is top_left, supports none "
                "(extend supports.causal if the kernel can)"
            ),
        ),
        (("--fa-case=b1h2s64d64-fp16*", "--fa-suite=history"), ""),
        (("--fa-case=b1h2s64d64-fp16",), ""),
    ],
    ids=["named", "glob", "judged"],
)
def test_a_named_case_that_is_not_judged_is_not_green(project: Project, words: tuple[str, ...], said: str) -> None:
    """A case that is named exactly, and that no selected kernel can compute, fails the run; one of a glob does not."""
    project.python_variant("narrow", manifest=NARROW)
    run = project.suite(*words, "--fa-variant=narrow", "-k", "test_correct")
    lines = [line for line in run.outlines if line.startswith("fa: not judged")]
    assert (run.ret, lines) == (1 if said else 0, [said] if said else []), run.text
