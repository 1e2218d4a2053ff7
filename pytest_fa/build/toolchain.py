"""Find the CUDA compiler and the host compiler, and identify them by their versions and files.

nvcc is searched in $CUDA_HOME, then in PATH, then where cuda-pathfinder looks: the wheels of the extra `cuda13`, conda,
and the default folders of the system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pytest_fa.errors import ToolchainError
from pytest_fa.regular_file import open_regular

FileStamp = tuple[str, int, int]
MAX_MEMO_BYTES = 2**20


class Toolchain(msgspec.Struct, frozen=True):
    """The compilers of a build.

    `home` is the toolkit's real folder, because nvcc may be a wrapper script.  `stamps` are the path, size and mtime of
    every program that affects the code; `versions` are the texts that they print.  Both are part of a build's key.
    `beside` names the PyTorch and Python versions that an extension is compiled for.  An extension without CUDA sources
    has no nvcc: `nvcc` and `home` are empty.  `arches` are the architectures that nvcc compiles for, and
    `checks_syntax` says whether it can check device code without compiling it; both follow from its version and are not
    part of the key.
    """

    nvcc: str
    home: str
    library_folder: str
    host_compiler: str
    versions: tuple[str, ...]
    stamps: tuple[FileStamp, ...]
    beside: tuple[str, ...] = ()
    arches: tuple[str, ...] | None = None
    checks_syntax: bool | None = None

    @property
    def title(self) -> str:
        """The versions for the terminal and the record, such as `nvcc 13.0.88, g++ 12.2.0`."""
        nvcc = re.search(r"V(\d+\.\d+\.\d+)", self.versions[0])
        host = re.search(r"(\d+\.\d+\.\d+)", self.versions[-1])
        compilers = [f"nvcc {nvcc[1] if nvcc else '?'}"] if self.nvcc else []
        return ", ".join((*compilers, f"{Path(self.host_compiler).name} {host[1] if host else '?'}", *self.beside))

    @property
    def identity(self) -> tuple[object, ...]:
        """The part of the cache key: versions, file sizes and times, but no folders."""
        stamps = tuple((Path(path).name, size, mtime) for path, size, mtime in self.stamps)
        return (self.versions, stamps, self.beside) if self.beside else (self.versions, stamps)

    def lacks(self, arches: Iterable[str]) -> str | None:
        """Return which of `arches` nvcc does not compile for, and for which it does; None if it has all of them."""
        missing = [arch for arch in arches if self.arches and arch not in (*self.arches, "host")]
        if not missing:
            return None
        return f"{self.title} does not compile for {', '.join(missing)}; it compiles for {', '.join(self.arches or ())}"


def find_toolchain(cache: Path) -> Toolchain:
    """Return the compilers of this machine.

    Their output is saved in `cache`, so a later call starts no program.  Raises `ToolchainError`, with the places that
    were searched and what to install.
    """
    nvcc, host = _find_nvcc(), _find_host_compiler()
    memo = cache / "toolchain.json"
    saved = _read_memo(memo)
    if saved is not None and (saved.nvcc, saved.host_compiler) == (str(nvcc), str(host)):
        return saved
    toolchain = _query(nvcc, host)
    if not memo.parent.is_dir():
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.parent.chmod(0o755)  # libraries of the cache are loaded, so other users may not write to it
    scratch = memo.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode(toolchain))
    scratch.replace(memo)
    return toolchain


def host_toolchain() -> Toolchain:
    """Return a toolchain with only the C++ compiler.  Raises `ToolchainError` if it is missing."""
    host = _find_host_compiler()
    version = _output([str(host), "--version"])
    return Toolchain("", "", "", str(host), (version,), (_stamp(host),))


def find_tool(name: str) -> Path | None:
    """Return the path of `cuobjdump` or `nvdisasm`, or None.

    The wheels are searched before PATH, because their versions are new enough for every cubin.
    """
    from cuda.pathfinder import find_nvidia_binary_utility  # noqa: PLC0415  # 60 ms, only for builds

    path = find_nvidia_binary_utility(name) or shutil.which(name)
    return Path(path) if path else None


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
    path = shutil.which(name)
    if not path:
        raise ToolchainError(
            f"no host compiler: {name!r} is not on PATH (CXX is {os.environ.get('CXX', 'unset')}); install g++"
        )
    return Path(path)


def _read_memo(memo: Path) -> Toolchain | None:
    try:
        with open_regular(memo) as stream:
            saved = msgspec.json.decode(stream.read(MAX_MEMO_BYTES), type=Toolchain)
        stamped = {stamp[0] for stamp in saved.stamps}
        is_whole = (
            len(saved.versions) == len(("nvcc", "ptxas", "host"))
            and {saved.nvcc, saved.host_compiler} <= stamped
            and saved.arches is not None
            and saved.checks_syntax is not None
        )
        return saved if is_whole and all(_stamp(Path(stamp[0])) == stamp for stamp in saved.stamps) else None
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def _query(nvcc: Path, host: Path) -> Toolchain:
    """Get the real folder of nvcc, which may be a wrapper script, and the versions of its programs."""
    dry_run = _output([str(nvcc), "-ccbin", str(host), "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    folder = re.search(r"_HERE_=(.*)", dry_run)
    if folder is None:
        raise ToolchainError(f"{nvcc} is not nvcc: with --dryrun it printed {dry_run.strip()[:200] or 'nothing'}")
    binaries = Path(folder[1].strip()).resolve()
    home = binaries.parent
    tools = [nvcc, binaries / "nvcc", binaries / "ptxas", home / "nvvm" / "bin" / "cicc", binaries / "cudafe++", host]
    missing = [str(tool) for tool in tools if not tool.exists()]
    if missing:
        raise ToolchainError(f"the CUDA toolkit at {home} is incomplete: missing {', '.join(missing)}")
    library_folder = next((home / name for name in ("lib64", "lib") if (home / name).is_dir()), home)
    options = _output([str(nvcc), "--help"])
    return Toolchain(
        nvcc=str(nvcc),
        home=str(home),
        library_folder=str(library_folder),
        host_compiler=str(host),
        versions=tuple(_output([str(tool), "--version"]) for tool in (nvcc, binaries / "ptxas", host)),
        stamps=tuple(dict.fromkeys(_stamp(tool) for tool in tools)),
        arches=_listed_arches(options),
        checks_syntax="-fdevice-syntax-only" in options,
    )


def _listed_arches(text: str) -> tuple[str, ...]:
    """Return the architectures in nvcc's help, in the order of their numbers.

    `nvcc --list-gpu-code` lists only those without a suffix.
    """
    names = set(re.findall(r"'(sm_\d+[af]?)'", text))
    return tuple(sorted(names, key=lambda name: (int(re.sub(r"\D", "", name)), name)))


def _output(command: list[str]) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ToolchainError(f"{command[0]} cannot be run: {problem}") from problem
    return run.stdout + run.stderr


def _stamp(path: Path) -> FileStamp:
    state = path.stat()
    return (str(path), state.st_size, state.st_mtime_ns)
