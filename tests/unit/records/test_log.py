"""Records on disk: lines as they come, profiles that keep what they do not replace, and those that have gone stale."""

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

HERE = Environment("NVIDIA H200", "9.0", "580.1", "13.0", "2.11", "3.12.1", "Linux 6", "a CPU", "0.1.0")


def record(
    variant: str = "ws_p2", case: str = "b1h2s64d64-fp16-seed0", kind: RecordKind = "correct", **changes: Any
) -> Record:
    """A record that passed; `changes` are other fields."""
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
        environment=HERE,
        source=Source("0123abcd", False, "git"),
        measured_at="2026-01-01T00:00:00+00:00",
        rerun_command="pytest",
    )
    return msgspec.structs.replace(plain, **changes)


def build(arch: Arch, identity: str | None) -> Build:
    """A build with that machine code."""
    return Build("ws_p2", arch, "key", "kernel.so", identity, None, (), (), (), "13.0", "a host", "today", 1.0)


# -- the run's own file -----------------------------------------------------------------------------------------------


def test_kept_records_name_no_folder_of_the_machine(tmp_path: Path) -> None:
    """Paths below the run's root are kept from there on, and an interpreter by its name."""
    told = msgspec.structs.replace(
        record("one"), message="/home/me/run/artifacts/x.log", rerun_command="pytest --fa-cache=/home/me/run/.cache"
    )
    told = msgspec.structs.replace(told, caught_by=("/home/me/env/bin/python3.12", "/usr/local/cuda/bin/ncu"))
    (path,) = save_records([told], tmp_path, Path("/home/me/run"))
    (kept,) = read_records(path)
    assert (kept.message, kept.rerun_command) == ("artifacts/x.log", "pytest --fa-cache=.cache")
    assert kept.caught_by == ("python", "/usr/local/cuda/bin/ncu")


def test_records_are_appended_as_they_come(tmp_path: Path) -> None:
    """Each record is on disk as one more line before the next one is made."""
    log = RecordLog(tmp_path / "artifacts")
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}") for seed in range(3)]
    for count, each in enumerate(records, start=1):
        log.append(each)
        assert records[:count] == read_records(log.path)


def test_a_run_without_records_leaves_nothing(tmp_path: Path) -> None:
    """The folder is made with the first record, not before."""
    RecordLog(tmp_path / "artifacts")
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    """The file is named after the moment and the process, so that runs side by side do not mix."""
    path = RecordLog(tmp_path).path
    assert tmp_path / "records" == path.parent
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{os.getpid()}\.jsonl", path.name)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_no_file_has_no_records(tmp_path: Path) -> None:
    """A profile that was never saved is empty."""
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b'{"schema": 0}', to_json(record())[:-20], to_json(record(schema=SCHEMA + 1))],
    ids=["empty", "half a brace", "a list", "older schema", "cut off", "newer schema"],
)
def test_a_line_of_another_schema_is_left_out(tmp_path: Path, line: bytes) -> None:
    """What this version cannot vouch for is not read, and the lines around it are."""
    path = tmp_path / "ws_p2.jsonl"
    first, last = record(case="b1h2s64d64-fp16-seed1"), record(case="b1h2s64d64-fp16-seed2")
    path.write_bytes(b"\n".join((to_json(first), line, to_json(last))) + b"\n")
    assert [first, last] == read_records(path)


# -- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"), (None, "cpu")],
)
def test_a_profile_lies_under_its_gpu(gpu: str | None, folder: str) -> None:
    """Times of one GPU never land beside those of another, nor beside those of none."""
    here = msgspec.structs.replace(HERE, gpu=gpu)
    assert folder == gpu_folder(here.gpu)


@pytest.mark.parametrize(
    ("variant", "name"), [("ws_p2", "ws_p2.jsonl"), ("ws_p2@BLOCK_M=64@MODE=a/b", "ws_p2-BLOCK_M-64-MODE-a-b.jsonl")]
)
def test_a_profile_is_named_after_its_variant(tmp_path: Path, variant: str, name: str) -> None:
    """The file name is the variant's, with nothing in it that a file system or a shell reads."""
    assert tmp_path / "nvidia-h200" / name == saved_path(tmp_path, record(variant))


def test_profiles_are_saved_by_variant_and_gpu(tmp_path: Path) -> None:
    """Every variant has its own file, and the files that were written are returned."""
    one, two = record("one"), record("two", environment=msgspec.structs.replace(HERE, gpu=None))
    paths = save_records([one, two], tmp_path)
    expected = {tmp_path / "nvidia-h200" / "one.jsonl": [one], tmp_path / "cpu" / "two.jsonl": [two]}
    assert expected == {path: read_records(path) for path in paths}


def test_saving_leaves_no_scratch_file(tmp_path: Path) -> None:
    """The file is written beside and renamed, and nothing else stays."""
    save_records([record("one")], tmp_path)
    expected = ["one.jsonl"]
    assert expected == [path.name for path in (tmp_path / "nvidia-h200").iterdir()]


def test_saving_replaces_the_same_id_and_keeps_the_others(tmp_path: Path) -> None:
    """A line gives way to a newer one of the same kind and id; another seed and another kind stay."""
    old = [record(), record(case="b1h2s64d64-fp16-seed1"), record(kind="speed")]
    save_records(old, tmp_path)
    new = record(measured_at="2026-02-02T00:00:00+00:00")
    (path,) = save_records([new], tmp_path)
    assert [new, old[1], old[2]] == read_records(path)


