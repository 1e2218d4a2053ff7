"""The nvcc command line of a variant, and the cache keys derived from it.

nvcc runs in a staging folder with links to the sources (`src`, `root`, `fa`).  All its paths are relative and the same
on all machines, so no folder name becomes part of the code or the key.  Files generated from the manifest are in
`generated`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pytest_fa.build.flag_list import unlisted_flags
from pytest_fa.build.interface import FORWARD, Interface, interface_of
from pytest_fa.build.keys import KEY_SCHEMA, PACKAGE, Dependency, digest, file_hash
from pytest_fa.build.lookups import CompiledFrom, LookupReader, default_folders, search_path
from pytest_fa.build.side_by_side import DEVICE, FATBIN, SEPARATOR
from pytest_fa.build.target import holds_ptx
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import ToolchainError

GENERATED = "generated"
FFI_DISTRIBUTION = "apache-tvm-ffi"
INCLUDE = PACKAGE / "include"
BINDINGS = PACKAGE / "build"
SIDE_BY_SIDE = PACKAGE / "build" / "side_by_side.py"

OBJECT = "kernel.o"
# nvcc keeps its intermediate files in the staging folder, where the device code is disassembled early.
KEEP = "-keep"
# Only relocatable device code needs nvcc's device linker.
NO_DEVICE_LINK = "-nodlink"
_DEVICE_LINK = re.compile(r"rdc|relocatable")
_SEPARABLE_SOURCE = re.compile(r"[^-].*\.cu")
# Debug information of host code has the size of the fatbin, which is not known if both are compiled at the same time.
_HOST_DEBUG = re.compile(r"(?:^|[=,])-g\b")
LOG, DEPFILE, LIBRARY = "log.txt", "deps.d", "kernel.so"
DEFINES = f"{GENERATED}/fa_defines.h"
INCLUDE_DEFINES = f"-include={DEFINES}"

# Environment variables that change what nvcc and g++ do.
COMPILER_ENVIRONMENT = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
)

_NVCC_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")

# Without -fno-gnu-unique, static variables of inline functions would be shared between variants in one process.
_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-gnu-unique"


def links(variant: Variant) -> dict[str, Path]:
    """Return the links of a staging folder, by name; the folders of `entry.include` are `include0`, `include1`..."""
    own = {"src": Path(variant.folder), "root": Path(variant.root), "fa": INCLUDE}
    return own | {name: (Path(variant.folder) / path).resolve() for name, path in _include_links(variant).items()}


def _include_links(variant: Variant) -> dict[str, str]:
    return {f"include{index}": path for index, path in enumerate(variant.entry.include)}


def instantiations_header(variant: Variant) -> str:
    """Return the text of `fa_instantiations.h`: the (dtype, head_dim) pairs as a macro.

    It is a header because nvcc splits the value of a -D option at commas.
    """
    pairs = " ".join(f"X({dtype}, {dim})" for dtype, dim in variant.instantiations)
    return f"#define FA_FOR_EACH_INSTANTIATION(X) {pairs}\n"


def defines_header(variant: Variant) -> str:
    """Return the text of `fa_defines.h`, which nvcc includes before the source.

    nvcc runs its own programs through a shell.  The defines are in a header so that no text of theirs gets there.
    """
    return "".join(f"#define {name} {value}\n" for name, value in variant.defines.items())


def compile_flags(variant: Variant, arch: Target) -> list[str]:
    """Return all flags that affect the code, without paths of this machine."""
    return [
        "-std=c++17",
        "-O3",
        "-lineinfo",
        *(_from_source(flag) for flag in variant.flags),
        _gencode(arch),
        "-Xptxas=-v,--warn-on-spills",
        f"-Xcompiler={_HOST_FLAGS}",
        "-Xlinker=-Bsymbolic,--no-undefined",
        "-shared",
        "-cudart=static",
        "-Isrc",
        "-Iroot/include",
        "-Ifa",
        f"-I{GENERATED}",
        *(f"-I{name}" for name in _include_links(variant)),
        INCLUDE_DEFINES,
    ]


def _from_source(flag: str) -> str:
    """Return the flag with an include folder that is relative to the variant's folder, not to the staging folder."""
    folder = flag.removeprefix("-I")
    return f"-Isrc/{folder}" if flag.startswith("-I") and not folder.startswith("/") else flag


def compile_command(variant: Variant, arch: Target, toolchain: Toolchain) -> list[str]:
    """Return the whole command, which must run in the staging folder."""
    return [
        *_nvcc(toolchain),
        *compile_flags(variant, arch),
        "-MD",
        "-MF",
        DEPFILE,
        "-o",
        LIBRARY,
        f"src/{variant.entry.source}",
        *_linked(toolchain),
    ]


