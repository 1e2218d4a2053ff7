"""The cache: what is seen as changed, what is found again, what survives kills, corruption and neighbours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from pytest_fa.build import cache as builds
from pytest_fa.build import command, keys
from pytest_fa.build.builder import BuildFailure, ensure
from pytest_fa.records.built import Build

if TYPE_CHECKING:
    from tests.unit.build.conftest import Workplace

# Another process that builds: python -c BUILDER <kernels> <cache>.  Lines of JSON: what the builder says, then the end.
BUILDER = """\
import json, sys
from pathlib import Path
from pytest_fa.build.builder import ensure
from pytest_fa.catalog.manifest import read_manifest

root, cache = Path(sys.argv[1]), Path(sys.argv[2])
(variant,) = read_manifest(root / "tile" / "variant.yaml", root)
report = ensure([(variant, "sm_80")], cache, say=lambda text: print(json.dumps(text), flush=True))
build = report.outcomes["tile", "sm_80"]
print(json.dumps({"compiled": report.compiled, "library": build.library}), flush=True)
"""


def start_builder(place: Workplace) -> subprocess.Popen[str]:
    """Build in another process, in a process group of its own."""
    command = [sys.executable, "-c", BUILDER, str(place.root), str(place.cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


# -- what is seen as changed ------------------------------------------------------------------------------------------


def edit_source(place: Workplace) -> None:
    """Another kernel."""
    source = place.folder / "kernel.cu"
    source.write_text(source.read_text(encoding="utf-8").replace("+ STEP", "- STEP"), encoding="utf-8")


def edit_header(place: Workplace) -> None:
    """Another header beside the source."""
    (place.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")


def edit_shared_header(place: Workplace) -> None:
    """Another header in the root's include folder."""
    (place.root / "include" / "shared.h").write_text("#define SHARED 1.5f\n", encoding="utf-8")


def edit_header_long_ago(place: Workplace) -> None:
    """Another header with a time of 2001, as an unpacked archive has it."""
    edit_header(place)
    os.utime(place.folder / "tile.h", (10**9, 10**9))


def add_define(place: Workplace) -> None:
    """Another definition in the manifest."""
    place.write_manifest("defines: {STEP: 2}\n")


def add_flag(place: Workplace) -> None:
    """Another compiler flag in the manifest."""
    place.write_manifest("flags: [-use_fast_math]\n")


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    "change", [edit_source, edit_header, edit_shared_header, edit_header_long_ago, add_define, add_flag]
)
def test_change_is_compiled(workplace: Workplace, change: Callable[[Workplace], None]) -> None:
    """Whatever shapes the code makes a new build, and the old one stays."""
    before = workplace.library()

    change(workplace)
    report = workplace.ensure()

    build = report.outcomes["tile", "sm_80"]
    assert isinstance(build, Build)
    assert report.compiled == 1
    assert workplace.cache / build.library != before
    assert (workplace.cache / build.library).is_file()
    assert before.is_file()


