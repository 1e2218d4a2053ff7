"""Compiles the source of a variant for the CPU, with the emulator in place of the GPU's instructions, and calls it.

Threads, copies and wgmmas run in a random order, so that a missing barrier gives a deadlock or a wrong result.  The
emulator has no weak memory, so it does not show that a fence is missing, and it has no registers and no time.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_fa.attention import abi
from pytest_fa.build.command import (
    BINDINGS,
    INCLUDE,
    binding_command,
    defines_header,
    ffi_folder,
    instantiations_header,
)
from pytest_fa.build.interface import interface_of
from pytest_fa.build.toolchain import find_toolchain
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.variant import Variant
from pytest_fa.features.sanitize.plain_call import ForwardArgs, Strides, forward_args
from pytest_fa.gpu.inputs import Inputs, Output, clone, empty_output, poison
from pytest_fa.judge.changed_inputs import require_only_written

FOLDER = Path(__file__).parent
NAN_BYTE = 0xFF  # a float of such bytes is NaN
WORKSPACE_ALIGNMENT = 256
OTHER_BYTES = 256  # behind the caller's struct, which a kernel must not read


class StuckKernel(Exception):
    """The emulated kernel does not end, or an mbarrier got an arrival that its phase does not have."""


@dataclass(frozen=True)
class Schedule:
    """What an emulated GPU has, and the order in which things happen on it.

    `early` is the probability that a copy, or a wgmma, is executed as soon as it may be.
    """

    seed: int = 0
    sms: int = 2
    early: float = 0.5
    resident_blocks: int = 8


class Emulator:
    """The emulator, compiled once into an object file in `folder`."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._toolchain = toolchain = find_toolchain(cache)
        cuda = Path(toolchain.home)
        folders = (FOLDER / "include", INCLUDE, cuda / "include", *cuda.glob("targets/*/include"))
        # Without -fno-gnu-unique, the libraries of two variants would share the static variables of inline functions.
        flags = ("-std=c++17", "-w", "-fPIC", "-fno-gnu-unique", *(f"-I{path}" for path in folders))
        self._command, self._object = [toolchain.host_compiler, *flags], folder / "emulator.o"
        self._run("-O2", "-c", FOLDER / "emulator.cpp", "-o", self._object)

    def link(self, variant: Variant, folder: Path, *more: str | Path) -> Path:
        """Translate a variant's source to C++ for the host, and compile it with the emulator and more arguments.

        Returns the library.
        """
        source = Path(variant.folder) / variant.entry.source
        headers = (path for path in Path(variant.root, "include").glob("fa/*.cuh") if "<<<" in path.read_text("utf-8"))
        (folder / "fa").mkdir()
        for path, name in ((source, "kernel.cpp"), *((header, f"fa/{header.name}") for header in headers)):
            (folder / name).write_text(_as_cpp(path.read_text(encoding="utf-8")), encoding="utf-8")
        (folder / "fa_instantiations.h").write_text(instantiations_header(variant), encoding="utf-8")
        (folder / "fa_defines.h").write_text(defines_header(variant), encoding="utf-8")
        included = (f"-I{folder}", f"-I{variant.root}/include", "-include", "emulator.h", "-include", "fa_defines.h")
        library = folder / f"{variant.name}.so"
        # Not optimised: a test runs a kernel for a second or two, and would compile it for longer.
        self._run("-O0", "-shared", *included, folder / "kernel.cpp", self._object, *more, "-o", library)
        return library

    def bound(self, variant: Variant, folder: Path) -> Path:
        """Link a variant with its binding, which then takes tensors on the CPU.  Returns the library."""
        binding, compiled = interface_of(variant).binding, folder / "b.o"
        words = [*binding_command(self._toolchain, interface_of(variant)), f"-I{BINDINGS}", f'-DBINDING="{binding}"']
        words[words.index(str(BINDINGS / binding))] = str(FOLDER / "bound.cpp")
        words[words.index("binding.o")] = str(compiled)
        subprocess.run(words, check=True, capture_output=True)
        libraries = (f"-L{ffi_folder()}/lib", "-ltvm_ffi", f"-Wl,-rpath,{ffi_folder()}/lib")
        return self.link(variant, folder, "-O2", compiled, *libraries)

    def _run(self, *arguments: str | Path) -> None:
        subprocess.run([*self._command, *map(str, arguments)], check=True, capture_output=True)


