"""The bundle: constraints, the stamp, the manifest, the archive."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

from pytest_fa.__main__ import main as all_commands
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import UsageProblem
from pytest_fa.features.bundle.commands import main
from pytest_fa.features.bundle.constraints import differences, read_constraints
from pytest_fa.features.bundle.make import make_bundle
from pytest_fa.features.bundle.privacy import without_private_names
from pytest_fa.features.bundle.seal import read_seal
from pytest_fa.features.bundle.stamp import write_stamp
from pytest_fa.features.bundle.verify import verify_bundle
from pytest_fa.records.environment import read_environment
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import SCHEMA, Record, Source, Stage, to_json
from pytest_fa.records.source import read_source
from tests.written_runs import end_run


def _git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def _record(outcome: Outcome) -> bytes:
    return to_json(
        Record(
            schema=SCHEMA,
            id="x-b1h2s64d64-fp16-seed0",
            kind="correct",
            variant="x",
            role="candidate",
            case=parse_case("b1h2s64d64-fp16-seed0"),
            outcome=outcome,
            message="",
            caught_by=(),
            stages=(Stage("launch", "ok", 0.1),),
            builds=(),
            check=None,
            repeats=None,
            diagnosis=None,
            speed=None,
            environment=read_environment(),
            source=Source(None, None, ""),
            measured_at="2026-01-01T00:00:00+00:00",
            rerun_command="pytest",
        )
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a committed source tree with the artifacts of a run."""
    (tmp_path / "constraints.txt").write_text("msgspec==0.0.1\npytest-fa-nowhere==1.0\n", encoding="utf-8")
    (tmp_path / "source.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("/artifacts/\n.fa-source.json\n", encoding="utf-8")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", "-A")
    _git(tmp_path, "commit", "-qm", "first")
    records = tmp_path / "artifacts" / "records"
    records.mkdir(parents=True)
    (records / "old.jsonl").write_bytes(_record(Outcome.WRONG) + b"\n")
    (records / "new.jsonl").write_bytes(_record(Outcome.OK) + b"\n" + _record(Outcome.WRONG) + b"\n")
    end_run(records / "new.jsonl", 1)
    (tmp_path / "artifacts" / "junit.xml").write_text("<testsuites/>", encoding="utf-8")
    read_source.cache_clear()
    return tmp_path


def _make(tree: Path) -> Path:
    arguments = ["make", "--folder", str(tree), "--artifacts", str(tree / "artifacts"), "--exit-status", "1"]
    assert main([*arguments, "--records", str(tree / "artifacts/records/new.jsonl")]) == 0
    (archive,) = (tree / "artifacts").glob("repro_bundle_*.tar.gz")
    return archive


def _manifest(tree: Path) -> Any:
    return yaml.safe_load((tree / "artifacts/manifest.yaml").read_text(encoding="utf-8"))


def _names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return [name.partition("/")[2] for name in tar.getnames()]


def test_manifest_describes_the_run(tree: Path, snapshot: SnapshotAssertion) -> None:
    """The manifest holds commit, dirty state, versions, differences, outcomes and pytest's exit status."""
    _make(tree)
    manifest = _manifest(tree)
    assert manifest["source"] == {"commit": read_source(tree).commit, "dirty": False, "origin": "git"}
    assert manifest["versions"]["pytest-fa-nowhere"] is None
    assert snapshot == manifest["differences_from_constraints"][1]
    assert (manifest["outcomes"], manifest["pytest_exit_status"]) == ({"correct": {"ok": 1, "wrong": 1}}, 1)


def test_a_tracked_file_among_the_results_is_left_out(tree: Path, snapshot: SnapshotAssertion) -> None:
    """It is named, the bundle says that its sources are not those of the commit, and `verify` counts the same files."""
    (tree / "artifacts/.gitkeep").touch()
    _git(tree, "add", "-f", "artifacts/.gitkeep")
    _git(tree, "commit", "-qm", "second")
    read_source.cache_clear()
    archive = _make(tree)
    manifest = _manifest(tree)
    assert snapshot == manifest["left_out"]
    assert manifest["source"]["dirty"] is True
    assert [problem.text for problem in verify_bundle(archive).problems if "source files" in problem.text] == []


