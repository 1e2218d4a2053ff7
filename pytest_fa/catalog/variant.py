"""A variant: one kernel to build or import, the cases it supports, and the limits its build must keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from pytest_fa.attention import backward, parts
from pytest_fa.attention.causal import Causal
from pytest_fa.attention.dtypes import Dtype
from pytest_fa.attention.e4m3 import OutDtype
from pytest_fa.attention.layout import PART as LAYOUT
from pytest_fa.attention.layout import CallLayout, Layout
from pytest_fa.attention.scores import Computes
from pytest_fa.attention.sizes import is_range, shown_sizes
from pytest_fa.catalog.case import Case
from pytest_fa.catalog.grammar import ARCH
from pytest_fa.catalog.own_truth import OwnTruth

Role = Literal["candidate", "baseline", "overhead", "ablation", "probe", "wrong"]
EntryKind = Literal["cuda", "torch", "python"]
Device = Literal["cuda", "cpu"]
Arch = Annotated[str, msgspec.Meta(pattern=rf"^{ARCH}\Z")]  # such as sm_80, sm_90a or sm_120f
Target = Annotated[str, msgspec.Meta(pattern=rf"^({ARCH}|host)\Z")]  # `host`: an extension without CUDA sources
Tolerance = Literal["same_precision", "absolute", "fp8"]
StrideRule = Literal["any", "aligned16", "equal", "dense"]  # each allows less than the one before


def tolerance_for(tolerance: Tolerance, dtype: str) -> Tolerance:
    """The policy by which a manifest's cases of a dtype are judged: `fp8` is for inputs in e4m3 only.

    For other inputs it would accept P in e4m3, which is far from what their precision gives.
    """
    return "same_precision" if tolerance == "fp8" and dtype != "e4m3" else tolerance


Rounding = Literal["q", "s", "p", "tanh", "tf32"]
Invariance = Literal["batch", "position", "chunk", "prefix", "split"]
Sanitizer = Literal["memcheck", "racecheck", "synccheck", "initcheck"]
SOME = msgspec.Meta(min_length=1)
FEW = msgspec.Meta(max_length=256)  # far more than a real manifest has
Count = Annotated[int, msgspec.Meta(ge=0)]

ARCHES: tuple[Arch, ...] = ("sm_80", "sm_89", "sm_90a")  # those of a manifest without `arch`
COMPANION_ROLES: tuple[Role, ...] = ("baseline", "overhead")


class Supports(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cases that a variant supports; all others are refused with a reason.

    `fp8_out` lists the dtypes of the output for inputs in e4m3; for other inputs it has no meaning.  `more` has the
    keys of the parts of attention without a field here, and the claimed values of each (`catalog.manifest` moves them).

    The last four say what a kernel assumes about its calls.  `strides`: `aligned16`, every row begins at a multiple of
    16 bytes; `equal`, in addition K and V have equal strides, and the output has q's; `dense`, in addition no tensor
    has gaps.  `self_attention_only`: there are as many keys as queries.  `fixed_scale`: the scale is 1 / sqrt(D).
    `default_stream_only`: it launches on the legacy default stream, whichever stream is current.

    `any_head_dim` is for baselines that choose a kernel themselves.  They get cases of every head_dim, and may refuse
    them.  Without `plain`, a variant is compared only where a case has a window, a bias or another such part.
    """

    dtype: Annotated[tuple[Dtype, ...], SOME] = ("fp16",)
    head_dim: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], SOME] = (64,)
    causal: Annotated[tuple[Causal, ...], SOME] = ("none",)
    layout: Annotated[tuple[Layout, ...], SOME] = ("bhsd",)
    device: Annotated[tuple[Device, ...], SOME] = ("cuda",)
    grouped_heads: bool = False
    seq_q_multiple_of: Annotated[int, msgspec.Meta(ge=1)] = 1
    seq_k_multiple_of: Annotated[int, msgspec.Meta(ge=1)] = 1
    seq_k_min: Count = 1
    fp8_out: Annotated[tuple[OutDtype, ...], SOME] = ("fp16",)
    strides: StrideRule = "any"
    self_attention_only: bool = False
    fixed_scale: bool = False
    default_stream_only: bool = False
    any_head_dim: bool = False
    plain: bool = True
    more: tuple[tuple[str, tuple[str | int | float | bool | None, ...]], ...] = ()

    def values_of(self, key: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a key; `default` if it is no field and the manifest does not have it."""
        values: tuple[Any, ...] = (
            getattr(self, key) if key in self.__struct_fields__ else dict(self.more).get(key, default)
        )
        return values

    def for_case(self, case: Case) -> Supports:
        """The same with the dtype, the head_dim and the parts of attention of a case."""
        claims = {part.supports: part.claim_for(case) for part in parts.claimed_parts()}
        fields = {key: claim for key, claim in claims.items() if key in self.__struct_fields__}
        more = tuple((key, claim) for key, claim in claims.items() if key not in fields)
        return msgspec.structs.replace(self, dtype=(case.dtype,), head_dim=(case.head_dim,), **fields, more=more)

    def allows_strides(self, strides: StrideRule) -> bool:
        """Whether tensors may have strides of this kind."""
        order = get_args(StrideRule)
        return order.index(strides) >= order.index(self.strides)

    def fp8_out_of(self, dtype: str) -> OutDtype:
        """Return `Case.fp8_out` of a supported case of this dtype."""
        return self.fp8_out[0] if dtype == "e4m3" else "fp16"


OUTPUTS = ("out", *parts.outputs(), *backward.ALL_GRADIENTS)
# What a kernel may write or return, and the words of `entry.call`: those of the parts of attention are among them.
WORDS = (
    *("q", "k", "v", *OUTPUTS, "scale"),
    *(word for word in parts.words() if word not in backward.RESULTS),  # which are `out` and `lse` in a manifest
    *parts.made_words(),
)
if TYPE_CHECKING:
    Returns = str
    Word = str
else:
    Returns = Literal[OUTPUTS]
    Word = Literal[WORDS]


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constant text argument; plain words such as `q` or `scale` name what is passed."""

    constant: str


Argument = Word | int | float | bool | Constant | None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to call a function whose signature is not that of `fa_forward`.

    `arguments` and `keywords` hold constants and the words q, k, v, out and scale, and those of the parts of attention.
    `layout` is the order of the tensors' axes; with `contiguous`, the
    function takes only contiguous tensors.  If `out` is not passed, the function returns its output: one tensor, or a
    tuple whose item number `returns` is the output.  As a list, `returns` names the items of the tuple, or has null for
    those that are no output.
    """

    arguments: tuple[Argument, ...] = ("q", "k", "v")
    keywords: dict[str, Argument] = {}
    layout: CallLayout = "bhsd"
    contiguous: bool = False
    returns: Count | tuple[Returns | None, ...] | None = None

    def passes(self, word: str) -> bool:
        """Return whether `word`, such as q, scale or v_descale, is passed to the function."""
        return word in (*self.arguments, *self.keywords.values())

    def place_of(self, word: Returns) -> int | None:
        """Return the index of an output in what the function returns; None if it is not there."""
        if isinstance(self.returns, tuple):
            return self.returns.index(word) if word in self.returns else None
        return self.returns if word == "out" else None


def is_shared_object(library: str) -> bool:
    """Whether a library of an entry is a file; others are modules."""
    return ".so" in library


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a variant is built and called: one of three kinds.

    `cuda`: a CUDA source that exports `fa_forward`.  `torch`: a PyTorch extension compiled from `sources`; its module
    has the function `target`, or it registers the operator `target` (`namespace::name`).  `python`: the callable
    `target` (`module:function`), or an operator that the last of `libraries`, or torch, registers.  `include` are
    folders of headers, for `cuda` and `torch`.  `context` names a context manager that is entered once around all calls
    of the variant, such as one that selects an SDPA backend, so that no call includes its cost.  With `autograd`, the
    function computes attention, and its gradients are those that torch's autograd gives.
    """

    kind: EntryKind = "cuda"
    source: str = "kernel.cu"
    target: str = ""
    context: str = ""
    sources: Annotated[tuple[str, ...], FEW] = ()
    include: Annotated[tuple[str, ...], FEW] = ()
    cflags: Annotated[tuple[str, ...], FEW] = ()
    ldflags: Annotated[tuple[str, ...], FEW] = ()
    libraries: Annotated[tuple[str, ...], FEW] = ()
    call: Call | None = None
    autograd: bool = False

    @property
    def is_operator(self) -> bool:
        """Whether `target` is an operator of torch's registry."""
        return "::" in self.target

    @property
    def has_cuda_sources(self) -> bool:
        """Whether the extension has CUDA sources, which need nvcc."""
        return any(source.endswith(".cu") for source in self.sources)


class InstructionLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The allowed number of instructions with one opcode in a kernel's machine code."""

    min: Count = 0
    max: Count | None = None


class Suppression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """False positives of a sanitizer that are suppressed: the most that are allowed, and the reason."""

    most: Count
    because: Annotated[str, SOME]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The resources that a build may use, and the memory of one judged call; a limit of None is not checked."""

    registers_per_thread: Count | None = None
    spill_bytes: Count | None = None
    stack_bytes: Count | None = None
    smem_bytes_per_block: Count | None = None
    advisories: Count | None = None
    instructions: dict[str, InstructionLimit] = {}
    workspace_bytes: Count | None = None
    peak_bytes: Count | None = None

    @property
    def of_build(self) -> Limits:
        """The limits that a build alone can break."""
        return msgspec.structs.replace(self, workspace_bytes=None, peak_bytes=None)


class Variant(msgspec.Struct, frozen=True):
    """One runnable kernel.

    `folder` holds its source and manifest; `root` is the kernels folder that contains `folder`.  `defines` are the
    compile-time parameters, in the manifest's order.  `instantiations` are the (dtype, head_dim) pairs that are built.
    `omits` names the phase that an ablation omits.  `computes` is attention, its gradients, or scores.  `cases` are a
    probe's own shapes, with seed 0, which replace those of a suite.  `may_differ` lists the outputs that may differ
    from call to call.  `any_arch` is True if the manifest names no architectures:
    then `--fa-arch` may select others than `arch`.  `optional` is True for a baseline that runs only if it is named,
    because it needs a package that most machines lack.  `returns` lists the outputs that the kernel writes or returns,
    `out` and those of parts of attention.  `conventions` has those of the manifest that are not plain.  `feature_keys`
    has the values of keys that belong to features.  `own_truth` is set for a run in which it is compared with the
    user's functions.
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
    may_differ: tuple[Returns, ...] = ()  # outputs that may differ from call to call
    invariant: tuple[Invariance, ...] = ()  # what changes no bit of a row
    checks_arguments: bool = False  # whether each malformed call is refused, or computed where it has a meaning
    omits: str = ""
    suppressions: dict[Sanitizer, Suppression] = {}
    computes: Computes = "attention"
    cases: tuple[Case, ...] = ()
    any_arch: bool = False
    optional: bool = False
    returns: tuple[Returns, ...] = ("out",)
    conventions: dict[str, str] = {}
    feature_keys: dict[str, Any] = {}
    own_truth: OwnTruth | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def deterministic(self) -> bool:
        """Whether all outputs of equal calls are equal."""
        return not self.may_differ

    @property
    def reference_rounds(self) -> tuple[Rounding, ...]:
        """The roundings of the same-precision reference: those declared, and by autograd those of an own output."""
        return (*self.rounds, backward.OWN_OUT) if self.entry.autograd else self.rounds

    @property
    def passed(self) -> tuple[str, ...]:
        """The keywords besides those of every call that a function without `entry.call` gets."""
        outputs = () if self.entry.autograd else self.returns  # autograd cannot see what is written into a buffer
        return (*outputs, *(word for part in parts.PARTS for word in part.passed_by(self)))

    @property
    def packs_inputs(self) -> bool:
        """Whether its function takes one tensor of which q, k and v are views."""
        return self.entry.call is not None and any(map(self.entry.call.passes, LAYOUT.made_words))

    @property
    def is_built(self) -> bool:
        """Whether the variant must be compiled."""
        return self.entry.kind != "python"

    @property
    def runs_beside_others(self) -> bool:
        """Whether it is timed beside every selected variant: a baseline, unless optional, or the role `overhead`."""
        return self.role in COMPANION_ROLES and not self.optional

    @property
    def is_judged(self) -> bool:
        """Whether its output is checked.  Variants that compute nothing or omit a phase are not judged."""
        return self.role != "overhead" and not self.omits

    def can_compute(self, case: Case) -> bool:
        """Return whether it computes what the case requires; the role `overhead` computes nothing and always fits."""
        return self.role == "overhead" or case.computes == self.computes

    def device_for(self, *, gpu: bool) -> Device | None:
        """Return the device it runs on: a supported GPU if there is one, else the CPU if supported, else None."""
        if gpu and "cuda" in self.supports.device:
            return "cuda"
        return "cpu" if "cpu" in self.supports.device else None

    def leaves_out(self, case: Case) -> bool:
        """Whether it is not compared on a case, because that has nothing but a mask (`supports.plain`)."""
        return not self.supports.plain and parts.words_beyond_plain(case).keys() <= {*parts.always_passed()}

    def refuses(self, case: Case) -> str | None:
        """Return why this variant does not support `case`, with the manifest field, or None."""
        for reason in self._refusals(case):
            return f"{self.name} does not support {case.shape_id}: {reason}"
        return None

    def _refusals(self, case: Case) -> Iterator[str]:
        """Yield a sentence for each reason."""
        supports = self.supports
        if not self.can_compute(case):
            yield f"it computes {self.computes}, the case requires {case.computes}"
        is_overhead = self.role == "overhead"  # it reads no tensor, so any head_dim fits
        yield from self._refused_value("dtype", case)
        yield from self._refused_parts(case, is_first=True)
        takes_any_head_dim = is_overhead or supports.any_head_dim
        if not takes_any_head_dim:
            yield from self._refused_value("head_dim", case)
        if case.dtype == "e4m3" and not is_overhead and case.fp8_out not in supports.fp8_out:
            yield f"the output is {case.fp8_out}, supports.fp8_out is {', '.join(supports.fp8_out)}"
        if not takes_any_head_dim and (case.dtype, case.head_dim) not in self.instantiations:
            yield f"no instantiation {case.dtype}-d{case.head_dim}, compiled are {self._instantiated}"
        yield from self._refused_parts(case, is_first=False)
        for field in ("seq_q", "seq_k"):
            multiple = getattr(supports, f"{field}_multiple_of")
            if getattr(case, field) % multiple:
                yield f"{field} is {getattr(case, field)}, supports multiples of {multiple}"
        if supports.self_attention_only and case.seq_q != case.seq_k:
            yield f"seq_q is {case.seq_q} and seq_k {case.seq_k}, supports equal lengths (self_attention_only: true)"
        if self.leaves_out(case):
            yield "it is plain attention, supports.plain is false"
        if case.seq_k < supports.seq_k_min:
            yield f"seq_k is {case.seq_k}, supports {supports.seq_k_min} and more"

    def _refused_value(self, field: Literal["dtype", "head_dim"], case: Case) -> Iterator[str]:
        value, allowed = getattr(case, field), getattr(self.supports, field)
        if value not in allowed:
            listed = shown_sizes(allowed) if field == "head_dim" else ", ".join(allowed)
            yield f"{field} is {value}, supports {listed}{self._remedy(field)}"

    @property
    def _instantiated(self) -> str:
        """The pairs that are built, those of a dtype with a range of head_dims in short."""
        by_dtype: dict[str, list[int]] = {}
        for dtype, dim in self.instantiations:
            by_dtype.setdefault(dtype, []).append(dim)
        if not any(map(is_range, by_dtype.values())):
            return ", ".join(f"{dtype}-d{dim}" for dtype, dim in self.instantiations)
        return "; ".join(f"{dtype} with head_dim {shown_sizes(dims)}" for dtype, dims in by_dtype.items())

    def _refused_parts(self, case: Case, *, is_first: bool) -> Iterator[str]:
        """What parts of attention it does not support.

        The role `overhead` fits any without a field in `supports`, if the C interface has it.
        """
        for part in sorted(parts.PARTS, key=lambda part: part.claim_order):
            is_new = part.supports not in self.supports.__struct_fields__
            is_free = self.role == "overhead" and is_new and part.is_in_c_interface
            if (part.claim_order == 0) is is_first and not is_free:
                refusal = part.refusal(case, self.supports, self._remedy(part.supports))
                yield from filter(None, (refusal, part.refusal_in(case, self.conventions)))

    def _remedy(self, key: str) -> str:
        """What to write if the kernel can compute the case."""
        return "" if self.role in COMPANION_ROLES else f" (extend supports.{key} if the kernel can)"


class BrokenVariant(msgspec.Struct, frozen=True):
    """A variant whose manifest cannot be read; its tests fail with `problem`, and other variants are not affected."""

    name: str
    problem: str

    def __str__(self) -> str:
        return self.name
