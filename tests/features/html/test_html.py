"""`--fa-html`: a run writes its report."""

from __future__ import annotations

from tests.projects import ONE_CASE, WRONG_SOURCE, Project


def test_a_run_writes_its_report(project: Project) -> None:
    """The report has the answer of the run and the failure of a wrong variant; the run names the file."""
    project.python_variant("good")
    project.python_variant("wrong", WRONG_SOURCE)
    run = project.suite(ONE_CASE, "-k", "test_correct", "--fa-html=out/report.html")
    page = (project.folder / "out" / "report.html").read_text(encoding="utf-8")
    answer = next(line for line in run.outlines if line.startswith("2 variants: "))
    assert (run.ret, answer in page, "wrong: wrong result" in page) == (1, True, True), run.text
    assert "report: out/report.html" in run.outlines


def test_a_report_that_cannot_be_written_fails_the_run(project: Project) -> None:
    """If the file cannot be written, one line says why, and the run fails although its tests passed."""
    project.python_variant("good")
    project.write("file", "")
    run = project.suite(ONE_CASE, "-k", "test_correct", "--fa-html=file/report.html")
    (line,) = [line for line in run.all_lines if line.startswith("fa: --fa-html was not written: ")]
    assert ("Not a directory" in line or "File exists" in line, run.ret) == (True, 1), run.text


def test_a_folder_is_refused(project: Project) -> None:
    """A folder as the file is a usage error that says what to type."""
    project.python_variant("good")
    run = project.suite("--fa-html=.", "--collect-only")
    assert run.ret == 4
    assert "--fa-html: '.' is a folder; give a file, such as ./report.html" in run.text
