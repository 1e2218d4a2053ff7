"""The toolchain: where it is looked for, what it says when it is not there, what it remembers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.build import toolchain
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError

NVCC = """\
#!/bin/sh
echo nvcc >> "{log}"
case "$*" in
  *--dryrun*) echo '#$ _SPACE_= ' >&2; echo "#$ _HERE_=${{0%/*}}" >&2; echo "#$ _THERE_=${{0%/*}}" >&2 ;;
  *) echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
esac
"""

PROGRAM = """\
#!/bin/sh
echo "${{0##*/}}" >> "{log}"
echo '{says}'
"""

TOOLS = ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "nvvm/bin/cicc")


class Machine:
    """A make-believe machine: toolkits and a host compiler that write down when they are started."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "path"
        self.cache = folder / "cache"
        self.log = folder / "started.txt"
        self.toolkit = folder / "toolkit"
        self.path.mkdir()
        self.add_toolkit(self.toolkit)
        self.host = self.program(self.path / "g++", "g++ (Distribution 12.2.0-14) 12.2.0")

    def program(self, path: Path, says: str) -> Path:
        """A program that prints `says`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROGRAM.format(log=self.log, says=says), encoding="utf-8")
        path.chmod(0o755)
        return path

    def add_toolkit(self, home: Path) -> Path:
        """A whole CUDA toolkit; its nvcc."""
        for name in TOOLS:
            self.program(home / name, f"{name}, release 13.0, V13.0.88")
        (home / "lib64").mkdir()
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(NVCC.format(log=self.log), encoding="utf-8")
        return nvcc

    def put_on_path(self, nvcc: Path) -> Path:
        """A script on PATH that only starts `nvcc`, as toolkits' packages install it."""
        script = self.path / "nvcc"
        script.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        return script

    def find(self) -> toolchain.Toolchain:
        """The toolchain of this machine."""
        return find_toolchain(self.cache)

    def started(self) -> list[str]:
        """The programs that ran so far."""
        return self.log.read_text(encoding="utf-8").split() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with g++ on PATH, a toolkit that nothing points to, and no wheels."""
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(made.path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "find_tool", lambda _: None)
    return made


def problem_of(machine: Machine) -> str:
    """The message of the error that must come."""
    with pytest.raises(ToolchainError) as caught:
        machine.find()
    return str(caught.value)


# -- found ------------------------------------------------------------------------------------------------------------


def test_nvcc_of_cuda_home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CUDA_HOME's nvcc is found with its home, its libraries and the host compiler, and titled by their versions."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))

    found = machine.find()

    assert (found.nvcc, found.home) == (str(machine.toolkit / "bin" / "nvcc"), str(machine.toolkit))
    assert (found.library_folder, found.host_compiler) == (str(machine.toolkit / "lib64"), str(machine.host))
    assert found.title == "nvcc 13.0.88, g++ 12.2.0"


@pytest.mark.parametrize("where", ["CUDA_HOME", "PATH", "wheels"])
def test_order_of_places(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """$CUDA_HOME comes before PATH, PATH before the wheels."""
    nvcc = {name: machine.add_toolkit(tmp_path / name) for name in ("CUDA_HOME", "PATH", "wheels")}
    monkeypatch.setattr(toolchain, "find_tool", lambda _: nvcc["wheels"])
    if where != "wheels":
        machine.put_on_path(nvcc["PATH"])
    if where == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "CUDA_HOME"))

    assert machine.find().home == str(tmp_path / where)


def test_cuda_home_without_nvcc_falls_back_to_path(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $CUDA_HOME that holds no compiler, as a runtime-only image sets it, does not hide the one on PATH."""
    monkeypatch.setenv("CUDA_HOME", str(machine.path))
    machine.put_on_path(machine.toolkit / "bin" / "nvcc")

    assert machine.find().home == str(machine.toolkit)


def test_wrapper_script(machine: Machine) -> None:
    """An nvcc on PATH that only starts another is used as it is, and home is where the real one lives."""
    wrapper = machine.put_on_path(machine.toolkit / "bin" / "nvcc")

    found = machine.find()

    assert (found.nvcc, found.home) == (str(wrapper), str(machine.toolkit))
    assert {str(wrapper), str(machine.toolkit / "bin" / "nvcc")} <= {path for path, _, _ in found.stamps}


