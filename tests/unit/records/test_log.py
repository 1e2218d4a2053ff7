"""Records on disk: appended lines, and saved files that keep what is not replaced."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Arch
from pytest_fa.records.built import Build, Kernel
from pytest_fa.records.compact import compact_lines
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.files import UnreadableRecords
from pytest_fa.records.log import RecordLog, read_records, save_records, saved_path
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import SCHEMA, Environment, Record, RecordKind, Source, to_json

ENVIRONMENT = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")


def record(
    variant: str = "ws_p2", case: str = "b1h2s64d64-fp16-seed0", kind: RecordKind = "correct", **changes: Any
) -> Record:
    """Return a record with outcome `ok`; `changes` are other fields."""
    plain = Record(
        schema=SCHEMA,
        id=f"{variant}-{case}",
        kind=kind,
        variant=variant,
        role="candidate",
        case=parse_case(case),
        outcome=Outcome.OK,
        message="",
        caught_by=(),
        stages=(),
        builds=(),
        check=None,
        repeats=None,
        diagnosis=None,
        speed=None,
        environment=ENVIRONMENT,
        source=Source("0123abcd", False, "git"),
        measured_at="2026-01-01T00:00:00+00:00",
        rerun_command="pytest",
    )
    return msgspec.structs.replace(plain, **changes)


def build(arch: Arch, identity: str | None) -> Build:
    """Return a build with this code identity."""
    return Build("ws_p2", arch, "key", "kernel.so", identity, None, (), (), (), "13.0", "a host", "today", 1.0)


# -- the run's own file -----------------------------------------------------------------------------------------------


def test_saved_records_have_no_local_paths(tmp_path: Path) -> None:
    """Paths below the run's root become relative, and the path of an interpreter becomes `python`."""
    local = record(
        "one",
        message="/home/me/run/artifacts/x.log",
        rerun_command="pytest --fa-cache=/home/me/run/.cache",
        caught_by=("/home/me/env/bin/python3.12", "/usr/local/cuda/bin/ncu"),
    )
    (path,) = save_records([local], tmp_path, Path("/home/me/run"))
    (saved,) = read_records(path)
    assert (saved.message, saved.rerun_command) == ("artifacts/x.log", "pytest --fa-cache=.cache")
    assert saved.caught_by == ("python", "/usr/local/cuda/bin/ncu")


def test_records_are_appended_at_once(tmp_path: Path) -> None:
    """After each `append`, the file has one line more."""
    log = RecordLog(tmp_path / "artifacts")
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}") for seed in range(3)]
    for count, appended in enumerate(records, start=1):
        log.append(appended)
        assert records[:count] == read_records(log.path)


def test_a_run_without_records_writes_nothing(tmp_path: Path) -> None:
    """The folder is created with the first record, not before."""
    RecordLog(tmp_path / "artifacts")
    assert list(tmp_path.iterdir()) == []


def test_each_run_has_its_own_file(tmp_path: Path) -> None:
    """The file name has the time and the process id, so parallel runs write different files."""
    path = RecordLog(tmp_path).path
    assert tmp_path / "records" == path.parent
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{os.getpid()}\.jsonl", path.name)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    """`read_records` returns an empty list for a missing file."""
    assert read_records(tmp_path / "none.jsonl") == []


# -- saved files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"), (None, "cpu")],
)
def test_records_are_saved_by_gpu(gpu: str | None, folder: str) -> None:
    """Each GPU has its own folder; records made without a GPU are in `cpu`."""
    assert folder == gpu_folder(gpu)


@pytest.mark.parametrize(
    ("variant", "name"), [("ws_p2", "ws_p2.jsonl"), ("ws_p2@BLOCK_M=64@MODE=a/b", "ws_p2-BLOCK_M-64-MODE-a-b.jsonl")]
)
def test_a_file_is_named_after_its_variant(tmp_path: Path, variant: str, name: str) -> None:
    """The file name is the variant's name, with special characters replaced by `-`."""
    assert tmp_path / "nvidia-h200" / name == saved_path(tmp_path, record(variant))


def test_records_are_saved_by_variant_and_gpu(tmp_path: Path) -> None:
    """Each variant has its own file per GPU, and `save_records` returns the files."""
    one, two = record("one"), record("two", environment=msgspec.structs.replace(ENVIRONMENT, gpu=None))
    paths = save_records([one, two], tmp_path)
    expected = {tmp_path / "nvidia-h200" / "one.jsonl": [one], tmp_path / "cpu" / "two.jsonl": [two]}
    assert expected == {path: read_records(path) for path in paths}