def _nvcc(toolchain: Toolchain) -> list[str]:
    return [toolchain.nvcc, "-ccbin", toolchain.host_compiler]


def _linked(toolchain: Toolchain) -> list[str]:
    """Return the object and the libraries that are linked into every library."""
    return ["binding/binding.o", f"-L{toolchain.library_folder}", f"-L{ffi_folder()}/lib", "-ltvm_ffi"]


def _side_by_side_command(variant: Variant, arch: Target, toolchain: Toolchain, objcopy: str) -> list[str]:
    """Return the command that compiles device code and host code side by side, and makes the same library."""
    flags = compile_flags(variant, arch)
    own = [flag for flag in flags if flag != "-shared"]
    source, target = f"src/{variant.entry.source}", object_name(variant.entry.source)
    device = [*own, "-keep-dir", DEVICE, "-fatbin", "-o", FATBIN, source]
    host = [*own, "-fdevice-syntax-only", "-MD", "-MF", DEPFILE, "-MT", LIBRARY, "-c", "-o", target, source]
    link = [*flags, NO_DEVICE_LINK, "-o", LIBRARY, target, *_linked(toolchain)]
    script = [sys.executable, "-I", "-S", str(SIDE_BY_SIDE), Path(target).stem, objcopy]
    parts = ([*_nvcc(toolchain), KEEP, *words] for words in (device, host, link))
    groups = [script, *parts, _ordinary_command(variant, arch, toolchain)]
    return [word for group in groups for word in (*group, SEPARATOR)][:-1]


def _ordinary_command(variant: Variant, arch: Target, toolchain: Toolchain) -> list[str]:
    """Return the whole command, with the options that affect neither the code nor the key."""
    nvcc, *words = compile_command(variant, arch, toolchain)
    return [nvcc, KEEP, *([] if _needs_device_link(variant) else [NO_DEVICE_LINK]), *words]


def _has_separable_parts(variant: Variant) -> bool:
    """Whether the host code of a variant can be compiled without its device code."""
    is_usual = _SEPARABLE_SOURCE.fullmatch(Path(variant.entry.source).name) is not None
    has_debug_information = any(_HOST_DEBUG.search(flag) for flag in variant.flags)
    return is_usual and not has_debug_information and not _needs_device_link(variant)


def _needs_device_link(variant: Variant) -> bool:
    """Whether a flag may ask for relocatable device code."""
    has_unknown = unlisted_flags(variant) or any(os.environ.get(name) for name in _NVCC_ENVIRONMENT)
    return bool(has_unknown) or any(_DEVICE_LINK.search(flag) for flag in variant.flags)


def object_command(variant: Variant, arch: Target, toolchain: Toolchain) -> list[str]:
    """Return the command that compiles the source without linking it, to read what it defines."""
    flags = [flag for flag in compile_flags(variant, arch) if flag != "-shared"]
    source = f"src/{variant.entry.source}"
    return [toolchain.nvcc, "-ccbin", toolchain.host_compiler, *flags, "-c", "-o", OBJECT, source]


def stage(
    variant: Variant, arch: Target, folder: Path, toolchain: Toolchain, binding: Path, *, side_by_side: bool
) -> list[str]:
    """Write links and generated files to a staging folder, and return the command to run there.

    With `side_by_side`, it compiles device code and host code at the same time, where that is possible.
    """
    for name, target in links(variant).items():
        (folder / name).symlink_to(target)
    (folder / GENERATED).mkdir()
    (folder / GENERATED / "fa_instantiations.h").write_text(instantiations_header(variant), encoding="utf-8")
    (folder / DEFINES).write_text(defines_header(variant), encoding="utf-8")
    (folder / "binding").symlink_to(binding)
    objcopy = shutil.which("objcopy")
    if not (side_by_side and objcopy and toolchain.checks_syntax and _has_separable_parts(variant)):
        return _ordinary_command(variant, arch, toolchain)
    (folder / DEVICE).mkdir()
    return _side_by_side_command(variant, arch, toolchain, objcopy)


def object_name(source: str) -> str:
    """Return the name of the object file that nvcc writes for a source."""
    return f"{Path(source).stem}.o"


def intermediate_files(staged: Path) -> list[Path]:
    """Return the files in a staging folder that nvcc has written and that a published build does not need."""
    kept = (LOG, DEPFILE, LIBRARY)
    return [path for path in staged.iterdir() if path.is_file() and not path.is_symlink() and path.name not in kept]


