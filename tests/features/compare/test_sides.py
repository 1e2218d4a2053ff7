"""The sides of a comparison: files, folders, bundles, git revisions, and what is none of these."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.errors import UsageProblem
from pytest_fa.features.compare import sides
from pytest_fa.features.compare.compare import compare
from pytest_fa.features.compare.comparison import comparison_text
from pytest_fa.features.compare.sides import read_side, read_sides
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import to_json
from tests.factories import RECORD, SHAPE, record, speed


def _write(path: Path, *variants: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(to_json(record(variant)) + b"\n" for variant in variants))
    return path


def _names(word: str, folder: Path) -> list[str]:
    return sorted(record.variant for record in read_side(word, folder).records)


def _bundle(path: Path, **members: bytes) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_a_file(tmp_path: Path) -> None:
    """A record file is read, relative to the folder."""
    _write(tmp_path / "run.jsonl", "a", "b")
    assert _names("run.jsonl", tmp_path) == ["a", "b"]


def test_a_folder(tmp_path: Path) -> None:
    """Every record file below a folder is read."""
    _write(tmp_path / "profiles/nvidia-h200/a.jsonl", "a")
    _write(tmp_path / "profiles/cpu/b.jsonl", "b")
    assert _names("profiles", tmp_path) == ["a", "b"]


def test_a_bundle(tmp_path: Path) -> None:
    """Of a bundle, the records of its run are read, not the profiles among its sources."""
    line = to_json(record("a")) + b"\n"
    _bundle(tmp_path / "x.tar.gz", **{"x/artifacts/records/r.jsonl": line, "x/profiles/gpu/b.jsonl": line * 2})
    assert _names("x.tar.gz", tmp_path) == ["a"]


def test_a_revision(tmp_path: Path) -> None:
    """A git revision gives its `profiles/`, and REVISION:FOLDER another folder, from any folder of the repository."""
    _write(tmp_path / "profiles/gpu/a.jsonl", "a")
    _write(tmp_path / "other/b.jsonl", "b")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)
    _write(tmp_path / "profiles/gpu/a.jsonl", "changed")
    assert _names("HEAD", tmp_path / "other") == ["a"]
    assert _names("HEAD:other", tmp_path) == ["b"]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    revisions = ("HEAD", "HEAD:other", commit[:8], commit.strip())
    names = [f"HEAD ({commit[:12]})", f"HEAD:other ({commit[:12]})", commit[:8], commit.strip()]
    assert [read_side(word, tmp_path).name for word in revisions] == names


def test_the_newest_record_counts(tmp_path: Path) -> None:
    """Of two records with the same kind and id, the newer one is compared, in any order."""
    lines = [to_json(record("a", measured_at=f"2026-01-0{day}T00:00:00+00:00", message=str(day))) for day in (2, 1)]
    (tmp_path / "run.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert [each.message for each in read_side("run.jsonl", tmp_path).records] == ["2"]


def test_each_gpu_has_its_own_records(tmp_path: Path) -> None:
    """Records of one id from two GPUs are both kept; of one GPU, the newest."""
    gpus = [msgspec.structs.replace(RECORD.environment, gpu=name) for name in ("NVIDIA H200", "NVIDIA L4")]
    lines = [to_json(record("a", environment=environment)) for environment in (*gpus, gpus[0])]
    (tmp_path / "run.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    kept = [each.environment.gpu for each in read_side("run.jsonl", tmp_path).records]
    assert kept == ["NVIDIA H200", "NVIDIA L4"]


def test_several_words_are_one_side(tmp_path: Path) -> None:
    """`read_sides` returns the records of all words together, each id once, and all complaints."""
    _write(tmp_path / "a.jsonl", "a", "b")
    path = _write(tmp_path / "b.jsonl", "b", "c")
    path.write_bytes(path.read_bytes() + b"no record\n")
    side = read_sides(["a.jsonl", "b.jsonl"], tmp_path)
    assert (side.name, len(side.complaints)) == ("a.jsonl, b.jsonl", 1)
    assert [each.variant for each in side.records] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("word", "name", "complaint"),
    [
        ("in/runs", "runs", "runs/b.jsonl"),
        ("in/runs/b.jsonl", "runs/b.jsonl", "runs/b.jsonl"),
        ("in/../out/runs", "runs", "runs/b.jsonl"),
        ("out/runs/b.jsonl", "b.jsonl", "b.jsonl"),
    ],
)
def test_a_mailed_side_names_no_folder(tmp_path: Path, word: str, name: str, complaint: str) -> None:
    """Absolute paths are shown relative to the working folder, or as their last part if they are outside of it."""
    for place in ("in", "out"):
        path = _write(tmp_path / place / "runs/b.jsonl", "b")
        path.write_bytes(path.read_bytes() + b"no record\n")
    side = read_sides([str(tmp_path / word)], tmp_path / "in")
    assert (side.name, side.complaints[0].partition(": ")[0]) == (name, complaint)


def test_unreadable_lines_are_named(tmp_path: Path) -> None:
    """Lines that are no records are counted and named; the others are compared."""
    path = _write(tmp_path / "run.jsonl", "a")
    path.write_bytes(path.read_bytes() + b"no record\n")
    (complaint,) = read_side("run.jsonl", tmp_path).complaints
    assert "1 of 2 lines cannot be read; line 2:" in complaint


@pytest.mark.parametrize("word", ["nowhere", "--upload-pack=touch x", "HEAD", "a\x00b"])
def test_neither_a_file_nor_a_revision(tmp_path: Path, word: str) -> None:
    """Anything else is one error that names the allowed forms; no word becomes an option of git."""
    with pytest.raises(UsageProblem, match=r"is neither a file nor a revision|cannot be read"):
        read_side(word, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_records(tmp_path: Path) -> None:
    """A file of random bytes is an error with its first problem."""
    (tmp_path / "noise.jsonl").write_bytes(b"\xff\x00\x01")
    with pytest.raises(UsageProblem, match=r"'noise.jsonl' has no records; .*noise.jsonl: 1 of 1 lines cannot be read"):
        read_side("noise.jsonl", tmp_path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08\x00"])
def test_a_broken_archive(tmp_path: Path, content: bytes) -> None:
    """An archive that cannot be read is one error."""
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(UsageProblem, match=r"'x.tar.gz' (cannot be read|has no records)"):
        read_side("x.tar.gz", tmp_path)


def test_a_large_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """An archive that unpacks to more than 1 GiB is refused before it is read."""
    monkeypatch.setattr(sides, "LARGEST_ARCHIVE_BYTES", 1000)
    _bundle(tmp_path / "x.tar.gz", **{"x/artifacts/r.jsonl": b"0" * 1001})
    with pytest.raises(UsageProblem) as error:
        read_side("x.tar.gz", tmp_path)
    assert snapshot == str(error.value)


def test_a_changed_bit_of_an_archive(tmp_path: Path) -> None:
    """An archive with a changed bit is refused, or has the same records: gzip's checksum is compared."""
    path, lines = tmp_path / "x.tar.gz", b"".join(to_json(record(name)) + b"\n" for name in ("a", "b"))
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:  # a bit of the content is a bit of the file
        member = tarfile.TarInfo("x/artifacts/r.jsonl")
        member.size = len(lines)
        archive.addfile(member, io.BytesIO(lines))
    good, content, refused = read_side("x.tar.gz", tmp_path).records, path.read_bytes(), 0
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert read_side("x.tar.gz", tmp_path).records == good
        except UsageProblem as problem:
            refused += 1
            assert str(problem).startswith("'x.tar.gz' ")  # noqa: PT017
    assert refused > len(content) // 7 - 5  # a few bits are the time and the system of gzip's header


