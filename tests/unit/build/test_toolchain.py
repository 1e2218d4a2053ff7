"""The toolchain: where it is searched, the messages if it is not found, and what is saved in the cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_fa.build import toolchain
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.errors import ToolchainError

NVCC = """\
#!/bin/sh
echo nvcc >> "{log}"
case "$*" in
  *--help*) echo "  '90','compute_120','lto_120','sm_120','sm_80','sm_90a','sm_120f','sm_120'." ;;
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
    """A simulated machine: toolkits and a host compiler that log when they are started."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "path"
        self.cache = folder / "cache"
        self.log = folder / "started.txt"
        self.toolkit = folder / "toolkit"
        self.path.mkdir()
        self.add_toolkit(self.toolkit)
        self.host = self.program(self.path / "g++", "g++ (Distribution 12.2.0-14) 12.2.0")

    def program(self, path: Path, says: str) -> Path:
        """Write a program that prints `says`, and return its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROGRAM.format(log=self.log, says=says), encoding="utf-8")
        path.chmod(0o755)
        return path

    def add_toolkit(self, home: Path) -> Path:
        """Write a complete CUDA toolkit, and return its nvcc."""
        for name in TOOLS:
            self.program(home / name, f"{name}, release 13.0, V13.0.88")
        (home / "lib64").mkdir()
        nvcc = home / "bin" / "nvcc"
        nvcc.write_text(NVCC.format(log=self.log), encoding="utf-8")
        return nvcc

    def put_on_path(self, nvcc: Path) -> Path:
        """Write a script on PATH that only starts `nvcc`, as some packages install it; return the script."""
        script = self.path / "nvcc"
        script.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        return script

    def find(self) -> toolchain.Toolchain:
        """Return the toolchain of this machine."""
        return find_toolchain(self.cache)

    def started(self) -> list[str]:
        """Return the names of the programs that were started so far."""
        return self.log.read_text(encoding="utf-8").split() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine with g++ on PATH, a toolkit that no variable points to, and no wheels."""
    simulated = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(simulated.path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain, "find_tool", lambda _: None)
    return simulated


def problem_of(machine: Machine) -> str:
    """Return the message of the expected `ToolchainError`."""
    with pytest.raises(ToolchainError) as caught:
        machine.find()
    return str(caught.value)


# -- found ------------------------------------------------------------------------------------------------------------


def test_nvcc_of_cuda_home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nvcc of $CUDA_HOME is found with its home, library folder and host compiler; the title has their versions."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))

    tools = machine.find()

    assert (tools.nvcc, tools.home) == (str(machine.toolkit / "bin" / "nvcc"), str(machine.toolkit))
    assert (tools.library_folder, tools.host_compiler) == (str(machine.toolkit / "lib64"), str(machine.host))
    assert tools.title == "nvcc 13.0.88, g++ 12.2.0"


@pytest.mark.parametrize("where", ["CUDA_HOME", "PATH", "wheels"])
def test_order_of_places(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """$CUDA_HOME is searched before PATH, and PATH before the wheels."""
    nvcc = {name: machine.add_toolkit(tmp_path / name) for name in ("CUDA_HOME", "PATH", "wheels")}
    monkeypatch.setattr(toolchain, "find_tool", lambda _: nvcc["wheels"])
    if where != "wheels":
        machine.put_on_path(nvcc["PATH"])
    if where == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "CUDA_HOME"))

    assert machine.find().home == str(tmp_path / where)


def test_cuda_home_without_nvcc_falls_back_to_path(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If $CUDA_HOME has no compiler, as in a runtime-only image, the one on PATH is used."""
    monkeypatch.setenv("CUDA_HOME", str(machine.path))
    machine.put_on_path(machine.toolkit / "bin" / "nvcc")

    assert machine.find().home == str(machine.toolkit)


