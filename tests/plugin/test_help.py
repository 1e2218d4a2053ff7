"""The help text, and the ini key of every option."""

from __future__ import annotations

import re

import pytest

from pytest_fa.feature import features
from pytest_fa.options.flags import all_options
from tests.projects import NewProject, Project, variants_of
from tests.tiers import nightly_after

FLAGS = [option.flag for option in all_options()]


@pytest.fixture(scope="module")
def help_text(new_project: NewProject) -> str:
    """The text of --help with single spaces between words."""
    return " ".join(new_project("help").run_here("--help").text.split())


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """A project whose ini file is rewritten by the tests."""
    project = new_project("ini")
    project.cuda_variant("zero")
    project.python_variant("good")
    project.python_variant("elsewhere", root="variants")
    return project


@pytest.fixture(scope="module")
def default_ids(pair: Project) -> list[str]:
    """The tests that are selected without any ini key."""
    pair.ini()
    return pair.ids()


def key_of(flag: str) -> str:
    """The ini key of an option."""
    return flag.removeprefix("--").replace("-", "_")


def shows_its_key(help_text: str, flag: str) -> bool:
    """Whether the help has an option, and next its ini key."""
    match = re.search(rf" {flag}(?![\w-])", help_text)  # --fa-watch is the beginning of --fa-watchdog
    key = key_of(flag)
    return match is not None and help_text[match.start() :].split("(ini: ", 1)[1].startswith(
        (f"{key})", f"{key}, default ")
    )


def test_help_begins_with_ten_everyday_options(new_project: NewProject) -> None:
    """They are the first group of --help; each feature with other options has a group of its own, without them."""
    text = new_project("groups").run_here("--help").text
    groups = re.findall(r"^attention kernels.*:$", text, re.MULTILINE)
    assert groups[0] == "attention kernels (pytest-fa): every day:"
    parts = [part.split("\n\n")[0] for part in re.split(r"^attention kernels.*:$", text, flags=re.MULTILINE)[1:]]
    flags = [re.findall(r"^  (--[\w-]+)", part, re.MULTILINE) for part in parts]
    everyday = [option.flag for option in all_options() if option.everyday]
    assert (flags[0], len(flags[0])) == (everyday, 10)
    assert sorted(flag for group in flags for flag in group) == sorted(FLAGS)
    titled = [feature.title for feature in features() if any(not row.everyday for row in feature.options)]
    assert groups[2:] == [f"attention kernels: {title}:" for title in titled]


def test_help_names_option_and_ini_key(help_text: str) -> None:
    """--help shows every option with its ini key."""
    assert [flag for flag in FLAGS if not shows_its_key(help_text, flag)] == []


def test_help_lists_ini_key(help_text: str) -> None:
    """The list of ini options in --help shows every ini key with its type."""
    types = {
        flag: [kind for kind in ("string", "bool") if f" {key_of(flag)} ({kind}): " in help_text] for flag in FLAGS
    }
    assert {flag: kinds for flag, kinds in types.items() if len(kinds) != 1} == {}


@pytest.mark.parametrize(
    ("line", "argument"),
    nightly_after(
        2,
        [
            ("fa_variant = zero", "--fa-variant=zero"),
            ("fa_kernels = variants", "--fa-kernels=variants"),
            ("fa_suite = smoke", "--fa-suite=smoke"),
            ("fa_case = *seed1", "--fa-case=*seed1"),
            ("fa_seeds = 3,7", "--fa-seeds=3,7"),
            ("fa_dtype = bf16", "--fa-dtype=bf16"),
            ("fa_define = BLOCK=32,64", "--fa-define=BLOCK=32,64"),
        ],
    ),
)
def test_ini_key_selects_like_its_option(pair: Project, default_ids: list[str], line: str, argument: str) -> None:
    """An ini key selects the same tests as its option, and others than the default."""
    pair.ini(line)
    by_key = pair.ids()
    pair.ini()
    assert (by_key == pair.ids(argument), by_key == default_ids) == (True, False)


def test_option_wins_over_ini_key(pair: Project) -> None:
    """An option on the command line overrides the ini key."""
    pair.ini("fa_variant = zero")
    assert variants_of(pair.ids("--fa-variant=good"), "test_correct") == ["good"]


def test_wrong_ini_value_is_a_usage_error(pair: Project) -> None:
    """A wrong name in the ini file is reported like a wrong name on the command line."""
    pair.ini("fa_variant = zro")
    result = pair.collect()
    complaint = "ERROR: --fa-variant: no variant 'zro'; did you mean 'zero'? (see --fa-list)"
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [complaint])


def test_list_by_ini_key(pair: Project) -> None:
    """`fa_list = true` prints the same list as --fa-list and runs nothing."""
    pair.ini()
    listed = pair.run_here("--pyargs", "pytest_fa.suite", "--fa-list").outlines
    pair.ini("fa_list = true")
    assert pair.suite("--collect-only", "-q").outlines == listed


def test_no_build_by_ini_key(pair: Project) -> None:
    """`fa_no_build = true`, `fa_cache` and `fa_arch` have the effect of their options."""
    pair.ini("fa_no_build = true", "fa_cache = empty", "fa_arch = sm_89")
    reason = pair.suite("-k", "test_build").reasons["test_build[zero]"].splitlines()[0]
    assert reason.startswith(f"not built: no build in {pair.folder / 'empty'}: ")


def test_require_gpu_by_ini_key(pair: Project) -> None:
    """With `fa_require_gpu = true`, a test that needs a GPU fails if there is none."""
    pair.ini("fa_require_gpu = true", "fa_no_build = true")
    result = pair.suite("-k", "test_correct and zero and b2h2 and seed0")
    assert result.outcomes == {"test_correct[zero-b2h2s64d64-fp16-seed0]": "failed"}