def test_archive_holds_results_and_source(tree: Path) -> None:
    """The archive has the manifest, this run's records and the tracked files, with the hashes of the manifest."""
    archive = _make(tree)
    with tarfile.open(archive) as tar:
        root = archive.name.removesuffix(".tar.gz")
        streams = {name.removeprefix(f"{root}/"): tar.extractfile(name) for name in tar.getnames()}
        contents = {name: stream.read() for name, stream in streams.items() if stream}
    assert sorted(contents) == [
        ".gitignore",
        "SHA256SUMS",
        "artifacts/junit.xml",
        "artifacts/manifest.yaml",
        "artifacts/records/new.jsonl",
        "constraints.txt",
        "source.py",
    ]
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items() if name != "SHA256SUMS"}
    assert read_seal(contents["SHA256SUMS"]) == hashes


def test_sha256sum_checks_an_unpacked_bundle(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The seal has the format of `sha256sum`, which checks an unpacked bundle without this program."""
    archive, folder = _make(tree), tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=unpacked, check=False).returncode == 0
    (unpacked / "source.py").write_text("x = 2\n", encoding="utf-8")
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=unpacked, check=False).returncode == 1


def test_the_source_tree_is_that_of_git(tree: Path) -> None:
    """For an unchanged checkout, `source_tree` is the tree of its commit."""
    _make(tree)
    command = ["git", "rev-parse", "HEAD^{tree}"]
    expected = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.strip()
    assert _manifest(tree)["source_tree"] == expected


def test_the_source_tree_without_git(tree: Path) -> None:
    """In a stamped copy without its `.git` folder, `source_tree` is that of the commit; only outputs are left out."""
    (tree / "package/build").mkdir(parents=True)
    (tree / "package/build/ninja.py").write_text("x = 1\n", encoding="utf-8")
    _git(tree, "add", "-A")
    _git(tree, "commit", "-qm", "second")
    command = ["git", "rev-parse", "HEAD^{tree}"]
    expected = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.strip()
    write_stamp(tree)
    (tree / ".git").rename(tree.parent / f"{tree.name}-git")
    for folder in ("build", "site", "package/__pycache__"):
        (tree / folder).mkdir()
        (tree / folder / "output").write_text("x", encoding="utf-8")
    _make(tree)
    assert _manifest(tree)["source_tree"] == expected


def test_an_untracked_variant_is_packed(tree: Path) -> None:
    """A variant that was judged and is not committed yet is packed, too; ignored files are not."""
    (tree / "kernels/mine").mkdir(parents=True)
    (tree / "kernels/mine/variant.yaml").write_text("role: candidate\n", encoding="utf-8")
    (tree / ".fa-source.json").write_text("{}", encoding="utf-8")
    assert "kernels/mine/variant.yaml" in _names(_make(tree))
    assert ".fa-source.json" not in _names(next((tree / "artifacts").glob("*.tar.gz")))


def test_links_that_lead_away_are_left_out(
    tree: Path, tmp_path_factory: pytest.TempPathFactory, snapshot: SnapshotAssertion
) -> None:
    """A link out of the source folder is not followed, and the manifest names it; a link inside is packed as a file."""
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("secret", encoding="utf-8")
    (tree / "away").symlink_to(secret)
    (tree / "inside").symlink_to("source.py")
    archive = _make(tree)
    assert snapshot == _manifest(tree)["left_out"]
    assert ("away" in _names(archive), "inside" in _names(archive)) == (False, True)


def test_an_exit_status_that_contradicts_the_records(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a wrong result, pytest cannot have ended with status 0: no bundle is written."""
    arguments = ["make", "--folder", str(tree), "--artifacts", str(tree / "artifacts"), "--exit-status", "0"]
    assert main([*arguments, "--records", str(tree / "artifacts/records/new.jsonl")]) == 2
    expected = "pytest's exit status is 0, but the records have 1 wrong; give pytest's own exit status"
    assert expected in capsys.readouterr().err
    assert list((tree / "artifacts").glob("repro_bundle_*")) == []


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (
            {"--records": "source.py"},
            "--records: {tree}/source.py is not in {tree}/artifacts, as all results must be; ",
        ),
        ({"--records": ""}, "--records: {cwd} is not in {tree}/artifacts, as all results must be; copy it there, or "),
        ({"--artifacts": "."}, "--artifacts: {tree} is not in {tree}/artifacts, as all results must be; copy it there"),
        ({"--artifacts": "artifacts/none"}, "--artifacts: there is no folder {tree}/artifacts/none; give the one of "),
        ({"--records": "artifacts/x.jsonl"}, "--records: there is no file {tree}/artifacts/x.jsonl; give a file that "),
        ({"--records": "artifacts/records"}, "{tree}/artifacts/records: it cannot be read: it is a folder, not a "),
    ],
)
def test_results_in_another_place(
    tree: Path, places: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results outside of the folder `artifacts` and results that are not there are one sentence; nothing is written."""
    before = sorted(tree.rglob("*"))
    words = {"--artifacts": "artifacts", "--records": "artifacts/records/new.jsonl", **places}
    options = [f"{option}={tree / place if place else ''}" for option, place in words.items()]
    assert main(["make", "--exit-status=1", f"--folder={tree}", *options]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("pytest_fa bundle: " + expected.format(tree=tree, cwd=Path.cwd()))
    assert sorted(tree.rglob("*")) == before


def test_names_of_person_and_machine_are_replaced(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results name neither the source folder, the home folder, the host nor the user; source files stay as they are."""
    monkeypatch.setattr("pytest_fa.features.bundle.privacy.platform.node", lambda: "buildbox-7.example.org")
    monkeypatch.setattr("pytest_fa.features.bundle.privacy.getpass.getuser", lambda: "alicia")
    monkeypatch.setenv("HOME", "/users/alicia")
    text = f"{tree}/source.py /users/alicia/.cache buildbox-7.example.org buildbox-7 alicia malicias"
    (tree / "artifacts/junit.xml").write_text(text, encoding="utf-8")
    (tree / "source.py").write_text("# alicia\n", encoding="utf-8")
    with tarfile.open(_make(tree)) as tar:
        contents = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar}
        junit, source = (contents[name] for name in ("artifacts/junit.xml", "source.py"))
        assert junit is not None
        assert source is not None
        assert junit.read().decode() == "./source.py ~/.cache HOST HOST USER malicias"
        assert source.read() == b"# alicia\n"


