"""Read a build's machine code, without a GPU: its identity, its size, and the number of each opcode."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pytest_fa.build.toolchain import find_tool

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import Section

_SIZED = 4
_THREADS = (0x05, 0x10)
_THREE_WORDS = 12
_NOT_HOST_CODE = (".nv_fatbin", ".note.gnu.build-id")
_DATA = (".rodata", ".dynstr", ".data", ".tdata")
_WORD_BYTES = 8  # of an address
_INSTRUCTION = re.compile(r"\s+[0-9a-f]+:\t(.*)")
_DISTANCE = re.compile(r"-?0x[0-9a-f]+(?=\(%rip\))")  # of what it reads, from the instruction
_TARGET = re.compile(r"\b[0-9a-f]+ (?=<)")  # the address of a jump; its function and the offset follow


class MachineCode(msgspec.Struct, frozen=True):
    """The code of one build.

    `identity` is a sha256 of the contents of the `.text.*` sections, which hold only code.  Equal identities mean equal
    instructions; folder names, line information and symbol names have no effect.  `kernels` maps a mangled name to its
    SASS bytes and its instruction counts by opcode (`HMMA`, `LDGSTS`, ...).  `threads` maps it to the maximum number of
    threads per block, if the source sets one.
    """

    identity: str
    kernels: dict[str, tuple[int, dict[str, int]]]
    threads: dict[str, int] = {}


class Disassembly(NamedTuple):
    """What nvdisasm says of a cubin: its code by kernel, and the instruction counts of each kernel by opcode."""

    code: dict[str, bytes]
    counts: dict[str, dict[str, int]]


def disassemble(cubin: Path) -> Disassembly:
    """Disassemble a cubin.  nvdisasm takes half a second to start.

    Raises `OSError` or `subprocess.CalledProcessError` if nvdisasm is missing or fails.
    """
    _, nvdisasm = _tools()
    code = _sections(cubin, ".text.")
    # The linker's cubin has no kernel.
    return Disassembly(code, _opcode_counts(_run([str(nvdisasm), "-json", str(cubin.resolve())])) if code else {})


def read_machine_code(library: Path, known: Iterable[Disassembly] = ()) -> MachineCode:
    """Extract the cubins of `library` and read them; a cubin with the code of a `known` one is not disassembled again.

    Raises `OSError` or `subprocess.CalledProcessError` if cuobjdump or nvdisasm is missing or fails.
    """
    cuobjdump, _ = _tools()
    with tempfile.TemporaryDirectory() as folder:
        _run([str(cuobjdump), "-xelf", "all", str(library.resolve())], folder)
        sections: dict[str, bytes] = {}
        threads: dict[str, int] = {}
        counts: dict[str, dict[str, int]] = {}
        for cubin in sorted(Path(folder).glob("*.cubin")):
            code = _sections(cubin, ".text.")
            same = next((each for each in known if each.code == code), None)
            disassembly = same or disassemble(cubin)
            sections.update(disassembly.code)
            counts.update(disassembly.counts)
            infos = _sections(cubin, ".nv.info.")
            threads.update({name: limit for name, info in infos.items() if (limit := max_threads(info)) is not None})
    hashes = sorted(hashlib.sha256(code).hexdigest() for code in sections.values())
    kernels = {name: (len(code), counts.get(name, {})) for name, code in sections.items()}
    return MachineCode(hashlib.sha256("".join(hashes).encode()).hexdigest()[:16], kernels, threads)


def host_code(library: Path) -> str | None:
    """Return a sha256 of the code and the data that a library holds for the CPU; None if they cannot be read.

    It is the same wherever they lie: the device code contains the numbers of source lines, and its size moves what lies
    behind it.  So an address counts as its section and the offset there.  None also without `objdump`, which a compiler
    comes with, and for processors other than x86-64.
    """
    from elftools.common.exceptions import ELFError  # noqa: PLC0415  # as in `_sections`
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415

    sha256 = hashlib.sha256()
    try:
        with library.open("rb") as stream:
            elf = ELFFile(stream)
            if elf["e_machine"] != "EM_X86_64":
                return None
            places = _places(elf)
            for text in _host_data(elf, places):
                sha256.update(text)
        listing = _run(["objdump", "--disassemble", "--no-show-raw-insn", str(library)])
    except (OSError, subprocess.SubprocessError, ELFError, ValueError):
        return None
    instructions = [match[1] for line in listing.splitlines() if (match := _INSTRUCTION.match(line))]
    for instruction in instructions:
        sha256.update(_without_addresses(instruction, places).encode() + b"\n")
    return sha256.hexdigest() if instructions else None


class _Place(NamedTuple):
    """A section in memory."""

    start: int
    end: int
    name: str


def _places(elf: ELFFile) -> list[_Place]:
    """The sections that are loaded for the CPU."""
    loaded = [section for section in elf.iter_sections() if _is_loaded(section)]
    return [
        _Place(section["sh_addr"], section["sh_addr"] + section["sh_size"], section.name)
        for section in loaded
        if section.name not in _NOT_HOST_CODE
    ]


def _is_loaded(section: Section) -> bool:
    from elftools.elf.constants import SH_FLAGS  # noqa: PLC0415

    return bool(section["sh_flags"] & SH_FLAGS.SHF_ALLOC)


def _place_of(address: int, places: list[_Place]) -> str:
    """The section and the offset of an address; the address itself if it is in none."""
    inside = (f"{place.name}+{address - place.start}" for place in places if place.start <= address < place.end)
    ended = (f"the end of {place.name}" for place in places if address == place.end)
    return next(inside, None) or next(ended, str(address))


def _host_data(elf: ELFFile, places: list[_Place]) -> Iterator[bytes]:
    """The sizes of all sections, the data without the addresses in it, and the addresses, as sections and offsets."""
    from elftools.elf.relocation import RelocationSection  # noqa: PLC0415
    from elftools.elf.sections import SymbolTableSection  # noqa: PLC0415

    loaded = [section for section in elf.iter_sections() if _is_loaded(section)]
    written: list[int] = []  # addresses of addresses, which the loader writes
    for section in loaded:
        if isinstance(section, SymbolTableSection):
            for symbol in section.iter_symbols():
                yield f"{symbol.name} {_place_of(symbol['st_value'], places)}\n".encode()
        if isinstance(section, RelocationSection):
            for relocation in section.iter_relocations():
                written.append(relocation["r_offset"])
                where, addend = (_place_of(relocation[field], places) for field in ("r_offset", "r_addend"))
                yield f"{where} {relocation['r_info_type']} {relocation['r_info_sym']} {addend}\n".encode()
    for section in loaded:
        if section.name in _NOT_HOST_CODE:
            continue
        start, size = section["sh_addr"], section["sh_size"]
        yield f"{section.name} {size}\n".encode()
        if section.name.startswith(_DATA):
            data = bytearray(section.data())
            for offset in (address - start for address in written if start <= address < start + size):
                data[offset : offset + _WORD_BYTES] = bytes(_WORD_BYTES)
            yield bytes(data)


def _without_addresses(instruction: str, places: list[_Place]) -> str:
    """An instruction of objdump's listing with the section and the offset of what it reads, and no address."""
    text, _, read = instruction.partition("# ")
    where = [_place_of(int(read.split()[0], 16), places)] if read else []
    return " ".join([_TARGET.sub("", _DISTANCE.sub("", text)).strip(), *where])


