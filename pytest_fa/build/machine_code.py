"""What the machine code says, without a GPU: its identity, its size, how often each opcode stands in it."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import struct
import subprocess
import tempfile
from pathlib import Path

import msgspec
from elftools.elf.elffile import ELFFile

from pytest_fa.build.toolchain import find_tool

_SIZED = 4
_THREADS = (0x05, 0x10)
_THREE_WORDS = 12


class MachineCode(msgspec.Struct, frozen=True):
    """The code of one build.

    `identity` is a sha256 over the contents of the `.text.*` sections, which hold code and nothing else: equal
    identities mean the same instructions, whatever the folder, the line info and the names around them.
    `kernels` maps a mangled name to its SASS bytes and its counts by opcode (`HMMA`, `LDGSTS`, ...), `threads` to the
    most threads that a block may have, where the source bounds them.
    """

    identity: str
    kernels: dict[str, tuple[int, dict[str, int]]]
    threads: dict[str, int] = {}


def read_machine_code(library: Path) -> MachineCode:
    """Take the cubin out of `library` and read it.

    Raises `OSError` or `subprocess.CalledProcessError` where cuobjdump or nvdisasm is missing or fails.
    """
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        raise FileNotFoundError(
            "cuobjdump and nvdisasm are not installed: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
        )
    environment = {**os.environ, "PATH": f"{nvdisasm.parent}:{os.environ.get('PATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        _run([str(cuobjdump), "-xelf", "all", str(library.resolve())], folder, environment)
        sections: dict[str, bytes] = {}
        threads: dict[str, int] = {}
        counts: dict[str, dict[str, int]] = {}
        for cubin in sorted(Path(folder).glob("*.cubin")):
            sections.update(_sections(cubin, ".text."))
            infos = _sections(cubin, ".nv.info.")
            threads.update({name: most for name, info in infos.items() if (most := max_threads(info)) is not None})
            counts.update(_opcode_counts(_run([str(nvdisasm), "-json", str(cubin)], folder, environment)))
    hashes = sorted(hashlib.sha256(code).hexdigest() for code in sections.values())
    kernels = {name: (len(code), counts.get(name, {})) for name, code in sections.items()}
    return MachineCode(hashlib.sha256("".join(hashes).encode()).hexdigest()[:16], kernels, threads)


def max_threads(info: bytes) -> int | None:
    """The most threads of a block, from a kernel's `.nv.info` section; None where the source does not bound them.

    Entries are a form, an attribute and a 16-bit number, which for form 4 is the size of what follows; attributes 0x05
    (`__launch_bounds__`) and 0x10 (`__block_size__`) hold three 32-bit numbers.
    """
    at = 0
    while at + 4 <= len(info):
        form, attribute, number = struct.unpack_from("<BBH", info, at)
        if form == _SIZED and attribute in _THREADS and number >= _THREE_WORDS:
            x, y, z = struct.unpack_from("<III", info, at + 4)
            return int(x * y * z)
        at += 4 + (number if form == _SIZED else 0)
    return None


def _sections(cubin: Path, prefix: str) -> dict[str, bytes]:
    with cubin.open("rb") as stream:
        return {
            section.name.removeprefix(prefix): section.data()
            for section in ELFFile(stream).iter_sections()
            if section.name.startswith(prefix)
        }


def _opcode_counts(text: str) -> dict[str, dict[str, int]]:
    _, functions = json.loads(text)
    return {
        each["function-name"]: dict(
            collections.Counter(line["opcode"].split(".")[0] for line in each["sass-instructions"]).most_common()
        )
        for each in functions
    }


def _run(command: list[str], folder: str, environment: dict[str, str]) -> str:
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return run.stdout
