"""Properties about the memory layout of the tensors: strides, offsets, sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import LIKE, OF_KEYS, OF_PARTS
from pytest_fa.attention.layout import AxisOrder, swapped
from pytest_fa.errors import LacksMemory, UnsupportedCase, WrongResult
from pytest_fa.gpu.inputs import Inputs, Output
from pytest_fa.judge.properties.cut import cut, has_heads_last, lengths
from pytest_fa.judge.subject import PropertySubject

FAR_ELEMENTS = 2**31 + 64
FAR_SLACK_ELEMENTS = 2**20  # for what begins at `FAR_ELEMENTS`
COPIES = 2  # of each tensor of a call: the judge's, and the one that the candidate sees
MANY = 2**16 + 1
MANY_SEQUENCE = 16
ALIGNED_BYTES = 16
UNALIGNED_BYTES = 8
KEYS_PAST_A_TILE = 129  # one key more than whole tiles of 32, 64 or 128

Restride = Callable[[torch.Tensor], torch.Tensor]  # copies a tensor to memory with other strides


def padded_rows(subject: PropertySubject) -> None:
    """Outputs are right if each row of each tensor is followed by NaN that belongs to no tensor.

    The rows are two row lengths apart, or a row length and 16 bytes of the smallest dtype.
    """
    unit = _unit(_taken(subject, subject.inputs()))

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return _with_row_pitch(tensor, 2 * tensor.shape[3])

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return _with_row_pitch(tensor, tensor.shape[3] + unit)

    _require_right_in("padded_rows", subject, twice, "rows two row lengths apart, with NaN between")
    _require_right_in("padded_rows", subject, padded, f"rows {unit} elements further apart, with NaN between")


def unaligned_rows(subject: PropertySubject) -> None:
    """Outputs are right if the rows of all tensors are 8 bytes further apart than their length."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return _with_row_pitch(tensor, tensor.shape[3] + UNALIGNED_BYTES // tensor.element_size())

    try:
        words = f"rows {UNALIGNED_BYTES} bytes further apart than their length, with NaN between"
        _require_right_in("unaligned_rows", subject, move, words)
    except UnsupportedCase as reason:
        remedy = "add `strides: aligned16` to `supports` if the kernel cannot read such rows"
        raise WrongResult("unaligned_rows", f"unaligned_rows: refused: {reason}; {remedy}") from None


def different_strides(subject: PropertySubject) -> None:
    """Outputs are right if q, k, v and the output each have row, head and batch strides that no other tensor has."""
    inputs = subject.inputs()
    taken = _taken(subject, inputs)
    unit = _unit(taken)
    q, k, v = (_with_own_strides(tensor, place, unit) for place, tensor in enumerate(taken[:3]))
    output = subject.output(taken)
    more = {
        name: _with_own_strides(output.more[name], 5 + place, unit)
        for place, name in enumerate(LIKE)
        if name in output.more and _is_matrix(name)
    }
    moved = Output(_with_own_strides(output.out, 3, unit), {**output.more, **more})
    strided = taken._replace(q=q, k=k, v=v)
    strided = _with_matrices(strided, lambda tensor: _with_own_strides(tensor, 4, unit))
    words = " (each tensor has strides of its own, with NaN in its gaps: is each read and written with its own?)"
    subject.require_right("different_strides", subject.call(strided, moved), inputs, words)


def expanded_heads(subject: PropertySubject) -> None:
    """Outputs are right if all heads share one head of K and V through a head stride of zero."""
    _require_right_expanded("expanded_heads", subject, dim=1)


def expanded_batch(subject: PropertySubject) -> None:
    """Outputs are right if all batches share one batch of K and V through a batch stride of zero."""
    _require_right_expanded("expanded_batch", subject, dim=0)


