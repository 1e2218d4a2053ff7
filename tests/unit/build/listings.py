"""The machine code of a built library, function by function."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pytest_fa.build.toolchain import find_tool


def functions_of(library: Path, folder: Path) -> dict[str, str]:
    """The listing of each kernel of a library, by its mangled name.  Writes the machine code to `folder`.

    Skips the test where cuobjdump or nvdisasm is not installed.
    """
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        pytest.skip("cuobjdump or nvdisasm is not installed")
    environment = {**os.environ, "PATH": f"{nvdisasm.parent}:{os.environ['PATH']}"}
    extract = [str(cuobjdump), "-xelf", "all", str(library.resolve())]
    subprocess.run(extract, cwd=folder, env=environment, check=True, capture_output=True)
    texts: dict[str, str] = {}
    for cubin in folder.glob("*.cubin"):
        command = [str(nvdisasm), "-c", str(cubin)]
        listing = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        sections = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", listing, flags=re.MULTILINE)[1:]
        texts.update(zip(sections[::2], sections[1::2], strict=True))
    return texts
