"""Processes with one cache: the same build is compiled once, others go on side by side, and kills leave no lock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pytest_fa.build import cache as builds
from pytest_fa.build import compile_batch, recipe
from pytest_fa.build.builder import ensure
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Variant
from pytest_fa.locks import held_lock, lock_if_free
from pytest_fa.records.built import Build
from tests.unit.build.conftest import Workplace

pytestmark = pytest.mark.needs_nvcc

# A process that builds: python -c BUILDER <kernels> <cache> <variant>...  It prints JSON lines: progress messages, then
# the result.
BUILDER = """\
import json, sys
from pathlib import Path
from pytest_fa.build.builder import ensure
from pytest_fa.catalog.manifest import read_manifest

root, cache, *names = map(Path, sys.argv[1:])
variants = [read_manifest(root / name / "variant.yaml", root)[0] for name in names]
requests = [(variant, "sm_80") for variant in variants]
report = ensure(requests, cache, say=lambda text: print(json.dumps(text), flush=True))
libraries = [build.library for build in report.outcomes.values()]
print(json.dumps({"compiled": report.compiled, "libraries": libraries}), flush=True)
"""
SECONDS = 120.0  # for a build on a busy machine


def start_builder(place: Workplace, *names: str) -> subprocess.Popen[str]:
    """Start a build in another process, with its own process group."""
    command = [sys.executable, "-c", BUILDER, str(place.root), str(place.cache), *(names or ("tile",))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def next_line(builder: subprocess.Popen[str]) -> str:
    """The next progress message of a builder."""
    assert builder.stdout
    return str(json.loads(builder.stdout.readline()))


def lock_of(place: Workplace, name: str) -> Path:
    """The lock of a variant's build."""
    return builds._lock_path(place.cache, variant_of(place, name), "sm_80")


def variant_of(place: Workplace, name: str) -> Variant:
    """A variant of the workplace."""
    return read_manifest(place.root / name / "variant.yaml", place.root)[0]


def add(place: Workplace, name: str) -> None:
    """Add a variant that is like `tile`, and change both so that they must be compiled."""
    (place.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")
    shutil.copytree(place.folder, place.root / name)


def test_a_build_does_not_wait_for_another_variant(workplace: Workplace) -> None:
    """While another process compiles one variant, the other is built; then this process waits, and uses that build."""
    add(workplace, "other")
    lines: list[str] = []
    with held_lock(lock_of(workplace, "tile"), "the build"):
        builder = start_builder(workplace, "tile", "other")
        lines += [next_line(builder) for _ in range(3)]
    result = json.loads(builder.communicate(timeout=SECONDS)[0].splitlines()[-1])
    building, done, waiting = lines
    assert building.startswith("building 1 with nvcc")
    assert building.endswith(": other/sm_80")
    assert done.startswith("1/1 other/sm_80 (")
    assert waiting.startswith(f"waiting for the build of tile/sm_80, held by process {os.getpid()} (")
    assert (result["compiled"], len(result["libraries"])) == (2, 2)


@pytest.mark.nightly
def test_two_processes_compile_once(workplace: Workplace) -> None:
    """If two processes need the same build at once, one compiles it and both get it."""
    (workplace.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")
    with held_lock(lock_of(workplace, "tile"), "the build"):
        builders = [start_builder(workplace) for _ in range(2)]
        first_lines = [next_line(builder) for builder in builders]
    results = [json.loads(builder.communicate(timeout=SECONDS)[0].splitlines()[-1]) for builder in builders]
    prefix = f"waiting for the build of tile/sm_80, held by process {os.getpid()} ("
    assert [line.startswith(prefix) for line in first_lines] == [True, True]
    assert sorted(result["compiled"] for result in results) == [0, 1]
    (library,) = {library for result in results for library in result["libraries"]}
    assert (workplace.cache / library).is_file()


@pytest.mark.nightly
def test_a_build_is_published_while_others_of_its_batch_are_compiled(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits for one build of a batch need not wait for the whole batch."""
    add(workplace, "other")
    for module in (recipe, compile_batch):
        monkeypatch.setattr(module, "parallel_jobs", lambda: 1)
    variants = [variant_of(workplace, name) for name in ("tile", "other")]
    published = dict[str, bool]()

    def look(text: str) -> None:
        if text.startswith("2/2 "):  # the second compiler has just ended
            for variant in variants:
                (outcome,) = ensure([(variant, "sm_80")], workplace.cache, no_build=True).outcomes.values()
                is_there = isinstance(outcome, Build)
                with lock_if_free(lock_of(workplace, variant.name), "the build") as is_free:
                    published[variant.name] = is_there and is_free

    report = ensure([(variant, "sm_80") for variant in variants], workplace.cache, say=look)
    assert report.compiled == 2
    assert sorted(published.values()) == [False, True]


def test_cleaning_waits_for_a_build_in_progress(workplace: Workplace) -> None:
    """--fa-clean deletes a build after it was published; the process that compiled it is not disturbed."""
    (workplace.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")
    builder, lines = start_builder(workplace), list[str]()
    assert next_line(builder).startswith("building 1 with nvcc")
    builds.delete_builds(workplace.cache, workplace.variant(), ("sm_80",), lines.append)
    result = json.loads(builder.communicate(timeout=SECONDS)[0].splitlines()[-1])
    (line,) = lines
    assert line.startswith(f"waiting for the build of tile/sm_80, held by process {builder.pid} (")
    assert result["compiled"] == 1
    assert list((workplace.cache / "builds").glob("*/*/kernel.so")) == []


def test_a_staging_folder_in_use_is_not_deleted(workplace: Workplace) -> None:
    """A builder deletes the staging folders of processes that have ended, and no others."""
    stale = workplace.cache / ".stage-of-an-earlier-version"
    stale.mkdir()
    is_in_use, may_end = threading.Event(), threading.Event()

    def use() -> None:
        with builds.staging_folder(workplace.cache):
            is_in_use.set()
            may_end.wait(SECONDS)

    user = threading.Thread(target=use)
    user.start()
    assert is_in_use.wait(SECONDS)
    (used,) = workplace.stages()
    with builds.staging_folder(workplace.cache) as own:
        assert sorted(workplace.stages()) == sorted((used, own))
    may_end.set()
    user.join(SECONDS)
    assert workplace.stages() == []


@pytest.mark.nightly
def test_build_after_a_kill(workplace: Workplace) -> None:
    """After `kill -9` during a build, the next build does not wait, and deletes the staging folder."""
    (workplace.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")
    builder, lines = start_builder(workplace), list[str]()
    message = next_line(builder)
    stages = workplace.stages()
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()

    report = workplace.ensure(say=lines.append)

    assert message.startswith("building 1 with nvcc")
    assert len(stages) == 1
    assert report.compiled == 1
    assert [line for line in lines if line.startswith("waiting")] == []
    assert workplace.stages() == []


@pytest.mark.nightly
def test_more_builds_than_locks(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process holds a limited number of locks, and compiles the rest of a large batch afterwards."""
    monkeypatch.setattr(builds, "MAX_LOCKS", 1)
    add(workplace, "other")
    lines: list[str] = []
    requests = [(variant_of(workplace, name), "sm_80") for name in ("tile", "other")]
    assert ensure(requests, workplace.cache, say=lines.append).compiled == 2
    assert len([line for line in lines if line.startswith("building 1 ")]) == 2
