"""Record files from anywhere: lines that are no records are counted and named, and the other lines are read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.records import files
from pytest_fa.records.compact import Content, compact_lines
from pytest_fa.records.files import BadLine, RecordFile, UnreadableRecords, read_record_file, try_to_read
from pytest_fa.records.log import read_records
from pytest_fa.records.read import read_line
from pytest_fa.records.record import SCHEMA, Record, to_builtins, to_json
from tests.factories import RECORD, SMALL_SHAPE, record

FIRST, LAST = record(case=f"{SMALL_SHAPE}-seed1"), record(case=f"{SMALL_SHAPE}-seed2")


def line(**changes: Any) -> bytes:
    """The line of the full record with other fields, which need not be possible."""
    return json.dumps({**to_builtins(RECORD), **changes}).encode()


def timed(device: str) -> bytes:
    """The line of the full record; `device` is the JSON of its device time."""
    return line(speed={**to_builtins(RECORD)["speed"], "device": "DEVICE"}).replace(b'"DEVICE"', device.encode())


def device(median: str, samples: str = "[1.0]") -> str:
    """The JSON of a device time with this median and these samples."""
    return f'{{"method": "m", "samples_us": {samples}, "median_us": {median}, "calls_per_sample": 1}}'


def compact(record: Record) -> bytes:
    """The compact line of one record."""
    (line,) = compact_lines([record])
    return line.rstrip()


NESTED = b"[" * 100_000 + b"]" * 100_000
CASE = to_builtins(RECORD)["case"]

BAD_LINES: dict[str, tuple[bytes, str]] = {
    "half a brace": (b"{", "Input data was truncated"),
    "a list": (b"[]", "record schema is None; this version reads schema 6"),
    "a number": (b"1", "record schema is None; this version reads schema 6"),
    "newer schema": (to_json(record(schema=SCHEMA + 1)), "record schema is 7; this version reads schema 6"),
    "a text as schema": (b'{"schema": "6"}', "record schema is '6'; this version reads schema 6"),
    "a part of a newer schema": (b'{"part": "a", "schema": 7}', "record schema is 7; this version reads schema 6"),
    "a part with a wrong value": (b'{"part": "a", "role": 1}', "Expected `str`, got `int`"),
    "a part without a name": (b'{"part": null}', "Expected `str`, got `null`"),
    "a missing part": (b'{"parts": ["0a"]}', "no line above it has its part '0a'"),
    "parts that are none": (b'{"parts": [[]]}', "Expected `str`, got `array` - at `$[0]`"),
    "a compact line without an id": (b'{"parts": [], "schema": 6}', "Object missing required field `id`"),
    "a stage with too many values": (
        compact(RECORD).replace(b'["sanity","not reached"]', b'["sanity","not reached",0.0,2]'),
        "Expected `object`, got `array` - at `$.stages",
    ),
    "a compact line with a case that is none": (
        compact(RECORD).replace(b'"kind"', b'"case":"b0","kind"'),
        "case 'b0' is malformed",
    ),
    "cut off": (to_json(record())[:-1], "Input data was truncated"),
    "two records": (to_json(record()) * 2, "JSON is malformed: trailing characters (byte "),
    "NaN": (timed(device("NaN")), "JSON is malformed: invalid character (byte "),
    "Infinity": (timed(device("Infinity")), "JSON is malformed: invalid character (byte "),
    "1e308": (timed(device("1e308")), "Expected `float` < 1000000000000.0 - at `$.speed.device.median_us`"),
    "1e999": (timed(device("1e999")), "Number out of range"),
    "no time": (timed(device("null")), "Expected `float`, got `null` - at `$.speed.device.median_us`"),
    "zero time": (timed(device("0")), "Expected `float` >= 1e-06 - at `$.speed.device.median_us`"),
    "negative time": (timed(device("1", "[-1]")), "Expected `float` >= 0.0 - at `$.speed.device.samples_us"),
    "null case": (line(case=None), "a record of kind speed has no case"),
    "no heads": (line(case={**CASE, "heads": 0}), "Expected `int` >= 1 - at `$.case.heads`"),
    "too many keys": (line(case={**CASE, "seq_k": 2**31}), "Expected `int` <= 2147483647 - at `$.case.seq_k`"),
    "5000 digits": (line(case={**CASE, "batch": "N"}).replace(b'"N"', b"1" * 5000), "Integer value out of range"),
    "impossible case": (line(case={**CASE, "kv_heads": 3}), "8 heads cannot share 3 key/value heads evenly"),
    "wrong type": (line(message=[]), "Expected `str`, got `array` - at `$.message`"),
    "unknown outcome": (line(outcome="great"), "Invalid enum value 'great' - at `$.outcome`"),
    "brackets": (NESTED, "its JSON is nested too deeply"),
    "brackets in an unknown field": (to_json(RECORD)[:-1] + b',"x":' + NESTED + b"}", "its JSON is nested too deeply"),
    "brackets in another order": (b'{"id":1,"schema":' + NESTED + b"}", "its JSON is nested too deeply"),
    "not UTF-8": (b'{"schema":4,"id":"\xff"}', "byte 18 is not UTF-8"),
    "not UTF-8 in an unknown field": (to_json(RECORD)[:-1] + b',"x":"\xc3"}', "is not UTF-8"),
    "half a surrogate pair": (
        line(message="MESSAGE").replace(b"MESSAGE", b"\\ud83d"),
        "utf-16 surrogate pair (byte ",
    ),
    "a raw ESC": (line(message="MESSAGE").replace(b"MESSAGE", b"\x1b[2J"), "JSON is malformed: invalid character"),
    "NUL bytes": (bytes(100), "JSON is malformed: invalid character (byte 0)"),
    "a byte order mark": (b"\xef\xbb\xbf" + to_json(RECORD), "JSON is malformed: invalid character (byte 0)"),
}


def written(path: Path, *lines: bytes) -> Path:
    """Write these lines to a file, and return its path."""
    path.write_bytes(b"".join(each + b"\n" for each in lines))
    return path


# -- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    """A line that is no record is returned with its number, its place and the reason; the lines around it are read."""
    content, problem = BAD_LINES[name]
    file = read_record_file(written(tmp_path / "x.jsonl", to_json(FIRST), content, to_json(LAST)))
    assert (file.records, file.problem) == ((FIRST, LAST), "")
    (bad,) = file.bad_lines
    assert (bad.number, bad.start, bad.length) == (2, len(to_json(FIRST)) + 1, len(content) + 1)
    assert problem in bad.problem


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_file_with_a_bad_line_is_refused(tmp_path: Path, name: str) -> None:
    """`read_records` raises an error with the file, the number of bad lines, the first one, the reason and a remedy."""
    content, problem = BAD_LINES[name]
    path = written(tmp_path / "x.jsonl", to_json(FIRST), content, to_json(LAST), b"{")
    with pytest.raises(UnreadableRecords) as raised:
        read_records(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: 2 of 4 lines cannot be read; line 2: ")
    assert problem in text
    assert text.endswith("; delete such lines, or read them with the version of pytest-fa that wrote them")
    assert "\n" not in text


@pytest.mark.parametrize("schema", [0, 3, 5])
def test_a_record_of_an_earlier_schema_is_explained_in_one_sentence(
    tmp_path: Path, schema: int, snapshot: SnapshotAssertion
) -> None:
    """The complaint says which schema was found, which one is read, and what to do."""
    path = written(tmp_path / "x.jsonl", to_json(record(id="one", schema=schema)), to_json(LAST))
    file = read_record_file(path)
    assert (file.records, [bad.earlier_key for bad in file.bad_lines]) == ((LAST,), [("correct", "one")])
    assert snapshot == file.complaint


def test_a_file_without_a_bad_line_has_no_complaint(tmp_path: Path) -> None:
    """Every line is a record, and there is nothing to complain about; empty lines do not count."""
    path = written(tmp_path / "x.jsonl", b"", to_json(FIRST), b" \r", to_json(LAST) + b"\r")
    assert read_record_file(path) == RecordFile(path, (FIRST, LAST))
    assert (read_records(path), read_record_file(path).complaint) == ([FIRST, LAST], "")


def test_empty_lines_are_numbered(tmp_path: Path) -> None:
    """The number of a bad line is that which an editor shows."""
    file = read_record_file(written(tmp_path / "x.jsonl", b"", to_json(FIRST), b"", b"{"))
    assert [bad.number for bad in file.bad_lines] == [4]


def test_the_last_line_may_lack_its_newline(tmp_path: Path) -> None:
    """A file whose last line was cut off has one bad line."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(to_json(FIRST) + b"\n" + to_json(LAST)[:40])
    file = read_record_file(path)
    assert (file.records, [(bad.number, bad.length) for bad in file.bad_lines]) == ((FIRST,), [(2, 40)])


