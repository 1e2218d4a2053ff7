"""The cache: which changes are detected, what is found again, and damaged builds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build import cache as builds
from pytest_fa.build import command, keys
from pytest_fa.build.builder import ensure
from pytest_fa.build.outcomes import BuildFailure
from pytest_fa.errors import UsageProblem
from pytest_fa.records.built import Build

if TYPE_CHECKING:
    from tests.tiers import nightly_after
from tests.tiers import nightly_after
from tests.unit.build.conftest import Workplace

# -- changes ----------------------------------------------------------------------------------------------------------


def edit_source(place: Workplace) -> None:
    """Change the kernel."""
    source = place.folder / "kernel.cu"
    source.write_text(source.read_text(encoding="utf-8").replace("+ STEP", "- STEP"), encoding="utf-8")


def edit_header(place: Workplace) -> None:
    """Change the header next to the source."""
    (place.folder / "tile.h").write_text("#define BLOCK 96\n", encoding="utf-8")


def edit_shared_header(place: Workplace) -> None:
    """Change the header in the root's include folder."""
    (place.root / "include" / "shared.h").write_text("#define SHARED 1.5f\n", encoding="utf-8")


def edit_header_long_ago(place: Workplace) -> None:
    """Change the header and set its time to 2001, as unpacking an archive does."""
    edit_header(place)
    os.utime(place.folder / "tile.h", (10**9, 10**9))


def add_define(place: Workplace) -> None:
    """Add a definition to the manifest."""
    place.write_manifest("defines: {STEP: 2}\n")


def add_flag(place: Workplace) -> None:
    """Add a compiler flag to the manifest."""
    place.write_manifest("flags: [-use_fast_math]\n")


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    "change",
    nightly_after(2, [edit_source, add_define, edit_header, edit_shared_header, edit_header_long_ago, add_flag]),
)
def test_change_is_compiled(workplace: Workplace, change: Callable[[Workplace], None]) -> None:
    """A change of anything that affects the code gives a new build, and the old build is kept."""
    before = workplace.library()

    change(workplace)
    report = workplace.ensure()

    build = report.outcomes["tile", "sm_80"]
    assert isinstance(build, Build)
    assert report.compiled == 1
    assert workplace.cache / build.library != before
    assert (workplace.cache / build.library).is_file()
    assert before.is_file()


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_header_library_needs_a_path(with_binding: Workplace) -> None:
    """An include folder in `flags` is relative to the variant's folder, and a change of its headers is compiled."""
    library = with_binding.root.parent / "third_party" / "include"
    library.mkdir(parents=True)
    (library / "lib.h").write_text("#define STEP 5\n", encoding="utf-8")
    source = with_binding.folder / "kernel.cu"
    source.write_text(f'#include "lib.h"\n{source.read_text(encoding="utf-8")}', encoding="utf-8")
    with_binding.write_manifest("flags: [-I../../third_party/include]\n")

    first, again = with_binding.ensure(), with_binding.ensure()
    (library / "lib.h").write_text("#define STEP 6\n", encoding="utf-8")
    changed = with_binding.ensure()

    assert (first.compiled, again.compiled, changed.compiled) == (1, 0, 1), first


