"""Build PyTorch extensions: the toolchain, the cache key, the staging folder and the dependencies.

torch.utils.cpp_extension compiles in a child process, see compile_extension.py.  Its own check for changes misses
edited headers.  Here, all files that ninja recorded are hashed, as for every other build.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import msgspec
import ninja

from pytest_fa.build.command import defines_header
from pytest_fa.build.keys import HEADER_SUFFIXES, KEY_SCHEMA, PACKAGE, digest, file_hash
from pytest_fa.build.lookups import CompiledFrom, LookupReader, default_folders, search_path
from pytest_fa.build.target import holds_ptx
from pytest_fa.build.toolchain import Toolchain, find_toolchain, host_toolchain
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import ToolchainError

DEPENDENCIES = "deps.json"
OBJECTS = "objects"
MODULE_NAME = "module.txt"  # next to the library; holds the module name that it was compiled with
SPEC = "spec.json"
DEFINES = "fa_defines.h"
SCRATCH = (SPEC, DEPENDENCIES, DEFINES, OBJECTS, "library")
# Environment variables that change what setuptools and the compilers do.
ENVIRONMENT = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "ARFLAGS")


class ExtensionSpec(msgspec.Struct, frozen=True):
    """The input of the child process: absolute paths, and the flags for each compiler."""

    name: str
    is_cuda: bool
    sources: tuple[str, ...]
    include: tuple[str, ...]
    cflags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    ldflags: tuple[str, ...]
    environment: dict[str, str]


class Compiled(msgspec.Struct, frozen=True):
    """The output of the child process: the files that ninja recorded, and the commands that it ran."""

    files: tuple[str, ...]
    commands: tuple[str, ...]


class Torch(msgspec.Struct, frozen=True):
    """The installed PyTorch, found without importing it."""

    version: str
    cuda: str | None
    folder: str


def find_extension_toolchain(cache: Path, variant: Variant) -> Toolchain:
    """Return the compilers and the PyTorch for an extension.  Raises `ToolchainError` that names what is missing."""
    torch = find_torch()
    if find_spec("setuptools") is None:
        raise ToolchainError("torch.utils.cpp_extension needs setuptools: `pip install setuptools`")
    if variant.entry.has_cuda_sources and torch.cuda is None:
        raise ToolchainError(f"torch {torch.version} has no CUDA, which CUDA sources need; install a torch with CUDA")
    compilers = find_toolchain(cache) if variant.entry.has_cuda_sources else host_toolchain()
    beside = (f"torch {torch.version}", f"Python {sys.version_info.major}.{sys.version_info.minor}")
    return msgspec.structs.replace(compilers, beside=beside)


@functools.cache
def find_torch() -> Torch:
    """Return the version and the folder of the installed torch.  Raises `ToolchainError` if it is not installed."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        raise ToolchainError("torch is not installed, which variants of kind torch need: `pip install torch`")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"cuda: Optional\[str\] = '([^']+)'", text)
    return Torch(version[1] if version else "?", cuda[1] if cuda else None, str(folder))


def request_parts(variant: Variant, arch: Target) -> list[object]:
    """Return what the request key covers; it includes the Python ABI and the PyTorch version."""
    entry = variant.entry
    abi = [find_torch().version, sysconfig.get_config_var("SOABI")]
    toolchain = [abi, extension_environment()]
    inputs = [entry.sources, entry.include, entry.ldflags, defines_header(variant)]
    return [KEY_SCHEMA, shown_command(variant, arch), inputs, toolchain]


def extension_environment() -> dict[str, str]:
    """Return the environment variables that change what setuptools and the compilers do and are set."""
    return {name: value for name in ENVIRONMENT if (value := os.environ.get(name))}


def shown_command(variant: Variant, arch: Target) -> tuple[str, ...]:
    """Return all flags that affect the code, without paths of this machine."""
    nvcc = (f"nvcc[{' '.join(_cuda_flags(variant))}]", f"TORCH_CUDA_ARCH_LIST={_arch_list(arch)}")
    cuda = nvcc if variant.entry.has_cuda_sources else ()
    return ("torch.utils.cpp_extension", f"c++[{' '.join(_cflags(variant))}]", *cuda, *variant.entry.sources)


