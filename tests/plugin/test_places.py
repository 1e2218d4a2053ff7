"""Runs in the wrong place, with two variants of one name, or with printed ids do what was meant or say why not."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest

from pytest_fa.catalog.discover import discover
from tests.factories import PYTHON_MANIFEST
from tests.projects import CASE, COMPANIONS, ONE_CASE, SHAPE, WRONG_SOURCE, ZERO_MANIFEST, NewProject, Project, Run
from tests.tiers import nightly_after

BUILTIN = Path(__file__).parents[2] / "pytest_fa" / "builtin"
SUM_TEST = "def test_sum():\n    assert 1 + 1 == 2\n"
KERNEL_TEST = "def test_uses_a_kernel(fa_variant):\n    pass\n"
LATE_TEST = """\
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover


def test_late(request):
    run = request.getfixturevalue("fa_run")
    variant = discover((request.config.rootpath / "kernels",)).variants["mine"]
    run.correct(variant, parse_case(CASE))
"""
RENAME = "(its folder, or its key under 'variants')"
IMPLIED = "fa: no path is given, so the shipped suite runs; add a path, such as '.', to run the tests there instead"


# -- two variants of one name -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twins(new_project: NewProject) -> Project:
    """A variant, a folder that declares the same name, another variant, and tests with and without kernels."""
    project = new_project("twins")
    project.python_variant("mask1")
    project.python_variant("dup", manifest=PYTHON_MANIFEST + "variants: {mask1: {}}\n")
    project.python_variant("other")
    project.write("test_sum.py", SUM_TEST)
    project.write("test_kernel.py", KERNEL_TEST)
    return project


def clash_of(project: Project) -> str:
    """The sentence about the two variants."""
    first, second = (project.folder / "kernels" / name / "variant.yaml" for name in ("dup", "mask1"))
    return f"variant 'mask1' is declared 2 times: in {first} and in {second}; rename one {RENAME}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fa-variant=mask1",),
        ("--fa-variant=other",),
        ("--fa-variant=other", "--fa-gate=0.95", "--fa-gate-baseline=mask1"),
        ("--fa-suite=smoke", "-n2"),
        ("--fa-variant=other", "test_kernel.py"),
    ],
    ids=" ".join,
)
def test_two_variants_of_one_name_end_the_run(twins: Project, arguments: tuple[str, ...]) -> None:
    """Every run that uses kernels ends with a usage error that has both paths."""
    assert twins.complaint(*arguments) == [f"ERROR: {clash_of(twins)}"]


@pytest.mark.parametrize("arguments", [("--pyargs", "pytest_fa.suite"), ("test_kernel.py",), ()], ids=" ".join)
def test_they_also_end_a_run_without_options(twins: Project, arguments: tuple[str, ...]) -> None:
    """A run that finds tests with kernels ends in the same way after collection, and runs no test."""
    result = twins.run_here("--collect-only", *arguments)
    assert (result.ret, result.errlines[0], result.outcomes) == (4, f"ERROR: {clash_of(twins)}", {})


def test_a_run_without_kernels_passes(twins: Project) -> None:
    """Tests that use no kernel run, also if the ini file sets options of pytest-fa; so does --help."""
    result = twins.run("test_sum.py")
    assert (result.ret, result.outcomes) == (pytest.ExitCode.OK, {"test_sum": "passed"})
    result = twins.run("test_sum.py", "-o", "fa_suite=smoke")
    assert (result.ret, result.outcomes) == (pytest.ExitCode.OK, {"test_sum": "passed"})
    assert twins.run_here("--help", "--fa-variant=mask1").ret == pytest.ExitCode.OK


def test_the_list_shows_them(twins: Project) -> None:
    """--fa-list lists every other variant, and the sentence."""
    result = twins.run_here("--fa-list")
    names = [line.split()[0] for line in result.all_lines]
    assert (result.ret, [name for name in names if name in ("mask1", "other", *COMPANIONS)]) == (
        pytest.ExitCode.OK,
        ["other", *COMPANIONS],
    )
    assert "".join(f"broken: {clash_of(twins)}".split()) in "".join(result.text.split())  # long lines are folded


def test_a_copied_baseline_ends_the_run(project: Project) -> None:
    """A copy of the built-in baselines does not replace them, so a gate is never decided against such a copy."""
    project.python_variant("mine")
    shutil.copytree(BUILTIN / "sdpa", project.folder / "kernels" / "sdpa_flash")
    result = project.run_here("--collect-only", "--fa-variant=mine", "--fa-gate=0.95")
    copy = project.folder / "kernels" / "sdpa_flash" / "variant.yaml"
    names = [name for name, variant in discover(()).variants.items() if variant.folder.endswith("sdpa")]
    sentences = [
        f"variant '{name}' of {copy} has the name of a built-in variant ({BUILTIN}/sdpa/variant.yaml), which is "
        f"reserved; rename yours {RENAME}"
        for name in names
    ]
    assert (result.ret, result.all_lines) == (4, [f"ERROR: {sentences[0]}", *sentences[1:]])


# -- no variants ------------------------------------------------------------------------------------------------------


def new(name: str, folder: Path, option: str = "") -> str:
    """The end of a message: the command that writes a variant."""
    return f"`python -m pytest_fa new {name}{option}` writes a variant into {folder}"


@pytest.mark.parametrize(
    ("files", "content"),
    nightly_after(
        2,
        [
            ((), "there is no such folder"),
            (("kernels/notes/a.txt", "kernels/b.cu"), "no folder in it has a variant.yaml (it contains b.cu, notes)"),
            (("kernels/",), "the folder is empty"),
            (
                ("kernels/variant.yaml",),
                "variant.yaml is in the folder itself; move it and its sources into a folder below it",
            ),
        ],
    ),
    ids=["missing", "without manifests", "empty", "one level too high"],
)
def test_a_folder_without_variants(project: Project, files: tuple[str, ...], content: str) -> None:
    """The message says what was looked for, where, what is there, and the command that writes a variant."""
    for name in files:
        (project.folder / name).mkdir(parents=True) if name.endswith("/") else project.write(name, "")
    folder = project.folder / "kernels"
    looked = f"looked for {folder}/<variant>/variant.yaml: {content}"
    complaint = f"ERROR: --fa-variant: no variant 'mine' (see --fa-list); {looked}; {new('mine', folder)}"
    assert project.complaint("--fa-variant=mine") == [complaint]
    every = project.collect(ONE_CASE)
    assert (every.ret, every.errlines[0]) == (4, f"ERROR: no variant to test: {looked}; {new('NAME', folder)}")
    listed = "".join(project.run_here("--fa-list").text.split())
    assert "".join(f"no variants of your own: {looked}; {new('NAME', folder)}".split()) in listed


def test_a_variant_without_a_manifest(project: Project) -> None:
    """A folder that has the name but no manifest is named."""
    project.python_variant("other")
    project.write("kernels/mine/kernel.cu", "")
    folder = project.folder / "kernels"
    result = project.run_here("--collect-only", "--fa-variant=mine")
    reason = f"the folder {folder / 'mine'} has no variant.yaml; {new('NAME', folder)}, with a manifest to copy"
    assert result.all_lines == [f"ERROR: --fa-variant: no variant 'mine' (see --fa-list); {reason}"]


@pytest.mark.parametrize("place", nightly_after(2, ["sub", "beside", "kernels", "kernels/mine"]))
def test_a_run_from_another_folder(tmp_path: Path, place: str) -> None:
    """From a folder below, inside or above the kernels, the message has the path of the variants nearby."""
    root = tmp_path / "parent" / "repository"
    Project(root, tmp_path).python_variant("mine")
    here = root.parent if place == "beside" else root / place
    here.mkdir(exist_ok=True)
    project = Project(here, tmp_path)
    complaints = project.complaint("--fa-variant=mine", f"--rootdir={here}")
    looked = f"looked for {here}/kernels/<variant>/variant.yaml: there is no such folder"
    kernels = os.path.relpath(root / "kernels", here)
    command = f"pytest --rootdir={here} --fa-kernels={kernels} --fa-variant=mine"
    hint = f"{root}/kernels has variants: `{command}`"
    complaint = f"no variant 'mine' (see --fa-list); {looked}; {hint}; {new('mine', here / 'kernels')}"
    assert complaints == [f"ERROR: --fa-variant: {complaint}"]
    advised = project.run_here(*command.split()[1:], "--collect-only", "-q")
    assert f"test_correct[mine-{CASE}]" in advised.ids


def test_kernels_beside_the_current_folder_are_not_recommended(tmp_path: Path) -> None:
    """The kernels of a folder beside the current one may be anybody's: the message does not name them."""
    Project(tmp_path / "other", tmp_path).python_variant("mine")
    here = tmp_path / "here"
    here.mkdir()
    complaints = Project(here, tmp_path).complaint("--fa-variant=mine", f"--rootdir={tmp_path}")
    places = [folder / "kernels" / "<variant>" / "variant.yaml" for folder in (here, tmp_path)]
    looked = "; ".join(f"looked for {place}: there is no such folder" for place in places)
    command = new("mine", here / "kernels")
    assert complaints == [f"ERROR: --fa-variant: no variant 'mine' (see --fa-list); {looked}; {command}"]