def add_library(place: Workplace, folder: Path) -> Path:
    """Add a header library to the variant in `place`, with a header without a suffix, and return its first header."""
    (folder / "tiles").mkdir(parents=True)
    (folder / "tiles" / "tile.h").write_text("#include <tiles/step>\n", encoding="utf-8")
    (folder / "tiles" / "step").write_text("#define STEP 5\n", encoding="utf-8")
    source = place.folder / "kernel.cu"
    source.write_text(f"#include <tiles/tile.h>\n{source.read_text(encoding='utf-8')}", encoding="utf-8")
    return folder / "tiles" / "tile.h"


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_header_library_is_part_of_the_build(workplace: Workplace, tmp_path: Path) -> None:
    """With `entry.include`, an edited header is compiled, and a new one if it is found; the folder's name is free."""
    header = add_library(workplace, workplace.root.parent / "third party" / "include")
    workplace.write_manifest('entry: {include: ["../../third party/include"]}\n')

    first, again = workplace.ensure(), workplace.ensure()
    header.with_name("step").write_text("#define STEP 6\n", encoding="utf-8")
    edited = workplace.ensure()
    header.with_name("new.h").write_text("", encoding="utf-8")
    unused = workplace.ensure()
    (workplace.root / "include" / "tiles").mkdir()
    (workplace.root / "include" / "tiles" / "step").write_text("#define STEP 7\n", encoding="utf-8")
    added = workplace.ensure()
    header.parents[1].rename(tmp_path / "elsewhere")
    workplace.write_manifest(f"entry: {{include: [{tmp_path / 'elsewhere'}]}}\n")
    moved = workplace.ensure()

    counts = [report.compiled for report in (first, again, edited, unused, added, moved)]
    assert [1, 0, 1, 0, 1, 0] == counts, first
    assert not any(str(tmp_path) in word for word in workplace.build().command)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_changed_header_library_is_seen_without_a_compiler(workplace: Workplace) -> None:
    """With --fa-no-build, too, the headers of `entry.include` are compared with those of the build."""
    header = add_library(workplace, workplace.root.parent / "library")
    workplace.write_manifest("entry: {include: [../../library]}\n")
    workplace.build()
    assert workplace.build(no_build=True).variant == "tile"

    header.write_text("#define STEP 7\n", encoding="utf-8")

    assert "changed since it was built: include0/tiles/tile.h" in workplace.failure(no_build=True)


