"""Calls one `cuda` variant without torch, on tensors that are separate allocations of exactly the right size.

    python -m pytest_fa.features.sanitize.plain_call JOB.json    call the library once and print the result as JSON

compute-sanitizer runs this program.  torch's allocator places tensors inside larger blocks, which would hide an access
past the end of a tensor.
"""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pytest_fa.attention import abi, parts
from pytest_fa.attention.backward import OF_PARTS
from pytest_fa.attention.cache_dtype import PLAIN
from pytest_fa.attention.dtypes import ELEMENT_BYTES
from pytest_fa.attention.layout import Layout, strides
from pytest_fa.attention.mask import VISIBLE
from pytest_fa.build.command import ffi_folder
from pytest_fa.build.interface import BACKWARD, FORWARD, Interface
from pytest_fa.build.unchanged import require_unchanged
from pytest_fa.catalog.case import Case
from pytest_fa.errors import ChangedBuild, FaError, LaunchError, UnsupportedCase
from pytest_fa.gpu.cuda_driver import CudaDriver
from pytest_fa.records.outcome import Outcome
from pytest_fa.wire.jobs import CaseJob, decode_job

ABI_VERSION = 1
DESCALE = 0.01  # of every number in 8 bits, which are below 448
E4M3_SIGN, E4M3_NAN = 0x80, 0x7F
EXPONENT_BITS = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000}
MESSAGE_BYTES = 512
LSE = 8.0  # of every row of a backward call: so that no weight is large