def device_folder(staged: Path) -> Path:
    """Return the folder in which nvcc keeps the device code: the staging folder, or one in it."""
    return staged / DEVICE if (staged / DEVICE).is_dir() else staged


def read_dependencies(staged: Path) -> tuple[Dependency, ...]:
    """Return every file of the compiler's depfile with its hash; paths are relative to the staging folder or absolute.

    Generated files are omitted, because the request key covers them.
    """
    paths = (path for path in _read_files(staged) if not path.removeprefix("./").startswith(GENERATED))
    return tuple((path, file_hash(str(staged / path)) or "") for path in paths)


def _read_files(staged: Path) -> list[str]:
    """Return every file of the compiler's depfile, as the compiler names it."""
    depfile = (staged / DEPFILE).read_text(encoding="utf-8")
    body = depfile.replace("\\\n", " ").split(":", 1)[1]
    return sorted({word.replace("\\ ", " ") for word in re.split(r"(?<!\\)\s+", body) if word})


def read_inputs(variant: Variant, arch: Target, toolchain: Toolchain, staged: Path) -> CompiledFrom:
    """Return what a staged library was compiled from."""
    systems = (*default_folders(toolchain.host_compiler), toolchain.home, str(INCLUDE), GENERATED)
    words, reader = compile_command(variant, arch, toolchain), LookupReader(staged, systems)
    from_environment = [word for name in _NVCC_ENVIRONMENT for word in os.environ.get(name, "").split()]
    reader.look_up_libraries((*from_environment, *words))
    searched = reader.searched(_read_files(staged), [search_path(words, staged, is_nvcc=True)])
    roots = links(variant)

    def portable(path: str) -> str | None:
        return path if path.startswith("/") or path.partition("/")[0] in roots else None

    return searched.inputs(read_dependencies(staged), staged, portable)


def binding_job(toolchain: Toolchain, interface: Interface) -> list[str]:
    """Return the command that compiles a shared binding.  If it fails, no part of the object remains."""
    return ["sh", "-c", '"$@" || { rm -f binding.o; exit 1; }', "sh", *binding_command(toolchain, interface)]


def binding_command(toolchain: Toolchain, interface: Interface) -> list[str]:
    """Return the compiler's command for a shared binding, which must run in its own staging folder."""
    return [
        toolchain.host_compiler,
        "-std=c++17",
        "-O2",
        *_HOST_FLAGS.split(","),
        f"-I{INCLUDE}",
        f"-I{toolchain.home}/include",
        f"-I{ffi_folder()}/include",
        "-c",
        str(BINDINGS / interface.binding),
        "-o",
        "binding.o",
    ]


def request_parts(variant: Variant, arch: Target) -> list[object]:
    """Return what the request key covers: flags, definitions, instantiations, names, the binding's source."""
    headers = [defines_header(variant), instantiations_header(variant)]
    return [
        KEY_SCHEMA,
        [compile_flags(variant, arch), headers, variant.entry.source],
        _binding_contents(interface_of(variant)),
    ]


def toolchain_key(toolchain: Toolchain) -> str:
    """Return the key of the compilers, of their environment variables, and of the tvm-ffi version."""
    return digest([toolchain.identity, compiler_environment(), metadata.version(FFI_DISTRIBUTION)])[:8]


def compiler_environment() -> dict[str, str]:
    """Return the environment variables that change what the compilers do and are set."""
    return {name: value for name in COMPILER_ENVIRONMENT if (value := os.environ.get(name))}


def binding_key(toolchain: Toolchain, interface: Interface) -> str:
    """Return the key of a compiled binding."""
    return digest([KEY_SCHEMA, _HOST_FLAGS, toolchain_key(toolchain), _binding_contents(interface)])


def _binding_contents(interface: Interface) -> list[str]:
    headers = dict.fromkeys((FORWARD.header, interface.header))
    paths = (BINDINGS / "binding.h", BINDINGS / interface.binding, *(INCLUDE / name for name in headers))
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def _gencode(arch: Target) -> str:
    """Return the -gencode option; builds of most plain architectures also hold PTX for newer GPUs.

    `-arch=` is not used, because it adds a compilation for the plain architecture.
    """
    number = arch.removeprefix("sm_")
    code = f"[{arch},compute_{number}]" if holds_ptx(arch) else arch
    return f"-gencode=arch=compute_{number},code={code}"


def ffi_folder() -> Path:
    """Return the folder of tvm-ffi's headers and library, without importing it, because its import imports torch.

    Raises `ToolchainError` if it is not installed.
    """
    spec = find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(f"{FFI_DISTRIBUTION} is not installed: `pip install {FFI_DISTRIBUTION}`")
    return Path(next(iter(spec.submodule_search_locations)))
