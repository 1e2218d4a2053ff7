"""`--fa-watch`: after each save of a selected variant's files, the variant is built, checked and timed again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fa.records.log import read_records
from tests.factories import CUDA_SOURCE, MANIFEST, PYTHON_MANIFEST, PYTHON_SOURCE
from tests.features.watch.watched import VERDICT, WatchedRun, save_at_once
from tests.projects import CASE, ONE_CASE, SHAPE, WRONG_SOURCE, Project
from tests.tiers import nightly_after

QUICK = ("-p", "no:cacheprovider", ONE_CASE, "--fa-soak=1")
CHANGE = r"(, [+-][\d.]+ %( \(within noise\))?| \(too noisy for a ratio\))"
TIME = rf"good {SHAPE}: [\d.]+ -> [\d.]+ us{CHANGE}, correct"
# The variant says that it was reached, and then takes longer than any test waits.
WAIT = """\
    import pathlib, time
    pathlib.Path("reached").touch()
    time.sleep(600)
"""
SLOW_SOURCE = PYTHON_SOURCE.replace("    scores =", f"{WAIT}    scores =", 1)
HEADER_SOURCE = CUDA_SOURCE.replace("#ifndef BLOCK", '#include "size.h"\n#ifndef BLOCK')
HEADER_MANIFEST = MANIFEST + "entry: {include: [../common]}\ndefines: {BLOCK: 64}\n"


@pytest.fixture
def good(project: Project) -> Project:
    """A project with one right variant for the CPU."""
    project.python_variant("good")
    return project


def source_of(project: Project, name: str = "good", file: str = "entry.py") -> Path:
    """The path of a variant's source."""
    return project.folder / "kernels" / name / file


def test_a_save_gets_a_verdict_and_the_change_of_the_time(good: Project) -> None:
    """After a save, the first case, the checks and one line with the change of the time follow; Ctrl-C ends with 0."""
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        text = run.saved(source_of(good), f"{PYTHON_SOURCE}# edited\n")
        assert run.interrupt() == pytest.ExitCode.OK
    assert "fa: saved kernels/good/entry.py\n" in text
    assert re.search(r"  good: 1 of 1 checks passed, [\d.]+ s after the save\n  " + TIME, text)
    assert "fa: ended by Ctrl-C; exit status 0, that of the last verdict\n" in run.text
    (log,) = [path for path in good.logs if path.stem.endswith("-watch")]
    assert [("correct", "ok"), ("speed", "ok")] == [
        (record.kind, record.outcome) for record in read_records(log) if record.variant == "good"
    ]


@pytest.mark.nightly
def test_ctrl_c_before_a_save_keeps_the_exit_status(project: Project) -> None:
    """Without a save, the exit status is that of the first run."""
    project.python_variant("good", WRONG_SOURCE)
    with WatchedRun(project, "--fa-variant=good", "-k", "test_correct", *QUICK).started() as run:
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert "fa: ended by Ctrl-C; exit status 1, that of the first run\n" in run.text


@pytest.mark.nightly
def test_the_first_failure_is_shown_in_full(good: Project) -> None:
    """A wrong save shows its failure with the rerun command and has no time; a later right one is compared again."""
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        wrong = run.saved(source_of(good), WRONG_SOURCE)
        right = run.saved(source_of(good), PYTHON_SOURCE + "# mended\n")
        run.saved(source_of(good), WRONG_SOURCE)
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert f"-- test_correct[good-{CASE}] --\nwrong: max error" in wrong
    assert re.search(r"\n  rerun: .*--fa-variant=good .*-k test_correct\n", wrong)
    assert f"  good {SHAPE}: wrong in 1 of 1 checks, not timed\n" in wrong
    assert re.search(TIME, right)


@pytest.mark.nightly
def test_a_rename_is_a_save(good: Project) -> None:
    """An editor that writes a temporary file and renames it gets one verdict, on the new content."""
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        place, scratch = len(run.text), source_of(good, file=".entry.py.swp")
        scratch.write_text(WRONG_SOURCE, encoding="utf-8")
        scratch.replace(source_of(good))
        assert run.until(VERDICT, after=place).startswith("fa: not correct: good")
    assert re.findall(r"fa: saved .*", run.text[place:]) == ["fa: saved kernels/good/entry.py"]


