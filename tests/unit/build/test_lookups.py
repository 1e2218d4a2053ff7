"""What a compiler looked for in vain is part of a build: a file that would now be found first is compiled."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pytest_fa.build import cache as builds
from pytest_fa.build.command import stage, toolchain_key
from pytest_fa.build.lookups import LookupReader, Searched, SearchPath, default_folders, search_path
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError
from tests.tiers import nightly_but
from tests.unit.build.conftest import SOURCE, Workplace

GXX = shutil.which("g++") or ""
pytestmark = pytest.mark.skipif(not GXX, reason="needs g++")

ASKING = """\
#if __has_include("impl.cu")
#error impl.cu
#endif
#if __has_include("table.def") || __has_include(<plain>)
#error a file with another suffix, or with none
#endif
#define HAS(name) __has_include(name)
#if HAS("lib/wrapped.inc") || /* a comment */ HAS( <after.h> )
#error by a macro
#endif
#include "sub/part.h"
#include <ext.h>
#define EXTRA "extra.h"
#include EXTRA
"""
CPATH, CPLUS, AFTER = "cpath", "cplus", "after"
# A file that appears, and how the reason names it.
NEW = {
    "kernels/tile/impl.cu": "src/impl.cu",
    "kernels/tile/table.def": "src/table.def",
    "kernels/include/plain": "root/include/plain",
    "kernels/tile/lib/wrapped.inc": "src/lib",
    "kernels/tile/shared.h": "src/shared.h",  # before that of kernels/include
    "kernels/tile/sub/deep.h": "src/sub/deep.h",  # beside the including file
    "kernels/tile/deep.h": "src/deep.h",
    "kernels/tile/extra.h": "src/extra.h",  # whose name a macro has
    "kernels/tile/sub/extra.h": "",  # no file of that folder asks for it
    "kernels/include/ext.h": "root/include/ext.h",
    "kernels/tile/cuda_runtime.h": "src/cuda_runtime.h",  # which nvcc includes by itself
    f"{CPATH}/ext.h": "{}/cpath/ext.h",
    f"{CPLUS}/table.def": "{}/cplus/table.def",
    f"{AFTER}/after.h": "{}/after/after.h",
    "absent/ext.h": "{}/absent",  # a folder of CPATH that did not exist
    "kernels/tile/new.h": "",
    "kernels/tile/notes.md": "",
}
USUAL = ("kernels/tile/impl.cu", "kernels/tile/sub/deep.h", f"{CPATH}/ext.h", "kernels/tile/notes.md")


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A built variant whose source asks for many files, with folders that the environment names."""
    folder = tmp_path_factory.mktemp("asking")
    place = Workplace(folder)
    place.write()
    for name in (CPATH, CPLUS, AFTER):
        (folder / name).mkdir()
    (place.folder / "sub").mkdir()
    (place.folder / "kernel.cu").write_text(SOURCE + ASKING, encoding="utf-8")
    (place.folder / "sub" / "part.h").write_text('#include "deep.h"\n', encoding="utf-8")
    (place.root / "include" / "deep.h").write_text("", encoding="utf-8")
    (place.root / "include" / "extra.h").write_text("", encoding="utf-8")
    (folder / CPLUS / "ext.h").write_text("", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPATH", f"{folder}/absent:{folder}/{CPATH}")
        patch.setenv("CPLUS_INCLUDE_PATH", f"{folder}/{CPLUS}")
        patch.setenv("NVCC_APPEND_FLAGS", f"-Xcompiler=-idirafter,{folder}/{AFTER}")
        try:
            place.build()
        except ToolchainError as problem:
            pytest.skip(str(problem))
        yield place


def look_up(place: Workplace) -> builds.Lookup:
    """Look for the variant's build in the cache."""
    return builds.find_build(place.cache, place.variant(), "sm_80", toolchain_key(find_toolchain(place.cache)))


@pytest.mark.needs_nvcc
@pytest.mark.parametrize("name", nightly_but(NEW, *USUAL))
def test_a_file_that_would_now_be_found_first_makes_a_new_build(asking: Workplace, name: str) -> None:
    """A file that the compiler looked for is named; another one changes nothing, and nor does one that is gone."""
    base = asking.root.parent
    path, parents = base / name, [parent for parent in (base / name).parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        reason = look_up(asking).reason
    finally:
        path.unlink()
        for parent in parents:
            parent.rmdir()
    said = NEW[name].format(base)
    assert (f"changed since it was built: {said} (new)" if said else "") == reason
    assert look_up(asking).build is not None


@pytest.mark.needs_nvcc
def test_a_file_that_appears_is_compiled(asking: Workplace) -> None:
    """The new file is part of the next compilation, here of its failure."""
    path = asking.folder / "impl.cu"
    path.touch()
    try:
        assert "#error impl.cu" in asking.failure()
    finally:
        path.unlink()
    assert asking.ensure().cached == 1


@pytest.mark.needs_nvcc
def test_a_header_that_appears_during_the_compilation_is_not_missed(workplace: Workplace) -> None:
    """If it is not known whether the compiler has found a new header, the build fails."""
    (workplace.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")

    def hide_shared_header(text: str) -> None:
        if " tile/sm_80 (" in text:  # the compiler has ended
            (workplace.folder / "shared.h").write_text("#define SHARED 1.5f\n", encoding="utf-8")

    assert "shared.h changed during the compilation; run again" in workplace.failure(say=hide_shared_header)


@pytest.mark.alone
@pytest.mark.needs_nvcc
def test_the_lookup_takes_less_time_than_two_looks_at_each_name(asking: Workplace) -> None:
    """A warm start compares what is missing: it lists each folder once and does not look at each name."""
    stored = builds._read_stored(asking.cache, asking.library().parent)
    assert isinstance(stored, builds.StoredBuild)
    assert stored.lookups is not None
    missing = [f"{folder}/{name}" for folder, names in stored.lookups.missing.items() for name in names]
    assert len(missing) > 500
    variant = asking.variant()
    alone = msgspec.structs.replace(stored, lookups=None)
    with_lookups = shortest(lambda: builds._changed(stored, variant, everything=True) == [])
    without = shortest(lambda: builds._changed(alone, variant, everything=True) == [])
    looks = shortest(lambda: not any(map(os.path.lexists, missing)))
    assert with_lookups - without < 2 * looks


def shortest(is_right: Callable[[], bool]) -> float:
    """The shortest time of a call, of nine; each call must return True."""
    starts = []
    for _ in range(10):
        starts.append(time.perf_counter())
        assert is_right()
    return min(later - earlier for earlier, later in pairwise(starts))


# -- against what the compiler does -----------------------------------------------------------------------------------

# It logs what a program could not open.
SPY = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static int tried(const char* path, int result) {
  int error = errno;
  FILE* log = result < 0 ? fopen(getenv("FA_SPY_LOG"), "a") : 0;
  if (log) fprintf(log, "%s %s\\n", program_invocation_short_name, path), fclose(log);
  errno = error;
  return result;
}
#define SPY(name)                                          \\
  int name(const char* path, int flags, ...) {             \\
    va_list list;                                          \\
    va_start(list, flags);                                 \\
    int mode = va_arg(list, int);                          \\
    va_end(list);                                          \\
    int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, #name); \\
    return tried(path, real(path, flags, mode));           \\
  }
SPY(open)
SPY(open64)
"""


@pytest.mark.needs_nvcc
def test_everything_that_the_compiler_could_not_open_is_noted(asking: Workplace, tmp_path: Path) -> None:
    """Each path that the preprocessor tries in vain is noted, or is below one that is noted."""
    (tmp_path / "spy.c").write_text(SPY, encoding="utf-8")
    spy, log = tmp_path / "spy.so", tmp_path / "log.txt"
    subprocess.run([GXX, "-x", "c", "-shared", "-fPIC", "-w", tmp_path / "spy.c", "-o", spy, "-ldl"], check=True)
    toolchain, staged = find_toolchain(asking.cache), tmp_path / "staged"
    staged.mkdir()
    command = stage(asking.variant(), "sm_80", staged, toolchain, tmp_path, side_by_side=False)
    dry = subprocess.run([command[0], "--dryrun", *command[1:]], cwd=staged, capture_output=True, text=True, check=True)
    line = next(line for line in dry.stderr.splitlines() if " -E " in line).removeprefix("#$ ")
    environment = {**os.environ, "LD_PRELOAD": str(spy), "FA_SPY_LOG": str(log)}
    subprocess.run(shlex.split(line), cwd=staged, check=True, env=environment)

    stored = builds._read_stored(asking.cache, asking.library().parent)
    assert isinstance(stored, builds.StoredBuild)
    assert stored.lookups is not None
    noted = {str(Path(folder, name)) for folder, names in stored.lookups.missing.items() for name in names}
    tried = {line.removeprefix("cc1plus ") for line in log.read_text().splitlines() if line.startswith("cc1plus ")}
    tried = {path for path in tried if not path.startswith(("./", "generated/"))}  # in the staging folder itself
    assert len(tried) > 100
    assert [] == sorted(path for path in tried if not {path, *map(str, Path(path).parents)} & noted)


# -- the reader, with g++ alone ---------------------------------------------------------------------------------------


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Searched]:
    """`read({"a.cpp": text}, "-Ione")`: what g++ looks up in these files, with these options."""
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)

    def read_files(files: dict[str, str], *options: str) -> Searched:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        command = [GXX, *options, "-MD", "-MF", "a.d", "-E", "a.cpp", "-o", os.devnull]
        subprocess.run(command, cwd=tmp_path, check=True)
        names = (tmp_path / "a.d").read_text().replace("\\\n", " ").partition(":")[2].split()
        path = search_path(command, tmp_path, is_nvcc=False)
        return LookupReader(tmp_path, default_folders(GXX)).searched(names, [path])

    return read_files


def missing_in(found: Searched, *folders: str) -> set[str]:
    """What is missing in folders of the test, without precompiled headers and the names of the system's headers."""
    pairs = {(folder, name) for folder, name in found.missing if folder in folders and not name.endswith(".gch")}
    return {f"{folder}/{name}" for folder, name in pairs if name.startswith("x")}


def test_include_next_begins_after_the_folder_of_its_file(read: Callable[..., Searched]) -> None:
    """The folders between the including file and the one that is found count, too."""
    files = {"a.cpp": "#include <x.h>\n", "one/x.h": "#include_next <x.h>\n", "two/y.h": "", "three/x.h": ""}
    found = read(files, "-Ione", "-Itwo", "-Ithree")
    assert missing_in(found, "one", "two", "three") == {"two/x.h"}


def test_folders_are_searched_in_the_compiler_s_order(read: Callable[..., Searched]) -> None:
    """-iquote comes before -I, -isystem and -idirafter, whatever their order in the command."""
    files = {
        "a.cpp": '#include "x.h"\n#include <x2.h>\n',
        "d/x.h": "",
        "d/x2.h": "",
        **{f"{name}/y": "" for name in "abc"},
    }
    found = read(files, "-idirafter", "d", "-isystem", "c", "-Ib", "-iquote", "a")
    assert missing_in(found, "a", "b", "c", "d") == {"a/x.h", "b/x.h", "c/x.h", "b/x2.h", "c/x2.h"}


@pytest.mark.parametrize(
    "line",
    [
        '#  include /* why */ "x.h"',
        '/* a comment that\n ends */ #include "x.h"',
        '#inc\\\nlude "x.h"',
        '%: include "x.h"',
        '#if 0\n#include "x.h"\n#endif',
        '#if __has_include /* */ ( "x.h" )\n#endif',
        '#define HAVE_X __has_include("x.h")\n#if HAVE_X\n#endif',
        '#define ONE(name) __has_include(name)\n#define TWO(a) (1 && ONE(a))\n#if TWO("x.h")\n#endif',
        '#if defined(__has_include) && __has_include("x.h")\n#endif',
    ],
)
def test_every_spelling_is_read(read: Callable[..., Searched], line: str) -> None:
    """Comments, continued lines, digraphs, skipped parts and macros hide no name."""
    is_needed = "#if" not in line
    found = read({"a.cpp": f"{line}\n", "one/y": "", "two/x.h" if is_needed else "two/y": ""}, "-Ione", "-Itwo")
    assert "one/x.h" in missing_in(found, "one", "two")
    assert found.listed == {}


UNTOLD = "#define TEXT(name) #name\n#define FILE_OF(name) TEXT(name.h)\n#if __has_include(FILE_OF(x))\n#endif\n"


def test_a_name_that_cannot_be_told_counts_every_new_file(read: Callable[..., Searched], tmp_path: Path) -> None:
    """If macros make the name, any new file in the searched folders of the user makes a new build."""
    found = read({"a.cpp": UNTOLD + '#include "sub/b.h"\n', "one/y": "", "sub/b.h": ""}, "-Ione")
    assert sorted(found.listed) == ["one", "sub"]
    lookups = found.inputs((), tmp_path, str).lookups
    assert lookups.changed(lambda path: str(tmp_path / path)) == []
    (tmp_path / "one" / "deeper").mkdir()
    (tmp_path / "one" / "deeper" / "any.txt").touch()
    assert lookups.changed(lambda path: str(tmp_path / path)) == ["the files in one"]


def test_a_question_that_was_answered_is_a_dependency(read: Callable[..., Searched]) -> None:
    """A file that only `__has_include` has found is recorded, so that its removal is seen."""
    assert read({"a.cpp": '#if __has_include("x.h")\n#endif\n', "x.h": ""}).asked == {"x.h"}


def test_what_is_no_file_is_not_missing_for_ever(read: Callable[..., Searched], tmp_path: Path) -> None:
    """A folder of the name, or a link to nothing, does not make a new build each time."""
    (tmp_path / "one" / "x").mkdir(parents=True)
    (tmp_path / "one" / "x2").symlink_to("nowhere")
    found = read({"a.cpp": "#include <x>\n#include <x2>\n", "two/x": "", "two/x2": ""}, "-Ione", "-Itwo")
    assert missing_in(found, "one") == {"one/x2"}
    lookups = found.inputs((), tmp_path, str).lookups
    assert lookups.changed(lambda path: str(tmp_path / path)) == []
    (tmp_path / "one" / "nowhere").touch()
    assert lookups.changed(lambda path: str(tmp_path / path)) == ["one/x2 (new)"]


def test_libraries_of_the_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that would now be linked first is noted, and a static one of the user is a dependency."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "three" / "libx.a").touch()
    monkeypatch.setenv("LIBRARY_PATH", "three")
    reader = LookupReader(tmp_path, default_folders(GXX))
    reader.look_up_libraries(["-Lone", "-lx", "-Ltwo", "-O3"])
    found = reader.searched([], [SearchPath((), (), (), ())])
    missing = {f"{folder}/{name}" for folder, name in found.missing}
    assert missing == {"one/libx.so", "one/libx.a", "two/libx.so", "two/libx.a", "three/libx.so"}
    assert found.asked == {"three/libx.a"}


def test_a_compiler_that_does_not_say_where_it_searches(tmp_path: Path) -> None:
    """A compiler whose search path is unknown is an error that names it."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho hello\n")
    compiler.chmod(0o755)
    with pytest.raises(ToolchainError, match=r"cc -v does not say where it searches for headers: hello"):
        search_path([str(compiler)], tmp_path, is_nvcc=False)