NAMES = {"/src": ".", "/users/höme": "~", "buildbox-7": "HOST", "alicia": "USER"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/scratch/pytest-of-alicia/x fa-alicia-cache", "/scratch/pytest-of-USER/x fa-USER-cache"),
        ("malicia alicia2 alicia_x", "malicia alicia2 alicia_x"),
        ("my-buildbox-7 buildbox-7-old buildbox-7.", "my-buildbox-7 buildbox-7-old HOST."),
        (json.dumps(["/users/höme/a", "/users/hömer"]), '["~/a", "/users/h\\u00f6mer"]'),
        ('<testsuite name="pytest" errors="0" hostname="vm"><a hostname="vm"/>', None),
        ('{"machine_info": {"cpu": {"arch": "X"}, "node": "v\\"m", "system": "Linux"}, "node": "left"}', None),
    ],
    ids=["user", "parts of words", "host", "JSON", "JUnit", "pytest-benchmark"],
)
def test_where_names_are_replaced(text: str, expected: str | None) -> None:
    """A user's name is replaced beside `-`, all names in JSON's ASCII, and the host in its fields even if short."""
    if expected is None:
        expected = text.replace('"vm"', '"HOST"', 1).replace('"v\\"m"', '"HOST"')
    assert without_private_names(text.encode(), NAMES).decode() == expected


def test_archive_is_named_after_commit_and_state(tree: Path) -> None:
    """The name of the archive has the commit, and `-dirty` if the tree was changed."""
    (tree / "source.py").write_text("x = 2\n", encoding="utf-8")
    commit = str(read_source(tree).commit)[:12]
    assert _make(tree).name.startswith(f"repro_bundle_{commit}-dirty_")


