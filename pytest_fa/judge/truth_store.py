"""`TruthStore`: the judge computes what it compares outputs with once, for all variants of a run on the same data.

The store belongs to the judge's process, in which no code of a variant runs, and which no process of a variant can
read.  Results are found by the bits of their inputs, so random data that are new in each call never meet an old result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch

from pytest_fa.attention import parts
from pytest_fa.attention.backward import GRADIENTS
from pytest_fa.attention.rows import RowTruth
from pytest_fa.attention.scores import Computes
from pytest_fa.catalog.own_truth import OwnTruth
from pytest_fa.catalog.variant import Rounding, Variant
from pytest_fa.errors import NoTruth
from pytest_fa.gpu.inputs import Inputs, clone
from pytest_fa.judge.cross_checks import cross_check_all
from pytest_fa.judge.fingerprints import sha256_of
from pytest_fa.judge.gradients import truth_of_gradients
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.output_check import MoreTruth
from pytest_fa.judge.padding import cleared
from pytest_fa.judge.policies import READS_SPREAD
from pytest_fa.judge.row_outputs import make_row_truth
from pytest_fa.judge.truth import Truth
from pytest_fa.records.checks import CrossCheck

MAX_BYTES = 2**29  # of tensors that are kept; at 1x8x512x64, a truth has 4.2 MB
MAX_INPUT_BYTES = 2**26  # more take longer to hash than their truth takes on a fast GPU
MIN_BYTES = 2**10  # what a result without tensors counts for

Computed = TypeVar("Computed")


class _Kept(NamedTuple):
    """A result, its tensors, and how often each of these had been changed when it was stored."""

    result: Any
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    size_bytes: int


class TruthSource(Protocol):
    """Where the truth comes from that the user's functions compute."""

    def truth_of(self, own: OwnTruth, inputs: Inputs, rounds: tuple[Rounding, ...], policy: str) -> Truth:
        """The truth and the reference of these functions.  Raises `NoTruth`."""