def test_zeros_behind_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """An archive that unpacks to many zeros behind its last file is refused, too."""
    path = tmp_path / "x.tar.gz"
    _bundle(path, **{"x/artifacts/r.jsonl": to_json(record("a")) + b"\n"})
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(200_000)))
    monkeypatch.setattr(sides, "LARGEST_ARCHIVE_BYTES", 100_000)
    with pytest.raises(UsageProblem) as error:
        read_side("x.tar.gz", tmp_path)
    assert snapshot == str(error.value)


def test_a_failure_hides_the_time(tmp_path: Path) -> None:
    """Of a failure and an earlier time of the same variant and shape, the time does not count, and the side says so."""
    timed = record("a", kind="speed", speed=speed(9.0))
    failed = record("a", outcome=Outcome.HUNG, measured_at="2026-02-03T00:00:00+00:00")
    (tmp_path / "run.jsonl").write_bytes(b"".join(to_json(each) + b"\n" for each in (timed, failed)))
    side = read_side("run.jsonl", tmp_path)
    assert [(each.kind, each.speed) for each in side.records] == [("speed", None), ("correct", None)]
    comparison = compare(side, side, lambda _: 0.008)
    assert comparison.counts == {"still wrong": 1}
    assert [(row.checks_a, row.device_us_a, row.reason) for row in comparison.rows] == [((0, 1), None, "2026-02-03: ")]
    text = comparison_text(comparison)
    hidden = "hung (2026-02-03) and not passed since, so 9.00 us of 2026-01-01 does not count"
    origin = "measured on the CPU a CPU, 2026-01-01 to 2026-02-03, without a commit"
    for name in "AB":
        assert f"{name}: a at {SHAPE}: {hidden}" in text
        assert f"{name}: {origin}" in text


def test_an_answer_of_another_folder_restores_the_time(tmp_path: Path) -> None:
    """Of several folders, the results that stand are those of all of them together."""
    timed, failed = record("a", kind="speed", speed=speed(9.0)), record("a", outcome=Outcome.WRONG)
    passed = record("a", measured_at="2026-02-03T00:00:00+00:00")
    for name, records in (("one", (timed, failed)), ("two", (passed,))):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(to_json(each) + b"\n" for each in records))
    side = read_sides(["one.jsonl", "two.jsonl"], tmp_path)
    assert ([each.speed for each in side.records], side.hidden) == ([timed.speed, None], ())
