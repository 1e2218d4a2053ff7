"""What a run shows: one table, the answer in the last lines, colours, and a status line on a terminal only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from tests.projects import ONE_CASE, SHAPE, WRONG_SOURCE, NewProject, Project, Run

BENCHMARK_TABLE = r"-+ benchmark.*: \d+ tests? -+"
OWN_BENCHMARK = """\
def test_own(benchmark):
    benchmark(lambda: sum(range(100)))
"""
# For an inner plugin: the status line is shown from the first test on.
NO_DELAY = "import pytest_fa.plugin.status_line\n\npytest_fa.plugin.status_line.SHOWN_AFTER_SECONDS = 0.0\n"


def benchmark_tables(run: Run) -> list[str]:
    """The tests in the tables of pytest-benchmark."""
    if not any(re.fullmatch(BENCHMARK_TABLE, line) for line in run.outlines):
        return []
    return [line.split()[0] for line in run.outlines if re.match(r"test_\S+ +\d", line)]


@pytest.fixture(scope="module")
def good(new_project: NewProject) -> Project:
    """A project with a variant for the CPU, and a benchmark that is none of pytest-fa's."""
    project = new_project("terminal")
    project.python_variant("good")
    project.write("test_own.py", OWN_BENCHMARK)
    return project


@pytest.fixture(scope="module")
def plain(good: Project) -> Run:
    """A run of the variant alone."""
    return good.suite(ONE_CASE, "-k", "good")


# -- one table --------------------------------------------------------------------------------------------------------


def test_a_run_prints_one_table(plain: Run) -> None:
    """Without an option of pytest-benchmark there is one table, which says that the times are of one CPU thread."""
    assert (plain.ret, benchmark_tables(plain)) == (pytest.ExitCode.OK, [])
    assert sum("device_us" in line for line in plain.outlines) == 1
    (heading,) = [line for line in plain.outlines if line.startswith(f"{SHAPE} ")]
    assert heading == f"{SHAPE} (CPU, 1 thread)"


@pytest.mark.parametrize("option", ["--benchmark-columns=min,median", "--benchmark-save=one"])
def test_an_option_of_pytest_benchmark_shows_its_table(good: Project, option: str) -> None:
    """With one of its options, pytest-benchmark shows its table, too."""
    assert benchmark_tables(good.suite(ONE_CASE, "-k", "good and speed", option)) == [f"test_speed[good-{SHAPE}]"]


@pytest.mark.nightly
def test_an_option_in_the_ini_file_counts(project: Project) -> None:
    """So does one of its options in `addopts`."""
    project.python_variant("good")
    project.write("pytest.ini", "[pytest]\naddopts = --junitxml=junit.xml --benchmark-sort=name\n")
    assert benchmark_tables(project.suite(ONE_CASE, "-k", "good and speed")) == [f"test_speed[good-{SHAPE}]"]


@pytest.mark.nightly
def test_benchmarks_of_the_user_keep_their_table(good: Project) -> None:
    """A user's own benchmark in the same run is shown by pytest-benchmark, without those of pytest-fa."""
    run = good.run("--pyargs", "pytest_fa.suite", "test_own.py", ONE_CASE, "-k", "good or own")
    assert benchmark_tables(run) == ["test_own"]
    assert sum("device_us" in line for line in run.outlines) == 1


@pytest.mark.nightly
def test_no_line_of_the_table_is_too_long(good: Project) -> None:
    """The table fits a narrow terminal."""
    run = good.suite(ONE_CASE, "-k", "speed", env={"COLUMNS": "80"})
    start = next(index for index, line in enumerate(run.outlines) if " attention kernels " in line)
    end = next(index for index, line in enumerate(run.outlines) if line.startswith("records: "))
    assert max(len(line) for line in run.outlines[start:end]) <= 80


# -- the answer -------------------------------------------------------------------------------------------------------


def test_the_last_lines_are_the_answer(plain: Run) -> None:
    """The last lines, below pytest's own, are the answer and the next command."""
    answer, command = plain.outlines[-2:]
    assert re.match(r"good: \d+/\d+ checks passed; [\d.]+ us at ", answer)
    expected = f"pytest --pyargs pytest_fa.suite --fa-variant=good {ONE_CASE} --benchmark-save=before"
    assert f"to compare with a later run: {expected}" == command
    assert " passed" in plain.outlines[-3]


def test_a_wrong_kernel_has_its_rerun_command_last(project: Project) -> None:
    """The last line of a run with a wrong kernel runs its first failure again, and does so."""
    project.python_variant("bad", source=WRONG_SOURCE)
    run = project.suite(ONE_CASE, "-k", "bad and correct")
    assert run.outlines[-3] == "bad: wrong in 1 of 1"
    words = run.outlines[-1].removeprefix("rerun: pytest ").split()
    again = project.run(*words)
    assert (again.ret, list(again.outcomes.values())) == (pytest.ExitCode.TESTS_FAILED, ["failed"])


