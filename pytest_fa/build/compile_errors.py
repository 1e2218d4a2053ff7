"""The text of a failed compilation: the compiler's error lines, and before them what they mean for the source."""

from __future__ import annotations

import re

from pytest_fa.build.interface import INTERFACES, Interface
from pytest_fa.build.occupancy import multiprocessor
from pytest_fa.build.resources import demangle
from pytest_fa.catalog.variant import Target

MAX_LINES = 60
STATIC_SMEM_BYTES = 49_152  # what ptxas allows on an architecture that is not an `a` architecture

_CHATTER = r"ptxas info|\s+\d+ bytes stack frame|ptxas \.|FAILED: |ninja: build stopped|.* -MM?D "
_TOO_MUCH_SMEM = re.compile(
    r"Entry function '(\S+)' uses too much shared data \(0x([0-9a-f]+) bytes, 0x([0-9a-f]+) max"
)
_CLASH = r'error: .*(?:"{0}"|return type alone\n.*\b{0}\b)'
_NOT_INCLUDED = r'error: .*(?:identifier "{0.args}" is undefined|no storage class .*\n.*\bFA_EXPORT\b.*\b{0.entry}\b)'

_NO_HEADER = re.compile(r"^(\S+?:\d+)(?::\d+)?: fatal error: (\S+): No such file or directory", re.MULTILINE)


def compile_error(log: str, arch: Target) -> str:
    """Return what a compiler's output means for the source, if that is known, or its first error; then its last lines.

    The lines are without ptxas's figures, the names of temporary files, and the commands of an inner ninja.
    """
    without_temporary_names = re.sub(r"\S*tmpxft_\S+", "(a temporary file)", log)
    lines = [line for line in without_temporary_names.splitlines() if not re.match(_CHATTER, line)]
    first_error = next((line.strip() for line in lines if re.search(r"\b(error|fatal)\b", line)), "it does not compile")
    return "\n".join([*(_explanations(log, arch) or [first_error]), *lines[-MAX_LINES:]])


def lacks_entry(log: str) -> bool:
    """Whether the linker found no `fa_forward` or `fa_backward`."""
    names = "|".join(interface.entry for interface in INTERFACES)
    return re.search(rf"undefined reference to .?(?:{names})\b", log) is not None


def _explanations(log: str, arch: Target) -> list[str]:
    """A sentence for each error whose meaning for the source is known."""
    sentences = [
        _smem_sentence(match[1], int(match[2], 16), int(match[3], 16), arch) for match in _TOO_MUCH_SMEM.finditer(log)
    ]
    for interface in INTERFACES:
        sentences += _signature_sentences(log, interface)
    for place, header in _NO_HEADER.findall(log)[:1]:
        sentences.append(f"{place}: there is no {header}; name the folder that has it: `entry: {{include: [FOLDER]}}`")
    for interface in INTERFACES:
        if re.search(_NOT_INCLUDED.format(interface), log):
            sentences.append(f"the source does not include the interface; write `{interface.include_line}`")
    return sentences


def _signature_sentences(log: str, interface: Interface) -> list[str]:
    """A sentence for each function whose arguments or result are others than those of the header."""
    lines = {interface.entry: interface.entry_line, interface.workspace: interface.workspace_line}
    return [
        f"{name} has another signature than {interface.header} declares; write `{line}`"
        for name, line in lines.items()
        if re.search(_CLASH.format(name), log)
    ]


def _smem_sentence(mangled: str, needed_bytes: int, most_bytes: int, arch: Target) -> str:
    """What ptxas says of too much static shared memory, in decimal bytes, with the excess."""
    chip = multiprocessor(arch)
    text = (
        f"kernel {demangle([mangled])[0]}: {needed_bytes:,} B of static shared memory, "
        f"{needed_bytes - most_bytes:,} B too many for {arch} ({most_bytes:,} B)"
    )
    if chip and chip.smem_bytes_per_block > most_bytes == STATIC_SMEM_BYTES:
        text += (
            f"; as dynamic shared memory (`extern __shared__`, with fa_allow_dynamic_smem), a block can have "
            f"{chip.smem_bytes_per_block:,} B"
        )
    return text
