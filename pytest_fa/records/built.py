"""Record types of a build: its kernels, their resources, and the shared library."""

from __future__ import annotations

import re

import msgspec

from pytest_fa.catalog.variant import Target
from pytest_fa.records.ranges import Natural, Seconds


class Kernel(msgspec.Struct, frozen=True):
    """One `__global__` function of a build, with the figures of ptxas and of the disassembler."""

    name: str
    mangled: str
    registers_per_thread: Natural
    spill_store_bytes: Natural
    spill_load_bytes: Natural
    stack_bytes: Natural
    smem_bytes_per_block: Natural
    instructions: dict[str, Natural] = {}
    sass_bytes: Natural | None = None
    max_threads_per_block: Natural | None = None

    @property
    def spill_bytes(self) -> int:
        """The bytes of spill stores and spill loads together."""
        return self.spill_store_bytes + self.spill_load_bytes


def stable_name(demangled: str) -> str:
    """Return a kernel's demangled name without the types of its template arguments: `k<(Mode)2>` becomes `k<2>`."""
    return re.sub(r"\([A-Za-z_][\w:]*\)(?=-?\d)", "", demangled)


class Advisory(msgspec.Struct, frozen=True):
    """A remark of ptxas, such as C7508 (setmaxnreg ignored) or C7511 (wgmma serialised)."""

    code: str
    text: str


class Build(msgspec.Struct, frozen=True):
    """One variant compiled for one architecture; `library` is its path relative to the cache.

    `environment` holds the environment variables that change what the compilers do.  `unlisted_flags` are the flags
    that only `--fa-allow-flag` permits.  `files` has the sha256 of the library and of each file beside it.  If one
    compilation made the builds of several variants, `shared_by` names all of them, and each has its `build_seconds`.
    """

    variant: str
    arch: Target
    key: str
    library: str
    code_identity: str | None
    code_identity_missing: str | None
    kernels: tuple[Kernel, ...]
    advisories: tuple[Advisory, ...]
    command: tuple[str, ...]
    compiler: str
    built_on: str
    built_at: str
    build_seconds: Seconds
    environment: dict[str, str] = {}
    unlisted_flags: tuple[str, ...] = ()
    files: dict[str, str] = {}
    shared_by: tuple[str, ...] = ()

    @property
    def counted_seconds(self) -> float:
        """The seconds for a sum over variants: those of a shared compilation count for its first variant only."""
        return self.build_seconds if not self.shared_by or self.variant == self.shared_by[0] else 0.0

    @property
    def seconds_text(self) -> str:
        """The seconds of the compilation, such as `1.5`, or `1.5 shared` if it made the builds of several variants."""
        return f"{self.build_seconds:.1f}{' shared' * bool(self.shared_by)}"
