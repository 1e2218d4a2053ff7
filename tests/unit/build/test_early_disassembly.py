"""The disassembly of device code while host code is compiled."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pytest_fa.build import early_disassembly, machine_code
from pytest_fa.build.early_disassembly import disassembling_early
from pytest_fa.build.machine_code import Disassembly, disassemble, read_machine_code
from tests.unit.build.conftest import Workplace


def test_a_cubin_is_disassembled_when_the_fatbin_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, it may be incomplete.  The linker's cubin is excluded, and a failure has no result.

    If device code is compiled in a folder of its own, the files beside that folder have none.
    """
    started = threading.Event()

    def fake(cubin: Path) -> Disassembly:
        started.set()
        if cubin.parent.name == "broken":
            raise ValueError
        return Disassembly({cubin.stem: b"code"}, {})

    monkeypatch.setattr(early_disassembly, "disassemble", fake)
    folders = {name: tmp_path / name for name in ("whole", "early", "broken", "apart", "host_only")}
    for folder in folders.values():
        folder.mkdir()
        for name in ("kernel.cubin", "kernel_dlink.cubin"):
            (folder / name).touch()
    for name in ("apart", "host_only"):
        (folders[name] / "kernel.fatbin").touch()
        (folders[name] / "device").mkdir()
        (folders[name] / "device" / "own.cubin").touch()
    with disassembling_early(folders.values()) as early:
        assert not started.wait(0.2)
        for name in ("whole", "broken"):
            (folders[name] / "kernel.fatbin").touch()
        (folders["apart"] / "device" / "device.fatbin").touch()
        assert started.wait(10)
        early.stop_looking()
        assert early.of(folders["apart"]) == [Disassembly({"own": b"code"}, {})]
        assert early.of(folders["host_only"]) == []
        assert early.of(folders["whole"]) == [Disassembly({"kernel": b"code"}, {})]
        assert early.of(folders["early"]) == early.of(folders["broken"]) == []


@pytest.mark.nightly
@pytest.mark.needs_nvcc
def test_only_other_code_is_disassembled_again(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cubin whose code is known is taken over; with other code, it is not."""
    library = workplace.library()
    code = read_machine_code(library)
    programs: list[str] = []
    run = machine_code._run

    def recorded(command: list[str], *arguments: Any) -> str:
        programs.append(Path(command[0]).name)
        return run(command, *arguments)

    known: list[Disassembly] = []

    def noted(cubin: Path) -> Disassembly:
        known.append(disassemble(cubin))
        return known[-1]

    monkeypatch.setattr(machine_code, "disassemble", noted)
    assert read_machine_code(library) == code
    monkeypatch.setattr(machine_code, "_run", recorded)
    assert read_machine_code(library, known) == code
    assert programs == ["cuobjdump"]
    other = [each._replace(code=dict.fromkeys(each.code, b"")) for each in known]
    assert read_machine_code(library, other) == code
    assert programs[1:] == ["cuobjdump", "nvdisasm"]


@pytest.mark.needs_nvcc
def test_a_build_leaves_no_intermediate_files(workplace: Workplace) -> None:
    """Its folder has what a build needs; nvcc's own files would take several megabytes."""
    names = {path.name for path in workplace.library().parent.iterdir()}
    assert names == {"build.json", "deps.d", "generated", "kernel.so", "log.txt"}