class Strides(ctypes.Structure):
    """`FaStrides` of `include/fa_forward.h`."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "head", "seq", "dim"))


CTYPES: dict[abi.FieldKind, type[ctypes.Structure | ctypes._SimpleCData[Any]]] = {
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float": ctypes.c_float,
    "pointer": ctypes.c_void_p,
    "strides": Strides,
}


class ForwardArgs(ctypes.Structure):
    """`FaForwardArgs` of `include/fa_forward.h`, with the same fields in the same order."""

    _fields_ = tuple((name, CTYPES[kind]) for name, kind in abi.FIELDS)


class BackwardArgs(ctypes.Structure):
    """`FaBackwardArgs` of `include/fa_backward.h`, with the same fields in the same order."""

    _fields_ = tuple((name, CTYPES[kind]) for name, kind in abi.BACKWARD_FIELDS)


PLAIN_SIZE = ForwardArgs.features.offset  # `FA_PLAIN_SIZE`


class PlainResult(msgspec.Struct, frozen=True):
    """The result of the call; `not_finite` is the number of NaN and Inf elements in the output."""

    outcome: Outcome
    message: str = ""
    not_finite: int | None = None


def main(arguments: list[str]) -> int:
    """Make the call and print its result.  Returns 0 if the call succeeded, 1 if not."""
    job = decode_job(Path(arguments[0]).read_bytes())
    assert isinstance(job, CaseJob) and job.library is not None  # noqa: S101, PT018  # features/sanitize/sanitize.py writes such jobs
    try:
        require_unchanged(job.library, job.file_hashes)
        result = call(job.case, job.library, job.variant.returns)
    except ChangedBuild as problem:
        result = PlainResult(Outcome.BUILD_CHANGED, str(problem))
    except UnsupportedCase as problem:
        result = PlainResult(Outcome.UNSUPPORTED, str(problem))
    except LaunchError as problem:
        result = PlainResult(Outcome.LAUNCH_FAILED, str(problem))
    except (FaError, OSError) as problem:
        result = PlainResult(Outcome.DEVICE_ERROR, str(problem))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    return 0 if result.outcome == Outcome.OK else 1


def call(case: Case, library: str, returns: tuple[str, ...] = ()) -> PlainResult:
    """Call the built library once on random inputs, and wait for it.

    Of the gradients of a bias and a sink, it asks for those in `returns`.
    Raises `UnsupportedCase`, `LaunchError`, or `DeviceLost` with the driver's error.
    """
    cuda = CudaDriver()
    ctypes.CDLL(str(ffi_folder() / "lib" / "libtvm_ffi.so"), mode=ctypes.RTLD_GLOBAL)
    build = ctypes.CDLL(library)
    query_count = case.batch * case.heads * case.seq_q * case.head_dim
    key_count, value_count = (math.prod(_cache_sizes(case)) * dim for dim in (case.head_dim, case.head_dim_v))
    generator = np.random.default_rng(case.seed)
    counts = (query_count, key_count, value_count)
    if case.layout == "packed":
        q = cuda.upload(_draw(generator, sum(counts), case.dtype))
        row_bytes = ELEMENT_BYTES[case.dtype] * case.head_dim
        k, v = (q + row_bytes * heads for heads in (case.heads, case.heads + case.kv_heads))
    else:
        of_cache = _cache_dtype(case) or case.dtype
        dtypes = (case.dtype, of_cache, of_cache)
        q, k, v = (cuda.upload(_draw(generator, *each)) for each in zip(counts, dtypes, strict=True))
    out_bytes = ELEMENT_BYTES[case.out_dtype] * math.prod(case.out_shape)
    out = cuda.allocate(out_bytes)
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    args = forward_args(case, q, k, v, out)
    for word, sizes in _tensor_sizes(case).items():
        drawn = _draw_tensor(generator, word, math.prod(sizes), case)
        setattr(args, abi.TENSORS[word], cuda.upload(drawn))
    if case.dtype == "e4m3":
        args.q_descale = cuda.upload(_descales(case.batch * case.heads))
        args.k_descale, args.v_descale = (cuda.upload(_descales(case.batch * case.kv_heads)) for _ in range(2))
    args.message, args.message_bytes = ctypes.addressof(message), MESSAGE_BYTES
    if case.computes == "gradients":
        backward, written = _backward_call(case, args, counts, cuda, generator)
        written += _ask_for(returns, backward, args, case, cuda)
        status = _launch(build, BACKWARD, backward, args, cuda)
    else:
        written = [(out, out_bytes)]
        status = _launch(build, FORWARD, args, args, cuda)
    if status < 0:
        raise UnsupportedCase(message.value.decode(errors="replace") or "the kernel gave no reason")
    if status > 0:
        raise LaunchError(f"the kernel returned CUDA error {status}")
    cuda.synchronize()
    not_finite = sum(_count_not_finite(cuda.download(*each), case.out_dtype) for each in written)
    return PlainResult(Outcome.OK, "", not_finite)


def _launch(
    build: ctypes.CDLL, interface: Interface, passed: ctypes.Structure, args: ForwardArgs, cuda: CudaDriver
) -> int:
    """Call the function of an interface, with the workspace that it asks for in `args`; returns its status."""
    if hasattr(build, interface.workspace):
        workspace_bytes = build[interface.workspace]
        workspace_bytes.restype = ctypes.c_size_t
        args.workspace_bytes = workspace_bytes(ctypes.byref(passed))
        args.workspace = cuda.allocate(args.workspace_bytes)
    status: int = build[interface.entry](ctypes.byref(passed), None)
    return status


def _backward_call(
    case: Case, args: ForwardArgs, counts: tuple[int, int, int], cuda: CudaDriver, generator: np.random.Generator
) -> tuple[BackwardArgs, list[tuple[int, int]]]:
    """The arguments of a backward call on random results of its forward pass, and where each gradient lies.

    `counts` are the numbers of elements of q, k and v.
    """
    of_out, rows = math.prod(case.out_shape), case.batch * case.heads * case.seq_q
    args.out = cuda.upload(_draw(generator, of_out, case.dtype))
    args.lse = cuda.upload(np.full(rows, LSE, dtype=np.float32).tobytes())
    backward = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs), forward=ctypes.addressof(args))
    backward.dout, backward.dout_stride = cuda.upload(_draw(generator, of_out, case.dtype)), args.out_stride
    if "dlse" in _words_of_tensors(case):
        backward.dlse = cuda.upload(_draw(generator, rows, "fp32"))
    written = []
    for name, count in zip("qkv", counts, strict=True):
        size_bytes = ELEMENT_BYTES[case.dtype] * count
        written.append((cuda.allocate(size_bytes), size_bytes))
        setattr(backward, f"d{name}", written[-1][0])
        setattr(backward, f"d{name}_stride", getattr(args, f"{name}_stride"))
    return backward, written


def _ask_for(
    returns: tuple[str, ...], backward: BackwardArgs, args: ForwardArgs, case: Case, cuda: CudaDriver
) -> list[tuple[int, int]]:
    """Ask for the gradients of a bias and a sink that a variant returns; where those of q's dtype lie."""
    written, sizes = [], _tensor_sizes(case)
    for name, word in OF_PARTS.items():
        if name in returns and word in sizes:
            dtype = case.dtype if parts.tensor_form(word).dtype == "q" else "fp32"
            size_bytes = ELEMENT_BYTES[dtype] * math.prod(sizes[word])
            address = cuda.allocate(size_bytes)
            setattr(backward, name, address)
            written += [(address, size_bytes)] if dtype == case.dtype else []
    backward.dbias_stride = args.bias_stride
    return written


