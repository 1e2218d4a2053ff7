"""A bundle with the built libraries: it is verified, and replayed without a compiler; changed libraries are noticed."""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from pytest_fa.build.command import LIBRARY
from pytest_fa.build.extension import MODULE_NAME
from pytest_fa.features.bundle.libraries import LIBRARIES
from pytest_fa.features.bundle.seal import SEAL, make_seal
from tests.features.bundle.test_replay_command import Bundled, _command
from tests.plugin.test_extension import MANIFEST, write_extension
from tests.projects import ONE_CASE, NewProject

ONE_VARIANT = MANIFEST.partition("variants:")[0]
HIDES_COMPILER = {"CXX": "/nowhere/g++"}


@pytest.fixture(scope="module")
def bundled(new_project: NewProject) -> Bundled:
    """Judge a PyTorch extension for the CPU on one case, and bundle the run with its library."""
    project = new_project("libraries")
    write_extension(project, ONE_VARIANT)
    run = project.suite(ONE_CASE, "-k", "test_correct and mine")
    assert run.ret == 0, run.text
    (log,) = project.logs
    words = ("make", "--records", str(log), "--exit-status", "0", "--with-libraries")
    made = _command(project, *words, "--cache", str(project.cache / "pytest-fa"))
    assert made.returncode == 0, made.stderr
    (archive,) = (project.folder / "artifacts").glob("repro_bundle_*.tar.gz")
    return Bundled(project, archive)


def content_of(archive: Path) -> dict[str, bytes]:
    """The content of every file of a bundle."""
    with tarfile.open(archive) as tar:
        streams = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar}
        return {name: stream.read() for name, stream in streams.items() if stream}


def pack(path: Path, content: dict[str, bytes]) -> Path:
    """An archive with this content, in which all hashes fit."""
    files = {name: data for name, data in content.items() if name != SEAL}
    files[SEAL] = make_seal({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    with gzip.open(path, "wb", 1) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.nightly
def test_the_library_is_in_the_bundle(bundled: Bundled) -> None:
    """The bundle has the files of the build and `build.json`, nothing else of the cache, and is verified."""
    packed = [name for name in content_of(bundled.archive) if name.startswith(LIBRARIES)]
    assert sorted(Path(name).name for name in packed) == ["build.json", LIBRARY, MODULE_NAME]
    result = bundled.command("verify", str(bundled.archive))
    assert (result.returncode, result.stdout.splitlines()[-1].partition(" ")[0]) == (0, "VERIFIED"), result.stdout


@pytest.mark.nightly
def test_it_is_replayed_without_a_compiler(bundled: Bundled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--use-libraries` runs the library of the bundle: the outcome is the same, and no compiler is started."""
    for name, value in HIDES_COMPILER.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "replay"
    result = bundled.command("replay", str(bundled.archive), "--use-libraries", "--folder", str(folder))
    log = (folder / "pytest-1.txt").read_text(encoding="utf-8")
    assert (result.returncode, result.stdout.splitlines()[-1].partition(" ")[0]) == (0, "REPRODUCED"), log
    assert not (folder / "cache").exists()
    again = bundled.command("replay", str(bundled.archive), "--folder", str(tmp_path / "compiled"))
    assert again.returncode != 0  # without the libraries, it needs the compiler that is hidden


@pytest.mark.nightly
def test_a_replay_that_compiles_does_not_use_libraries(bundled: Bundled) -> None:
    """With the level `build`, `--use-libraries` is refused."""
    result = bundled.command("replay", str(bundled.archive), "--use-libraries", "--level=build")
    assert (result.returncode, "use right or fast" in result.stderr) == (2, True)


def library_of(content: dict[str, bytes]) -> str:
    """The name of the first library."""
    return next(name for name in content if name.startswith(LIBRARIES) and name.endswith(".so"))


@pytest.mark.nightly
def test_a_changed_library_is_noticed_although_all_hashes_fit(bundled: Bundled, tmp_path: Path) -> None:
    """A library that is not the one of the records breaks the bundle, also if it is sealed again."""
    content = content_of(bundled.archive)
    name = library_of(content)
    content[name] += b"\0"
    result = bundled.command("verify", str(pack(tmp_path / "x.tar.gz", content)))
    assert result.returncode == 1
    assert f"consistency: {name} is not the library that the records name" in result.stdout


@pytest.mark.nightly
def test_another_library_and_a_missing_one_are_noticed(bundled: Bundled, tmp_path: Path) -> None:
    """A library that no record names breaks the bundle, and so does one that is missing beside others."""
    content = content_of(bundled.archive)
    content[f"{LIBRARIES}builds/other/kernel.so"] = content.pop(library_of(content))
    result = bundled.command("verify", str(pack(tmp_path / "x.tar.gz", content)))
    assert result.returncode == 1
    assert "builds/other/kernel.so belongs to no build of the records" in result.stdout
    assert "is missing, although the bundle has libraries" in result.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("damage", "reason"), [("remove", "is not in the cache"), ("change", "is not the library")])
def test_a_library_that_was_not_run_is_not_packed(bundled: Bundled, tmp_path: Path, damage: str, reason: str) -> None:
    """If the cache has lost or changed a library since the run, no bundle is made."""
    cache = tmp_path / "cache"
    shutil.copytree(bundled.project.cache / "pytest-fa" / "builds", cache / "builds")
    for library in cache.glob("builds/*/*/kernel.so"):
        library.chmod(0o644)
        if damage == "remove":
            library.unlink()
        else:
            library.write_bytes(library.read_bytes() + b"\0")
    (log,) = bundled.project.logs
    words = ("make", "--records", str(log), "--exit-status", "0", "--with-libraries", "--cache", str(cache))
    result = bundled.command(*words)
    assert (result.returncode, reason in result.stderr) == (2, True), result.stderr