@pytest.mark.nightly
def test_kernels_are_looked_for_where_one_stands(tmp_path: Path) -> None:
    """Typed paths are relative to the working folder, in which `kernels` is looked for first, then at pytest's root."""
    root, here = tmp_path / "repository", tmp_path / "repository" / "attention"
    Project(here, tmp_path).python_variant("mine")
    Project(root, tmp_path).python_variant("other")
    project, below = Project(root, tmp_path), Project(here, tmp_path)
    project.write("pytest.ini", "[pytest]\ntestpaths = tests\n")
    project.write("tests/test_sum.py", SUM_TEST)

    def variants_of(start: Project, *arguments: str) -> set[str]:
        result = start.run_here("--collect-only", "-q", ONE_CASE, "-k", "test_correct", *arguments)
        return {test_id.split("[")[1].split("-")[0] for test_id in result.ids}

    assert variants_of(below) == {"mine"}
    assert variants_of(below, "--fa-kernels=kernels") == {"mine"}
    assert variants_of(below, "--fa-kernels=../kernels") == {"other"}
    suite = ("--pyargs", "pytest_fa.suite")
    assert variants_of(project, *suite) == {"other"}
    assert variants_of(project, *suite, "--fa-kernels=attention/kernels") == {"mine"}
    shutil.rmtree(here / "kernels")
    assert variants_of(below) == {"other"}
    project.write("pytest.ini", "[pytest]\naddopts = --fa-kernels=kernels\n")
    assert variants_of(below) == {"other"}