def test_a_line_of_more_than_16_mib_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer line is named without being parsed, and the next line is read."""
    path, size = tmp_path / "x.jsonl", 40 * 2**20
    with path.open("wb") as stream:
        stream.write(b"\n")
        stream.seek(size)
        stream.write(b"\n" + to_json(LAST) + b"\n")
    parsed: list[int] = []

    def read(data: bytes, parts: dict[str, Content]) -> Record | None:
        parsed.append(len(data))
        return read_line(data, parts)

    monkeypatch.setattr("pytest_fa.records.files.read_line", read)
    file = read_record_file(path)
    assert (file.records, file.bad_lines) == ((LAST,), (BadLine(2, 1, size, "it is longer than 16 MiB"),))
    assert parsed == [len(to_json(LAST)) + 1]


def test_a_file_of_bad_lines_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If more lines are bad than any record file would have, reading stops and the file is refused."""
    monkeypatch.setattr(files, "MAX_BAD_LINES", 3)
    path = written(tmp_path / "x.jsonl", to_json(FIRST), *[b"x"] * 3)
    assert len(read_record_file(path).bad_lines) == 3
    file = read_record_file(written(path, to_json(FIRST), *[b"x"] * 4))
    assert file == RecordFile(path, problem="more than 3 of its lines are no records", remedy="remove it")


