"""Machines and GPUs are told apart without being named, also on a host with eight GPUs."""

from __future__ import annotations

import platform
import re
import tempfile
from pathlib import Path

import filelock
import pytest

from pytest_fa.host.timing_lock import timing_lock
from pytest_fa.records.environment import Gpu, GpuSettings, find_gpu, make_gpu_first, read_gpu_settings
from pytest_fa.records.machine_identity import SALT_NAME, read_machine
from tests.fake_nvml import NVMLError, pretend

EIGHT = tuple(Gpu("NVIDIA H200", f"GPU-{number}000", (9, 0), "580.1", "13.1") for number in range(8))


pytestmark = pytest.mark.usefixtures("fresh_gpu")


def worker(monkeypatch: pytest.MonkeyPatch, number: int) -> Gpu:
    """Become a worker of pytest-xdist, and return the GPU that it uses."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    find_gpu.cache_clear()
    make_gpu_first(number)
    gpu = find_gpu()
    assert gpu is not None
    return gpu


def test_machine_and_gpu_are_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the host's name nor the UUID is in the record; both hashes are the same in every run."""
    pretend(monkeypatch, *EIGHT)
    machine = read_machine(tmp_path / "cache")
    assert machine is not None
    assert (machine.mig, machine.ecc, machine.power_limit_watts) == (False, True, 700.0)
    assert all(re.fullmatch("[0-9a-f]{12}", str(name)) for name in (machine.host_hash, machine.gpu_hash))
    assert platform.node() not in str(machine)
    assert read_machine(tmp_path / "cache") == machine


def test_another_cache_has_another_salt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hashes of two users differ, so that nobody finds a name by hashing guesses."""
    pretend(monkeypatch, *EIGHT)
    one, other = read_machine(tmp_path / "a"), read_machine(tmp_path / "b")
    assert one is not None
    assert other is not None
    assert (one.host_hash != other.host_hash, one.gpu_hash != other.gpu_hash) == (True, True)
    assert ((tmp_path / "a" / SALT_NAME).stat().st_mode & 0o077) == 0


def test_without_a_place_for_the_salt_there_is_no_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a salt, nothing is hashed: a bare hash of a host's name could be guessed."""
    pretend(monkeypatch)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert read_machine(tmp_path / "file") is None
    machine = read_machine(tmp_path / "cache")
    assert machine is not None
    assert (machine.gpu_hash, machine.mig, machine.ecc, machine.power_limit_watts) == (None, None, None, None)


def test_settings_that_nvml_does_not_have_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without MIG, ECC and a power limit has no such settings, and a slice is one by its UUID."""
    nvml = pretend(monkeypatch, *EIGHT)

    def refuse(_: Gpu) -> None:
        raise NVMLError

    for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetEccMode", "nvmlDeviceGetEnforcedPowerLimit"):
        monkeypatch.setattr(nvml, name, refuse, raising=False)
    assert read_gpu_settings("GPU-0000") == GpuSettings(None, None, None)
    assert read_gpu_settings("MIG-0000").mig is True


def test_eight_workers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a host with eight GPUs, eight workers use all of them; a ninth shares the first one."""
    pretend(monkeypatch, *EIGHT)
    gpus, hashes = [], []
    for number in range(9):
        gpus.append(worker(monkeypatch, number).uuid)
        machine = read_machine(tmp_path)
        hashes.append(machine.gpu_hash if machine else None)
    assert gpus == [*(gpu.uuid for gpu in EIGHT), EIGHT[0].uuid]
    assert len(set(hashes)) == 8


def test_timing_is_exclusive_on_each_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers on different GPUs time at once; one that shares a GPU waits."""
    pretend(monkeypatch, *EIGHT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    is_free = []
    worker(monkeypatch, 0)
    with timing_lock():
        for number in (1, 7, 8):
            worker(monkeypatch, number)
            (path,) = [Path(lock) for lock in _lock_of(monkeypatch)]
            try:
                with filelock.FileLock(path, timeout=0):
                    is_free.append(True)
            except filelock.Timeout:
                is_free.append(False)
    assert is_free == [True, True, False]


def _lock_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file that `timing_lock` would lock in this process."""
    paths: list[str] = []
    with monkeypatch.context() as context:
        context.setattr("pytest_fa.host.timing_lock.held_lock", lambda path, *_, **__: paths.append(str(path)))
        timing_lock()
    return paths