def _tools() -> tuple[Path, Path]:
    """The paths of cuobjdump and nvdisasm.  Raises `FileNotFoundError`."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    if cuobjdump is None or nvdisasm is None:
        raise FileNotFoundError(
            "cuobjdump and nvdisasm are not installed: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
        )
    return cuobjdump, nvdisasm


def max_threads(info: bytes) -> int | None:
    """Return the maximum threads per block from a kernel's `.nv.info` section, or None if the source sets none.

    An entry has a format byte, an attribute byte and a 16-bit number; for format 4, the number is the size of the
    payload that follows.  The attributes 0x05 (`__launch_bounds__`) and 0x10 (`__block_size__`) hold three 32-bit
    numbers.
    """
    offset = 0
    while offset + 4 <= len(info):
        form, attribute, number = struct.unpack_from("<BBH", info, offset)
        if form == _SIZED and attribute in _THREADS and number >= _THREE_WORDS:
            x, y, z = struct.unpack_from("<III", info, offset + 4)
            return int(x * y * z)
        offset += 4 + (number if form == _SIZED else 0)
    return None


def _sections(cubin: Path, prefix: str) -> dict[str, bytes]:
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415  # 30 ms, only for a new build

    with cubin.open("rb") as stream:
        return {
            section.name.removeprefix(prefix): section.data()
            for section in ELFFile(stream).iter_sections()
            if section.name.startswith(prefix)
        }


def _opcode_counts(text: str) -> dict[str, dict[str, int]]:
    _, functions = json.loads(text)
    return {
        function["function-name"]: dict(
            collections.Counter(line["opcode"].split(".")[0] for line in function["sass-instructions"]).most_common()
        )
        for function in functions
    }


def _run(command: list[str], folder: str | None = None) -> str:
    nvdisasm = find_tool("nvdisasm")  # cuobjdump looks for it on PATH
    environment = {**os.environ, "PATH": f"{nvdisasm.parent if nvdisasm else ''}:{os.environ.get('PATH', '')}"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=300)  # noqa: S603
    return run.stdout