def offset_pointers(subject: PropertySubject) -> None:
    """Outputs are right for tensors that begin one element or 8 bytes into their allocation.

    A kernel may refuse one of the two offsets.  If it refuses both, the property is refused.
    """

    def check(size_bytes: int | None) -> None:
        size = f"{size_bytes} bytes" if size_bytes else "one element"
        _require_right_in("offset_pointers", subject, partial(at_offset, size_bytes), f"pointers offset by {size}")

    _require_one_accepted([partial(check, size_bytes) for size_bytes in (None, 8)])


def many_heads(subject: PropertySubject) -> None:
    """Outputs are right for 2^16 + 1 short heads, more than 16 bits or the y dimension of a grid can count."""
    _require_right_for_many("many_heads", subject, batches=1, heads=MANY)


def many_batches(subject: PropertySubject) -> None:
    """Outputs are right for 2^16 + 1 short batches, more than the y or z dimension of a grid can count."""
    _require_right_for_many("many_batches", subject, batches=MANY, heads=1)


def many_queries(subject: PropertySubject) -> None:
    """Outputs are right for 2^16 + 1 queries, more than 16 bits can count; the last query has other data."""
    inputs = subject.inputs()
    if inputs.appends:
        raise UnsupportedCase("each query has a new key, and there are fewer keys")
    ends = lengths(subject, MANY, MANY_SEQUENCE)
    q, k, v = (_repeated(tensor[:1, :1], end) for tensor, end in zip(inputs[:3], ends, strict=True))
    q[:, :, -1] = q[:, :, 0].flip(-1)
    descales = inputs.descales and inputs.descales.map(lambda descale: descale[:1, :1].contiguous())
    first, queries, keys = torch.zeros(1, dtype=torch.long), torch.arange(ends[0]), torch.arange(ends[1])
    extra = _extra_at(inputs, batches=first, heads=first, queries=queries % inputs.q.shape[2], keys=keys)
    many = parts.fitted(inputs._replace(q=q, k=k, v=v, descales=descales, extra=extra))
    subject.require_right("many_queries", subject.call(many), many)


def far_offsets(subject: PropertySubject) -> None:
    """Outputs are right if the last row, head or batch begins more than 2^31 elements after the first.

    K and V are far in one call, q and the output in another.  A kernel may refuse some of these calls, but not all.
    """
    inputs = subject.inputs()
    taken = _taken(subject, inputs)
    unit = _unit(taken)
    largest = max(tensor.numel() for tensor in (*taken[:3], subject.output(taken).out))
    size = FAR_ELEMENTS + 2 * max(FAR_SLACK_ELEMENTS, largest)
    size_bytes = size * max(taken.k.element_size(), inputs.output_dtype.itemsize)
    _require_memory(subject, 1.1 * COPIES * 2 * size_bytes)  # of two tensors, and a tenth for all else

    def check_keys(move: Restride) -> None:
        far = taken._replace(k=move(taken.k), v=move(taken.v))
        subject.require_right("far_offsets", subject.call(far), inputs)

    def check_queries(move: Restride) -> None:
        output = subject.output(taken)
        moved = _moved(output, move)
        subject.require_right("far_offsets", subject.call(taken._replace(q=move(taken.q)), moved), inputs)

    checks = (check_keys, check_queries)
    _require_one_accepted([partial(check, partial(_far, axis, size, unit)) for axis in (0, 1, 2) for check in checks])