def forward_args(case: Case, q: int, k: int, v: int, out: int) -> ForwardArgs:
    """The arguments of a call on dense tensors at these device addresses, in the case's layout.

    The addresses of further tensors are missing.  Raises `UnsupportedCase` for a part that the C interface lacks.
    """
    args = ForwardArgs(abi_version=ABI_VERSION, struct_size=PLAIN_SIZE)
    args.q, args.k, args.v, args.out = q, k, v, out
    for name in ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"):
        setattr(args, name, getattr(case, name))
    of_row = case.heads + 2 * case.kv_heads if case.layout == "packed" else 0  # heads of one tensor
    args.q_stride = Strides(*strides(case.layout, of_row or case.heads, case.seq_q, case.head_dim))
    args.out_stride = Strides(*strides(case.layout, case.heads, case.seq_q, case.head_dim_v))
    if case.computes == "scores":
        _, heads, queries, keys = case.out_shape
        args.out_stride = Strides(heads * queries * keys, queries * keys, keys, 1)
    args.k_stride = Strides(*strides(case.layout, of_row or case.kv_heads, case.seq_k, case.head_dim))
    args.v_stride = Strides(*strides(case.layout, of_row or case.kv_heads, case.seq_k, case.head_dim_v))
    args.scale = case.scale
    for word, value in _values(case).items():
        field = abi.NUMBERS.get(word, word)
        if field not in dict(abi.FIELDS):
            raise UnsupportedCase(f"the C interface has no field for {word!r}")
        setattr(args, field, abi.CODES[word][value] if word in abi.CODES else value)
        args.features |= abi.FEATURES.get(word, 0)
    for word, sizes in _tensor_sizes(case).items():
        field = abi.TENSORS[word]
        args.features |= abi.FEATURES.get(field, 0)
        if dict(abi.FIELDS).get(f"{field}_stride") == "strides":
            setattr(args, f"{field}_stride", _tensor_strides(word, sizes, case.layout))
    _place(args, case)
    if args.features:
        args.struct_size = ctypes.sizeof(ForwardArgs)
    return args


