"""Saved records of a run's variants: which are stale, which launches they have, and which files are incomplete."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pytest_fa.catalog.variant import Arch
from pytest_fa.records.built import Build
from pytest_fa.records.log import save_records
from pytest_fa.records.record import Environment, Record, to_json
from pytest_fa.records.saved import SavedRecords
from tests.factories import BUILD, RECORD, SMALL_SHAPE, record

H200 = msgspec.structs.replace(RECORD.environment, gpu="NVIDIA H200")


def built(arch: Arch, identity: str | None) -> Build:
    """A build with this code identity."""
    return msgspec.structs.replace(BUILD, variant="ws_p2", arch=arch, code_identity=identity)


def with_builds(*builds: Build, variant: str = "ws_p2", seed: int = 0, environment: Environment = H200) -> Record:
    """A record with these builds."""
    return record(variant, f"{SMALL_SHAPE}-seed{seed}", builds=builds, environment=environment)


def stale_variants(records: list[Record], folder: Path) -> list[str]:
    """The variants of `records` whose saved records are stale."""
    return SavedRecords(folder, [each.variant for each in records]).stale_variants(records)


# -- stale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ((built("sm_90a", "old"),), (built("sm_90a", "new"),), ["ws_p2"]),
        ((built("sm_90a", "same"),), (built("sm_90a", "same"),), []),
        ((built("sm_80", "old"), built("sm_90a", "same")), (built("sm_90a", "same"),), []),
        ((built("sm_80", "same"), built("sm_90a", "old")), (built("sm_80", "same"), built("sm_90a", "new")), ["ws_p2"]),
        ((built("sm_80", "old"),), (built("sm_90a", "new"),), []),
        ((), (built("sm_90a", "new"),), []),
        ((built("sm_90a", "old"),), (), []),
        ((built("sm_90a", "old"),), (built("sm_90a", None),), []),
        ((built("sm_90a", None),), (built("sm_90a", "new"),), []),
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
    save_records([with_builds(*saved)], tmp_path)
    assert expected == stale_variants([with_builds(*now, seed=5)], tmp_path)


@pytest.mark.parametrize("gpu", [None, "NVIDIA L4"])
def test_another_machine_detects_stale_records(tmp_path: Path, gpu: str | None) -> None:
    """Saved records of one GPU are compared with the builds of any machine, so CI without a GPU detects stale ones."""
    save_records([with_builds(built("sm_90a", "old"))], tmp_path)
    newer = with_builds(built("sm_90a", "new"), environment=msgspec.structs.replace(H200, gpu=gpu))
    assert stale_variants([newer], tmp_path) == ["ws_p2"]


def test_a_stale_variant_is_named_once(tmp_path: Path) -> None:
    """A variant with several stale records is named once, and other variants are not named."""
    old, new, unchanged = built("sm_90a", "old"), built("sm_90a", "new"), built("sm_90a", "unchanged")
    save_records([with_builds(old, variant="one", seed=seed) for seed in range(3)], tmp_path)
    save_records([with_builds(unchanged, variant="two", seed=seed) for seed in range(3)], tmp_path)
    run = [
        *(with_builds(new, variant="one", seed=seed) for seed in range(3)),
        *(with_builds(unchanged, variant="two", seed=seed) for seed in range(3)),
    ]
    assert stale_variants(run, tmp_path) == ["one"]


# -- launches and records ---------------------------------------------------------------------------------------------


def test_launches_are_found_by_variant_and_kernel(tmp_path: Path) -> None:
    """The launch of each saved kernel is found by its variant and its demangled name."""
    save_records([RECORD], tmp_path)
    launches = SavedRecords(tmp_path, [RECORD.variant, "other"]).launches()
    assert RECORD.speed is not None
    assert launches == {(RECORD.variant, "kernel<fp16, 64>"): RECORD.speed.launches[0]}


def test_records_are_found_by_variant_and_gpu(tmp_path: Path) -> None:
    """The saved records of a variant on one GPU do not include those of another GPU."""
    on_cpu, on_gpu = record("one"), record("one", environment=H200)
    save_records([on_cpu, on_gpu, record("two")], tmp_path)
    saved = SavedRecords(tmp_path, ["one"])
    assert (saved.of("one", None), saved.of("one", "NVIDIA H200"), saved.of("one", "NVIDIA L4")) == (
        [on_cpu],
        [on_gpu],
        [],
    )


# -- incomplete files -------------------------------------------------------------------------------------------------


def test_readable_lines_of_an_incomplete_file_are_used(tmp_path: Path) -> None:
    """If one line of a saved file cannot be read, the file is named, and its other lines are still compared."""
    (path,) = save_records([with_builds(built("sm_90a", "old")), record("fine", environment=H200)], tmp_path)[:1]
    path.write_bytes(b"{\n" + path.read_bytes())
    run = [with_builds(built("sm_90a", "new")), record("fine")]
    saved = SavedRecords(tmp_path, [each.variant for each in run])
    assert saved.stale_variants(run) == ["ws_p2"]
    assert [(file.path, len(file.records), len(file.bad_lines)) for file in saved.incomplete] == [(path, 1, 1)]


def test_a_file_is_read_once(tmp_path: Path) -> None:
    """Saved records that change during a run are not read again, so all lines of the end of a run agree."""
    (path,) = save_records([with_builds(built("sm_90a", "old"))], tmp_path)
    saved = SavedRecords(tmp_path, ["ws_p2", "ws_p2"])
    path.write_bytes(to_json(with_builds(built("sm_90a", "new"))))
    assert saved.stale_variants([with_builds(built("sm_90a", "new"))]) == ["ws_p2"]