def _require_memory(subject: PropertySubject, needed_bytes: float) -> None:
    """Raise `UnsupportedCase` if the GPU has too little memory, `LacksMemory` if too little of it is free."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(subject.device)
    if total_bytes < needed_bytes:
        raise UnsupportedCase(f"needs {needed_bytes / 1e9:.0f} GB of GPU memory, found {total_bytes / 1e9:.0f} GB")
    if free_bytes < needed_bytes:
        raise LacksMemory(f"needs {needed_bytes / 1e9:.0f} GB of free GPU memory, found {free_bytes / 1e9:.0f} GB")


def _require_one_accepted(checks: Sequence[Callable[[], None]]) -> None:
    """Make all checks; a kernel may refuse some of their calls.  Raises the first refusal if it refuses all."""
    refusals = []
    for check in checks:
        try:
            check()
        except UnsupportedCase as reason:
            refusals.append(reason)
    if len(refusals) == len(checks):
        raise refusals[0]


def _require_right_in(name: str, subject: PropertySubject, move: Restride, words: str) -> None:
    """Judge a call whose inputs and output were moved by `move`, which returns the same shape at other strides.

    `words` say where they are then.
    """
    inputs = subject.inputs()
    taken = _taken(subject, inputs)
    placed = _with_matrices(taken.map(move), move)
    output = subject.output(taken)
    moved = _moved(output, move)
    subject.require_right(name, subject.call(placed, moved), inputs, f" ({words})")


def _taken(subject: PropertySubject, inputs: Inputs) -> Inputs:
    """The call as its tensors lie in memory, so that they can be moved; a cache in pages is dense in each call."""
    return subject.taken(inputs) if inputs.cache is None else inputs


def _moved(output: Output, move: Restride) -> Output:
    """The output moved, and with it other gradients; vectors and a log-sum-exp are dense in each call."""
    more = {name: move(tensor) if _is_matrix(name) else tensor for name, tensor in output.more.items()}
    return Output(move(output.out), more)


def _is_matrix(output: str) -> bool:
    """Whether a further output has strides of its own."""
    return output in OF_KEYS or (output in OF_PARTS and not parts.tensor_form(OF_PARTS[output]).vector)


def _with_matrices(inputs: Inputs, move: Restride) -> Inputs:
    """The inputs with those tensors of parts moved that are no vectors, which are dense in each call."""
    forms = {name: parts.tensor_form(name).vector for name in inputs.extra}
    extra = {name: move(each) if forms[name] in ("", "like_out") else each for name, each in inputs.extra.items()}
    return inputs._replace(extra=extra)


def _require_right_expanded(name: str, subject: PropertySubject, dim: int) -> None:
    """Judge calls in which all of dimension `dim` of K and V is its first index, at a stride of zero.

    One of them has a single key in its last tile.
    """
    whole = subject.inputs()
    if whole.appends:
        raise UnsupportedCase("batches or heads that share memory cannot have new keys of their own")
    shorter = cut(subject, whole, KEYS_PAST_A_TILE)
    for inputs in (whole, shorter) if shorter else (whole,):
        first = inputs.map(lambda tensor: tensor.narrow(dim, 0, 1).expand_as(tensor))
        expanded = inputs._replace(k=first.k, v=first.v)
        if inputs.descales is not None:
            of_first = inputs.descales.map(lambda descale: descale.narrow(dim, 0, 1).expand_as(descale).contiguous())
            expanded = expanded._replace(descales=of_first._replace(q=inputs.descales.q))
        words = f" ({inputs.k.shape[2]} keys, the {('batch', 'head')[dim]} stride of k and v is 0)"
        subject.require_right(name, subject.call(expanded), expanded, words)


def _require_right_for_many(name: str, subject: PropertySubject, batches: int, heads: int) -> None:
    """Judge a call of many batches or heads of few keys.

    The last one has other data than the rest, so that a batch or head that is computed in its place is found.
    """
    inputs = subject.inputs()
    ends = lengths(subject, MANY_SEQUENCE, MANY_SEQUENCE)
    if subject.device.type == "cuda":  # the tensors of both sides, and truth in float64
        elements = batches * heads * sum(end * each.shape[3] for end, each in zip(ends, inputs[:3], strict=True))
        _require_memory(subject, elements * (COPIES * inputs.q.element_size() + 2 * torch.float64.itemsize))
    q, k, v = (
        tensor[:1, :1, :end].expand(batches, heads, -1, -1).clone()
        for tensor, end in zip(inputs[:3], ends, strict=True)
    )
    for tensor in (q, k, v):
        tensor[-1, -1] = tensor[-1, -1].flip(0)
    descales = inputs.descales and inputs.descales.map(
        lambda descale: descale[:1, :1].expand(batches, heads).contiguous()
    )
    rows, of_keys = (torch.arange(end) for end in ends[:2])
    of_batches, of_heads = torch.arange(batches) % inputs.q.shape[0], torch.arange(heads) % inputs.q.shape[1]
    extra = _extra_at(inputs, batches=of_batches, heads=of_heads, queries=rows, keys=of_keys)
    many = parts.fitted(inputs._replace(q=q, k=k, v=v, descales=descales, extra=extra))
    subject.require_right(name, subject.call(many), many)


# -- tensors at other strides -----------------------------------------------------------------------------------------


def _extra_at(inputs: Inputs, **places: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of parts for these batches, heads, queries and keys."""
    return inputs.extra_at(**{axis: places_of_axis.to(inputs.q.device) for axis, places_of_axis in places.items()})