def test_a_fifo_in_a_header_library_fails_its_own_build(unbuilt: Workplace) -> None:
    """A FIFO in a folder of `entry.include` is named; nothing is compiled."""
    header = add_library(unbuilt, unbuilt.root.parent / "library")
    unbuilt.write_manifest("entry: {include: [../../library]}\n")
    os.mkfifo(header.with_name("pipe"))
    assert "library/tiles/pipe is not a regular file; a compiler that includes it would not end" in unbuilt.failure()


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_compiler_flags_from_the_environment_are_compiled(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVCC_APPEND_FLAGS affects the code, so it gives another build."""
    plain = workplace.build()

    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DSTEP=3")
    with_flags = workplace.ensure()
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    again = workplace.ensure()

    (changed,) = with_flags.outcomes.values()
    assert isinstance(changed, Build)
    assert with_flags.compiled == 1
    assert changed.code_identity != plain.code_identity
    assert (again.compiled, again.outcomes["tile", "sm_80"]) == (0, plain)


@pytest.mark.needs_nvcc
def test_reverted_edit_finds_the_old_build(workplace: Workplace) -> None:
    """Builds are found by content, so undoing an edit needs no compilation."""
    before, old_text = workplace.build(), (workplace.folder / "tile.h").read_text(encoding="utf-8")
    edit_header(workplace)
    edited = workplace.build()

    (workplace.folder / "tile.h").write_text(old_text, encoding="utf-8")
    report = workplace.ensure()

    assert edited.library != before.library
    assert (report.compiled, report.cached, report.outcomes["tile", "sm_80"]) == (0, 1, before)


def touch(path: Path) -> None:
    """Set a new modification time."""
    path.touch()


def rewrite(path: Path) -> None:
    """Write the same content again."""
    path.write_bytes(path.read_bytes())


def replace(path: Path) -> None:
    """Replace the file by another one with the same content, as a checkout does."""
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.needs_nvcc
@pytest.mark.parametrize("change", nightly_after(1, [touch, rewrite, replace]))
def test_unchanged_content_is_not_compiled(workplace: Workplace, change: Callable[[Path], None]) -> None:
    """If only times or inodes change, nothing is compiled."""
    for path in (workplace.folder / "kernel.cu", workplace.folder / "tile.h", workplace.root / "include" / "shared.h"):
        change(path)

    report = workplace.ensure()

    assert (report.compiled, report.cached) == (0, 1)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_same_content_elsewhere_has_the_same_code_identity(workplace: Workplace, tmp_path: Path) -> None:
    """Compiled in another folder, the same sources give the same machine code."""
    original = workplace.build()
    elsewhere = type(workplace)(tmp_path / "quite another folder")
    shutil.copytree(workplace.root, elsewhere.root)
    shutil.copytree(workplace.cache / "binding", elsewhere.cache / "binding")

    report = elsewhere.ensure()

    (copied,) = report.outcomes.values()
    assert isinstance(copied, Build)
    assert report.compiled == 1
    assert original.code_identity is not None
    assert copied.code_identity == original.code_identity


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_each_set_of_definitions_has_its_own_build(workplace: Workplace) -> None:
    """Builds of one source with different definitions are both kept, and each is found by its definitions."""
    plain = workplace.build()
    add_define(workplace)
    defined = workplace.build()

    workplace.write_manifest("")

    assert workplace.build() == plain
    assert defined.code_identity != plain.code_identity


@pytest.mark.needs_nvcc
def test_edit_during_compilation_is_not_published(workplace: Workplace, snapshot: SnapshotAssertion) -> None:
    """If a file changes during the compilation, its hash may not match the code, so the build fails."""
    edit_header(workplace)

    def edit_again(text: str) -> None:
        if text.startswith("building"):
            time.sleep(0.05)  # file systems record the time of the last clock tick
            edit_shared_header(workplace)

    message = workplace.failure(say=edit_again)

    assert snapshot == message
    assert workplace.failure(no_build=True).startswith("no build in ")


# -- warm -------------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.needs_nvcc
@pytest.mark.usefixtures("forbid_programs")
def test_warm_lookup_starts_no_program(workplace: Workplace) -> None:
    """If all builds are in the cache, the lookup starts no program and takes less than 50 ms."""
    reports = [workplace.ensure() for _ in range(3)]

    assert [(report.compiled, report.cached) for report in reports] == [(0, 1)] * 3
    assert min(report.seconds for report in reports) < 0.05


@pytest.mark.usefixtures("forbid_programs")
def test_an_empty_batch_needs_no_compiler(tmp_path: Path, hide_compilers: Callable[[], None]) -> None:
    """A batch without requests, as in a run of Python variants, needs no compiler."""
    hide_compilers()

    report = ensure([], tmp_path)

    assert (report.outcomes, report.compiled, report.cached) == ({}, 0, 0)


# -- damage --------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    """Remove the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    """Remove the content of a file."""
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Put another shared library in place of the file."""
    path.write_bytes(Path(sys.modules["_ctypes"].__file__ or "").read_bytes())


def link_out(path: Path) -> None:
    """Move a file out of the cache and put a symlink to it in its place."""
    outside = path.parents[4] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def link_to_itself(path: Path) -> None:
    """Put a symlink to itself in place of the file."""
    path.unlink()
    path.symlink_to(path)


def nest(path: Path) -> None:
    """Put 100,000 nested lists in place of the content."""
    path.write_bytes(b"[" * 100_000)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("build.json", truncate, "cannot be read"),
    ("kernel.so", flip_a_bit, "has changed since it was built"),
    ("build.json", empty, "cannot be read"),
    ("build.json", Path.unlink, "cannot be read"),
    ("build.json", nest, "cannot be read"),
    ("build.json", link_to_itself, "cannot be read"),
    ("build.json", link_out, "is a symlink to a place outside the cache"),
    ("kernel.so", Path.unlink, "is missing"),
    ("kernel.so", empty, "is empty"),
    ("kernel.so", truncate, "has changed since it was built"),
    ("kernel.so", swap, "has changed since it was built"),
    ("kernel.so", link_to_itself, "is missing"),
    ("kernel.so", link_out, "is a symlink to a place outside the cache"),
]


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    nightly_after(2, DAMAGE),
    ids=[f"{name}-{damage.__name__}" for name, damage, _ in DAMAGE],
)
def test_damaged_build_is_rebuilt_once(
    workplace: Workplace, name: str, damage: Callable[[Path], object], said: str
) -> None:
    """A damaged build is compiled again, one line says why, and the next lookup finds the new one."""
    damage(workplace.library().with_name(name))
    lines: list[str] = []

    rebuilt = workplace.ensure(say=lines.append)
    after = workplace.ensure()

    (line,) = [line for line in lines if line.startswith("compiling tile/sm_80 again: ")]
    assert f"/{name} {said}" in line

    build = rebuilt.outcomes["tile", "sm_80"]
    assert isinstance(build, Build)
    assert rebuilt.compiled == 1
    assert (workplace.cache / build.library).is_file()
    assert (after.compiled, after.cached) == (0, 1)


@pytest.mark.needs_nvcc
def test_the_library_that_was_checked_is_loaded(workplace: Workplace, tmp_path: Path) -> None:
    """A `build.json` that names another library is no way to load that one."""
    path = workplace.library().with_name("build.json")
    content = json.loads(path.read_bytes())
    content["build"]["library"] = str(tmp_path / "evil.so")
    path.write_text(json.dumps(content), encoding="utf-8")
    assert workplace.cache / workplace.build().library == workplace.library()


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("damage", [truncate, empty, Path.unlink, link_out], ids=lambda function: function.__name__)
def test_a_damaged_binding_is_compiled_again(workplace: Workplace, damage: Callable[[Path], object]) -> None:
    """The object file that all builds share is checked like a library."""
    (binding,) = (workplace.cache / "binding").glob("*/binding.o")
    damage(binding)
    edit_source(workplace)
    assert workplace.ensure().compiled == 1
    assert binding.is_file()
    assert not binding.is_symlink()


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_binding_that_does_not_compile_is_the_failure_of_the_build(
    unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build's message has the compiler's, half a binding is none, and the next run tries again."""
    with monkeypatch.context() as broken:
        broken.setattr(
            "pytest_fa.build.command.binding_command",
            lambda *_: ["sh", "-c", "echo part > binding.o; echo no luck; exit 1"],
        )
        message = unbuilt.failure()
    assert message.startswith("the shared binding did not compile: ")
    assert "\nno luck\n" in message
    build = unbuilt.build()
    assert (unbuilt.cache / build.library).is_file()


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_build_that_others_may_write_to_is_compiled_again(workplace: Workplace) -> None:
    """The folder of a build is not writable for every user, also if the cache was copied without care."""
    workplace.library().parent.chmod(0o777)
    lines: list[str] = []
    assert workplace.ensure(say=lines.append).compiled == 1
    assert [line for line in lines if "again: every user may write to builds/" in line] != []


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_cache_made_under_umask_0_is_used_again(unbuilt: Workplace) -> None:
    """Whatever the umask is, what is built can be used by the next run."""
    shutil.rmtree(unbuilt.cache)
    old = os.umask(0)
    try:
        first, second = unbuilt.ensure(), unbuilt.ensure()
    finally:
        os.umask(old)
    assert (first.compiled, second.cached) == (1, 1)
    writable = [path for path in unbuilt.cache.rglob("*") if path.name != ".lock" and path.stat().st_mode & 0o002]
    assert [path for path in writable if path.suffix in (".so", ".o", "")] == []


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("name", ["build.json", "toolchain.json"])
def test_a_fifo_in_the_cache_is_not_waited_for(workplace: Workplace, name: str) -> None:
    """A FIFO in place of a file is no file."""
    path = workplace.cache / name if name == "toolchain.json" else workplace.library().with_name(name)
    path.unlink()
    os.mkfifo(path)
    assert isinstance(workplace.build(), Build)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
@pytest.mark.parametrize("change", [{"versions": []}, {"nvcc": "/elsewhere/nvcc"}, {"stamps": []}], ids=str)
def test_a_changed_memo_of_the_toolchain_is_not_used(workplace: Workplace, change: dict[str, object]) -> None:
    """The compilers are those that were found, whatever the memo says."""
    path = workplace.cache / "toolchain.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}), encoding="utf-8")
    edit_source(workplace)
    assert workplace.build().compiler.startswith("nvcc 1")


@pytest.mark.parametrize("name", ["p.h", "pipe"])
def test_a_fifo_beside_a_source_fails_its_own_build(unbuilt: Workplace, name: str) -> None:
    """A compiler that includes a FIFO would not end, so nothing is compiled."""
    os.mkfifo(unbuilt.folder / name)
    assert "is not a regular file; a compiler that includes it would not end" in unbuilt.failure()


def test_a_lookup_beside_a_clean_up(unbuilt: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that another process removes during a lookup is no build."""
    folder = builds.request_folder(unbuilt.cache, unbuilt.variant(), "sm_80")
    monkeypatch.setattr(Path, "glob", lambda *_, **__: iter([folder / "a-b", folder / "a-c"]))
    assert builds.find_build(unbuilt.cache, unbuilt.variant(), "sm_80", None).build is None


@pytest.mark.needs_nvcc
def test_no_build_names_the_damage(workplace: Workplace) -> None:
    """With --fa-no-build, a damaged library is not used, and the failure names the file and both hashes."""
    built = keys.file_hash(str(workplace.library())) or ""
    flip_a_bit(workplace.library())
    changed = keys.file_hash(str(workplace.library())) or ""
    hashes = f"its sha256 is {changed[:16]}..., that of the build {built[:16]}..."
    expected = f"kernel.so has changed since it was built: {hashes}; drop --fa-no-build"
    assert expected in workplace.failure(no_build=True)


@pytest.mark.needs_nvcc
def test_a_damaged_build_is_no_gate_baseline(workplace: Workplace) -> None:
    """A build that is named by its key is not used if its library has changed."""
    key = workplace.build().key
    flip_a_bit(workplace.library())
    with pytest.raises(UsageProblem, match=r"kernel\.so has changed since it was built"):
        builds.find_by_key(workplace.cache, key)


def move_in_another_build(place: Workplace) -> str:
    """Put the files of a build of the same sources with another flag in the only build's place; return its key."""
    flags, folder = "flags: [-O1]\n", place.library().parent
    place.write_manifest(flags)
    other = place.build()
    place.write_manifest("")
    shutil.rmtree(folder)
    shutil.copytree((place.cache / other.library).parent, folder)
    return other.key


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_build_in_the_place_of_another_is_not_used(workplace: Workplace) -> None:
    """A folder that has the files and hashes of another build, from the same sources, is compiled again."""
    key = workplace.build().key
    other_key = move_in_another_build(workplace)
    lines: list[str] = []
    report = workplace.ensure(say=lines.append)
    build = report.outcomes["tile", "sm_80"]
    assert isinstance(build, Build)
    assert (report.compiled, build.key) == (1, key) != (1, other_key)
    assert [line for line in lines if line.endswith("build.json is that of another build")] != []


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_build_in_the_place_of_another_is_no_gate_baseline(workplace: Workplace) -> None:
    """A build that is named by its key must be in the folder of that key."""
    other_key = move_in_another_build(workplace)
    with pytest.raises(UsageProblem, match=r"build\.json is that of another build; build it again"):
        builds.find_by_key(workplace.cache, other_key)


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_an_entry_without_hashes_is_compiled_again(workplace: Workplace) -> None:
    """A build of an earlier version, whose record has no hashes, is compiled again; one line says why."""
    path = workplace.library().with_name("build.json")
    content = json.loads(path.read_bytes())
    del content["build"]["files"]
    path.write_text(json.dumps(content), encoding="utf-8")
    lines: list[str] = []
    assert workplace.ensure(say=lines.append).compiled == 1
    (line,) = [line for line in lines if line.startswith("compiling tile/sm_80 again: ")]
    assert line.endswith("build.json does not list the files of its folder")
    assert workplace.build().files == {"kernel.so": keys.file_hash(str(workplace.library()))}


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_a_linked_folder_of_builds_is_replaced(workplace: Workplace, tmp_path: Path) -> None:
    """A request's folder that is a symlink to a place outside is not written to; a real folder replaces it."""
    folder = workplace.library().parents[1]
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    before = sorted(path.name for path in (tmp_path / "outside").iterdir())

    build = workplace.build()

    assert not folder.is_symlink()
    assert (workplace.cache / build.library).is_file()
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == before


@pytest.mark.needs_nvcc
def test_delete_builds_follows_no_symlink(workplace: Workplace, tmp_path: Path) -> None:
    """--fa-clean removes a symlink and nothing behind it."""
    folder = workplace.library().parents[1]
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")

    builds.delete_builds(workplace.cache, workplace.variant(), ("sm_80",))

    assert not folder.is_symlink()
    assert list((tmp_path / "outside").glob("*/kernel.so")) != []


@pytest.mark.parametrize("folder", nightly_after(1, ["", "builds", "binding"]))
def test_a_cache_that_everybody_may_write_to_is_refused(unbuilt: Workplace, folder: str) -> None:
    """Libraries of the cache are loaded and run, so no other user may write to it."""
    path = unbuilt.cache / folder
    path.mkdir(exist_ok=True)
    path.chmod(0o777)
    with pytest.raises(UsageProblem) as caught:
        unbuilt.ensure()
    assert str(caught.value) == (
        f"--fa-cache: every user may write to {path} (mode 777), and libraries in it are loaded and run; "
        f"`chmod o-w {path}`, or give another folder"
    )


@pytest.mark.parametrize("folder", ["builds", "binding"])
def test_a_linked_part_of_the_cache_is_refused(unbuilt: Workplace, tmp_path: Path, folder: str) -> None:
    """The folders of the cache are not symlinks; the cache itself may be one."""
    (unbuilt.cache / folder).symlink_to(tmp_path)
    with pytest.raises(UsageProblem, match="is a symlink; remove it"):
        unbuilt.ensure()


def test_a_new_cache_is_not_writable_for_others(tmp_path: Path) -> None:
    """Whatever the umask is, other users cannot write to a cache that this tool makes."""
    old = os.umask(0)
    try:
        with builds.staging_folder(tmp_path / "cache"):
            mode = (tmp_path / "cache").stat().st_mode & 0o777
    finally:
        os.umask(old)
    assert mode == 0o755


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a small file system with these options; skip where that is not permitted."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount_with(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount a file system")
        return folder

    yield mount_with
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


@pytest.mark.needs_nvcc
@pytest.mark.parametrize(
    ("options", "said"), [("mode=755,size=64k", "No space left on device"), ("mode=755,ro", "Read-only file system")]
)
def test_a_full_or_read_only_disk_is_one_line(
    unbuilt: Workplace, mount: Callable[[str], Path], options: str, said: str
) -> None:
    """The reason is in the operating system's error, or in the compiler's lines, and no staging folder stays."""
    unbuilt.cache = mount(options)
    try:
        text = unbuilt.failure()
    except OSError as problem:
        text = str(problem)
    assert said in text
    assert unbuilt.stages() == []


@pytest.mark.needs_nvcc
def test_failing_variant_does_not_affect_another(workplace: Workplace) -> None:
    """If one variant of a batch does not compile, the other one is built, and the error is reported once."""
    good = msgspec.structs.replace(workplace.variant(), name="good", defines={"STEP": 4})
    bad = msgspec.structs.replace(workplace.variant(), name="bad", defines={"STEP": "nonsense"})

    report = ensure([(bad, "sm_80"), (good, "sm_80")], workplace.cache)

    build, failure = report.outcomes["good", "sm_80"], report.outcomes["bad", "sm_80"]
    assert isinstance(build, Build)
    assert (workplace.cache / build.library).is_file()
    assert isinstance(failure, BuildFailure)
    first_line, *log, last_line = failure.message.splitlines()
    assert first_line.endswith('error: identifier "nonsense" is undefined (bad for sm_80)')
    assert "\n".join(log).count('error: identifier "nonsense" is undefined') == 1
    assert last_line.startswith("command: ")
    assert "-DSTEP=nonsense" in last_line
    assert failure.message.count("command: ") == 1
    assert "ptxas info" not in failure.message
    assert workplace.stages() == []


@pytest.mark.needs_nvcc
def test_failed_compilation_is_retried(workplace: Workplace) -> None:
    """After a failed compilation, the variant is built once its source is correct."""
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
    """With `no_build`, a build is found on a machine without a compiler."""
    with_compiler = workplace.build()
    hide_compilers()

    report = workplace.ensure(no_build=True)

    assert (report.compiled, report.cached) == (0, 1)
    assert report.outcomes["tile", "sm_80"] == with_compiler


@pytest.mark.needs_nvcc
def test_no_build_finds_a_copied_build(
    workplace: Workplace, tmp_path: Path, hide_compilers: Callable[[], None]
) -> None:
    """A build is found after sources and cache were copied to other folders."""
    copied = type(workplace)(tmp_path / "target machine")
    shutil.copytree(workplace.root, copied.root)
    shutil.copytree(workplace.cache / "builds", copied.cache / "builds")
    hide_compilers()

    build = copied.build(no_build=True)

    assert (copied.cache / build.library).is_file()
    assert build.compiler.startswith("nvcc ")


@pytest.mark.needs_nvcc
def test_no_build_of_a_changed_source(workplace: Workplace) -> None:
    """The message names the files that changed since the build, and what to do."""
    edit_header(workplace)

    assert workplace.failure(no_build=True) == (
        f"no build in {workplace.cache}: changed since it was built: src/tile.h; "
        "drop --fa-no-build, or build it there first (tile for sm_80)"
    )


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_no_build_compares_with_the_newest_build(workplace: Workplace) -> None:
    """The message names what changed since the newest build, not since an older one."""
    edit_header(workplace)
    workplace.build()
    edit_source(workplace)

    assert "changed since it was built: src/kernel.cu;" in workplace.failure(no_build=True)


@pytest.mark.needs_nvcc
def test_no_build_of_a_build_without_its_library(workplace: Workplace) -> None:
    """If only the library is missing, the message says so, and not that a file changed."""
    workplace.library().unlink()

    message = workplace.failure(no_build=True)

    assert "changed since it was built" not in message
    assert "kernel.so" in message


def test_no_build_of_what_was_never_built(unbuilt: Workplace) -> None:
    """The message says that there is no build, which cache was searched, and what to do."""
    assert unbuilt.failure(no_build=True) == (
        f"no build in {unbuilt.cache}: it was never built with these flags and definitions; "
        "drop --fa-no-build, or build it there first (tile for sm_80)"
    )


@pytest.mark.needs_nvcc
def test_delete_builds(workplace: Workplace) -> None:
    """`delete_builds` deletes a variant's builds with its current definitions, and no other variant's builds."""
    kept = workplace.library()
    second = msgspec.structs.replace(workplace.variant(), name="other")
    shutil.copytree(
        builds.request_folder(workplace.cache, workplace.variant(), "sm_80"),
        builds.request_folder(workplace.cache, second, "sm_80"),
    )

    builds.delete_builds(workplace.cache, second, ("sm_80",))

    report = ensure([(workplace.variant(), "sm_80"), (second, "sm_80")], workplace.cache, no_build=True)
    assert isinstance(report.outcomes["tile", "sm_80"], Build)
    assert isinstance(report.outcomes["other", "sm_80"], BuildFailure)
    assert kept.is_file()


# -- parts ------------------------------------------------------------------------------------------------------------


def test_dependencies_of_a_depfile(tmp_path: Path) -> None:
    """Continued lines, escaped spaces and duplicates are read as `make` does; generated files are omitted."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "kernel.cu").write_bytes(b"a")
    (tmp_path / "with space.h").write_bytes(b"b")
    depfile = "kernel.so : src/kernel.cu \\\n    with\\ space.h \\\n  src/kernel.cu generated/fa_instantiations.h\n"

    (tmp_path / "deps.d").write_text(depfile, encoding="utf-8")

    dependencies = command.read_dependencies(tmp_path)

    assert dependencies == (
        ("src/kernel.cu", "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"),
        ("with space.h", "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"),
    )


def test_file_hash_of_a_missing_file(tmp_path: Path) -> None:
    """`file_hash` returns None for a missing file."""
    assert keys.file_hash(str(tmp_path / "nothing")) is None


def test_file_hash_sees_an_edit_that_keeps_size_and_time(tmp_path: Path) -> None:
    """An edit that keeps size and modification time is detected by the change time."""
    path = tmp_path / "tile.h"
    path.write_bytes(b"#define BLOCK 64")
    os.utime(path, (10**9, 10**9))
    before = keys.file_hash(str(path))

    time.sleep(0.02)  # two clock ticks
    path.write_bytes(b"#define BLOCK 96")
    os.utime(path, (10**9, 10**9))

    assert keys.file_hash(str(path)) != before
