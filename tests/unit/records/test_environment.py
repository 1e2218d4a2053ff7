"""The GPU, its clocks and the environment, read from a fake NVML."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

import pytest_fa
from pytest_fa.records.environment import (
    Gpu,
    _process_name,
    find_gpu,
    find_gpus,
    find_other_gpu_processes,
    make_gpu_first,
    may_open_gpu_early,
    read_clocks,
    read_environment,
)
from pytest_fa.records.timing import Clocks
from tests.fake_nvml import pretend

H200 = Gpu("NVIDIA H200", "GPU-aaaa", (9, 0), "580.1", "13.1")
RTX = Gpu("NVIDIA GeForce RTX 4090", "GPU-bbbb", (8, 9), "580.1", "13.1")


pytestmark = pytest.mark.usefixtures("fresh_gpu")


# -- GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, H200),
        ("0", H200),
        ("1", RTX),
        ("1,0", RTX),
        (" 1 , 0", RTX),
        ("GPU-bbbb", RTX),
        ("GPU-bbbb,GPU-aaaa", RTX),
        ("", None),
        (" ", None),
        ("-1", None),
        ("-1,0", None),
        ("2", None),
        ("GPU-cccc", None),
        ("none", None),
    ],
)
def test_the_gpu_is_the_first_that_cuda_would_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: Gpu | None
) -> None:
    """CUDA_VISIBLE_DEVICES names the GPU by index or UUID; with an empty, negative or unknown entry there is none."""
    pretend(monkeypatch, H200, RTX)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert expected == find_gpu()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [H200, RTX]), ("1,0", [RTX, H200]), ("1", [RTX]), ("0,-1,1", [H200]), ("", []), ("7", [])],
)
def test_every_visible_gpu_is_listed(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[Gpu]) -> None:
    """All GPUs are listed in CUDA's order, up to the first entry of CUDA_VISIBLE_DEVICES that names none."""
    pretend(monkeypatch, H200, RTX)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert expected == find_gpus()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-aaaa"]),
        ("1", ["GPU-bbbb"] * 3),
        ("GPU-bbbb,0", ["GPU-bbbb", "GPU-aaaa", "GPU-bbbb"]),
        ("0,-1,1", ["GPU-aaaa"] * 3),
        ("", [None] * 3),
    ],
)
def test_processes_take_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str | None]
) -> None:
    """Processes 0, 1 and 2 of a run get the visible GPUs in turn."""
    pretend(monkeypatch, H200, RTX)
    first = []
    for number in range(3):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        find_gpu.cache_clear()
        make_gpu_first(number)
        gpu = find_gpu()
        first.append(gpu.uuid if gpu else None)
    assert first == expected


@pytest.mark.parametrize("driver", [True, False])
def test_without_a_device_or_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, *, driver: bool) -> None:
    """`find_gpu` returns None without a driver, and with a driver but no device."""
    pretend(monkeypatch, driver=driver)
    assert find_gpu() is None


@pytest.mark.parametrize("gpus", [(H200,), ()])
def test_nvml_is_shut_down(monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...]) -> None:
    """NVML is shut down after each query, with and without a GPU."""
    nvml = pretend(monkeypatch, *gpus)
    find_gpu()
    read_clocks("GPU-aaaa")
    assert nvml.open == 0


def test_clocks_are_read_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks are in MHz, power in watts, temperature in degrees Celsius; throttle reasons are NVML's bits."""
    pretend(monkeypatch, H200)
    expected = Clocks(sm_mhz=1980, memory_mhz=2619, power_watts=650.5, temperature_c=41, throttle_reasons=4)
    assert expected == read_clocks("GPU-aaaa")


@pytest.mark.parametrize(("uuid", "driver"), [("GPU-cccc", True), ("GPU-aaaa", False)])
def test_unreadable_clocks_are_none(monkeypatch: pytest.MonkeyPatch, uuid: str, *, driver: bool) -> None:
    """For an unknown GPU or without a driver, `read_clocks` returns None, not zeros."""
    pretend(monkeypatch, H200, driver=driver)
    assert read_clocks(uuid) is None


def test_the_environment_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has GPU, compute capability, driver, CUDA, Python and pytest-fa version as text."""
    pretend(monkeypatch, H200)
    environment = read_environment()
    expected = "NVIDIA H200", "9.0", "580.1", "13.1"
    assert expected == (environment.gpu, environment.compute_capability, environment.driver, environment.cuda)
    assert (platform.python_version(), pytest_fa.__version__) == (environment.python, environment.pytest_fa)


def test_without_a_gpu_its_fields_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, the fields of the GPU are None."""
    pretend(monkeypatch, driver=False)
    environment = read_environment()
    assert {environment.gpu, environment.compute_capability, environment.driver, environment.cuda} == {None}


# -- other processes on the GPU ---------------------------------------------------------------------------------------

# A process with a name that is not UTF-8.  It waits until its input is closed.
ODD_NAME = """\
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"\\xff\\x1btrain", 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[int]:
    """The process id of a child with an odd name."""
    command = [sys.executable, "-c", ODD_NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


def test_processes_of_other_runs_are_named(monkeypatch: pytest.MonkeyPatch, child: int) -> None:
    """This process and what it started belong to this run.  Its parent does not, nor does a process that has ended."""
    nvml = pretend(monkeypatch, H200)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    nvml.pids = (os.getpid(), child, os.getppid(), 2**22 + 1)
    parent, ended = find_other_gpu_processes()
    assert (parent.split()[0], ended) == (str(os.getppid()), f"{2**22 + 1} (not visible here)")


def test_what_a_named_server_started_belongs_to_the_run(monkeypatch: pytest.MonkeyPatch, child: int) -> None:
    """The processes of a server that another process has forked are of this run, if the server is named."""
    nvml = pretend(monkeypatch, H200)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # not the ancestor of `child`
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    nvml.pids = (child,)
    assert len(find_other_gpu_processes()) == 1
    assert find_other_gpu_processes((child,)) == ()


def test_workers_of_xdist_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parent of a worker of pytest-xdist has started belongs to the run."""
    nvml = pretend(monkeypatch, H200)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    nvml.pids = (os.getpid(), os.getppid())
    assert find_other_gpu_processes() == ()


def test_any_name_of_a_process_can_be_shown(child: int) -> None:
    """A name is printable, also if it is not UTF-8 or has control characters."""
    assert _process_name(child) == "\ufffd\\x1btrain"


@pytest.mark.parametrize(("compute_mode", "worker", "may"), [(0, None, True), (3, None, False), (0, "gw1", False)])
def test_a_candidate_opens_the_gpu_early_where_nothing_forbids_it(
    monkeypatch: pytest.MonkeyPatch, compute_mode: int, worker: str | None, *, may: bool
) -> None:
    """Not in exclusive-process mode, which is 3, and not where another worker may be timing."""
    nvml = pretend(monkeypatch, H200)
    nvml.compute_mode = compute_mode
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    assert may_open_gpu_early() is may
    nvml.driver = False
    assert may_open_gpu_early() is False
