"""--fa-define: variants with other definitions, created from the command line."""

from __future__ import annotations

import pytest

from tests.factories import MANIFEST
from tests.projects import NewProject, Project, variants_of


@pytest.fixture(scope="module")
def pair(new_project: NewProject) -> Project:
    """One variant with two definitions, and one without any."""
    project = new_project("define")
    project.cuda_variant("tiled", manifest=MANIFEST + "defines: {BLOCK: 64, STAGES: 2}\n")
    project.python_variant("plain")
    return project


def checked(project: Project, *arguments: str) -> list[str]:
    """The variants that test_correct runs over."""
    return variants_of(project.ids("--fa-suite=smoke", "-k", "test_correct", *arguments), "test_correct")


def test_every_value_makes_a_variant(pair: Project) -> None:
    """Each value gives a variant of every variant with that definition; the other variants do not change."""
    assert checked(pair, "--fa-define=BLOCK=32,64") == ["plain", "tiled@BLOCK=32", "tiled@BLOCK=64"]


def test_two_definitions_make_the_product(pair: Project) -> None:
    """If --fa-define is given twice, every pair of values gives a variant."""
    variants = checked(pair, "--fa-variant=tiled", "--fa-define=BLOCK=32,64", "--fa-define=STAGES=3,4")
    assert variants == [f"tiled@BLOCK={block}@STAGES={stages}" for block in (32, 64) for stages in (3, 4)]


def test_definitions_of_a_name_are_kept(pair: Project) -> None:
    """A definition in a variant's name stays when --fa-define adds another one."""
    variants = checked(pair, "--fa-variant=tiled@STAGES=3,tiled@STAGES=4", "--fa-define=BLOCK=32")
    assert variants == ["tiled@STAGES=3@BLOCK=32", "tiled@STAGES=4@BLOCK=32"]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("BLOK=32", "--fa-define: no selected variant has 'BLOK'; did you mean 'BLOCK'? (they have: BLOCK, STAGES)"),
        ("BLOCK", "--fa-define: 'BLOCK' is malformed; the form is NAME=VALUE"),
        ("BLOCK=", "--fa-define: 'BLOCK=' is malformed; the form is NAME=VALUE"),
        ("=32", "--fa-define: '=32' is malformed; the form is NAME=VALUE"),
    ],
)
def test_bad_definition_is_a_usage_error(pair: Project, value: str, complaint: str) -> None:
    """A definition that no variant has, or that is malformed, is a usage error of one line."""
    result = pair.collect(f"--fa-define={value}")
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


def test_empty_value_is_a_usage_error(pair: Project) -> None:
    """A list of values that ends with a comma is a usage error, not a variant with an empty definition."""
    result = pair.collect("--fa-define=BLOCK=32,")
    assert (result.ret, len(result.all_lines)) == (pytest.ExitCode.USAGE_ERROR, 1)


@pytest.mark.parametrize("value", ["--5", "²"])
def test_value_that_looks_like_a_number(pair: Project, value: str) -> None:
    """A value that resembles a number is accepted as text or refused, without an internal error."""
    result = pair.collect(f"--fa-define=BLOCK={value}")
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR)