@pytest.mark.parametrize(
    "word", nightly_after(2, ["kernels/mine", "kernels/mine/entry.py", "kernels", "kernels/mine/variant.yaml"])
)
def test_a_path_of_kernels_means_them(stranger: Project, word: str) -> None:
    """The shipped suite tests the variant of a folder or file, or every variant of a kernels folder."""
    result = stranger.run_here("--collect-only", "-q", word)
    assert f"test_correct[mine-{CASE}]" in result.ids
    both = stranger.run_here("--collect-only", "-q", word, "tests/test_sum.py")
    assert both.ids == ["test_sum", *result.ids]
    assert stranger.run_here("--collect-only", "-q", word, "--fa-variant=mine", ONE_CASE, "-k", "speed").ids == [
        f"test_speed[{name}-{SHAPE}]" for name in ("mine", *COMPANIONS)
    ]


@pytest.mark.nightly
def test_a_path_of_kernels_elsewhere(tmp_path: Path) -> None:
    """The run and its rerun command name the kernels folder, and the suite where `testpaths` names other tests."""
    project = Project(tmp_path / "repository", tmp_path)
    project.write("attn/kernels/mine/variant.yaml", PYTHON_MANIFEST)
    project.write("attn/kernels/mine/entry.py", WRONG_SOURCE)
    project.write("pytest.ini", "[pytest]\ntestpaths = tests\n")
    project.write("tests/test_sum.py", SUM_TEST)
    result = project.run("attn/kernels/mine", ONE_CASE, "-k", "test_correct")
    words = "--pyargs pytest_fa.suite --fa-kernels=attn/kernels --fa-variant=mine"
    assert (result.ret, words in result.all_lines[-1]) == (1, True)
    again = project.run_here("--collect-only", "-q", *shlex.split(result.all_lines[-1].partition("pytest ")[2]))
    assert again.ids == [f"test_correct[mine-{CASE}]"]