class Emulated:
    """A variant, compiled for the CPU into a library in `folder`."""

    def __init__(self, variant: Variant, emulator: Emulator, folder: Path) -> None:
        self.variant = variant
        self.workspace = torch.empty(0, dtype=torch.uint8)  # of the latest call
        self._library = ctypes.CDLL(str(emulator.link(variant, folder)))
        self._library.emulator_error.restype = ctypes.c_char_p
        self._library.emulator_launched.restype = ctypes.c_char_p
        self._library.emulator_set.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_double)

    def __call__(  # what one call of a kernel needs
        self,
        case: Case,
        inputs: Inputs,
        schedule: Schedule,
        calls: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp of the last of `calls` calls, which share a workspace; it is full of NaN first.

        The calls before the last one have other data: the queries, and the rows of V, are in reverse order.

        Raises `StuckKernel`, `ValueError` if the variant refuses the case, and `WrongResult` for a changed input.
        """
        inputs = inputs.placed()
        before = clone(inputs)
        q, k, v = inputs.q, inputs.k, inputs.v
        out = empty_output(q, k, v, "attention", inputs.output_dtype)
        lse = torch.empty(q.shape[:3])
        args = forward_args(case, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            of_batch, *others = tensor.stride()
            setattr(args, f"{name}_stride", Strides(of_batch if len(tensor) > 1 else 0, *others))
        args.lse, args.scale = lse.data_ptr(), inputs.scale
        for name, tensor in inputs.tensors.items():
            setattr(args, abi.TENSORS.get(name, name), tensor.data_ptr())
        message = ctypes.create_string_buffer(512)
        args.message, args.message_bytes = ctypes.addressof(message), len(message)
        args.workspace_bytes = self.workspace_bytes(case, schedule.sms)
        self.workspace = torch.full((args.workspace_bytes + WORKSPACE_ALIGNMENT,), NAN_BYTE, dtype=torch.uint8)
        args.workspace = -(-self.workspace.data_ptr() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        reversed_q, reversed_v = (torch.empty_like(tensor).copy_(tensor.flip(2)) for tensor in (q, v))
        for number in range(calls):
            is_last = number == calls - 1
            args.q = (q if is_last else reversed_q).data_ptr()
            args.v = (v if is_last else reversed_v).data_ptr()
            for tensor in (out, lse):
                poison(tensor)
            self._set(schedule, number)
            struct = ctypes.create_string_buffer(bytes(args)[: args.struct_size] + bytes([NAN_BYTE]) * OTHER_BYTES)
            status = self._library.fa_forward(struct, None)
            if problem := self._library.emulator_error().decode():
                raise StuckKernel(f"{self.variant.name}, {case.id}, {schedule}: {problem}")
            if status < 0:
                raise ValueError(message.value.decode())
        require_only_written(before, inputs)
        output = inputs.dense_output(Output(out, {"lse": lse}))
        return output.out, output.more["lse"]

    def workspace_bytes(self, case: Case, sms: int) -> int:
        """The size of the workspace that the variant requests for a case on a GPU with so many SMs."""
        if not hasattr(self._library, "fa_workspace_bytes"):
            return 0
        self._set(Schedule(sms=sms), 0)
        self._library.fa_workspace_bytes.restype = ctypes.c_size_t
        args: ForwardArgs = forward_args(case, *[WORKSPACE_ALIGNMENT] * 4)
        size: int = self._library.fa_workspace_bytes(ctypes.byref(args))
        return size

    def took(self, parameter: str) -> bool:
        """Whether the kernel that was launched last has a parameter of this type."""
        return parameter in self._library.emulator_launched().decode()

    def _set(self, schedule: Schedule, number: int) -> None:
        seed = 1000 * schedule.seed + number
        self._library.emulator_set(seed, schedule.sms, schedule.resident_blocks, schedule.early)


def _as_cpp(source: str) -> str:
    """The source without what only nvcc understands: launches, and arrays in dynamic shared memory."""
    cluster = re.search(r"__cluster_dims__\((.*?)\)", source)
    before = f"emulator::next_cluster_size() = {cluster[1]}; " if cluster else ""
    source = re.sub(r"(\w+(?:<[\w, ]*>)?)<<<(.*?)>>>\(", rf"{before}emulator::launch(\1, \2, ", source, flags=re.DOTALL)
    array = r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];"
    return re.sub(array, r"unsigned char* const \1 = emulator::block_smem();", source)
