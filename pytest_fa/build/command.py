"""The compiler's command line and the key that it makes.

nvcc runs in a staging folder with links to the sources (`src`, `root`, `fa`), so that every path it sees is relative
and the same on all machines: no folder name reaches the code or the key.  What the manifest makes lies in `generated`.
"""

from __future__ import annotations

import hashlib
import os
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pytest_fa.build.keys import HEADER_SUFFIXES, KEY_SCHEMA, PACKAGE, Dependency, digest, file_hash
from pytest_fa.build.toolchain import Toolchain
from pytest_fa.catalog.variant import Target, Variant
from pytest_fa.errors import ToolchainError

GENERATED = "generated"
FFI_DISTRIBUTION = "apache-tvm-ffi"
INCLUDE = PACKAGE / "include"
BINDING = PACKAGE / "build" / "binding.cpp"

# What nvcc and g++ read beside their arguments.
COMPILER_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")

# Hidden symbols and no unique ones: statics of inline functions would otherwise merge across variants in one process.
_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-gnu-unique"


def links(variant: Variant) -> dict[str, Path]:
    """The links of a staging folder: what each relative prefix stands for."""
    return {"src": Path(variant.folder), "root": Path(variant.root), "fa": INCLUDE}


def instantiations_header(variant: Variant) -> str:
    """`fa_instantiations.h`: the manifest's (dtype, head_dim) pairs as a macro: nvcc splits a -D at commas."""
    pairs = " ".join(f"X({dtype}, {dim})" for dtype, dim in variant.instantiations)
    return f"#define FA_FOR_EACH_INSTANTIATION(X) {pairs}\n"


def compile_flags(variant: Variant, arch: Target) -> list[str]:
    """Everything that shapes the code, free of this machine's paths."""
    return [
        "-std=c++17",
        "-O3",
        "-lineinfo",
        *variant.flags,
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
        *(f"-D{name}={value}" for name, value in variant.defines.items()),
    ]


def compile_command(variant: Variant, arch: Target, toolchain: Toolchain) -> list[str]:
    """The whole command, to be run in the staging folder."""
    return [
        toolchain.nvcc,
        "-ccbin",
        toolchain.host_compiler,
        *compile_flags(variant, arch),
        "-MD",
        "-MF",
        "deps.d",
        "-o",
        "kernel.so",
        f"src/{variant.entry.source}",
        "binding/binding.o",
        f"-L{toolchain.library_folder}",
        f"-L{ffi_folder()}/lib",
        "-ltvm_ffi",
    ]


def stage(variant: Variant, arch: Target, folder: Path, toolchain: Toolchain, binding: Path) -> list[str]:
    """Fill a staging folder with links and what the manifest makes; the command to be run there."""
    for name, target in links(variant).items():
        (folder / name).symlink_to(target)
    (folder / GENERATED).mkdir()
    (folder / GENERATED / "fa_instantiations.h").write_text(instantiations_header(variant), encoding="utf-8")
    (folder / "binding").symlink_to(binding)
    return compile_command(variant, arch, toolchain)


def read_dependencies(staged: Path) -> tuple[Dependency, ...]:
    """Every file of the compiler's depfile, with its hash; relative paths are taken from the staging folder.

    Generated files are left out: the request covers them.
    """
    depfile = (staged / "deps.d").read_text(encoding="utf-8")
    body = depfile.replace("\\\n", " ").split(":", 1)[1]
    paths = sorted(
        {word.replace("\\ ", " ") for word in re.split(r"(?<!\\)\s+", body) if word and not word.startswith(GENERATED)}
    )
    return tuple((path, file_hash(str(staged / path)) or "") for path in paths)


def binding_command(toolchain: Toolchain) -> list[str]:
    """The command for the one shared binding, to be run in its own staging folder."""
    return [
        toolchain.host_compiler,
        "-std=c++17",
        "-O2",
        *_HOST_FLAGS.split(","),
        f"-I{INCLUDE}",
        f"-I{toolchain.home}/include",
        f"-I{ffi_folder()}/include",
        "-c",
        str(BINDING),
        "-o",
        "binding.o",
    ]


def request(variant: Variant, arch: Target) -> list[object]:
    """What is asked for, on any machine: flags, defines, instantiations, source name, the binding's source."""
    made = [compile_flags(variant, arch), instantiations_header(variant), variant.entry.source, _header_names(variant)]
    return [KEY_SCHEMA, made, _binding_contents()]


def toolchain_key(toolchain: Toolchain) -> str:
    """What it is compiled with: compilers, their environment, and tvm-ffi."""
    environment = {name: os.environ.get(name, "") for name in COMPILER_ENVIRONMENT}
    return digest([toolchain.identity, environment, metadata.version(FFI_DISTRIBUTION)])[:8]


def binding_key(toolchain: Toolchain) -> str:
    """The binding's own key."""
    return digest([KEY_SCHEMA, _HOST_FLAGS, toolchain_key(toolchain), _binding_contents()])


def _header_names(variant: Variant) -> list[str]:
    """Every header that an include may find among the sources: a new one may shadow another, and no depfile says so."""
    folders = {"src": Path(variant.folder), "root": Path(variant.root) / "include"}
    return sorted(
        f"{prefix}/{path.relative_to(folder)}"
        for prefix, folder in folders.items()
        for path in folder.rglob("*")
        if path.suffix in HEADER_SUFFIXES
    )


def _binding_contents() -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in (BINDING, INCLUDE / "fa_forward.h")]


def _gencode(arch: Target) -> str:
    """`-gencode`, never `-arch=`, which adds a pass for the plain architecture; sm_80 keeps PTX for newer cards."""
    number = arch.removeprefix("sm_")
    code = f"[{arch},compute_{number}]" if arch == "sm_80" else arch
    return f"-gencode=arch=compute_{number},code={code}"


def ffi_folder() -> Path:
    """tvm-ffi's headers and library, found without importing it: its import brings torch in."""
    spec = find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(f"{FFI_DISTRIBUTION} is not installed: `pip install {FFI_DISTRIBUTION}`")
    return Path(next(iter(spec.submodule_search_locations)))