def test_wrapper_script(machine: Machine) -> None:
    """If nvcc on PATH is a wrapper script, it is used, and `home` is the folder of the real toolkit."""
    wrapper = machine.put_on_path(machine.toolkit / "bin" / "nvcc")

    tools = machine.find()

    assert (tools.nvcc, tools.home) == (str(wrapper), str(machine.toolkit))
    assert {str(wrapper), str(machine.toolkit / "bin" / "nvcc")} <= {path for path, _, _ in tools.stamps}


@pytest.mark.parametrize("name", ["lib64", "lib"])
def test_library_folder(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The library folder is `lib64` in toolkits and `lib` in wheels."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    (machine.toolkit / "lib64").rename(machine.toolkit / name)

    assert machine.find().library_folder == str(machine.toolkit / name)


def test_cxx_names_the_host_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host compiler is the program that $CXX names, not g++."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    monkeypatch.setenv("CXX", "clang++")
    clang = machine.program(machine.path / "clang++", "clang version 19.1.7")

    tools = machine.find()

    assert tools.host_compiler == str(clang)
    assert tools.title == "nvcc 13.0.88, clang++ 19.1.7"


@pytest.mark.needs_nvcc
def test_real_nvcc_with_another_host_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If $CXX names the host compiler and `gcc` is not installed, nvcc is still found and queried."""
    nvcc = toolchain.find_toolchain(tmp_path / "before").nvcc
    for name in ("sh", "rm", "cat", "as", "ld", "dirname", "basename"):
        if program := shutil.which(name):
            (tmp_path / name).symlink_to(program)
    (tmp_path / "g++-12").symlink_to(shutil.which("g++") or "")
    (tmp_path / "nvcc").symlink_to(nvcc)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-12")

    tools = find_toolchain(tmp_path / "after")

    assert tools.host_compiler == str(tmp_path / "g++-12")


# -- not found --------------------------------------------------------------------------------------------------------


def test_no_nvcc(machine: Machine, snapshot: SnapshotAssertion) -> None:
    """Without nvcc, the message names the searched places and what to install."""
    assert snapshot == problem_of(machine)


def test_no_nvcc_in_cuda_home(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names a $CUDA_HOME that does not exist."""
    monkeypatch.setenv("CUDA_HOME", "/opt/nowhere")

    assert problem_of(machine).startswith("no CUDA compiler: CUDA_HOME is /opt/nowhere, nvcc is not on PATH")


@pytest.mark.parametrize(
    "cxx",
    [
        None,
        "icpx",
    ],
)
def test_no_host_compiler(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, cxx: str | None, snapshot: SnapshotAssertion
) -> None:
    """Without a host compiler, the message names the one that was searched."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    machine.host.unlink()
    if cxx:
        monkeypatch.setenv("CXX", cxx)

    assert snapshot == problem_of(machine)


@pytest.mark.parametrize(("says", "end"), [("", "nothing"), ("usage: nvcc [a game]", "usage: nvcc [a game]")])
def test_not_an_nvcc(machine: Machine, says: str, end: str) -> None:
    """Another program named nvcc is refused, with its path and output."""
    nvcc = machine.path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '{says}'\n", encoding="utf-8")
    nvcc.chmod(0o755)

    assert problem_of(machine) == f"{nvcc} is not nvcc: with --dryrun it printed {end}"


def test_nvcc_that_does_not_start(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be executed is refused, with its path and the system's message."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    nvcc = machine.toolkit / "bin" / "nvcc"
    nvcc.chmod(0o644)

    problem = problem_of(machine)

    assert problem.startswith(f"{nvcc} cannot be run: ")
    assert "Permission denied" in problem


@pytest.mark.parametrize("missing", TOOLS[1:])
def test_incomplete_toolkit(machine: Machine, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """An incomplete toolkit, as from single wheels, is refused, with the missing file."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    (machine.toolkit / missing).unlink()

    assert problem_of(machine) == (
        f"the CUDA toolkit at {machine.toolkit} is incomplete: missing {machine.toolkit / missing}"
    )


# -- saved ------------------------------------------------------------------------------------------------------------


def test_second_search_starts_no_program(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilers' output is saved in the cache."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    first, started = machine.find(), machine.started()

    second = machine.find()

    assert second == first
    assert started != []
    assert machine.started() == started


def rewrite(path: Path) -> None:
    """Change the content."""
    path.write_text(path.read_text(encoding="utf-8") + "# updated\n", encoding="utf-8")


def redate(path: Path) -> None:
    """Change only the time, as a reinstallation of the same size does."""
    os.utime(path, (10**9, 10**9))


@pytest.mark.parametrize("change", [rewrite, redate])
@pytest.mark.parametrize("tool", [*TOOLS, "host"])
def test_changed_tool_is_queried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tool: str, change: Callable[[Path], None]
) -> None:
    """If a program that affects the code changes, all are queried again, and the identity changes."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    before, started = machine.find(), machine.started()

    change(machine.host if tool == "host" else machine.toolkit / tool)
    after = machine.find()

    assert len(machine.started()) == 2 * len(started)
    assert after.identity != before.identity


def test_another_nvcc_on_path_is_queried(machine: Machine, tmp_path: Path) -> None:
    """If another nvcc is found first, it is queried, and the saved one is not used."""
    machine.put_on_path(machine.toolkit / "bin" / "nvcc")
    before = machine.find()

    machine.put_on_path(machine.add_toolkit(tmp_path / "newer"))

    assert before.home == str(machine.toolkit)
    assert machine.find().home == str(tmp_path / "newer")


@pytest.mark.parametrize("content", ["", "{", '{"nvcc": "elsewhere"}'])
def test_a_malformed_saved_toolchain_is_replaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """If toolchain.json cannot be read, the compilers are queried and it is written again."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    before = machine.find()
    (machine.cache / "toolchain.json").write_text(content, encoding="utf-8")

    after = machine.find()
    started = machine.started()
    machine.find()

    assert after == before
    assert machine.started() == started


def test_identity_does_not_depend_on_folders(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same programs, with the same times, have the same identity in another folder."""
    monkeypatch.setenv("CUDA_HOME", str(machine.toolkit))
    before = machine.find()
    moved = shutil.copytree(machine.toolkit, tmp_path / "moved")
    monkeypatch.setenv("CUDA_HOME", str(moved))

    after = machine.find()

    assert after.home == str(moved)
    assert after.identity == before.identity


def test_the_architectures_are_those_of_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The architectures come from nvcc's help, in the order of their numbers, and are saved with the versions."""
    machine = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{machine.path}:{machine.toolkit / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    expected = ("sm_80", "sm_90a", "sm_120", "sm_120f")
    assert [expected, expected] == [find_toolchain(machine.cache).arches for _ in range(2)]
    assert find_toolchain(machine.cache).lacks(["sm_80", "host"]) is None
    assert find_toolchain(machine.cache).lacks(["sm_70", "sm_80"]) == (
        "nvcc 13.0.88, g++ 12.2.0 does not compile for sm_70; it compiles for sm_80, sm_90a, sm_120, sm_120f"
    )


def test_what_nvcc_can_do_is_not_part_of_the_key() -> None:
    """Builds that were made before its architectures and options were saved have the same key."""
    old = toolchain.Toolchain("nvcc", "/cuda", "/cuda/lib64", "g++", ("a", "b", "c"), (("/bin/nvcc", 1, 2),))
    assert old.identity == msgspec.structs.replace(old, arches=("sm_80",), checks_syntax=True).identity


def test_nvcc_says_whether_it_can_check_syntax_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc that can do so has an option in its help.  A saved toolchain that does not say it is renewed."""
    machine = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{machine.path}:{machine.toolkit / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    before = find_toolchain(machine.cache)
    assert before.checks_syntax is False
    nvcc = Path(before.nvcc)
    nvcc.write_text(nvcc.read_text(encoding="utf-8").replace("'90',", "-fdevice-syntax-only '90',"), encoding="utf-8")
    memo = machine.cache / "toolchain.json"
    assert find_toolchain(machine.cache).checks_syntax is True
    memo.write_text(memo.read_text(encoding="utf-8").replace('"checks_syntax":true', '"checks_syntax":null'), "utf-8")
    assert find_toolchain(machine.cache).checks_syntax is True