def _repeated(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """A dense tensor of `length` rows, which are those of `tensor` again and again."""
    return tensor.repeat(1, 1, -(-length // tensor.shape[2]), 1)[:, :, :length].contiguous()


def _unit(inputs: Inputs) -> int:
    """A number of elements whose size is a multiple of 16 bytes in each tensor of a call."""
    return ALIGNED_BYTES // min(inputs.q.element_size(), inputs.k.element_size(), inputs.output_dtype.itemsize)


def _with_row_pitch(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
    """A copy whose rows are `pitch` elements apart, with NaN between them, and heads and sequence as they lie."""
    heads, seq = tensor.shape[1:3]
    steps = (pitch, heads * pitch) if has_heads_last(tensor) else (seq * pitch, pitch)
    return _copied(tensor, (heads * seq * pitch, *steps))


def _with_own_strides(tensor: torch.Tensor, number: int, unit: int) -> torch.Tensor:
    """A copy with strides, all multiples of `unit` elements, that differ for each `number`, and NaN in the gaps."""
    _, heads, seq, dim = tensor.shape
    innermost = (-(-dim // unit) + 1 + number) * unit
    if has_heads_last(tensor):
        row = heads * innermost + (3 + 2 * number) * unit
        return _copied(tensor, (seq * row + (5 + 3 * number) * unit, innermost, row))
    head = seq * innermost + (3 + 2 * number) * unit
    return _copied(tensor, (heads * head + (5 + 3 * number) * unit, head, innermost))


def _copied(tensor: torch.Tensor, strides: tuple[int, int, int]) -> torch.Tensor:
    """A copy at these strides of batch, head and row in elements, with NaN in the gaps; of int8 127."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, (*strides, 1), strict=True))
    gap = 127 if tensor.dtype == torch.int8 else float("nan")
    storage = torch.full((max(size, 1),), gap, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, (*strides, 1)).copy_(tensor)


def at_offset(size_bytes: int | None, tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy that begins this many bytes into its allocation, with its axes as they lie; None: one element."""
    elements = size_bytes // tensor.element_size() if size_bytes else 1
    storage = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    order: AxisOrder = "bshd" if has_heads_last(tensor) else "bhsd"
    memory = storage[elements:].view(swapped(tensor, order).shape)
    return swapped(memory, order).copy_(tensor)


def _far(axis: int, size: int, unit: int, tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last index of axis 0 (batch), 1 (head) or 2 (row) begins `FAR_ELEMENTS` after the first.

    The other axes are packed into the gaps.  All copies have `size` elements, so that their memory is used again.
    """
    inner = [each for each in ((0, 2, 1) if has_heads_last(tensor) else (0, 1, 2)) if each != axis]
    strides, packed = [0, 0, 0], tensor.shape[3]
    for each in reversed(inner):
        strides[each], packed = packed, packed * tensor.shape[each]
    steps = max(1, tensor.shape[axis] - 1)
    strides[axis] = -(-FAR_ELEMENTS // steps // unit) * unit
    storage = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, (*strides, 1)).copy_(tensor)