@pytest.mark.needs_nvcc
def test_compiler_flags_from_the_environment_are_compiled(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVCC_APPEND_FLAGS shapes the code without a word in the manifest, so it makes a build of its own."""
    plain = workplace.build()

    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DSTEP=3")
    with_flags = workplace.ensure()
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    again = workplace.ensure()

    (other,) = with_flags.outcomes.values()
    assert isinstance(other, Build)
    assert with_flags.compiled == 1
    assert other.code_identity != plain.code_identity
    assert (again.compiled, again.outcomes["tile", "sm_80"]) == (0, plain)


@pytest.mark.needs_nvcc
def test_reverted_edit_finds_the_old_leaf(workplace: Workplace) -> None:
    """A build is named by content: undoing an edit costs no compilation."""
    before, old_text = workplace.build(), (workplace.folder / "tile.h").read_text(encoding="utf-8")
    edit_header(workplace)
    edited = workplace.build()

    (workplace.folder / "tile.h").write_text(old_text, encoding="utf-8")
    report = workplace.ensure()

    assert edited.library != before.library
    assert (report.compiled, report.cached, report.outcomes["tile", "sm_80"]) == (0, 1, before)


def touch(path: Path) -> None:
    """A new time."""
    path.touch()


def rewrite(path: Path) -> None:
    """The same text, written again."""
    path.write_bytes(path.read_bytes())


def replace(path: Path) -> None:
    """The same text in another file, as after a checkout."""
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.needs_nvcc
@pytest.mark.parametrize("disturb", [touch, rewrite, replace])
def test_untouched_content_is_a_hit(workplace: Workplace, disturb: Callable[[Path], None]) -> None:
    """Times and inodes move, content does not: nothing is compiled."""
    for path in (workplace.folder / "kernel.cu", workplace.folder / "tile.h", workplace.root / "include" / "shared.h"):
        disturb(path)

    report = workplace.ensure()

    assert (report.compiled, report.cached) == (0, 1)


@pytest.mark.needs_nvcc
def test_same_content_elsewhere_has_the_same_code_identity(workplace: Workplace, tmp_path: Path) -> None:
    """No folder name reaches the machine code: compiled anew in another folder, it is the same code."""
    here = workplace.build()
    elsewhere = type(workplace)(tmp_path / "quite another folder")
    shutil.copytree(workplace.root, elsewhere.root)
    shutil.copytree(workplace.cache / "binding", elsewhere.cache / "binding")

    report = elsewhere.ensure()

    (there,) = report.outcomes.values()
    assert isinstance(there, Build)
    assert report.compiled == 1
    assert here.code_identity is not None
    assert there.code_identity == here.code_identity


@pytest.mark.needs_nvcc
def test_definitions_have_leaves_of_their_own(workplace: Workplace) -> None:
    """Two variants of one source lie side by side, and each is found by its own definitions."""
    plain = workplace.build()
    add_define(workplace)
    defined = workplace.build()

    workplace.write_manifest("")

    assert workplace.build() == plain
    assert defined.code_identity != plain.code_identity


@pytest.mark.needs_nvcc
def test_edit_during_compilation_is_not_published(workplace: Workplace) -> None:
    """A file that changes while it is compiled might bless other code: there is no build, and the message says so."""
    edit_header(workplace)

    def edit_again(text: str) -> None:
        if text.startswith("building"):
            time.sleep(0.05)  # file systems stamp changes with the time of the last clock tick
            edit_shared_header(workplace)

    message = workplace.failure(say=edit_again)

    assert message == "tile for sm_80: root/include/shared.h changed while it was being compiled; run again"
    assert "for sm_80: no build" in workplace.failure(no_build=True)


# -- warm -------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.needs_nvcc
@pytest.mark.usefixtures("forbid_programs")
def test_warm_lookup_starts_no_program(workplace: Workplace) -> None:
    """Where everything is in the cache, no program is started and it takes milliseconds."""
    reports = [workplace.ensure() for _ in range(3)]

    assert [(report.compiled, report.cached) for report in reports] == [(0, 1)] * 3
    assert min(report.seconds for report in reports) < 0.05


@pytest.mark.usefixtures("forbid_programs")
def test_nothing_asked_for_needs_no_compiler(tmp_path: Path, hide_compilers: Callable[[], None]) -> None:
    """A batch without requests, as a run of Python variants has it, asks for no compiler."""
    hide_compilers()

    report = ensure([], tmp_path)

    assert (report.outcomes, report.compiled, report.cached) == ({}, 0, 0)


# -- neighbours, kills, corruption ------------------------------------------------------------------------------------


@pytest.mark.needs_nvcc
def test_two_processes_compile_once(workplace: Workplace) -> None:
    """Of two processes that want one build at once, one compiles and both get it."""
    edit_header(workplace)
    with builds.locked(workplace.cache, lambda _: None):
        builders = [start_builder(workplace) for _ in range(2)]
        first_lines = [json.loads(each.stdout.readline()) for each in builders if each.stdout]

    ends = [json.loads(each.communicate(timeout=60)[0].splitlines()[-1]) for each in builders]

    assert first_lines == [f"waiting for another build in {workplace.cache}"] * 2
    assert sorted(end["compiled"] for end in ends) == [0, 1]
    assert len({end["library"] for end in ends}) == 1
    assert (workplace.cache / ends[0]["library"]).is_file()


@pytest.mark.needs_nvcc
def test_build_after_a_kill(workplace: Workplace) -> None:
    """`kill -9` in the middle of a build leaves a staging folder; the next build works and sweeps it."""
    edit_header(workplace)
    builder = start_builder(workplace)
    assert builder.stdout
    said = json.loads(builder.stdout.readline())
    left_over = workplace.stages()
    os.killpg(builder.pid, signal.SIGKILL)
    builder.communicate()

    report = workplace.ensure()

    assert said.startswith("building 1 with nvcc")
    assert len(left_over) == 1
    assert isinstance(report.outcomes["tile", "sm_80"], Build)
    assert report.compiled == 1
    assert workplace.stages() == []


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    ("name", "content"),
    [("build.json", b"{"), ("build.json", b""), ("build.json", None), ("kernel.so", None)],
    ids=["half a build.json", "an empty build.json", "no build.json", "no kernel.so"],
)
def test_broken_leaf_is_rebuilt_once(workplace: Workplace, name: str, content: bytes | None) -> None:
    """A build that is not whole is compiled again and is whole then: the build after that finds it."""
    path = workplace.library().with_name(name)
    path.unlink()
    if content is not None:
        path.write_bytes(content)

    rebuilt = workplace.ensure()
    after = workplace.ensure()

    build = rebuilt.outcomes["tile", "sm_80"]
    assert isinstance(build, Build)
    assert rebuilt.compiled == 1
    assert (workplace.cache / build.library).is_file()
    assert (after.compiled, after.cached) == (0, 1)


@pytest.mark.needs_nvcc
def test_failing_variant_does_not_stop_its_neighbour(workplace: Workplace) -> None:
    """Of a bad and a good variant in one batch the good one is built; the bad one's error is told once."""
    good = msgspec.structs.replace(workplace.variant(), name="good", defines={"STEP": 4})
    bad = msgspec.structs.replace(workplace.variant(), name="bad", defines={"STEP": "nonsense"})

    report = ensure([(bad, "sm_80"), (good, "sm_80")], workplace.cache)

    build, failure = report.outcomes["good", "sm_80"], report.outcomes["bad", "sm_80"]
    assert isinstance(build, Build)
    assert (workplace.cache / build.library).is_file()
    assert isinstance(failure, BuildFailure)
    first_line, *_, last_line = failure.message.splitlines()
    assert first_line == "bad for sm_80: it did not compile:"
    assert failure.message.count('error: identifier "nonsense" is undefined') == 1
    assert last_line.startswith("command: ")
    assert "-DSTEP=nonsense" in last_line
    assert failure.message.count("command: ") == 1
    assert "ptxas info" not in failure.message
    assert workplace.stages() == []


@pytest.mark.needs_nvcc
def test_failure_is_not_remembered(workplace: Workplace) -> None:
    """A variant that did not compile is tried again; once its source is right, it is built."""
    shared = workplace.root / "include" / "shared.h"
    shared.write_text("#error not yet\n", encoding="utf-8")
    message = workplace.failure()

    edit_shared_header(workplace)

    assert "root/include/shared.h" in message
    assert "#error not yet" in message
    assert workplace.build().variant == "tile"


# -- without building -------------------------------------------------------------------------------------------------


@pytest.mark.needs_nvcc
@pytest.mark.usefixtures("forbid_programs")
def test_no_build_needs_no_compiler(workplace: Workplace, hide_compilers: Callable[[], None]) -> None:
    """`no_build` finds a build where no compiler is installed."""
    with_compiler = workplace.build()
    hide_compilers()

    report = workplace.ensure(no_build=True)

    assert (report.compiled, report.cached) == (0, 1)
    assert report.outcomes["tile", "sm_80"] == with_compiler


@pytest.mark.needs_nvcc
def test_no_build_finds_a_carried_leaf(
    workplace: Workplace, tmp_path: Path, hide_compilers: Callable[[], None]
) -> None:
    """Sources and cache copied to other folders, each its own, still belong together."""
    carried = type(workplace)(tmp_path / "target machine")
    shutil.copytree(workplace.root, carried.root)
    shutil.copytree(workplace.cache / "builds", carried.cache / "builds")
    hide_compilers()

    build = carried.build(no_build=True)

    assert (carried.cache / build.library).is_file()
    assert build.compiler.startswith("nvcc ")


@pytest.mark.needs_nvcc
def test_no_build_of_a_changed_source(workplace: Workplace) -> None:
    """The message names what changed since the build was built and says what to do."""
    edit_header(workplace)

    assert workplace.failure(no_build=True) == (
        f"tile for sm_80: no build in {workplace.cache}: changed since it was built: src/tile.h; "
        "drop --fa-no-build, or build it there first"
    )


@pytest.mark.needs_nvcc
def test_no_build_compares_with_the_newest_leaf(workplace: Workplace) -> None:
    """Of several leaves the newest counts: the message names what changed since then, not since an older one."""
    edit_header(workplace)
    workplace.build()
    edit_source(workplace)

    assert "changed since it was built: src/kernel.cu;" in workplace.failure(no_build=True)


@pytest.mark.needs_nvcc
def test_no_build_of_a_leaf_without_its_library(workplace: Workplace) -> None:
    """Where nothing changed and the library is gone, the message says that, not that something changed."""
    workplace.library().unlink()

    message = workplace.failure(no_build=True)

    assert "changed since it was built" not in message
    assert "kernel.so" in message


def test_no_build_of_what_was_never_built(unbuilt: Workplace) -> None:
    """The message says that there never was a build, where it was looked for and what to do."""
    assert unbuilt.failure(no_build=True) == (
        f"tile for sm_80: no build in {unbuilt.cache}: it was never built with these flags and definitions; "
        "drop --fa-no-build, or build it there first"
    )


@pytest.mark.needs_nvcc
def test_forget(workplace: Workplace) -> None:
    """`forget` removes a variant's builds for its present definitions, and no other variant's."""
    kept = workplace.library()
    other = msgspec.structs.replace(workplace.variant(), name="other")
    shutil.copytree(
        builds.scope(workplace.cache, workplace.variant(), "sm_80"), builds.scope(workplace.cache, other, "sm_80")
    )

    builds.forget(workplace.cache, other, ("sm_80",))

    report = ensure([(workplace.variant(), "sm_80"), (other, "sm_80")], workplace.cache, no_build=True)
    assert isinstance(report.outcomes["tile", "sm_80"], Build)
    assert isinstance(report.outcomes["other", "sm_80"], BuildFailure)
    assert kept.is_file()


# -- parts ------------------------------------------------------------------------------------------------------------


def test_dependencies_of_a_depfile(tmp_path: Path) -> None:
    """Continued lines, escaped spaces and repeats are read as make reads them; generated files are left out."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kernel.cu").write_bytes(b"a")
    (tmp_path / "with space.h").write_bytes(b"b")
    depfile = "kernel.so : src/kernel.cu \\\n    with\\ space.h \\\n  src/kernel.cu generated/fa_instantiations.h\n"

    (tmp_path / "deps.d").write_text(depfile, encoding="utf-8")

    found = command.read_dependencies(tmp_path)

    assert found == (
        ("src/kernel.cu", "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"),
        ("with space.h", "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"),
    )


def test_file_hash_of_a_missing_file(tmp_path: Path) -> None:
    """A file that is not there has no hash."""
    assert keys.file_hash(str(tmp_path / "nothing")) is None


def test_file_hash_sees_an_edit_that_keeps_size_and_time(tmp_path: Path) -> None:
    """Same size, same modification time, other content: the change time tells."""
    path = tmp_path / "tile.h"
    path.write_bytes(b"#define BLOCK 64")
    os.utime(path, (10**9, 10**9))
    before = keys.file_hash(str(path))

    time.sleep(0.02)  # two clock ticks
    path.write_bytes(b"#define BLOCK 96")
    os.utime(path, (10**9, 10**9))

    assert keys.file_hash(str(path)) != before