def stage(
    variant: Variant, arch: Target, folder: Path, toolchain: Toolchain, key: str, files_at_once: int
) -> list[str]:
    """Write the specification to a staging folder, and return the command to run there.

    The module is named after the variant's folder, since the variants of a folder may share the library.
    """
    home = Path(variant.folder)
    contents = [file_hash(str(path)) for path in _known_files(variant)]
    name = "_".join(("fa", re.sub(r"\W", "_", home.name, flags=re.ASCII), digest([key, contents])))
    named = (home / name for name in variant.entry.include)
    include = [path for path in (home, *named, Path(variant.root) / "include") if path.is_dir()]
    spec = ExtensionSpec(
        name=name,
        is_cuda=variant.entry.has_cuda_sources,
        sources=tuple(str((home / source).resolve()) for source in variant.entry.sources),
        include=tuple(str(path.resolve()) for path in include),
        cflags=(*_cflags(variant), "-include", str(folder / DEFINES)),
        cuda_flags=(*_cuda_flags(variant), "-include", str(folder / DEFINES)),
        ldflags=variant.entry.ldflags,
        environment=_environment(toolchain, arch, files_at_once),
    )
    (folder / SPEC).write_bytes(msgspec.json.encode(spec))
    (folder / DEFINES).write_text(defines_header(variant), encoding="utf-8")
    (folder / MODULE_NAME).write_text(name, encoding="utf-8")
    path = os.pathsep.join((str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", "pytest_fa.build.compile_extension", SPEC]


def read_inputs(variant: Variant, toolchain: Toolchain, staged: Path) -> CompiledFrom:
    """Return what a staged library was compiled from, without PyTorch's files: its version is in the key."""
    torch = Path(find_torch().folder)
    own_folders = [folder.resolve() for folder in _folders(variant)]
    compiled = msgspec.json.decode((staged / DEPENDENCIES).read_bytes(), type=Compiled)

    def portable(name: str) -> str | None:
        path = Path(os.path.normpath(staged / OBJECTS / name))
        return None if path.is_relative_to(staged) else _portable(path, own_folders)

    read = {name: Path(os.path.normpath(staged / OBJECTS / name)) for name in compiled.files}
    own = {portable(name): path for name, path in read.items() if not path.is_relative_to(torch)}
    dependencies = tuple(sorted((place, file_hash(str(path)) or "") for place, path in own.items() if place))
    headers = (str(torch), sysconfig.get_paths()["include"], *filter(None, (toolchain.home,)))
    reader = LookupReader(staged / OBJECTS, (*default_folders(toolchain.host_compiler), *headers))
    reader.look_up_libraries((*os.environ.get("LDFLAGS", "").split(), *variant.entry.ldflags))
    commands = dict.fromkeys(tuple(shlex.split(command)) for command in compiled.commands)
    paths = [search_path(list(words), staged / OBJECTS, is_nvcc=words[0] == toolchain.nvcc) for words in commands]
    searched = reader.searched(compiled.files, list(dict.fromkeys(paths)))
    return searched.inputs(dependencies, staged / OBJECTS, portable)


def _portable(path: Path, own_folders: list[Path]) -> str:
    """Return `path` relative to the variant's folder (`own_folders[0]`), or unchanged for a file of the system."""
    system_folders = ("/usr", sys.prefix, sys.base_prefix, *_cuda_homes())
    is_own = any(path.is_relative_to(folder) for folder in own_folders)
    is_system = any(path.is_relative_to(folder) for folder in system_folders)
    return str(path) if is_system and not is_own else f"src/{os.path.relpath(path, own_folders[0])}"


def _cuda_homes() -> list[str]:
    return [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]


def _cflags(variant: Variant) -> list[str]:
    """Return the C++ flags.

    Without -fno-gnu-unique, static variables of inline functions would be shared between variants in one process.
    """
    return ["-O3", "-fno-gnu-unique", *variant.entry.cflags]


def _cuda_flags(variant: Variant) -> list[str]:
    log = ["-lineinfo", "-Xptxas=-v,--warn-on-spills", "-Xcompiler=-fno-gnu-unique"]
    return ["-O3", *log, *variant.flags]


def _environment(toolchain: Toolchain, arch: Target, files_at_once: int) -> dict[str, str]:
    path = os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", "")))
    common = {
        "CXX": toolchain.host_compiler,
        "CC": toolchain.host_compiler,
        "PATH": path,
        "MAX_JOBS": str(files_at_once),
    }
    cuda = {"CUDA_HOME": toolchain.home, "PYTORCH_NVCC": toolchain.nvcc, "TORCH_CUDA_ARCH_LIST": _arch_list(arch)}
    return {**common, **(cuda if toolchain.nvcc else {})}


def _arch_list(arch: Target) -> str:
    """Return torch's name of an architecture: `9.0a` for `sm_90a`, and `8.0+PTX` if the build also holds PTX."""
    parts = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch)
    return f"{parts[1]}.{parts[2]}{parts[3]}{'+PTX' if holds_ptx(arch) else ''}" if parts else ""


def _known_files(variant: Variant) -> list[Path]:
    sources = [Path(variant.folder) / source for source in variant.entry.sources]
    return [*sources, *(path for folder in _folders(variant) for path in _headers(folder))]


def _folders(variant: Variant) -> list[Path]:
    """Return the folders in which an #include may find a header.

    They are the variant's folder, those of `entry.include`, and those of the sources.
    """
    home = Path(variant.folder)
    named = (home / name for name in variant.entry.include)
    source_folders = ((home / source).parent for source in variant.entry.sources)
    return list(dict.fromkeys((home, *named, *source_folders)))


def _headers(folder: Path) -> list[Path]:
    """Return all headers in a folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix in HEADER_SUFFIXES)