def _place(args: ForwardArgs, case: Case) -> None:
    """Say where keys lie in pages, and that sequences lie behind one another."""
    cache = parts.cache_of(case)
    if cache:
        layout: Layout = "bhsd" if cache.heads_first else "bshd"
        args.k_stride, args.v_stride = (
            Strides(*strides(layout, case.kv_heads, cache.page_size, dim)) for dim in (case.head_dim, case.head_dim_v)
        )
        args.page_size, args.block_table_stride = cache.page_size, -(-case.seq_k // cache.page_size)
        args.seq_k = args.page_size * args.block_table_stride
    if case.layout == "thd":
        args.rows_q = case.batch * case.seq_q
        args.q_stride.batch = args.out_stride.batch = 0
        if not cache:
            args.rows_k = case.batch * case.seq_k
            args.k_stride.batch = args.v_stride.batch = 0


def _values(case: Case) -> dict[str, Any]:
    """The fields of a call whose values are no tensors, without those of every call."""
    words = {"dtype": case.dtype, "out_dtype": case.out_dtype, **parts.arguments_of(case)}
    if case.head_dim_v != case.head_dim:
        words["head_dim_v"] = case.head_dim_v
    if cache_dtype := _cache_dtype(case):
        words["cache_dtype"] = cache_dtype
    return words


def _tensor_sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """The tensors of parts of attention by their words: [batch or 1, heads or 1, seq_q or 1, seq_k or 1] or as made.

    Scales of a cache are [batch or 1, kv_heads or 1, seq_k or 1, 1], with pages [pages or 1, kv_heads or 1, page_size
    or 1, 1].  Raises `UnsupportedCase` for a tensor that the C interface lacks.
    """
    whole = (case.batch, case.heads, case.seq_q, case.seq_k)
    sizes: dict[str, tuple[int, ...]] = {}
    for word in _words_of_tensors(case):
        part = parts.tensor_words()[word]
        if word in abi.OF_BACKWARD:
            continue
        if word not in abi.TENSORS:
            raise UnsupportedCase(f"the C interface has no field for {word!r}")
        if parts.tensor_form(word).is_made:
            sizes[word] = part.made_shape(word, case)
        elif axes := part.axes(word, case):
            of_word = (*whole[:3], part.columns(word, case)) if parts.is_table(word) else whole
            sizes[word] = tuple(size if depends else 1 for size, depends in zip(of_word, axes, strict=True))
    return sizes


def _words_of_tensors(case: Case) -> list[str]:
    """The words of all tensors of parts that a call has."""
    return [word for word, part in parts.tensor_words().items() if part.is_passed(word, case)]


def _cache_dtype(case: Case) -> str:
    """The dtype of a quantised cache; empty if k and v have that of q."""
    text = str(case.value_of("cache_dtype"))
    return "" if text == PLAIN else text.split("_", maxsplit=1)[0]


def _cache_sizes(case: Case) -> tuple[int, int, int]:
    """The batches or pages, key/value heads, and keys or slots of k and v."""
    cache = parts.cache_of(case)
    return (cache.pages, case.kv_heads, cache.page_size) if cache else (case.batch, case.kv_heads, case.seq_k)


def _tensor_strides(word: str, sizes: tuple[int, ...], layout: Layout) -> Strides:
    """The strides of a dense tensor; of one that is no rows, with 0 along an axis with one element."""
    if parts.tensor_form(word).vector == "rows":
        return Strides(*strides(layout, *sizes[1:]))
    return Strides(*(0 if size == 1 else math.prod(sizes[axis + 1 :]) for axis, size in enumerate(sizes)))


def _draw(generator: np.random.Generator, count: int, dtype: str) -> bytes:
    """`count` numbers from N(0, 1) as bytes of this dtype.  bf16 is the upper half of fp32.

    e4m3 gets random bytes that are not NaN: numbers of all magnitudes up to 448.
    """
    if dtype == "e4m3":
        signs = generator.integers(0, 2, count, dtype=np.uint8) * E4M3_SIGN
        return (generator.integers(0, E4M3_NAN, count, dtype=np.uint8) | signs).astype(np.uint8).tobytes()
    if dtype == "int8":
        return generator.bytes(count)
    numbers = generator.standard_normal(count, dtype=np.float32)
    if dtype == "fp32":
        return numbers.tobytes()
    if dtype == "fp16":
        return numbers.astype(np.float16).tobytes()
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _draw_tensor(generator: np.random.Generator, word: str, count: int, case: Case) -> bytes:
    """A tensor of a part of attention: numbers from N(0, 1), three visible keys of four, or what is not random."""
    form, dtype = parts.tensor_form(word).dtype, case.dtype
    if parts.tensor_form(word).vector == "scale":
        return _descales(count)
    if not parts.tensor_form(word).is_random:
        return np.array(parts.tensor_words()[word].fixed(word, case), dtype=form).tobytes()
    if form == "bool":
        return (generator.random(count) < VISIBLE).astype(np.uint8).tobytes()
    return _draw(generator, count, "fp32" if form == "float32" or dtype == "e4m3" else dtype)


def _descales(count: int) -> bytes:
    return np.full(count, DESCALE, dtype=np.float32).tobytes()


def _count_not_finite(content: bytes, dtype: str) -> int:
    """The number of NaN and Inf elements: those in which all bits of the exponent are set."""
    exponent = EXPONENT_BITS[dtype]
    bits = np.frombuffer(content, dtype=f"uint{8 * ELEMENT_BYTES[dtype]}")
    return int(np.count_nonzero((bits & exponent) == exponent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
