"""A bundle whose records are not those that its run wrote is refused, or it is named what is missing."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from pytest_fa.errors import UsageProblem
from pytest_fa.features.bundle.bundle_manifest import MANIFEST, outcomes_of
from pytest_fa.features.bundle.make import make_bundle
from pytest_fa.features.bundle.seal import SEAL, git_tree, make_seal
from pytest_fa.features.bundle.verify import Verification, verify_bundle
from pytest_fa.records.environment import read_environment
from pytest_fa.records.files import read_stream
from pytest_fa.records.record import Record, to_json
from pytest_fa.records.source import read_source
from tests.factories import right_record
from tests.written_runs import end_run

RECORDS, ENTRY = "artifacts/records/run.jsonl", "kernels/mine/entry.py"
CASES = [f"b1h1s{size}d64-fp16-seed0" for size in (16, 32)]
Content = dict[str, bytes]
Manifest = dict[str, Any]


@pytest.fixture
def content(tmp_path: Path) -> Content:
    """The files of a verified bundle: two right cases of a Python variant, and a property of it."""
    tree = tmp_path / "tree"
    records = tree / RECORDS
    records.parent.mkdir(parents=True)
    (tree / ENTRY).parent.mkdir(parents=True)
    (tree / ENTRY).write_text("right = True\n")
    read_source.cache_clear()
    facts: dict[str, Any] = {"environment": read_environment(), "source": read_source(tree)}
    facts["sources"] = {ENTRY: hashlib.sha256((tree / ENTRY).read_bytes()).hexdigest()}
    lines = [right_record("mine", case, **facts) for case in CASES]
    lines.append(msgspec.structs.replace(lines[0], kind="property", id="mine-storage_offset"))
    records.write_bytes(b"".join(to_json(line) + b"\n" for line in lines))
    archive = make_bundle(tree, tree / "artifacts", end_run(records, 0), 0).archive
    with tarfile.open(archive) as tar:
        streams = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar}
        return {name: stream.read() for name, stream in streams.items() if stream}


def remade(folder: Path, content: Content, change: Callable[[Manifest], object] = lambda _: None) -> Verification:
    """Verify an archive of this content after all its hashes, and what the manifest counts, were made anew."""
    manifest = yaml.safe_load(content[MANIFEST])
    sources = {name: data for name, data in content.items() if name != SEAL and not name.startswith("artifacts/")}
    blobs = {name: hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() for name, data in sources.items()}  # noqa: S324  # git's
    manifest["source_tree"] = git_tree((name, blob, False) for name, blob in blobs.items())
    manifest["outcomes"] = outcomes_of(read_stream(Path(RECORDS), io.BytesIO(content[RECORDS])).records)
    change(manifest)
    content = {**content, MANIFEST: yaml.safe_dump(manifest).encode()}
    seal = make_seal({name: hashlib.sha256(data).hexdigest() for name, data in content.items() if name != SEAL})
    path = folder / "remade.tar.gz"
    with gzip.open(path, "wb", 1) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, data in {**content, SEAL: seal}.items():
            member = tarfile.TarInfo(f"top/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return verify_bundle(path)


def texts(verification: Verification) -> list[str]:
    """The sentences of the problems."""
    return [problem.text for problem in verification.problems]


def edited(content: Content, edit: Callable[[list[Record]], list[Record]]) -> Content:
    """The content with other records."""
    records = list(read_stream(Path(RECORDS), io.BytesIO(content[RECORDS])).records)
    return {**content, RECORDS: b"".join(to_json(record) + b"\n" for record in edit(records))}


def test_what_was_made_anew_is_verified(content: Content, tmp_path: Path) -> None:
    """Without a forgery, the helper of these tests makes a verified bundle that needs no note."""
    verification = remade(tmp_path, content)
    assert (texts(verification), verification.notes) == ([], ())


def test_a_dropped_record_is_a_problem(content: Content, tmp_path: Path) -> None:
    """The number of records must be the one that the run wrote; a kind that is missing altogether is named, too."""
    verification = remade(tmp_path, edited(content, lambda records: records[:2]))
    assert texts(verification) == ["the run wrote 3 records, the bundle has 2"]
    assert verification.notes == ("mine: no record of kind property",)


def test_a_doubled_record_is_a_problem(content: Content, tmp_path: Path) -> None:
    """A record that occurs twice is named, even if the number of records is right again."""
    verification = remade(tmp_path, edited(content, lambda records: [*records[:2], records[0]]))
    assert texts(verification) == [f"correct mine-{CASES[0]}: this record occurs 2 times"]


def test_a_replaced_source_is_a_problem(content: Content, tmp_path: Path) -> None:
    """The source of a Python variant must be the one that was judged; a source that is not there is named."""
    (text,) = texts(remade(tmp_path, {**content, ENTRY: b"right = False\n"}))
    assert text.startswith(f"{ENTRY}: its sha256 is ")
    without = {name: data for name, data in content.items() if name != ENTRY}
    assert remade(tmp_path, without).notes == (f"sources that are not in the bundle: {ENTRY}",)


def test_a_source_that_changed_since_is_not_bundled(content: Content, tmp_path: Path) -> None:
    """`make` refuses a source that is not the one that was judged, instead of writing a bundle that is broken."""
    tree = tmp_path / "tree"
    (tree / ENTRY).write_text("right = False\n")
    with pytest.raises(UsageProblem, match=rf"{ENTRY}: its sha256 is .*; it was changed since the run"):
        make_bundle(tree, tree / "artifacts", tree / RECORDS, 0)
    assert ENTRY in content


def test_a_repeated_key_is_a_problem(content: Content, tmp_path: Path) -> None:
    """A line with two outcomes is wrong for one reader and ok for another."""
    forged = content[RECORDS].replace(b'{"schema":6,', b'{"schema":6,"outcome":"wrong",', 1)
    assert forged != content[RECORDS]
    (text,) = texts(remade(tmp_path, {**content, RECORDS: forged}))
    assert text == f"{RECORDS}: line 1: the key 'outcome' occurs twice in one object"


@pytest.mark.parametrize("schema", [4, 5])
def test_an_older_schema_is_a_problem(content: Content, tmp_path: Path, schema: int) -> None:
    """Records of an earlier schema are not read: they had fewer figures."""
    older = content[RECORDS].replace(b'"schema":6', b'"schema":%d' % schema)
    text = next(text for text in texts(remade(tmp_path, {**content, RECORDS: older})) if "schema" in text)
    assert f"3 of 3 lines cannot be read; line 1: record schema is {schema}, and this" in text


@pytest.mark.parametrize(
    ("created", "problem"),
    [
        ("2999-01-01T00:00:00+00:00", "which is in the future"),
        ((datetime.now(UTC) + timedelta(days=3)).isoformat(), "which is in the future"),
        ("2999", "which is not a time with a time zone"),
        ("tomorrow", "which is not a time with a time zone"),
    ],
    ids=["far", "in three days", "a year", "a word"],
)
def test_a_time_in_the_future_is_a_problem(content: Content, tmp_path: Path, created: str, problem: str) -> None:
    """A bundle cannot have been made later than now."""
    (text,) = texts(remade(tmp_path, content, lambda manifest: manifest.update(created=created)))
    assert problem in text


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("difference", "line 2 is another", "the run noticed that its records were changed: line 2 is another"),
        ("exit_status", 1, "the run ended with 1, the manifest says 0"),
        ("count", 4, "the run wrote 4 records, the bundle has 3"),
    ],
)
def test_what_the_run_wrote_must_fit(content: Content, tmp_path: Path, field: str, value: object, problem: str) -> None:
    """The manifest has what the run says that it wrote, and the records must fit it."""
    verification = remade(tmp_path, content, lambda manifest: manifest["written"].update({field: value}))
    assert texts(verification) == [problem]


def test_an_earlier_manifest_is_refused(content: Content, tmp_path: Path) -> None:
    """A manifest of an earlier schema does not say what the run wrote."""

    def make_earlier(manifest: Manifest) -> None:
        manifest.update(schema=2)
        del manifest["written"]

    (text,) = texts(remade(tmp_path, content, make_earlier))
    assert text == f"{MANIFEST} cannot be read: its schema is 2; this version reads schema 3"


def test_the_notes_are_printed(content: Content, tmp_path: Path) -> None:
    """The JSON of a verification has the notes."""
    verification = remade(tmp_path, edited(content, lambda records: records[:2]))
    assert json.loads(to_json(verification))["notes"] == ["mine: no record of kind property"]