@pytest.mark.nightly
def test_the_last_of_several_saves_counts(good: Project) -> None:
    """Saves in quick succession get one verdict, on the last content; no other content can have one in this time."""
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        place = len(run.text)
        for number in range(3):
            source_of(good).write_text(f"{SLOW_SOURCE}# {number}\n", encoding="utf-8")
        run.saved(source_of(good), f"{PYTHON_SOURCE}# the last one\n")
        assert re.findall(VERDICT, run.text[place:]) == ["correct"]


@pytest.mark.nightly
def test_a_save_abandons_the_run(good: Project) -> None:
    """A save during a run ends the candidate's call at once, and the new source gets the verdict."""
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        place = len(run.text)
        source_of(good).write_text(SLOW_SOURCE, encoding="utf-8")
        run.until("fa: saved", after=place)
        run.until_exists(good.folder, "reached")
        run.saved(source_of(good), PYTHON_SOURCE + "# quick\n")
        assert run.interrupt() == pytest.ExitCode.OK
    assert "fa: another save: this run is abandoned\n" in run.text[place:]
    assert re.findall(VERDICT, run.text[place:]) == ["correct"]


@pytest.mark.nightly
def test_ctrl_c_in_the_middle_of_a_run_is_an_interruption(good: Project) -> None:
    """Ctrl-C before the verdict on what was saved last ends with 2; a right verdict on older content does not count."""
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        run.saved(source_of(good), f"{PYTHON_SOURCE}# right\n")
        source_of(good).write_text(SLOW_SOURCE, encoding="utf-8")
        run.until_exists(good.folder, "reached")
        assert run.interrupt() == pytest.ExitCode.INTERRUPTED
    assert "fa: ended by Ctrl-C; exit status 2, that of an interrupted run\n" in run.text
    assert "fa: without a verdict on what was saved last: good\n" in run.text


@pytest.mark.nightly
def test_ctrl_c_after_a_mended_manifest_is_an_interruption(good: Project) -> None:
    """A manifest that was broken, and is not any more, is no known failure."""
    manifest = source_of(good, file="variant.yaml")
    whole = manifest.read_text(encoding="utf-8")
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        place = len(run.text)
        manifest.write_text("entry: [\n", encoding="utf-8")
        run.until("fa: error: ", after=place)
        source_of(good).write_text(SLOW_SOURCE, encoding="utf-8")
        manifest.write_text(whole, encoding="utf-8")
        run.until_exists(good.folder, "reached")
        assert run.interrupt() == pytest.ExitCode.INTERRUPTED
    assert "fa: without a verdict on what was saved last: good\n" in run.text


@pytest.mark.nightly
def test_an_abandoned_run_keeps_its_verdicts(project: Project) -> None:
    """A variant that was judged before a run was ended has a verdict and records: a failure is no interruption."""
    for name in ("first", "second"):
        project.python_variant(name)
    with WatchedRun(project, *QUICK).started() as run:
        source_of(project, "second").write_text(SLOW_SOURCE, encoding="utf-8")
        source_of(project, "first").write_text(WRONG_SOURCE, encoding="utf-8")
        log = run.until_exists(project.folder, "artifacts/records/*-watch.jsonl")
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert "fa: ended by Ctrl-C; exit status 1, that of the last verdict\n" in run.text
    assert "fa: without a verdict on what was saved last: second\n" in run.text
    assert ["wrong"] == [
        record.outcome for record in read_records(log) if (record.kind, record.variant) == ("correct", "first")
    ]


@pytest.mark.nightly
def test_what_the_first_run_has_not_reached_is_judged(project: Project) -> None:
    """After -x, a save also gets a verdict for the variants that have none, after the one that was saved."""
    project.python_variant("first", WRONG_SOURCE)
    project.python_variant("second", WRONG_SOURCE)
    with WatchedRun(project, "-x", *QUICK).started() as run:
        text = run.saved(source_of(project, "first"), PYTHON_SOURCE)
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert ["first: 1 of 1", "second: 0 of 1"] == re.findall(r"(\w+: \d of \d) checks passed", text)
    assert "\nfa: not correct: second, " in text


