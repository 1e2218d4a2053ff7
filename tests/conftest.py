"""Fixtures of all tests: a separate cache, a writer of small variants, and skips for missing hardware or compilers."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from pytest_fa.build.keys import PACKAGE
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from pytest_fa.host.resident import end_resident
from pytest_fa.records.environment import find_gpu
from tests.factories import MANIFEST, WriteVariant
from tests.tiers import mark_nightly_parameters

# Fixtures: small projects in which pytest runs, recordings of other programs, and jobs for workers.
pytest_plugins = ("tests.projects", "tests.recordings", "tests.worker_jobs")

# Environment variables that change the output of an inner pytest: under CI, its short summary has whole messages.
CHANGES_OUTPUT = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "FORCE_COLOR", "NO_COLOR")
for _name in CHANGES_OUTPUT:
    os.environ.pop(_name, None)

# The processes that tests start read compiled modules and write none: of a file that a test changes twice in a second,
# Python would take the older code.  The tests' own processes do as they were told; those of pytest-xdist inherit it.
os.environ.setdefault("FA_TEST_WRITES_BYTECODE", "" if sys.dont_write_bytecode else "yes")
sys.dont_write_bytecode = not os.environ["FA_TEST_WRITES_BYTECODE"]
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# A shell that starts these tests in the background ignores Ctrl-C for them; tests that send it to a child would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Only inner runs of pytest use a resident server, and never that of the user.
os.environ["PYTEST_FA_SERVER"] = "off"

# Under pytest-xdist, each process and its children use one core.  Otherwise torch would use all cores in every process,
# and the judge's tests would take three times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# The files whose tests take the longest, which start first: otherwise one process would end long after the others.
LONGEST = (
    "test_planted_faults.py",
    "test_selftest.py",
    "test_places.py",
    "test_watch.py",
    "test_conventions.py",
    "test_cluster_kernels.py",
    "test_long_kernels.py",
    "test_alibi_bias_mask.py",
    "test_diagnosis_matrix.py",
    "test_gradients.py",
    "test_judged.py",
    "test_gradient_mistakes.py",
    "test_cache.py",
    "test_properties.py",
    "test_float32.py",
    "test_extension.py",
    "test_hostile_worker.py",
    "test_exploits.py",
    "test_first_ten_minutes.py",
    "test_terminal.py",
    "test_rerun.py",
    "test_mutations.py",
    "test_kills.py",
    "test_ncu.py",
    "test_exploits_compile.py",
    "test_overlap.py",
    "test_compiling.py",
    "test_replay.py",
    "test_libraries.py",
    "test_jobs.py",
    "test_exports.py",
    "test_cheats.py",
    "test_sinks.py",
    "test_score_parts.py",
    "test_gradient_data.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without Python's garbage collector, and let it pass over what was collected from then on.

    Thousands of tests are half a million objects, which live to the end.  Looking at all of them takes 0.3 s, and each
    run of pytest in the tests' own process does that when it ends.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave some parameters to the nightly run, and put the files that take the longest first."""
    mark_nightly_parameters(items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package, and choose the socket of the resident server that inner runs use."""
    if not hasattr(config, "workerinput"):
        if not sys.dont_write_bytecode:
            compileall.compile_dir(PACKAGE, quiet=2)
        os.environ["FA_TEST_SERVER"] = str(Path(tempfile.mkdtemp(prefix="fa-")) / "server.sock")


SLOWEST_SHOWN = 10


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the files whose tests took the longest, so that a minute that creeps in is seen."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            name = report.nodeid.partition("::")[0]
            seconds[name] += report.duration  # type: ignore[assignment]  # a Counter of floats
            tests[name] += report.when == "call"
    if len(seconds) > 1:
        terminalreporter.section(f"slowest {min(SLOWEST_SHOWN, len(seconds))} of {len(seconds)} files")
        for name, total in seconds.most_common(SLOWEST_SHOWN):
            terminalreporter.line(f"{total:7.1f} s  {tests[name]:4} tests  {name}")
        terminalreporter.line(f"{sum(seconds.values()):7.1f} s  {sum(tests.values()):4} tests  in all files")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the resident server if a test has started it."""
    if not hasattr(config, "workerinput"):
        place = Path(os.environ["FA_TEST_SERVER"])
        end_resident(place)
        shutil.rmtree(place.parent, ignore_errors=True)  # the server removes its socket at the same time


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a build cache that is shared by all tests of a session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _separate_user_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect the user's cache folder, and hide the outer pytest's options from an inner pytest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def write_variant(tmp_path: Path) -> WriteVariant:
    """Return a function that writes a variant to `tmp_path/kernels` and returns its folder.

    Call it as `write_variant("name", manifest=..., **{"kernel.cu": ...})`.
    """

    def write(name: str, *, manifest: str = MANIFEST, root: Path | None = None, **files: str) -> Path:
        folder = (root or tmp_path / "kernels") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "variant.yaml").write_text(textwrap.dedent(manifest), encoding="utf-8")
        for filename, text in files.items():
            (folder / filename).write_text(textwrap.dedent(text), encoding="utf-8")
        return folder

    return write


def _has_nvcc(cache: Path) -> bool:
    try:
        find_toolchain(cache)
    except ToolchainError:
        return False
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU before any of their fixtures, including module fixtures, builds something."""
    if item.get_closest_marker("needs_gpu") and find_gpu() is None:
        pytest.skip("this machine has no GPU")


@pytest.fixture(autouse=True)
def _skip_what_this_machine_lacks(request: pytest.FixtureRequest, shared_cache: Path) -> None:
    if request.node.get_closest_marker("needs_nvcc") and not _has_nvcc(shared_cache):
        pytest.skip("this machine has no CUDA compiler")
