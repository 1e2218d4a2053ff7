"""Records on disk: appended lines, saved files that keep what is not replaced, and stale saved records."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.variant import Arch
from pytest_fa.records.built import Build, Kernel
from pytest_fa.records.environment import gpu_folder
from pytest_fa.records.log import RecordLog, read_records, save_records, saved_path, stale_variants
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
        outcome="ok",
        message="",
        caught_by=(),
        stages=(),
        builds=(),
        check=None,
        repeats=None,
        diagnosis=None,
        speed=None,
        gate=None,
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


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b'{"schema": 0}', to_json(record())[:-20], to_json(record(schema=SCHEMA + 1))],
    ids=["empty", "half a brace", "a list", "older schema", "cut off", "newer schema"],
)
def test_an_unreadable_line_is_skipped(tmp_path: Path, line: bytes) -> None:
    """A malformed line or one of an unsupported schema is skipped, and the lines around it are read."""
    path = tmp_path / "ws_p2.jsonl"
    first, last = record(case="b1h2s64d64-fp16-seed1"), record(case="b1h2s64d64-fp16-seed2")
    path.write_bytes(b"\n".join((to_json(first), line, to_json(last))) + b"\n")
    assert [first, last] == read_records(path)


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
    gates = [
        record(kind="gate", id="ws_p2", rerun_command=f"pytest {option}", message=str(number))
        for number, option in enumerate(options)
    ]
    for gate in gates:
        (path,) = save_records([gate], tmp_path)
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


def test_kernels_are_kept_if_their_record_is_replaced(tmp_path: Path) -> None:
    """If the record that lists a build's kernels is replaced, the next record of the build lists them."""
    kernels = (Kernel("one", "_Zone", 32, 0, 0, 0, 0),)
    first = msgspec.structs.replace(build("sm_90a", "1"), kernels=kernels)
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}", builds=(first,)) for seed in range(2)]
    save_records(records, tmp_path)
    newer = record(builds=(build("sm_90a", "2"),))
    (path,) = save_records([newer], tmp_path)
    assert [newer, records[1]] == read_records(path)


def test_kernels_are_taken_from_a_later_record(tmp_path: Path) -> None:
    """If the first record of a build lists no kernels, they are taken from the next one that does."""
    complete = msgspec.structs.replace(build("sm_90a", "1"), kernels=(Kernel("one", "_Zone", 32, 0, 0, 0, 0),))
    bare = msgspec.structs.replace(complete, kernels=())
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}", builds=(used,)) for seed, used in enumerate((bare, complete))]
    (path,) = save_records(records, tmp_path)
    assert [(complete,), (complete,)] == [saved.builds for saved in read_records(path)]


def test_saving_twice_changes_nothing(tmp_path: Path) -> None:
    """The same records in another order give an identical file."""
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}") for seed in range(3)]
    (path,) = save_records(records, tmp_path)
    before = path.read_bytes()
    save_records(records[::-1], tmp_path)
    assert before == path.read_bytes()


def test_saving_keeps_the_lines_that_it_cannot_read(tmp_path: Path) -> None:
    """A line of an unsupported schema is kept unchanged when other records are saved."""
    path = saved_path(tmp_path, record())
    path.parent.mkdir()
    unreadable = b'{"schema":0,"id":"ws_p2-b1h2s64d64-fp16-seed7","us":10.5}'
    path.write_bytes(unreadable + b"\n")
    save_records([record()], tmp_path)
    assert sorted((unreadable, to_json(record()))) == sorted(path.read_bytes().splitlines())


# -- stale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ((build("sm_90a", "old"),), (build("sm_90a", "new"),), ["ws_p2"]),
        ((build("sm_90a", "same"),), (build("sm_90a", "same"),), []),
        ((build("sm_80", "old"), build("sm_90a", "same")), (build("sm_90a", "same"),), []),
        ((build("sm_80", "same"), build("sm_90a", "old")), (build("sm_80", "same"), build("sm_90a", "new")), ["ws_p2"]),
        ((build("sm_80", "old"),), (build("sm_90a", "new"),), []),
        ((), (build("sm_90a", "new"),), []),
        ((build("sm_90a", "old"),), (), []),
        ((build("sm_90a", "old"),), (build("sm_90a", None),), []),
        ((build("sm_90a", None),), (build("sm_90a", "new"),), []),
    ],
    ids=[
        "other code",
        "same code",
        "another architecture is not in this run",
        "one of two architectures",
        "no architecture in common",
        "saved without a build",
        "run without a build",
        "this run's code is unknown",
        "the saved code is unknown",
    ],
)
def test_saved_records_are_stale_if_the_machine_code_differs(
    tmp_path: Path, saved: tuple[Build, ...], now: tuple[Build, ...], expected: list[str]
) -> None:
    """Records are stale if the code identities for the same architecture are both known and differ."""
    save_records([record(builds=saved)], tmp_path)
    assert expected == stale_variants([record(case="b1h2s64d64-fp16-seed5", builds=now)], tmp_path)


@pytest.mark.parametrize("gpu", [None, "NVIDIA L4"])
def test_another_machine_detects_stale_records(tmp_path: Path, gpu: str | None) -> None:
    """Saved records of one GPU are compared with the builds of any machine, so CI without a GPU detects stale ones."""
    save_records([record(builds=(build("sm_90a", "old"),))], tmp_path)
    environment = msgspec.structs.replace(ENVIRONMENT, gpu=gpu)
    newer = record(builds=(build("sm_90a", "new"),), environment=environment)
    assert stale_variants([newer], tmp_path) == ["ws_p2"]


def test_a_stale_variant_is_named_once(tmp_path: Path) -> None:
    """A variant with several stale records is named once, and other variants are not named."""
    old, new, unchanged = build("sm_90a", "old"), build("sm_90a", "new"), build("sm_90a", "unchanged")
    seeds = [f"b1h2s64d64-fp16-seed{seed}" for seed in range(3)]
    save_records([record("one", case, builds=(old,)) for case in seeds], tmp_path)
    save_records([record("two", case, builds=(unchanged,)) for case in seeds], tmp_path)
    run = [
        *(record("one", case, builds=(new,)) for case in seeds),
        *(record("two", case, builds=(unchanged,)) for case in seeds),
    ]
    assert stale_variants(run, tmp_path) == ["one"]