def test_a_folder_of_kernels_with_tests_of_a_user_is_pytests(project: Project) -> None:
    """A folder below which pytest finds a test is what pytest makes of it; a broken manifest is named."""
    project.python_variant("mine")
    project.write("kernels/mine/test_mine.py", SUM_TEST)
    assert project.run_here("--collect-only", "-q", "kernels/mine").ids == ["test_sum"]
    project.write("kernels/odd/variant.yaml", "supports: {dtype: fp99}\n")
    broken = project.run("kernels/odd", "--fa-suite=smoke")
    assert (broken.ret, "fp99" in broken.text) == (4, True)


def test_no_name_is_suggested_for_a_folder_without_a_manifest(project: Project) -> None:
    """A folder of the name exists, so the message names its missing manifest and no similar name."""
    project.python_variant("other")
    project.write("kernels/foo/kernel.cu", "")
    folder = project.folder / "kernels"
    reason = f"the folder {folder / 'foo'} has no variant.yaml; {new('NAME', folder)}, with a manifest to copy"
    complaint = f"ERROR: --fa-variant: no variant 'foo' (see --fa-list); {reason}"
    assert project.complaint("--fa-variant=foo") == [complaint]


@pytest.mark.parametrize(("name", "text"), [("gone", "no folder"), ("empty", "no <variant>/variant.yaml in")])
def test_a_named_folder_without_variants(project: Project, name: str, text: str) -> None:
    """The message of --fa-kernels has the path and a command that writes into exactly this folder."""
    (project.folder / "empty").mkdir()
    folder = project.folder / name
    command = new("NAME", folder, f" --kernels={folder}")
    assert project.complaint(f"--fa-kernels={name}") == [f"ERROR: --fa-kernels: {text} {str(folder)!r}; {command}"]


def test_tests_without_variants_need_none(project: Project) -> None:
    """A user's own test with only `fa_case` runs in a project without kernels."""
    project.write("test_own.py", "def test_case_alone(fa_case):\n    pass\n")
    result = project.run("test_own.py", ONE_CASE)
    assert (result.ret, result.outcomes) == (0, {f"test_case_alone[{CASE}]": "passed"})


# -- which tests run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(new_project: NewProject) -> Project:
    """Another repository, with tests of its own and one variant."""
    project = new_project("stranger")
    project.python_variant("mine")
    project.write("tests/test_sum.py", SUM_TEST)
    project.write("tests/test_kernel.py", KERNEL_TEST)
    project.write("sub/keep", "")
    return project


def files_of(result: Run) -> list[str]:
    """The files of the tests that `--collect-only -q` listed, each once."""
    return list(dict.fromkeys(line.split("::")[0] for line in result.outlines if "::" in line))


OWN_FILES = ["tests/test_kernel.py", "tests/test_sum.py"]


@pytest.mark.parametrize(
    ("arguments", "files"),
    nightly_after(
        2,
        [
            (("--fa-variant=mine",), ["test_attention.py"]),
            (("--fa-variant=mine", "--pyargs"), ["test_attention.py"]),
            (("--fa-variant=mine", "."), OWN_FILES),
            (("--fa-variant=mine", "tests/test_kernel.py"), ["tests/test_kernel.py"]),
            (
                ("--fa-variant=mine", "tests/test_kernel.py", "--pyargs", "pytest_fa.suite"),
                [*OWN_FILES[:1], "test_attention.py"],
            ),
            (("--fa-variant=mine", "-o", "testpaths=tests"), OWN_FILES),
            (("-o", "fa_variant=mine"), OWN_FILES),
            (("-o", "addopts=--fa-variant=mine"), OWN_FILES),
            ((), OWN_FILES),
        ],
    ),
    ids=" ".join,
)
def test_an_option_without_a_path_means_the_shipped_suite(
    stranger: Project, arguments: tuple[str, ...], files: list[str]
) -> None:
    """The shipped suite runs if an option is typed and neither a path nor `testpaths` says otherwise."""
    assert files_of(stranger.run_here("--collect-only", "-q", *arguments)) == files


