"""Workload files: what they may say, which are shipped, and a run with one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fa.attention import parts
from pytest_fa.catalog.discover import discover
from pytest_fa.errors import UsageProblem
from pytest_fa.features.workload.plugin import OPTIONS
from pytest_fa.features.workload.workload import EXAMPLE, SHIPPED, read_workload
from pytest_fa.records.log import read_records
from tests.projects import CASE, ONE_CASE, SHAPE, NewProject, Project, cases_of

OTHER = "b1h4s65d64-fp16-causal"
MIX = f"# per 1000 calls\ncases:\n  {CASE}: 620\n  {OTHER}: 0.5\n"


@pytest.fixture(scope="module")
def one(new_project: NewProject) -> Project:
    """A project with a variant, which is right without a mask and wrong with one, and a workload."""
    project = new_project("workload")
    project.python_variant("good")
    project.write("mix.yaml", MIX)
    return project


def test_it_has_cases_and_weights(one: Project) -> None:
    """Ids may have seeds; weights are whole numbers or not."""
    mix = read_workload("mix.yaml", one.folder)
    expected = [(CASE, CASE, 620.0), (OTHER, f"{OTHER}-seed0", 0.5)]
    assert expected == [(each.id, each.case.id, each.weight) for each in mix]


FORM = f"it must list cases with their weights, such as `cases: {{{EXAMPLE}}}`"
WRONG_FILES = {
    "": FORM,
    "[1, 2]": FORM,
    "cases:": FORM,
    "cases: {}": FORM,
    "cases: [b1h2s64d64-fp16]": FORM,
    f"case: {{{SHAPE}: 1}}": "unknown key 'case'; did you mean 'cases'? (allowed: cases)",
    f"cases: {{{SHAPE}: 1}}\nnote: x": "unknown key 'note' (allowed: cases)",
    "cases: {b1h2: 1}": "case 'b1h2' is malformed; "
    f"the form is {parts.grammar()}, as in b1h8s512d64-fp16-seed0",
    "cases: {12: 1}": f"case '12' is malformed; the form is {parts.grammar()}, as in b1h8s512d64-fp16-seed0",
    f"cases: {{{SHAPE}-bshd-kv2: 1}}": f"case '{SHAPE}-bshd-kv2' is malformed; "
    f"the form is {parts.grammar()}, as in b1h8s512d64-fp16-seed0",
    f"cases: {{{SHAPE}: 1, {SHAPE}-seed0: 2}}": f"{SHAPE} and {CASE} are one shape, which is timed once; "
    "add up their weights",
    **{
        f"cases: {{{SHAPE}: {written}}}": f"the weight of {SHAPE} is {read}; "
        "it must be a number above 0, from 1e-09 to 1e+09"
        for written, read in (
            ("0", "0"), ("-3", "-3"), ("true", "True"), ("'5'", "'5'"), ("", "None"), ("1e999", "inf"),
            (".nan", "'.nan'"), ("[1]", "[1]"), ("1e-300", "1e-300"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_has_one_error(tmp_path: Path, text: str) -> None:
    """The message names the option, the file, what is wrong and what is allowed."""
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(UsageProblem) as caught:
        read_workload("mix.yaml", tmp_path)
    assert f"--fa-workload: {tmp_path}/mix.yaml: {WRONG_FILES[text]}" == str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cases: {", "line 1, column 9: "),
        (f"cases:\n  {SHAPE}: 1\n  {SHAPE}: 2\n", f"duplicate key '{SHAPE}' on line 3"),
        ("#" * 70_000, "it is larger than 65536 bytes, the limit"),
    ],
)
def test_what_is_not_read_as_yaml_has_one_error(tmp_path: Path, text: str, words: str) -> None:
    """The reader of manifests says what is wrong, and where."""
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(UsageProblem) as caught:
        read_workload("mix.yaml", tmp_path)
    assert str(caught.value).startswith(f"--fa-workload: {tmp_path}/mix.yaml: {words}")


@pytest.mark.parametrize(
    ("name", "hint"), [("gone.yaml", ""), ("llama_decod", "; did you mean 'llama_decode'?"), ("x" * 5000, "")]
)
def test_an_absent_file_names_what_is_shipped(one: Project, name: str, hint: str) -> None:
    """A name that is neither a file nor shipped is one line of a usage error."""
    complaint = f"ERROR: --fa-workload: there is no file {name!r}{hint} (shipped workloads: llama_decode, llama_server)"
    assert one.complaint(f"--fa-workload={name}") == [complaint]


@pytest.mark.parametrize("other", [ONE_CASE, "--fa-suite=smoke"])
def test_only_one_option_selects_cases(one: Project, other: str) -> None:
    """Beside --fa-case or --fa-suite, a workload is refused; one of the ini file gives way to them."""
    complaint = f"ERROR: --fa-workload: the workload selects the cases; drop {other.partition('=')[0]}"
    assert one.complaint("--fa-workload=mix.yaml", other) == [complaint]
    in_ini = ("-o", "fa_workload=mix.yaml", "--fa-variant=good", "-k", "test_correct")
    assert one.ids(*in_ini, other) == one.ids("--fa-variant=good", "-k", "test_correct", other)
    assert cases_of(one.ids(*in_ini), "test_correct") == [CASE, f"{OTHER}-seed0"]


def test_it_replaces_the_cases_of_the_ini_file(one: Project) -> None:
    """A typed workload wins over `fa_case` and `fa_suite` of the ini file, which itself may have one of both only."""
    ini = ("-o", f"fa_case={CASE}", "-o", "fa_suite=smoke")
    assert cases_of(one.ids("--fa-workload=mix.yaml", *ini), "test_correct") == [CASE, f"{OTHER}-seed0"]
    complaint = "ERROR: fa_workload: the workload selects the cases; drop fa_case from the ini file"
    assert one.complaint("--fa-variant=good", "-o", "fa_workload=mix.yaml", *ini) == [complaint]


def test_the_help_names_what_is_shipped() -> None:
    """The text of the option has the name of each shipped workload."""
    (row,) = OPTIONS
    assert [name for name in SHIPPED if name not in row.help] == []


def test_shipped_workloads_have_the_baselines_that_they_say(tmp_path: Path) -> None:
    """SDPA computes each case of `llama_decode`, and none of `llama_server`, which says so."""
    sdpa = discover((tmp_path,)).variants["sdpa_cudnn"]
    refused = {name: {bool(sdpa.refuses(each.case)) for each in read_workload(name, tmp_path)} for name in SHIPPED}
    assert refused == {"llama_decode": {False}, "llama_server": {True}}
    assert all("The weights are an example" in path.read_text(encoding="utf-8") for path in SHIPPED.values())


@pytest.mark.nightly
def test_a_run_ends_its_table_with_the_mix(one: Project) -> None:
    """A run judges and times the cases, and has a line for the variant; the next command has the workload, too."""
    result = one.suite("--fa-variant=good", "--fa-workload=mix.yaml")
    assert result.ret == pytest.ExitCode.OK, result.text
    assert cases_of(list(result.outcomes), "test_correct") == [CASE, f"{OTHER}-seed0"]
    (line,) = [line for line in result.outlines if line.startswith("workload mix.yaml: ")]
    weights, total_us = {SHAPE: 620, OTHER: 0.5}, 0.0
    for each in read_records(one.logs[-1]):
        if each.variant == "good" and each.speed and each.case:
            total_us += weights[each.case.shape_id] * each.speed.device.median_us
    noise = r"undecided, [01] of 2 cases have a ratio: noisy at \S+(, \S+)?; weighted time {}~? us"
    ratio = r"(~?\d+\.\d+ of|undecided beside) .*weighted over 2 of 2 cases: {}~? us and .*"
    forms = (form.format(re.escape(f"{total_us:.2f}")) for form in (noise, ratio))
    assert re.fullmatch(f"workload mix.yaml: good ({'|'.join(forms)})", line), line
    if " of 2 cases have a ratio: noisy" not in line:
        assert " sdpa_" in line
    assert "--fa-workload=mix.yaml --benchmark-save=before" in result.outlines[-1]
    left_out = [line for line in result.outlines if line.endswith("not judged, --fa-workload left it out")]
    assert len(left_out) == 1


@pytest.mark.nightly
def test_without_times_it_is_undecided(one: Project) -> None:
    """A run that only checks names every case; one that only compiles has no line."""
    checked = one.suite("--fa-variant=good", "--fa-workload=mix.yaml", "--benchmark-disable")
    line = f"workload mix.yaml: good undecided, 0 of 2 cases have a ratio: not timed at {SHAPE}, {OTHER}"
    assert line in checked.outlines
    assert "workload mix.yaml: " not in one.suite("--fa-variant=good", "--fa-workload=mix.yaml", "--fa-static").text