@pytest.mark.nightly
def test_what_was_not_run_is_no_success(good: Project) -> None:
    """A variant that the first run skipped has no verdict, so the exit status is not 0 if another one is right."""
    good.cuda_variant("one")
    with WatchedRun(good, "--fa-arch=sm_90a", "-k", "test_correct", *QUICK).started() as run:
        text = run.saved(source_of(good), f"{PYTHON_SOURCE}# edited\n")
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert "  good: 1 of 1 checks passed" in text
    assert "\nfa: not run: one, " in text


@pytest.mark.nightly
def test_a_failed_test_of_ones_own_stays_failed(good: Project) -> None:
    """No save repeats a test of one's own, so no verdict turns its failure into exit status 0."""
    good.write("test_own.py", "def test_own():\n    assert False\n")
    with WatchedRun(
        good, "--fa-variant=good", "test_own.py", "-k", "test_own or test_correct", *QUICK
    ).started() as run:
        text = run.saved(source_of(good), f"{PYTHON_SOURCE}# edited\n")
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert "\nfa: correct, " in text
    assert "fa: failed or not run in the first run, and not repeated: test_own.py::test_own\n" in run.text


@pytest.mark.nightly
def test_only_selected_variants_are_watched(project: Project) -> None:
    """With -k, the files of a variant without a selected test are not watched, and it has no part in a verdict."""
    for name in ("one", "two"):
        project.python_variant(name)
    with WatchedRun(project, "-k", "one and test_correct", *QUICK).started() as run:
        place = len(run.text)
        source_of(project, "two").write_text(WRONG_SOURCE, encoding="utf-8")
        run.saved(source_of(project, "one"), f"{PYTHON_SOURCE}# edited\n")
        assert run.interrupt() == pytest.ExitCode.OK
    assert "fa: watching 2 files of one; Ctrl-C ends\n" in run.text
    assert ["correct"] == re.findall(VERDICT, run.text[place:])
    assert "two" not in run.text[place:]


@pytest.mark.nightly
def test_a_broken_manifest_is_one_error(good: Project) -> None:
    """A save that breaks the manifest gives one error; after it is mended, times are compared with the last good."""
    manifest = source_of(good, file="variant.yaml")
    with WatchedRun(good, "--fa-variant=good", *QUICK).started() as run:
        place = len(run.text)
        save_at_once(manifest, PYTHON_MANIFEST + "suports: {}\n")
        error = run.until("fa: error: .*\n", after=place)
        mended = run.saved(manifest, PYTHON_MANIFEST.replace("a test needs one", "another reason"), at_once=True)
        assert run.interrupt() == pytest.ExitCode.OK
    assert "good cannot be used" in error
    assert "suports" in error
    assert run.text[place:].count("fa: error:") == 1
    assert re.search(TIME, mended)


@pytest.mark.nightly
def test_another_variant_may_appear(good: Project) -> None:
    """A new folder with a manifest is a new variant, if the selection includes it; the others are not run again."""
    with WatchedRun(good, *QUICK).started() as run:
        place = len(run.text)
        source_of(good, "other").parent.mkdir()
        source_of(good, "other").write_text(PYTHON_SOURCE, encoding="utf-8")
        text = run.saved(source_of(good, "other", "variant.yaml"), PYTHON_MANIFEST)
    assert "  other: 1 of 1 checks passed" in text
    assert "  good" not in run.text[place:]


