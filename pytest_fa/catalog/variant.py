"""A variant: one kernel to build or import, what it supports, and what it must not exceed."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pytest_fa.catalog.case import Case, Causal, Computes, Dtype, Layout
from pytest_fa.earlier import MANIFEST_KEYS, also_called

Role = Literal["candidate", "baseline", "overhead", "ablation", "probe", "wrong"]
EntryKind = Literal["cuda", "torch", "python"]
Device = Literal["cuda", "cpu"]
Arch = Literal["sm_80", "sm_89", "sm_90a"]
Target = Arch | Literal["host"]  # what a build is for: an extension without CUDA sources is for the host
Tolerance = Literal["same_precision", "absolute", "fp8"]
Rounding = Literal["q", "s", "p"]
Sanitizer = Literal["memcheck", "racecheck", "synccheck", "initcheck"]
SOME = msgspec.Meta(min_length=1)
Count = Annotated[int, msgspec.Meta(ge=0)]

ARCHES: tuple[Arch, ...] = ("sm_80", "sm_89", "sm_90a")
COMPANION_ROLES: tuple[Role, ...] = ("baseline", "overhead")


class Supports(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cases that a variant takes; everything else is refused with a reason."""

    dtype: Annotated[tuple[Dtype, ...], SOME] = ("fp16",)
    head_dim: Annotated[tuple[int, ...], SOME] = (64,)
    causal: Annotated[tuple[Causal, ...], SOME] = ("none",)
    layout: Annotated[tuple[Layout, ...], SOME] = ("bhsd",)
    device: Annotated[tuple[Device, ...], SOME] = ("cuda",)
    grouped_heads: bool = False
    seq_q_multiple_of: Annotated[int, msgspec.Meta(ge=1)] = 1
    seq_k_multiple_of: Annotated[int, msgspec.Meta(ge=1)] = 1
    seq_k_min: Count = 1


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An argument that is always the same; needed for text alone, since a word stands for what it names."""

    constant: str


Argument = Literal["q", "k", "v", "out", "scale", "causal"] | int | float | bool | Constant | None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a function that is not ours wants to be called.

    `arguments` and `keywords` hold words for what is passed (`causal` as true or false) and constants.  `layout` is the
    order of the tensors' axes, `contiguous` that it takes no others.  Where `out` is not passed, the function returns
    its output: a tensor, or with `returns` the so-many-th of several.
    """

    arguments: tuple[Argument, ...] = ("q", "k", "v")
    keywords: dict[str, Argument] = {}
    layout: Layout = "bhsd"
    contiguous: bool = False
    returns: Count | None = None

    def passes(self, word: str) -> bool:
        """Whether the function is given `q`, `k`, `v`, `out`, `scale` or `causal`."""
        return word in (*self.arguments, *self.keywords.values())


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a variant is made and called: one of three kinds.

    `cuda`: a CUDA source that exports `fa_forward`.  `torch`: an extension of PyTorch, made of `sources`, whose module
    has the function `target`, or which registers the operator `target` (`namespace::name`).  `python`: the callable
    `target` (`module:function`); `context` names a context manager that is entered once around all that is done with
    the variant, such as one that pins a backend: calls do not pay for it.
    """

    kind: EntryKind = "cuda"
    source: str = "kernel.cu"
    target: str = ""
    context: str = ""
    sources: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    call: Call | None = None

    @property
    def has_cuda_sources(self) -> bool:
        """Whether an extension needs nvcc."""
        return any(source.endswith(".cu") for source in self.sources)


class InstructionLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on how often one opcode may stand in a kernel's machine code."""

    min: Count = 0
    max: Count | None = None


class Suppression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Findings of a sanitizer that are none: how many at most, and why."""

    most: Count
    because: Annotated[str, SOME]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a build may use; a limit that is absent is not judged."""

    registers_per_thread: Count | None = None
    spill_bytes: Count | None = None
    stack_bytes: Count | None = None
    smem_bytes_per_block: Count | None = None
    advisories: Count | None = None
    instructions: dict[str, InstructionLimit] = {}