class TruthStore:
    """Computes truth, the truth of further outputs and cross-checks, and keeps up to `most_bytes` of the last ones.

    The truth of a variant with an `own_truth` comes from `source`; before it is asked, `announce` says that this may
    take long.  With `most_bytes` = 0 nothing is kept: a process in which a variant runs must not hold the right answer.
    """

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self.source: TruthSource | None = None
        self.announce: Callable[[], object] = lambda: None
        self.is_warm = most_bytes == 0  # whether its process need not load what it computes with any more
        self._kept: OrderedDict[tuple[object, ...], _Kept] = OrderedDict()  # the least recently used comes first

    def truth_of(
        self,
        computes: Computes,
        inputs: Inputs,
        rounds: tuple[Rounding, ...],
        policy: str,
        own_truth: OwnTruth | None = None,
    ) -> Truth:
        """Truth and the same-precision reference: of the user's functions if there are some, else `oracle.truth_of`."""
        if computes == "gradients":
            return self._gradients_of(inputs, rounds)[GRADIENTS[0]]
        what = ("truth", computes, rounds, policy in READS_SPREAD, own_truth)
        return self._once(what, inputs, lambda own: self._truth_of(computes, own, rounds, policy, own_truth))

    def new_truth_of(
        self, computes: Computes, inputs: Inputs, variant: Variant, policy: str
    ) -> tuple[Truth, dict[str, MoreTruth]]:
        """The truth for a variant on data that no other call has, and that of other gradients: it is not kept."""
        if computes == "gradients":
            of_all = self.with_memory(lambda: truth_of_gradients(inputs, variant.reference_rounds))
            return of_all[GRADIENTS[0]], {name: of_all[name] for name in GRADIENTS[1:] if name in of_all}
        of_output = lambda: self._truth_of(computes, inputs, variant.reference_rounds, policy, variant.own_truth)  # noqa: E731
        return self.with_memory(of_output), {}

    def more_truths_of(
        self, outputs: Iterable[str], inputs: Inputs, variant: Variant, policy: str
    ) -> dict[str, MoreTruth]:
        """The truth of further outputs and their bounds, or of other gradients than dq that have an element."""
        if variant.computes == "gradients":
            known_gradients = self._gradients_of(inputs, variant.reference_rounds)
            return {name: known_gradients[name] for name in outputs if name in known_gradients}
        return {**self.row_truths_of(outputs, inputs, variant, policy)}

    def _gradients_of(self, inputs: Inputs, rounds: tuple[Rounding, ...]) -> dict[str, Truth]:
        kept = self._once(("gradients", rounds), inputs, lambda own: (*truth_of_gradients(own, rounds).items(),))
        return dict(kept)

    def row_truths_of(
        self, outputs: Iterable[str], inputs: Inputs, variant: Variant, policy: str
    ) -> dict[str, RowTruth]:
        """The truth of further outputs and their bounds; see `make_row_truth`.

        Raises `NoTruth` if functions of the user's do not return one of them.
        """
        if (own := variant.own_truth) is not None:
            known = dict(self.truth_of(variant.computes, inputs, variant.reference_rounds, policy, own).rows)
            if missing := [output for output in outputs if output not in known]:
                raise NoTruth(
                    f"your reference {own.title} does not return {missing[0]}, which {variant.name} declares in "
                    f"`returns`; return (out, {missing[0]}) in each function; nothing was judged"
                )
            padding = parts.padding(inputs)
            return {
                output: known[output]._replace(conventions=inputs.conventions, padding=padding) for output in outputs
            }
        return {output: self._row_truth_of(output, inputs, variant.reference_rounds, policy) for output in outputs}

    def _truth_of(
        self,
        computes: Computes,
        inputs: Inputs,
        rounds: tuple[Rounding, ...],
        policy: str,
        own_truth: OwnTruth | None,
    ) -> Truth:
        if own_truth is None:
            return truth_of(computes, inputs, rounds, policy)
        if self.source is None:
            raise NoTruth(f"{own_truth.title} needs a process of its own, which this run cannot start")
        self.announce()
        own, padding = self.source.truth_of(own_truth, inputs, rounds, policy), parts.padding(inputs)
        out, same_precision = (cleared(padding, each) for each in (own.out, own.same_precision))
        return own._replace(out=out, same_precision=same_precision, padding=padding)

    def _row_truth_of(self, output: str, inputs: Inputs, rounds: tuple[Rounding, ...], policy: str) -> RowTruth:
        part = parts.outputs()[output]
        return self._once((output, rounds, policy), inputs, lambda own: make_row_truth(part, own, rounds, policy))

    def cross_checks(
        self, variants: tuple[Variant, ...], inputs: Inputs, truth: Truth, rounds: tuple[Rounding, ...], policy: str
    ) -> tuple[CrossCheck, ...]:
        """The verdicts on SDPA's backends on these inputs, whose truth for `rounds` is known; see `cross_check_all`."""
        what = ("cross-checks", msgspec.json.encode(variants), rounds, policy)
        return self._once(what, inputs, lambda own: cross_check_all(variants, own, truth, policy))

    def with_memory(self, work: Callable[[], Computed]) -> Computed:
        """The result of work that allocates memory on the GPU.  If that is used up, forget all, and try once more."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if not self._kept:
                raise
        # Here the exception is gone, and with it what the first try had allocated.
        self.forget()
        return work()

    def forget(self) -> None:
        """Give the memory of all results back to the GPU."""
        self._kept.clear()
        torch.cuda.empty_cache()

    def _once(self, what: tuple[object, ...], inputs: Inputs, compute: Callable[[Inputs], Computed]) -> Computed:
        """The result for these inputs, computed now or before."""
        return self.with_memory(lambda: self._kept_or_computed(what, inputs, compute))

    def _kept_or_computed(
        self, what: tuple[object, ...], inputs: Inputs, compute: Callable[[Inputs], Computed]
    ) -> Computed:
        """The result for these inputs, from the store if it has one.

        It is computed from a private copy, and so is the key: a variant may write into the memory of its inputs, and
        must not make the judge store a result under the key of other data.
        """
        size_bytes = sum(tensor.nbytes for tensor in inputs.parts.values())
        if not self._most_bytes or size_bytes > MAX_INPUT_BYTES:
            return compute(inputs)
        own = clone(inputs)
        key = (*what, _key_of(own))
        kept = self._kept.get(key)
        if kept is None or _versions(kept.tensors) != kept.versions:
            kept = self._keep(key, compute(own))
        else:
            self._kept.move_to_end(key)
        return kept.result  # type: ignore[no-any-return]  # stored under its own key

    def _keep(self, key: tuple[object, ...], result: object) -> _Kept:
        """Store a result unless it is larger than the store, and forget those that were not used for longest."""
        tensors = tuple(_tensors_of(result))
        size_bytes = MIN_BYTES + sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        kept = _Kept(result, tensors, _versions(tensors), size_bytes)
        if size_bytes <= self._most_bytes:
            self._kept[key] = kept
        while sum(each.size_bytes for each in self._kept.values()) > self._most_bytes:
            self._kept.popitem(last=False)
        return kept


def _key_of(inputs: Inputs) -> tuple[object, ...]:
    """What determines a result: the bits of all tensors, their shapes, both dtypes, the device, scale and words."""
    tensors, q = inputs.parts.values(), inputs.q
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    dtypes = q.dtype, inputs.output_dtype
    words = (inputs.scale, *inputs.words.items(), *sorted(inputs.conventions.items()))
    return sha256_of(*tensors), *inputs.parts, shapes, *dtypes, str(q.device), *words


def _versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """How often each tensor was changed in place: a result that something has changed is computed again."""
    return tuple(tensor._version for tensor in tensors)  # noqa: SLF001  # there is no public name


def _tensors_of(result: object) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors_of(part)