def test_a_file_that_a_stamp_does_not_know(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stamp fits although a file was added; the bundle is dirty, because its tree is not that of the commit."""
    write_stamp(tree)
    (tree / "added.py").write_text("x = 2\n", encoding="utf-8")
    read_source.cache_clear()
    assert read_source(tree).dirty is False
    archive = _make(tree)
    assert (_manifest(tree)["source"]["dirty"], "-dirty_" in archive.name) == (True, True)
    main(["verify", str(archive)])
    assert f"commit {read_source(tree).commit} with changes, source tree " in capsys.readouterr().out


def test_a_folder_of_a_repository_has_a_tree(tree: Path) -> None:
    """The tree of a folder in a repository is compared with that folder's tree in the commit."""
    folder = tree / "inner"
    (folder / "artifacts").mkdir(parents=True)
    (folder / "source.py").write_text("x = 1\n", encoding="utf-8")
    (folder / ".gitignore").write_text("/artifacts/\n", encoding="utf-8")
    (folder / "artifacts/new.jsonl").write_bytes(_record(Outcome.OK))
    end_run(folder / "artifacts/new.jsonl", 0)
    _git(tree, "add", "-A")
    _git(tree, "commit", "-qm", "second")
    make_bundle(folder, folder / "artifacts", folder / "artifacts/new.jsonl", 0)
    assert _manifest(folder)["source"]["dirty"] is False


def test_a_bundle_is_made_without_git(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without the program git, a stamped tree is packed."""
    write_stamp(tree)
    read_source.cache_clear()
    monkeypatch.setenv("PATH", str(tree / "nowhere"))
    _make(tree)
    assert _manifest(tree)["source"]["origin"] == ".fa-source.json"


@pytest.mark.parametrize(("of_record", "of_bundle", "is_right"), [(True, False, False), (True, True, True)])
def test_records_of_changed_sources(tree: Path, *, of_record: bool, of_bundle: bool, is_right: bool) -> None:
    """Records that were measured on changed sources are a problem of a bundle that says its sources are unchanged."""
    source = msgspec.structs.replace(read_source(tree), dirty=of_record)
    line = msgspec.json.decode(_record(Outcome.WRONG), type=dict[str, Any])
    line["source"] = msgspec.to_builtins(source)
    (tree / "artifacts/records/new.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    end_run(tree / "artifacts/records/new.jsonl", 1)
    if of_bundle:
        (tree / "added.py").write_text("x = 2\n", encoding="utf-8")
    texts = [problem.text for problem in verify_bundle(_make(tree)).problems]
    problem = f"{line['id']}: it was measured on changed sources, but the manifest says that they are unchanged"
    assert (problem not in texts) is is_right


def test_stamp_is_used_without_git(tree: Path) -> None:
    """In a tree without its `.git` folder, commit and dirty state are those of the stamp."""
    before = read_source(tree)
    write_stamp(tree)
    (tree / ".git").rename(tree.parent / f"{tree.name}-git")
    read_source.cache_clear()
    after = read_source(tree)
    assert (after.commit, after.dirty, after.origin) == (before.commit, before.dirty, ".fa-source.json")


def test_stamp_needs_a_commit(tmp_path: Path) -> None:
    """In a folder without a git commit, `write_stamp` raises an error that says so."""
    with pytest.raises(UsageProblem, match="no git commit to record"):
        write_stamp(tmp_path)


def test_stamp_command(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m pytest_fa bundle stamp` writes the file and prints its path."""
    assert main(["stamp", str(tree)]) == 0
    assert json.loads((tree / ".fa-source.json").read_text(encoding="utf-8"))["dirty"] is False
    assert capsys.readouterr().out.startswith("wrote ")


def test_the_command_beside_others(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m pytest_fa bundle` is the same command, and the list of all commands names it."""
    assert all_commands(["bundle", "stamp", str(tree)]) == 0
    assert capsys.readouterr().out.startswith("wrote ")
    with pytest.raises(SystemExit, match="0"):
        all_commands(["--help"])
    assert "\n    bundle " in capsys.readouterr().out


def test_local_versions_are_not_compared(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """The version 2.13.0+cpu matches the pin 2.13.0; another version and a missing package are reported."""
    installed = {"torch": "2.13.0+cpu", "numpy": "2.0.0", "nvtx": None}
    monkeypatch.setattr("pytest_fa.features.bundle.constraints.installed_version", installed.get)
    changed = differences({"torch": "2.13.0", "numpy": "2.4.6", "nvtx": "0.2.17"})
    assert snapshot == [str(difference) for difference in changed]


def test_constraints_must_be_pins(tmp_path: Path) -> None:
    """A line that is not a pin is refused, with its number and the required form."""
    path = tmp_path / "constraints.txt"
    path.write_text("# versions\nnumpy==2.4.6\n\ntorch>=2\n", encoding="utf-8")
    with pytest.raises(UsageProblem, match=r"line 4: 'torch>=2' is not of the form name==version"):
        read_constraints(path)


def test_problem_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that fails returns 2 and prints one line with the reason."""
    assert main(["stamp", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"pytest_fa bundle: {tmp_path}: no git commit to record")


def test_records_that_cannot_be_read_are_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a line of the record file cannot be read, no manifest and no archive are written, and the status is 2."""
    records = tree / "artifacts/records/new.jsonl"
    records.write_bytes(records.read_bytes() + b"[1e308]\n")
    arguments = ["make", "--folder", str(tree), "--artifacts", str(tree / "artifacts"), "--exit-status", "1"]
    assert main([*arguments, "--records", str(records)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"pytest_fa bundle: {records}: 1 of 3 lines cannot be read; line 3: record schema is ")
    assert sorted(path.name for path in (tree / "artifacts").iterdir()) == ["junit.xml", "records"]