@pytest.mark.nightly
def test_with_qq_only_the_answer_is_shown(good: Project) -> None:
    """-qq leaves out the next command; --no-summary also the answer."""
    assert good.suite(ONE_CASE, "-k", "good and speed", "-qq").outlines[-1].startswith("good: 1/1 checks passed; ")
    assert "checks passed" not in good.suite(ONE_CASE, "-k", "good and speed", "--no-summary").text


def test_an_unrelated_run_has_no_answer(good: Project) -> None:
    """A run without kernels ends with pytest's own line."""
    assert " passed in " in good.run("test_own.py").outlines[-1]


@pytest.mark.parametrize(("color", "is_red"), [("yes", True), ("no", False)])
def test_wrong_is_red_with_colours(project: Project, color: str, *, is_red: bool) -> None:
    """The row of a wrong kernel is red with --color=yes, and there is no escape sequence with --color=no."""
    project.python_variant("bad", source=WRONG_SOURCE)
    run = project.suite(ONE_CASE, "-k", "bad and correct", f"--color={color}")
    (row,) = [line for line in run.outlines if "WRONG 1/1" in line]
    assert row.startswith("\x1b[31m") is is_red
    assert ("\x1b" in run.text) is is_red


@pytest.mark.nightly
def test_verbose_explains_the_columns(good: Project) -> None:
    """-v explains the columns and shows the slowest stages; without it, one line says so."""
    explained = good.suite(ONE_CASE, "-k", "good and speed", "-v").outlines
    brief = good.suite(ONE_CASE, "-k", "good and speed").outlines
    assert [any(line.startswith("device_us: ") for line in lines) for lines in (explained, brief)] == [True, False]
    assert [any(line.startswith("slowest stages ") for line in lines) for lines in (explained, brief)] == [True, False]
    assert "pytest -v explains the columns and shows every row" in brief


# -- many variants ----------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_twenty_variants_on_four_shapes_fit_100_lines(new_project: NewProject) -> None:
    """A run of twenty variants on four shapes has at most 100 lines, and one answer."""
    project = new_project("twenty")
    for index in range(20):
        project.python_variant(f"v{index:02}")
    cases = ",".join(f"b1h1s{size}d64-fp16-seed0" for size in (16, 24, 32, 48))
    run = project.suite("--fa-variant=v*", f"--fa-case={cases}", "-k", "test_correct or test_speed")
    assert run.ret == pytest.ExitCode.OK
    assert len(run.outlines) <= 100
    assert run.outlines[-2].startswith("20 variants: 20 correct; ")


# -- the status line --------------------------------------------------------------------------------------------------


def on_terminal(project: Project, *arguments: str) -> str:
    """The output of a run of the shipped suite on a pseudo-terminal."""
    reader, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--pyargs", "pytest_fa.suite", "-p", "no_delay", *arguments],
        cwd=project.folder,
        env={**environment, "XDG_CACHE_HOME": str(project.cache), "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=subprocess.STDOUT,
    )
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(reader, 65536):
            chunks.append(chunk)
    except OSError:  # the other end was closed
        pass
    os.close(reader)
    assert process.wait(timeout=240) == pytest.ExitCode.OK
    return b"".join(chunks).decode()


@pytest.fixture
def slow(project: Project) -> Project:
    """A project in which every run is long enough for the status line."""
    project.python_variant("good")
    project.write("no_delay.py", NO_DELAY)
    return project


STATUS = r"fa: \d+ of \d+ tests, about \d+ s left"


@pytest.mark.nightly
@pytest.mark.parametrize("verbosity", [(), ("-v",)])
def test_a_terminal_shows_the_status_line(slow: Project, verbosity: tuple[str, ...]) -> None:
    """On a terminal the number of finished tests and the time that is left are shown, and erased in the end."""
    text = on_terminal(slow, ONE_CASE, "-k", "good", *verbosity)
    *_, last = re.finditer(STATUS, text)
    assert re.search(r"\n\x1b\[2K\x1b\[A\r", text[last.end() :])
    assert re.search(r"[1-9]\d* passed", text)


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["-q", "-s"])
def test_the_status_line_can_be_in_the_way(slow: Project, option: str) -> None:
    """With -q, and where something else writes to the terminal, it is not shown."""
    assert re.search(STATUS, on_terminal(slow, ONE_CASE, "-k", "good and speed", option)) is None


def test_a_log_has_no_status_line(slow: Project) -> None:
    """Output that is not a terminal has no status line, also with colours."""
    assert re.search(STATUS, slow.suite("-p", "no_delay", ONE_CASE, "-k", "good", "--color=yes").text) is None
