"""Compile one PyTorch extension, in a process of its own: `python -m pytest_fa.build.compile_extension SPEC.json`.

This module imports torch, so no other module imports it.  It writes `kernel.so` and `deps.json` to the current folder.
torch.utils.cpp_extension writes its own build.ninja, which records every included file.  The folder is new and private,
so no lock file of another build can block this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from setuptools import Distribution

from pytest_fa.build.command import LIBRARY
from pytest_fa.build.extension import DEPENDENCIES, OBJECTS, Compiled, ExtensionSpec


def main(arguments: list[str]) -> int:
    """Compile the extension; return 0, or 1 if it fails.  Compiler output goes to stdout and stderr."""
    spec = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=ExtensionSpec)
    os.environ.update(spec.environment)
    from torch.utils import cpp_extension  # noqa: PLC0415  # it reads the environment at import

    kind = cpp_extension.CUDAExtension if spec.is_cuda else cpp_extension.CppExtension
    extension = kind(  # type: ignore[no-untyped-call]
        name=spec.name,
        sources=list(spec.sources),
        include_dirs=list(spec.include),
        extra_compile_args={"cxx": list(spec.cflags), "nvcc": list(spec.cuda_flags)},
        extra_link_args=list(spec.ldflags),
    )
    distribution = Distribution({"name": spec.name, "ext_modules": [extension]})
    options = {"use_ninja": True, "no_python_abi_suffix": True}
    build = cpp_extension.BuildExtension.with_options(**options)(distribution)  # type: ignore[no-untyped-call]
    build.build_temp, build.build_lib = str(Path(OBJECTS).resolve()), str(Path("library").resolve())
    try:
        build.ensure_finalized()
        build.run()
    except (Exception, SystemExit) as problem:  # noqa: BLE001  # distutils raises exceptions of many types
        sys.stdout.write(f"{problem}\n")
        return 1
    compiled = Compiled(_dependencies(build.build_temp), _commands(build.build_temp))
    Path(DEPENDENCIES).write_bytes(msgspec.json.encode(compiled))
    Path("library", f"{spec.name}.so").rename(LIBRARY)
    return 0


def _dependencies(folder: str) -> tuple[str, ...]:
    """Return the files that ninja recorded for all objects: `ninja -t deps` prints each on an indented line."""
    lines = _ninja(folder, "deps").splitlines()
    return tuple(sorted({line.strip() for line in lines if line.startswith(" ")}))


def _commands(folder: str) -> tuple[str, ...]:
    """Return the commands that compiled the objects."""
    return tuple(sorted({each["command"] for each in json.loads(_ninja(folder, "compdb")) if each["file"]}))


def _ninja(folder: str, tool: str) -> str:
    command = ["ninja", "-C", folder, "--quiet", "-t", tool]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout  # noqa: S603


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