@also_called(MANIFEST_KEYS)
class Variant(msgspec.Struct, frozen=True):
    """One runnable kernel.

    `folder` holds its source and manifest, `root` is the kernels folder it was found under.  `defines` are the
    compile-time parameters, in the manifest's order; `instantiations` the (dtype, head_dim) pairs compiled in.
    `computes` is attention, or the scores of it alone; `cases` are a probe's own shapes, seed 0, in place of a suite's.
    """

    name: str
    folder: str
    root: str
    role: Role
    entry: Entry
    arch: tuple[Target, ...]
    supports: Supports
    instantiations: tuple[tuple[Dtype, int], ...]
    defines: dict[str, int | str]
    flags: tuple[str, ...]
    rounds: tuple[Rounding, ...]
    limits: Limits
    tolerance: Tolerance
    step: str
    parent: str | None
    because: str
    expect: str
    deterministic: bool = True
    omits: str = ""
    suppressions: dict[Sanitizer, Suppression] = {}
    computes: Computes = "attention"
    cases: tuple[Case, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def is_built(self) -> bool:
        """Whether a compiler is needed."""
        return self.entry.kind != "python"

    @property
    def is_judged(self) -> bool:
        """Whether its output means anything: a floor does no work, and without a stage the result is another."""
        return self.role != "overhead" and not self.omits

    @property
    def may_be_gated(self) -> bool:
        """Whether it is attention, whole and judged: of a probe there is no baseline."""
        return self.is_judged and self.role != "probe" and self.computes == "attention"

    def answers(self, case: Case) -> bool:
        """Whether it computes what the case asks for; a floor, which computes nothing, stands beside anything."""
        return self.role == "overhead" or case.computes == self.computes

    def device_for(self, *, gpu: bool) -> Device | None:
        """The device it runs on: the GPU where there is one, else the CPU, else none."""
        if gpu and "cuda" in self.supports.device:
            return "cuda"
        return "cpu" if "cpu" in self.supports.device else None

    def refuses(self, case: Case) -> str | None:
        """Why this variant does not take `case`, naming the manifest field, or None."""
        for reason in self._refusals(case):
            return f"{self.name} does not support {case.shape_id}: {reason}"
        return None

    def _refusals(self, case: Case):  # type: ignore[no-untyped-def]  # noqa: ANN202  # a generator of sentences
        supports = self.supports
        if not self.answers(case):
            yield f"it computes {self.computes}, the case asks for {case.computes}"
        is_overhead = self.role == "overhead"  # which reads no row, and so takes any length of it
        for field in ("dtype", "causal", "layout", *(() if is_overhead else ("head_dim",))):
            value, allowed = getattr(case, field), getattr(supports, field)
            if value not in allowed:
                yield f"{field} is {value}, supports {', '.join(map(str, allowed))}"
        if not is_overhead and (case.dtype, case.head_dim) not in self.instantiations:
            built = ", ".join(f"{dtype}-d{dim}" for dtype, dim in self.instantiations)
            yield f"no instantiation {case.dtype}-d{case.head_dim}, compiled are {built}"
        if case.kv_heads != case.heads and not supports.grouped_heads:
            yield f"kv_heads is {case.kv_heads} for {case.heads} heads, supports equal numbers (grouped_heads: false)"
        for field in ("seq_q", "seq_k"):
            multiple = getattr(supports, f"{field}_multiple_of")
            if getattr(case, field) % multiple:
                yield f"{field} is {getattr(case, field)}, supports multiples of {multiple}"
        if case.seq_k < supports.seq_k_min:
            yield f"seq_k is {case.seq_k}, supports {supports.seq_k_min} and more"


class BrokenVariant(msgspec.Struct, frozen=True):
    """A manifest that could not be read: its neighbours go on, it fails with `problem`."""

    name: str
    problem: str

    def __str__(self) -> str:
        return self.name
