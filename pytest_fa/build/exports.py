"""What a CUDA source exports: the functions in the symbol table of what was compiled from it.

A C++ function has a mangled name, which encodes its namespace and its arguments.  The binding calls C functions, so it
does not find such a function.
"""

from __future__ import annotations

from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from pytest_fa.build.interface import Interface
from pytest_fa.build.resources import demangle

MAX_NAMES = 5
COLD = ".cold"  # the end of the name under which a compiler puts the rarely used part of a function elsewhere
STUB = "__device_stub__"  # nvcc makes a host function of this name for each kernel


def entry_problem(source: str, object_file: Path, interface: Interface) -> str:
    """Return why the linker found no `fa_forward` or `fa_backward` in the compiled source, and the line to write."""
    functions, entry = _functions(object_file), interface.entry
    write = f"write `{interface.entry_line}`"
    if name := _cpp_name(entry, functions):
        return (
            f'{source} defines {entry} as a C++ function ({name}), not as the C function; extern "C" is missing, '
            f"it is in a namespace, or its arguments differ from those in {interface.header}; {write}"
        )
    visible = [name for name, binding in functions.items() if binding != "STB_LOCAL"]  # nvcc's own are local
    shown = [name for name in demangle(visible) if not name.startswith(STUB)][:MAX_NAMES]
    instead = f" (it defines: {', '.join(shown)})" if shown else ""
    return f"{source} defines no function {entry}{instead}; {write}"


def workspace_problem(source: str, object_file: Path, interface: Interface) -> str | None:
    """Return why the function for the workspace of a compiled source would never be called, or None."""
    functions, workspace = _functions(object_file), interface.workspace
    name = _cpp_name(workspace, functions)
    if workspace in functions or not name:
        return None
    return (
        f"{source} defines {workspace} as a C++ function ({name}), which is never called; the kernel would "
        f"get no workspace; write `{interface.workspace_line}`"
    )


def _cpp_name(name: str, functions: dict[str, str]) -> str | None:
    """The namespace and the parameters of a C++ function of this name, as in `mine::fa_forward(int)`, or None."""
    mangled = next((each for each in functions if each.startswith("_Z") and f"{len(name)}{name}" in each), None)
    return demangle([mangled], parameters=True)[0] if mangled else None


def _functions(path: Path) -> dict[str, str]:
    """The functions that an object file or a library defines, and the binding of each, such as STB_GLOBAL.

    Raises `OSError` or `ELFError` if the file cannot be read.
    """
    with path.open("rb") as stream:
        sections = [each for each in ELFFile(stream).iter_sections() if isinstance(each, SymbolTableSection)]
        symbols = [symbol for section in sections for symbol in section.iter_symbols()]
        defined = (symbol for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF")
        infos = ((symbol.name, symbol["st_info"]) for symbol in defined)
        functions = {name: info["bind"] for name, info in infos if info["type"] == "STT_FUNC"}
        return {name: binding for name, binding in functions.items() if not name.endswith(COLD)}