def test_the_header_says_so(stranger: Project) -> None:
    """The header of an implied suite says how to run the tests of a folder; other headers do not."""
    implied, explicit = (
        stranger.run_here("--co", "--fa-variant=mine"),
        stranger.run_here("--co", "--fa-variant=mine", "tests"),
    )
    assert [IMPLIED in result.outlines for result in (implied, explicit)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "flags"),
    nightly_after(
        2,
        [
            (("-o", "testpaths=tests/test_sum.py", "--fa-variant=mine", "--fa-gate=0.95"), "--fa-variant, --fa-gate"),
            (("tests/test_sum.py", "--ncu", "--fa-html=x.html"), "--ncu, --fa-html"),
            (("tests/test_sum.py", "--fa-require-gpu"), "--fa-require-gpu"),
            (("--collect-only", "--fa-suite=smoke", "tests/test_sum.py"), "--fa-suite"),
        ],
    ),
    ids=" ".join,
)
def test_a_run_without_kernels_is_not_green(stranger: Project, arguments: tuple[str, ...], flags: str) -> None:
    """If no test uses kernels, the run ends before its tests with the command that tests kernels."""
    result = stranger.run_here(*arguments)
    assert (result.ret, result.outcomes) == (pytest.ExitCode.USAGE_ERROR, {})
    expected = f"ERROR: {flags}: no selected test uses kernels, so nothing would be judged; the shipped suite: pytest "
    assert any(line.startswith(expected) for line in result.all_lines)


def test_a_gate_that_is_not_selected_is_not_green(stranger: Project) -> None:
    """The tests of an option must be selected; a user's own with `fa_run` may do it, which the end of the run knows."""
    deselected = stranger.run_here("--fa-variant=mine", "--fa-gate=0.95", "-k", "test_build or test_correct")
    assert deselected.ret == pytest.ExitCode.USAGE_ERROR
    assert "--fa-gate: test_gate is not among the selected tests; " in deselected.text
    own = stranger.run_here("tests/test_kernel.py", "--fa-variant=mine", "--fa-gate=0.95", ONE_CASE)
    assert own.ret == pytest.ExitCode.USAGE_ERROR
    assert "--fa-gate: test_gate is not among the selected tests; " in own.text
    stranger.write("other/test_run.py", "def test_of_a_user(fa_run):\n    pass\n")
    late = stranger.run_here("other/test_run.py", "--fa-variant=mine", "--fa-gate=0.95", ONE_CASE)
    assert (late.ret, late.outcomes) == (pytest.ExitCode.USAGE_ERROR, {"test_of_a_user": "passed"})
    assert "--fa-gate: no test of this run did that; " in late.all_lines[-1]


@pytest.mark.parametrize("option", ["--fa-html=x.html", "--fa-save"])
def test_a_page_or_records_that_are_not_written_are_not_green(stranger: Project, option: str) -> None:
    """Without a record, an option that writes records ends the run with the command that judges."""
    result = stranger.run_here("tests/test_kernel.py", "--fa-variant=mine", option, ONE_CASE)
    assert (result.ret, (stranger.folder / "x.html").exists()) == (pytest.ExitCode.USAGE_ERROR, False)
    reason = "no test of this run judged a kernel, so nothing was written; the shipped suite: pytest "
    assert result.all_lines[-1].startswith(f"ERROR: {option.partition('=')[0]}: {reason}")