@pytest.mark.nightly
def test_a_header_concerns_the_variants_that_include_it(project: Project) -> None:
    """The compiler knows who includes a header: both variants are built again, and with their own source only one."""
    project.write("kernels/common/size.h", "#define SIZE 32\n")
    project.write("kernels/common/unused.h", "#define UNUSED\n")
    for name in ("one", "two"):
        project.cuda_variant(name, HEADER_SOURCE, HEADER_MANIFEST)
    with WatchedRun(project, "--fa-arch=sm_90a", "-k", "test_build", "-p", "no:cacheprovider").started() as run:
        project.write("kernels/common/unused.h", "#define UNUSED 1\n")
        both = run.saved(project.folder / "kernels/common/size.h", "#define SIZE 64\n")
        one = run.saved(source_of(project, "one", "kernel.cu"), f"{HEADER_SOURCE}// edited\n")
        assert run.interrupt() == pytest.ExitCode.OK
    assert "fa: saved kernels/common/size.h\n" in both
    assert re.findall(r"  (\w+): built for sm_90a in [\d.]+ s, \d+ registers, 0 B spilled", both) == ["one", "two"]
    assert re.findall(r"  (\w+): built for", one) == ["one"]


@pytest.mark.nightly
def test_without_a_gpu_a_cuda_variant_is_built_but_not_run(project: Project) -> None:
    """A variant that this machine cannot run is built; the verdict says that it was not run, and is no success."""
    project.cuda_variant("one")
    with WatchedRun(project, "--fa-arch=sm_90a", "-p", "no:cacheprovider").started() as run:
        text = run.saved(source_of(project, "one", "kernel.cu"), f"{CUDA_SOURCE}// edited\n")
        assert run.interrupt() == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"  one: built for sm_90a in [\d.]+ s, \d+ registers, 0 B spilled\n", text)
    assert "  not run: one needs a GPU, and this machine has none\nfa: not run: one, " in text


@pytest.mark.nightly
def test_a_missing_header_mends_the_build(project: Project) -> None:
    """A failed build is repeated when the header that it lacked is created."""
    project.cuda_variant("one", CUDA_SOURCE.replace("#ifndef BLOCK", '#include "size.h"\n#ifndef BLOCK'))
    with WatchedRun(project, "--fa-arch=sm_90a", "-k", "test_build", "-p", "no:cacheprovider").started() as run:
        text = run.saved(source_of(project, "one", "size.h"), "#define SIZE 1\n")
        assert run.interrupt() == pytest.ExitCode.OK
    assert "size.h: No such file or directory" in run.text
    assert "  one: built for sm_90a" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    nightly_after(
        3,
        [
            (["-n", "1"], "one process at a time builds, checks and times; drop -n"),
            (["--fa-gate=0.95"], "decides no gate; drop --fa-gate"),
            (["--ncu"], "profiles nothing; drop --ncu"),
            (["--fa-sanitize=memcheck"], "runs no sanitizer; drop --fa-sanitize"),
            (["--fa-static"], "--fa-static only compiles; drop --fa-static"),
            (["--fa-selftest"], "drop --fa-selftest"),
            (["--fa-no-build"], "a source that was saved must be compiled; drop --fa-no-build"),
            (["--fa-save"], "drop --fa-save"),
            (["--fa-html=report.html"], "drop --fa-html"),
            (["--fa-shard=1/2"], "drop --fa-shard"),
            (["--benchmark-compare"], "drop --benchmark-compare"),
            (["--benchmark-save=x"], "drop --benchmark-save=x"),
            ([], "stdout is not a terminal, so no one could read the lines and press Ctrl-C; drop --fa-watch"),
        ],
    ),
    ids=lambda value: value[0] if isinstance(value, list) and value else "",
)
def test_what_cannot_be_watched_is_refused(good: Project, arguments: list[str], words: str) -> None:
    """An option that does not fit, and a run without a terminal, end with one line and exit status 4."""
    run = good.suite("--fa-watch", "--fa-variant=good", *arguments)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in run.all_lines if "--fa-watch: " in line]
    assert line.startswith("ERROR: --fa-watch: ")
    assert line.endswith(words)


def test_nothing_to_repeat_ends_the_run(good: Project) -> None:
    """If no test of the shipped suite was selected, the run ends and says why."""
    good.write("test_own.py", "def test_own(fa_variant):\n    pass\n")
    with WatchedRun(good, "--fa-variant=good", "test_own.py", "-k", "test_own", *QUICK) as run:
        run.until("fa: --fa-watch ends: no test of the shipped suite was selected, so nothing can be repeated\n")
        assert run.ended() == pytest.ExitCode.OK