def test_saving_deletes_its_temporary_file(tmp_path: Path) -> None:
    """After saving, only the record file is in the folder."""
    save_records([record("one")], tmp_path)
    assert [path.name for path in (tmp_path / "nvidia-h200").iterdir()] == ["one.jsonl"]


def test_saving_replaces_the_same_id_and_keeps_the_others(tmp_path: Path) -> None:
    """A record replaces the saved one of the same kind and id; other seeds and kinds are kept."""
    old = [record(), record(case="b1h2s64d64-fp16-seed1"), record(kind="speed")]
    save_records(old, tmp_path)
    new = record(measured_at="2026-02-02T00:00:00+00:00")
    (path,) = save_records([new], tmp_path)
    assert [new, old[1], old[2]] == read_records(path)


def test_two_gates_of_one_variant_are_two_records(tmp_path: Path) -> None:
    """A gate replaces only a saved gate with the same rerun command, because its id is just the variant's name."""
    options = ("--fa-case=b1h2s64d64-fp16-seed0", "--fa-case=b1h4s128d64-fp16-seed0", "--fa-case=b1h2s64d64-fp16-seed0")
    for number, option in enumerate(options):
        gate = record(kind="gate", id="ws_p2", rerun_command=f"pytest {option}", message=str(number))
        (path,) = save_records([msgspec.structs.replace(gate, case=None)], tmp_path)
    assert [gate.message for gate in read_records(path)] == ["2", "1"]


def test_the_last_of_two_records_of_a_run_is_kept(tmp_path: Path) -> None:
    """Within one run, a later record of the same kind and id replaces the earlier one."""
    new = record(measured_at="2026-02-02T00:00:00+00:00")
    (path,) = save_records([record(), new], tmp_path)
    assert [new] == read_records(path)


def test_kernels_of_a_build_are_saved_once(tmp_path: Path) -> None:
    """A file lists the kernels of each build once, and all records of the build have them when they are read."""
    kernels = [(Kernel(name, f"_Z{name}", 32, 0, 0, 0, 0, {"FFMA": 7}),) for name in ("old", "new")]
    old, new = (
        msgspec.structs.replace(build("sm_90a", identity), kernels=listed)
        for identity, listed in zip(("1", "2"), kernels, strict=True)
    )
    records = [
        record(case=f"b1h2s64d64-fp16-seed{seed}", builds=(used,)) for seed, used in enumerate((old, new, old, new))
    ]
    save_records(records[:2], tmp_path)
    (path,) = save_records(records[2:], tmp_path)
    assert records == read_records(path)
    assert [path.read_text().count(f'"_Z{name}"') for name in ("old", "new")] == [1, 1]


def test_what_is_shared_is_kept_if_a_record_is_replaced(tmp_path: Path) -> None:
    """If the first of two records that share a build is replaced, the other one has the build."""
    kernels = (Kernel("one", "_Zone", 32, 0, 0, 0, 0),)
    first = msgspec.structs.replace(build("sm_90a", "1"), kernels=kernels)
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}", builds=(first,)) for seed in range(2)]
    save_records(records, tmp_path)
    newer = record(builds=(build("sm_90a", "2"),))
    (path,) = save_records([newer], tmp_path)
    assert [newer, records[1]] == read_records(path)


def test_saving_twice_changes_nothing(tmp_path: Path) -> None:
    """The same records in another order give an identical file."""
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}") for seed in range(3)]
    (path,) = save_records(records, tmp_path)
    before = path.read_bytes()
    save_records(records[::-1], tmp_path)
    assert before == path.read_bytes()


LATER = b'{"schema":99,"id":"ws_p2-b1h2s64d64-fp16-seed7","us":10.5}'


@pytest.mark.parametrize("unreadable", [LATER, b"{", b"\xff\r", b"\x1b[2J", b"[" * 100_000])
def test_saving_keeps_the_lines_that_it_cannot_read(tmp_path: Path, unreadable: bytes) -> None:
    """A line that is no record of this version, such as one of a later schema, is kept unchanged."""
    path = saved_path(tmp_path, record())
    path.parent.mkdir()
    path.write_bytes(unreadable + b"\n\n" + to_json(record(case="b1h2s64d64-fp16-seed1")) + b"\n" + LATER)
    save_records([record()], tmp_path)
    records = b"".join(compact_lines([record(), record(case="b1h2s64d64-fp16-seed1")]))
    assert path.read_bytes() == unreadable + b"\n" + LATER + b"\n" + records