@pytest.mark.nightly
def test_workers_that_judge_nothing_are_not_green(stranger: Project) -> None:
    """With `-n`, the run says at its end that no test used kernels, or did what an option asks for."""
    stranger.write("other/test_run.py", "def test_of_a_user(fa_run):\n    pass\n")
    result = stranger.run_here("tests/test_sum.py", "--fa-variant=mine", "-n1")
    assert (result.ret, result.outcomes) == (pytest.ExitCode.USAGE_ERROR, {"test_sum": "passed"})
    assert "no test of this run used kernels, so nothing was judged" in result.all_lines[-1]

    assert stranger.run_here("tests/test_kernel.py", "--fa-variant=mine", "-n1").ret == pytest.ExitCode.OK
    late = stranger.run_here("other/test_run.py", "--fa-variant=mine", "--fa-sanitize=memcheck", ONE_CASE, "-n1")
    assert (late.ret, "no test of this run did that" in late.all_lines[-1]) == (pytest.ExitCode.USAGE_ERROR, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("tests/test_sum.py",),
        ("tests/test_sum.py", "--fa-clean", "--fa-cache=cache"),
        ("late/test_late.py", "--fa-variant=mine", ONE_CASE),
    ],
    ids=["no option", "clean", "late fixture"],
)
def test_other_runs_stay_green(stranger: Project, arguments: tuple[str, ...]) -> None:
    """A run that asks for nothing tests what it wants, and a fixture may be asked for while a test runs."""
    stranger.write("late/test_late.py", f'CASE = "{CASE}"\n{LATE_TEST}')
    assert stranger.run_here(*arguments).ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("sub", "--fa-variant=mine"), "pytest --collect-only --fa-variant=mine"),
        (("--fa-variant=mine", "sub", "-x", "-q"), "pytest --collect-only --fa-variant=mine -x -q"),
        (
            ("-o", "testpaths=sub", "--fa-variant=mine"),
            "pytest --pyargs pytest_fa.suite --collect-only -o testpaths=sub --fa-variant=mine",
        ),
    ],
    ids=" ".join,
)
def test_a_folder_without_tests(stranger: Project, arguments: tuple[str, ...], command: str) -> None:
    """If the path has no test, the last line says so and has the command that tests kernels."""
    result = stranger.run_here("--collect-only", *arguments)
    last_line = f"fa: no test in sub; the shipped suite tests kernels: {command}"
    assert (result.ret, result.all_lines[-1]) == (pytest.ExitCode.NO_TESTS_COLLECTED, last_line)


def test_deselected_tests_are_no_empty_folder(stranger: Project) -> None:
    """A run whose tests are all deselected, or without an option of pytest-fa, ends as always."""
    for arguments in (("--fa-variant=mine", "-k", "nothing"), ("sub",)):
        result = stranger.run_here("--collect-only", *arguments)
        assert (result.ret, "fa: no test in" in result.text) == (pytest.ExitCode.NO_TESTS_COLLECTED, False)


# -- ids as they are printed ------------------------------------------------------------------------------------------

TEST = f"test_correct[mine-{CASE}]"
PRINTED = [
    f"test_attention.py::{TEST}",
    f"pytest_fa/suite/test_attention.py::{TEST}",
    f"../../elsewhere/pytest_fa/suite/test_attention.py::{TEST}",
    f"pytest_fa.suite.test_attention::{TEST}",
]


@pytest.mark.parametrize("printed", nightly_after(2, PRINTED))
def test_a_printed_id_selects_its_test(stranger: Project, printed: str) -> None:
    """The id of a test is accepted as pytest prints it in this repository or in another one, and printed again."""
    result = stranger.run_here("--collect-only", "-q", printed)
    assert [line for line in result.outlines if "::" in line] == [f"test_attention.py::{TEST}"]


@pytest.mark.parametrize(
    ("shape", "options", "seeds"),
    [(SHAPE, (), "012"), (SHAPE, ("--fa-seeds=4,7",), "47"), ("b1h2s17d64-fp16", (), "0")],
)
def test_an_id_without_a_seed_stands_for_every_seed(
    stranger: Project, shape: str, options: tuple[str, ...], seeds: str
) -> None:
    """The id of `test_correct` with a shape, as the table prints it, selects the test of each seed."""
    result = stranger.run_here("--collect-only", "-q", f"test_attention.py::test_correct[mine-{shape}]", *options)
    assert result.ids == [f"test_correct[mine-{shape}-seed{seed}]" for seed in seeds]