def test_a_long_reason_is_cut(tmp_path: Path) -> None:
    """The reason is one line of limited length, and a value that it quotes cannot change the terminal."""
    path = written(tmp_path / "x.jsonl", line(outcome="\x1b[2J\n" + "x" * 10_000))
    (bad,) = read_record_file(path).bad_lines
    assert bad.problem.startswith(r"Invalid enum value '\x1b[2J\nxxx")
    assert len(bad.problem) == files.LONGEST_PROBLEM + 3


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none.jsonl", "none/none.jsonl", "file/none.jsonl"])
def test_a_missing_file_is_empty(tmp_path: Path, name: str) -> None:
    """A file that does not exist has no records and nothing to complain about."""
    (tmp_path / "file").touch()
    assert read_record_file(tmp_path / name) == RecordFile(tmp_path / name)
    assert read_records(tmp_path / name) == []


def make_special(path: Path, kind: str) -> None:
    """Make something at `path` that is no regular file."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    """A FIFO, a folder or a device in place of a file is refused at once: nothing waits for a writer."""
    path = tmp_path / "x.jsonl"
    make_special(path, kind)
    remedy = "give the path of a regular file"
    assert read_record_file(path) == RecordFile(path, problem=f"it is a {kind}, not a regular file", remedy=remedy)
    with pytest.raises(UnreadableRecords) as raised:
        read_records(path)
    assert str(raised.value) == f"{path}: it cannot be read: it is a {kind}, not a regular file; {remedy}"


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that may not be opened is refused with the system's reason."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "x.jsonl")

    monkeypatch.setattr("os.open", refuse)
    assert read_record_file(tmp_path / "x.jsonl").problem == "Permission denied"


def test_an_impossible_path_is_refused(tmp_path: Path) -> None:
    """A path with NUL, which a Markdown file may contain, is refused."""
    assert "embedded null" in read_record_file(tmp_path / "a\0b.jsonl").problem  # Python 3.13 has other words


def test_the_name_of_a_file_is_printable(tmp_path: Path) -> None:
    """Control characters in a file's name do not reach the error message."""
    path = written(tmp_path / "\x1b[2J.jsonl", b"{")
    with pytest.raises(UnreadableRecords, match=r"/\\x1b\[2J\.jsonl: 1 of 1 lines"):
        read_records(path)


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\x1b[31m", "\x9b31m", "\x7f", "\r", "\b", "\f", "\u202e", "\u2066", "\x00"])
def test_the_words_of_a_file_are_printable(tmp_path: Path, text: str) -> None:
    """Each string of a record that is read is printable, with escapes in place of control characters."""
    kernel = msgspec.structs.replace(RECORD.builds[0].kernels[0], name=f"k{text}")
    build = msgspec.structs.replace(RECORD.builds[0], kernels=(kernel,))
    unsafe = msgspec.structs.replace(RECORD, message=f"a{text}b", builds=(build,))
    (read,) = read_records(written(tmp_path / "x.jsonl", to_json(unsafe)))
    words = (read.message, read.builds[0].kernels[0].name)
    assert [text in word for word in words] == [False, False]
    assert all("\\" in word for word in words)


@pytest.mark.parametrize("text", ["::error::x", "\n \t::error::x", "in it ##[error]x"])
def test_a_file_contains_no_workflow_command(tmp_path: Path, text: str) -> None:
    """A command of GitHub's runner in a record that is read has an escape in place of its first mark."""
    unsafe = msgspec.structs.replace(RECORD, message=text)
    (read,) = read_records(written(tmp_path / "x.jsonl", to_json(unsafe)))
    assert read.message in (r"\x3a:error::x", "\n \t" + r"\x3a:error::x", r"in it \x23#[error]x")


def test_other_words_of_a_file_stay(tmp_path: Path) -> None:
    """Text in any script is read as it was written."""
    words: Record = msgspec.structs.replace(RECORD, message="\u4e2d\u6587\n\t\N{GREEK SMALL LETTER MU}s \\x1b")
    assert read_records(written(tmp_path / "x.jsonl", to_json(words))) == [words]


# -- reading what may be missing --------------------------------------------------------------------------------------


def test_a_reason_takes_the_place_of_an_exception() -> None:
    """`try_to_read` returns what was read, or None and the reason."""

    def fail() -> Record:
        raise UnreadableRecords("x.jsonl: it is a FIFO")

    assert try_to_read(lambda: RECORD) == (RECORD, "")
    assert try_to_read(lambda: None) == (None, "")
    assert try_to_read(fail) == (None, "x.jsonl: it is a FIFO")