@pytest.mark.parametrize("name", ["lib64", "lib"])
def test_library_folder(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Toolkits keep their libraries in `lib64`, wheels in `lib`."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    (machine.toolkit / "lib64").rename(machine.toolkit / name)

    assert machine.find().library_folder == str(machine.toolkit / name)


def test_cxx_names_the_host_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX is used instead of g++, by name."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    monkeypatch.setenv("CXX", "clang++")
    other = machine.program(machine.path / "clang++", "clang version 19.1.7")

    found = machine.find()

    assert found.host_compiler == str(other)
    assert found.title == "nvcc 13.0.88, clang++ 19.1.7"


@pytest.mark.needs_nvcc
def test_real_nvcc_with_another_host_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host compiler is named by $CXX and no plain `gcc` is installed, nvcc is still found and asked."""
    nvcc = toolchain.find_toolchain(tmp_path / "before").nvcc
    for name in ("sh", "rm", "cat", "as", "ld", "dirname", "basename"):
        if program := shutil.which(name):
            (tmp_path / name).symlink_to(program)
    (tmp_path / "g++-12").symlink_to(shutil.which("g++") or "")
    (tmp_path / "nvcc").symlink_to(nvcc)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-12")

    found = find_toolchain(tmp_path / "after")

    assert found.host_compiler == str(tmp_path / "g++-12")


# -- not found --------------------------------------------------------------------------------------------------------


def test_no_nvcc(machine: Machine) -> None:
    """Without nvcc the message says where was looked and what to install."""
    assert problem_of(machine) == (
        "no CUDA compiler: CUDA_HOME is unset, nvcc is not on PATH, nor in wheels, conda or the usual places; "
        "install a CUDA toolkit, or `pip install 'pytest-fa[cuda13]'`"
    )


def test_no_nvcc_in_cuda_home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $CUDA_HOME that leads nowhere is named."""
    monkeypatch.setenv("CUDA_HOME", "/opt/nowhere")

    assert problem_of(machine).startswith("no CUDA compiler: CUDA_HOME is /opt/nowhere, nvcc is not on PATH")


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        (None, "no host compiler: 'g++' is not on PATH (CXX is unset); install g++"),
        ("icpx", "no host compiler: 'icpx' is not on PATH (CXX is icpx); install g++"),
    ],
)
def test_no_host_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch, cxx: str | None, message: str) -> None:
    """Without a host compiler the message names the one that was looked for."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    machine.host.unlink()
    if cxx:
        monkeypatch.setenv("CXX", cxx)

    assert problem_of(machine) == message


@pytest.mark.parametrize(
    ("says", "end"), [("", "it printed nothing"), ("usage: nvcc [a game]", "usage: nvcc [a game]")]
)
def test_not_an_nvcc(machine: Machine, says: str, end: str) -> None:
    """A program of that name that is something else is named, with what it printed."""
    nvcc = machine.path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    nvcc.chmod(0o755)

    assert problem_of(machine) == f"{nvcc} does not answer like nvcc: {end}"


def test_nvcc_that_does_not_start(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be executed is named, with the system's words."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    nvcc = machine.toolkit / "bin" / "nvcc"
    nvcc.chmod(0o644)

    problem = problem_of(machine)

    assert problem.startswith(f"{nvcc} does not run: ")
    assert "Permission denied" in problem


@pytest.mark.parametrize("missing", TOOLS[1:])
def test_incomplete_toolkit(machine: Machine, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """A toolkit that lacks a part, as wheels installed one by one do, is named with that part."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    (machine.toolkit / missing).unlink()

    assert problem_of(machine) == (
        f"the CUDA toolkit at {machine.toolkit} is incomplete: no {machine.toolkit / missing}"
    )


# -- remembered -------------------------------------------------------------------------------------------------------


def test_second_look_starts_no_program(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compilers said is remembered in the cache."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    first, started = machine.find(), machine.started()

    second = machine.find()

    assert second == first
    assert started != []
    assert machine.started() == started


def rewrite(path: Path) -> None:
    """Other content."""
    path.write_text(path.read_text(encoding="utf-8") + "# updated\n", encoding="utf-8")


def redate(path: Path) -> None:
    """Another time alone, as after a reinstallation of the same size."""
    os.utime(path, (10**9, 10**9))


@pytest.mark.parametrize("change", [rewrite, redate])
@pytest.mark.parametrize("tool", [*TOOLS, "host"])
def test_changed_tool_is_asked_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tool: str, change: Callable[[Path], None]
) -> None:
    """When any program that shapes the code changes, all are asked again and the identity is another."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    before, started = machine.find(), machine.started()

    change(machine.host if tool == "host" else machine.toolkit / tool)
    after = machine.find()

    assert len(machine.started()) == 2 * len(started)
    assert after.identity != before.identity


def test_another_nvcc_on_path_is_asked(machine: Machine, tmp_path: Path) -> None:
    """A memory of one compiler does not answer for another one that is found first now."""
    machine.put_on_path(machine.toolkit / "bin" / "nvcc")
    before = machine.find()

    machine.put_on_path(machine.add_toolkit(tmp_path / "newer"))

    assert before.home == str(machine.toolkit)
    assert machine.find().home == str(tmp_path / "newer")


@pytest.mark.parametrize("memory", ["", "{", '{"nvcc": "elsewhere"}'])
def test_broken_memory_is_asked_again(machine: Machine, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    """A memory that cannot be read is made anew."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    before = machine.find()
    (machine.cache / "toolchain.json").write_text(memory, encoding="utf-8")

    after = machine.find()
    started = machine.started()
    machine.find()

    assert after == before
    assert machine.started() == started


def test_identity_is_free_of_folders(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same programs with the same times in another folder have the same identity."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    before = machine.find()
    moved = shutil.copytree(machine.toolkit, tmp_path / "moved")
    monkeypatch.setenv("CUDA_HOME", str(moved))

    after = machine.find()

    assert after.home == str(moved)
    assert after.identity == before.identity