@pytest.mark.parametrize("printed", nightly_after(1, PRINTED))
def test_a_printed_id_can_be_deselected(stranger: Project, printed: str) -> None:
    """--deselect accepts the same ids."""
    ids = stranger.run_here("--collect-only", "-q", ONE_CASE, "--deselect", printed).ids
    assert ids == [f"test_speed[{name}-{SHAPE}]" for name in ("mine", *COMPANIONS)]


def test_a_users_own_file_comes_first(project: Project) -> None:
    """A file of the user with the name of the suite's file is what its path says."""
    project.write("test_attention.py", SUM_TEST)
    assert project.run_here("--collect-only", "-q", "test_attention.py::test_sum").ids == ["test_sum"]


@pytest.mark.parametrize("word", ["test_attention.py", "test_attention.py::test_sum", "test_attention.py::test_sum[1]"])
def test_a_missing_file_is_not_the_suites(stranger: Project, word: str) -> None:
    """A path of no file is an error as always, unless it is the full id of a shipped test."""
    result = stranger.run_here(word)
    assert (result.ret, result.all_lines[-1]) == (4, f"ERROR: file or directory not found: {word}")


def test_an_id_of_an_unknown_variant(stranger: Project) -> None:
    """The id of a variant that does not exist is a usage error with a suggestion."""
    complaint = "ERROR: --fa-variant: no variant 'mien'; did you mean 'mine'? (see --fa-list)"
    assert stranger.complaint(f"test_attention.py::test_correct[mien-{CASE}]") == [complaint]


@pytest.mark.nightly
def test_an_id_of_the_self_test(stranger: Project) -> None:
    """With --fa-selftest, the id of one of its tests selects this test."""
    result = stranger.run_here("--fa-selftest", "--collect-only", "-q", "selftest.py::test_judge[gain_only]")
    assert [line for line in result.outlines if "::" in line] == ["selftest.py::test_judge[gain_only]"]


@pytest.mark.parametrize(
    ("case", "seeds"),
    [(SHAPE, "012"), (f"mine-{CASE}", "0"), (PRINTED[0], "0"), (f"test_speed[mine-{SHAPE}]", "012")],
)
def test_a_case_as_printed(stranger: Project, case: str, seeds: str) -> None:
    """--fa-case accepts the id of a shape, which stands for every seed of the suite, and ids inside a test id."""
    ids = stranger.run_here("--collect-only", "-q", f"--fa-case={case}", "-k", "test_correct").ids
    assert ids == [f"test_correct[mine-{SHAPE}-seed{seed}]" for seed in seeds]


def test_a_shape_of_no_suite_has_seed_0(stranger: Project) -> None:
    """A shape that is not in the suite is run with seed 0, or with the seeds of --fa-seeds."""
    collect = ("--collect-only", "-q", "--fa-case=b3h1s9d64-fp16", "-k", "test_correct")
    assert stranger.run_here(*collect).ids == ["test_correct[mine-b3h1s9d64-fp16-seed0]"]
    assert stranger.run_here(*collect, "--fa-seeds=5,").ids == ["test_correct[mine-b3h1s9d64-fp16-seed5]"]


@pytest.mark.parametrize(
    "test",
    [
        "test_correct[mine-b1h2s17d64-fp16-seed0]",
        "test_correct[ablated-b1h2s64d64-fp16-seed9]",
        "test_speed[mine-b1h2s17d64-fp16]",
        "test_property[ablated-new_data]",
        "test_build[zero@BLOCK=32]",
    ],
)
def test_an_id_needs_no_options(stranger: Project, test: str) -> None:
    """The id of a test selects its variant and its case, also those that no candidate and no suite of the run has."""
    stranger.python_variant("ablated", manifest=PYTHON_MANIFEST + "role: ablation\n")
    stranger.cuda_variant("zero", manifest=ZERO_MANIFEST + "role: ablation\n")
    result = stranger.run_here("--collect-only", "-q", f"test_attention.py::{test}")
    assert [line for line in result.outlines if "::" in line] == [f"test_attention.py::{test}"]