def test_two_gates_of_one_variant_are_two_records(tmp_path: Path) -> None:
    """A gate's id is its variant's: one over other shapes replaces nothing, the same question's later answer does."""
    asked = ("--fa-case=b1h2s64d64-fp16-seed0", "--fa-case=b1h4s128d64-fp16-seed0", "--fa-case=b1h2s64d64-fp16-seed0")
    gates = [
        record(kind="gate", id="ws_p2", rerun_command=f"pytest {each}", message=str(n)) for n, each in enumerate(asked)
    ]
    for each in gates:
        (path,) = save_records([each], tmp_path)
    assert [each.message for each in read_records(path)] == ["2", "1"]


def test_the_last_of_two_records_of_a_run_is_kept(tmp_path: Path) -> None:
    """Within one run, too, the newer record of the same kind and id wins."""
    new = record(measured_at="2026-02-02T00:00:00+00:00")
    (path,) = save_records([record(), new], tmp_path)
    assert [new] == read_records(path)


def test_kernels_of_a_leaf_are_saved_once(tmp_path: Path) -> None:
    """Records of one build share what its kernels are, in the file and not in what is read; another build has its own."""
    kernels = [(Kernel(name, f"_Z{name}", 32, 0, 0, 0, 0, {"FFMA": 7}),) for name in ("old", "new")]
    old, new = (
        msgspec.structs.replace(build("sm_90a", name), kernels=each)
        for name, each in zip(("1", "2"), kernels, strict=True)
    )
    records = [
        record(case=f"b1h2s64d64-fp16-seed{seed}", builds=(each,)) for seed, each in enumerate((old, new, old, new))
    ]
    save_records(records[:2], tmp_path)
    (path,) = save_records(records[2:], tmp_path)
    assert records == read_records(path)
    assert [path.read_text().count(f'"_Z{name}"') for name in ("old", "new")] == [1, 1]


def test_kernels_survive_the_record_that_had_them(tmp_path: Path) -> None:
    """Where the first record of a build is replaced by one of another build, the next says what the kernels were."""
    kernels = (Kernel("one", "_Zone", 32, 0, 0, 0, 0),)
    first = msgspec.structs.replace(build("sm_90a", "1"), kernels=kernels)
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}", builds=(first,)) for seed in range(2)]
    save_records(records, tmp_path)
    newer = record(builds=(build("sm_90a", "2"),))
    (path,) = save_records([newer], tmp_path)
    assert [newer, records[1]] == read_records(path)


def test_a_record_that_lacks_its_kernels_takes_them_from_none(tmp_path: Path) -> None:
    """Where the line that had them was lost, the next record that has them says them for all."""
    whole = msgspec.structs.replace(build("sm_90a", "1"), kernels=(Kernel("one", "_Zone", 32, 0, 0, 0, 0),))
    bare = msgspec.structs.replace(whole, kernels=())
    records = [record(case=f"b1h2s64d64-fp16-seed{n}", builds=(each,)) for n, each in enumerate((bare, whole))]
    (path,) = save_records(records, tmp_path)
    assert [(whole,), (whole,)] == [each.builds for each in read_records(path)]


def test_saving_twice_changes_nothing(tmp_path: Path) -> None:
    """The same records in another order give the same file, byte for byte, so that a commit shows what changed."""
    records = [record(case=f"b1h2s64d64-fp16-seed{seed}") for seed in range(3)]
    (path,) = save_records(records, tmp_path)
    before = path.read_bytes()
    save_records(records[::-1], tmp_path)
    assert before == path.read_bytes()


def test_saving_keeps_the_lines_that_it_cannot_read(tmp_path: Path) -> None:
    """A line of another schema was measured too: it stays as it is when a neighbour is saved."""
    path = saved_path(tmp_path, record())
    path.parent.mkdir()
    foreign = b'{"schema":0,"id":"ws_p2-b1h2s64d64-fp16-seed7","us":10.5}'
    path.write_bytes(foreign + b"\n")
    save_records([record()], tmp_path)
    assert sorted((foreign, to_json(record()))) == sorted(path.read_bytes().splitlines())


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
def test_a_profile_is_stale_when_its_machine_code_has_moved(
    tmp_path: Path, saved: tuple[Build, ...], now: tuple[Build, ...], expected: list[str]
) -> None:
    """Only code that is known on both sides, for the same architecture, and different makes a profile stale."""
    save_records([record(builds=saved)], tmp_path)
    assert expected == stale_variants([record(case="b1h2s64d64-fp16-seed5", builds=now)], tmp_path)


@pytest.mark.parametrize("gpu", [None, "NVIDIA L4"])
def test_another_machine_sees_what_is_stale(tmp_path: Path, gpu: str | None) -> None:
    """What was measured on one GPU is held to what any machine compiles for it: that is how CI, without one, tells."""
    save_records([record(builds=(build("sm_90a", "old"),))], tmp_path)
    here = msgspec.structs.replace(HERE, gpu=gpu)
    found = record(builds=(build("sm_90a", "new"),), environment=here)
    assert stale_variants([found], tmp_path) == ["ws_p2"]


def test_a_stale_variant_is_named_once(tmp_path: Path) -> None:
    """However many of its records moved, a variant is named once, and its neighbours are not."""
    old, new, same = build("sm_90a", "old"), build("sm_90a", "new"), build("sm_90a", "same")
    seeds = [f"b1h2s64d64-fp16-seed{seed}" for seed in range(3)]
    save_records([record("one", case, builds=(old,)) for case in seeds], tmp_path)
    save_records([record("two", case, builds=(same,)) for case in seeds], tmp_path)
    run = [
        *(record("one", case, builds=(new,)) for case in seeds),
        *(record("two", case, builds=(same,)) for case in seeds),
    ]
    expected = ["one"]
    assert expected == stale_variants(run, tmp_path)