def test_a_compact_line_that_cannot_be_read_keeps_its_parts(tmp_path: Path) -> None:
    """A compact line with an impossible figure is kept, with the parts that it names: another reader may need them."""
    path = saved_path(tmp_path, record())
    path.parent.mkdir()
    *parts, good, _ = compact_lines([record(builds=(build("sm_90a", "1"),)), record("ws_p2", "b1h2s64d64-fp16-seed1")])
    bad = good.replace(b'"id"', b'"compile_seconds":-1.0,"id"')
    path.write_bytes(b"".join([*parts, bad]))
    save_records([record(role="baseline")], tmp_path)
    assert path.read_bytes().startswith(b"".join(parts[:-1]))
    path.write_bytes(path.read_bytes().replace(b'"compile_seconds":-1.0,', b""))
    assert [each.role for each in read_records(path)] == ["candidate", "baseline"]


@pytest.mark.parametrize("other", ["seed7", "seed0"])
def test_a_new_record_replaces_one_of_an_earlier_schema(tmp_path: Path, other: str) -> None:
    """A record of an earlier schema stays until a new one with the same kind and id is saved."""
    path = saved_path(tmp_path, record())
    path.parent.mkdir()
    earlier = b'{"schema":5,"id":"ws_p2-b1h2s64d64-fp16-%s","kind":"correct"}\n' % other.encode()
    path.write_bytes(earlier)
    save_records([record()], tmp_path)
    kept = earlier if other == "seed7" else b""
    assert path.read_bytes() == kept + b"".join(compact_lines([record()]))


def test_saving_keeps_a_line_that_is_too_long(tmp_path: Path) -> None:
    """A line of more than 16 MiB is kept unchanged as well."""
    path, size = saved_path(tmp_path, record()), 40 * 2**20
    path.parent.mkdir()
    path.write_bytes(b"x" * size)
    save_records([record()], tmp_path)
    assert path.read_bytes() == b"x" * size + b"\n" + b"".join(compact_lines([record()]))


def test_saving_does_not_replace_what_is_no_file(tmp_path: Path) -> None:
    """A folder or a FIFO in place of a saved file is reported and stays, and no temporary file is left."""
    paths = [saved_path(tmp_path, record(name)) for name in ("one", "two")]
    paths[0].mkdir(parents=True)
    os.mkfifo(paths[1])
    for name, kind in (("one", "folder"), ("two", "FIFO")):
        with pytest.raises(OSError, match=f"it is a {kind}, not a regular file"):
            save_records([record(name)], tmp_path)
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["one.jsonl", "two.jsonl"]


def test_saving_stops_at_a_file_of_bad_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that holds something else than records is reported, and it does not change."""
    monkeypatch.setattr("pytest_fa.records.files.MAX_BAD_LINES", 2)
    path = saved_path(tmp_path, record())
    path.parent.mkdir()
    path.write_bytes(b"a\nb\nc\n")
    with pytest.raises(UnreadableRecords, match="more than 2 of its lines are no records"):
        save_records([record()], tmp_path)
    assert path.read_bytes() == b"a\nb\nc\n"
    assert [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("gpu", ["../../../etc", "/etc", "..", ".", "", "a/../b", "\n/\x00"])
def test_a_record_cannot_be_saved_outside_the_folder(tmp_path: Path, gpu: str) -> None:
    """The name of a GPU, which a record file supplies, and that of a variant never lead out of the records folder."""
    away = record("../../x", environment=msgspec.structs.replace(ENVIRONMENT, gpu=gpu))
    assert saved_path(tmp_path, away).resolve().parent.parent == tmp_path


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """If a line does not fit on the disk, the lines before it stay whole, and the error is raised."""
    log = RecordLog(tmp_path)
    log.append(record())
    size = log.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.append(record())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert log.path.stat().st_size == size
    log.append(record())
    assert len(read_records(log.path)) == 2


def test_processes_that_save_at_the_same_time_keep_each_others_records(tmp_path: Path) -> None:
    """Each of them reads the file, adds its record, and writes the file."""
    program = (
        "import sys; from pathlib import Path; from pytest_fa.records.log import save_records\n"
        "from tests.factories import ENVIRONMENT, OK, record\n"
        "folder, first = Path(sys.argv[1]), int(sys.argv[2])\n"
        "(folder / f'ready{first}').touch()\n"
        "while len(list(folder.glob('ready*'))) < 2: pass\n"
        "for seed in range(first, first + 40):\n"
        "    each = record('mine', f'b1h8s512d64-fp16-seed{seed}', 'correct', check=OK, environment=ENVIRONMENT)\n"
        "    save_records([each], folder)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(first)], cwd=Path(__file__).parents[3])
        for first in (0, 100)
    ]
    assert [each.wait(60) for each in both] == [0, 0]
    assert len(list(read_records(tmp_path / "nvidia-h200" / "mine.jsonl"))) == 80
