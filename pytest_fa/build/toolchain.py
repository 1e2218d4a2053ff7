"""The CUDA compiler: found once, identified by what it says and by what lies on disk.

Looked for in this order: $CUDA_HOME, PATH, and where cuda-pathfinder looks: the wheels of the `cuda13` extra, conda,
the system's usual places.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec

from pytest_fa.errors import ToolchainError

FileStamp = tuple[str, int, int]


class Toolchain(msgspec.Struct, frozen=True):
    """A compiler that answers.

    `home` is the toolkit's real folder (nvcc may be a wrapper), `stamps` are path, size and mtime of every program that
    shapes the code, `versions` what they print: all of them are part of a build's key.  `beside` names what an
    extension of PyTorch is compiled against; one without CUDA sources has no nvcc.
    """

    nvcc: str
    home: str
    library_folder: str
    host_compiler: str
    versions: tuple[str, ...]
    stamps: tuple[FileStamp, ...]
    beside: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """For people: `nvcc 13.0.88, g++ 12.2.0`."""
        nvcc = re.search(r"V(\d+\.\d+\.\d+)", self.versions[0])
        host = re.search(r"(\d+\.\d+\.\d+)", self.versions[-1])
        compilers = [f"nvcc {nvcc[1] if nvcc else '?'}"] if self.nvcc else []
        return ", ".join((*compilers, f"{Path(self.host_compiler).name} {host[1] if host else '?'}", *self.beside))

    @property
    def identity(self) -> tuple[object, ...]:
        """What the key takes: versions, sizes and times, without the folders."""
        stamps = tuple((Path(path).name, size, mtime) for path, size, mtime in self.stamps)
        return (self.versions, stamps, self.beside) if self.beside else (self.versions, stamps)


def find_toolchain(cache: Path) -> Toolchain:
    """The compiler of this machine.

    What it printed is remembered in `cache`, so that a warm start runs no program.
    Raises `ToolchainError` that says where was looked and what to install.
    """
    nvcc, host = _find_nvcc(), _find_host_compiler()
    memo = cache / "toolchain.json"
    known = _recall(memo)
    if known is not None and _stamp(nvcc) in known.stamps and _stamp(host) in known.stamps:
        return known
    found = _ask(nvcc, host)
    memo.parent.mkdir(parents=True, exist_ok=True)
    scratch = memo.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode(found))
    scratch.replace(memo)
    return found


def host_toolchain() -> Toolchain:
    """The C++ compiler alone.  Raises `ToolchainError`."""
    host = _find_host_compiler()
    version = _output([str(host), "--version"])
    return Toolchain("", "", "", str(host), (version,), (_stamp(host),))


def find_tool(name: str) -> Path | None:
    """`cuobjdump` or `nvdisasm`: from the wheels (new enough for every cubin), else from PATH."""
    from cuda.pathfinder import find_nvidia_binary_utility  # noqa: PLC0415  # 60 ms that only a build pays

    found = find_nvidia_binary_utility(name) or shutil.which(name)
    return Path(found) if found else None


def _find_nvcc() -> Path:
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").is_file():
        return Path(home) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        return Path(on_path)
    if in_wheels := find_tool("nvcc"):
        return in_wheels
    raise ToolchainError(
        f"no CUDA compiler: CUDA_HOME is {home or 'unset'}, nvcc is not on PATH, "
        "nor in wheels, conda or the usual places; install a CUDA toolkit, or `pip install 'pytest-fa[cuda13]'`"
    )


def _find_host_compiler() -> Path:
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if not found:
        raise ToolchainError(
            f"no host compiler: {name!r} is not on PATH (CXX is {os.environ.get('CXX', 'unset')}); install g++"
        )
    return Path(found)


def _recall(memo: Path) -> Toolchain | None:
    try:
        known = msgspec.json.decode(memo.read_bytes(), type=Toolchain)
        return known if all(_stamp(Path(stamp[0])) == stamp for stamp in known.stamps) else None
    except (OSError, msgspec.MsgspecError):
        return None


def _ask(nvcc: Path, host: Path) -> Toolchain:
    """Ask nvcc where it really lives (it may be a wrapper script), then every part for its version."""
    dry_run = _output([str(nvcc), "-ccbin", str(host), "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    here = re.search(r"_HERE_=(.*)", dry_run)
    if here is None:
        raise ToolchainError(f"{nvcc} does not answer like nvcc: {dry_run.strip()[:200] or 'it printed nothing'}")
    binaries = Path(here[1].strip()).resolve()
    home = binaries.parent
    tools = [nvcc, binaries / "nvcc", binaries / "ptxas", home / "nvvm" / "bin" / "cicc", binaries / "cudafe++", host]
    missing = [str(tool) for tool in tools if not tool.exists()]
    if missing:
        raise ToolchainError(f"the CUDA toolkit at {home} is incomplete: no {', '.join(missing)}")
    library_folder = next((home / name for name in ("lib64", "lib") if (home / name).is_dir()), home)
    return Toolchain(
        nvcc=str(nvcc),
        home=str(home),
        library_folder=str(library_folder),
        host_compiler=str(host),
        versions=tuple(_output([str(tool), "--version"]) for tool in (nvcc, binaries / "ptxas", host)),
        stamps=tuple(dict.fromkeys(_stamp(tool) for tool in tools)),
    )


def _output(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ToolchainError(f"{command[0]} does not run: {problem}") from problem
    return run.stdout + run.stderr


def _stamp(path: Path) -> FileStamp:
    state = path.stat()
    return (str(path), state.st_size, state.st_mtime_ns)
