"""The list of the parts of attention, and what all of them together make of a case, a call, its scores and its mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fa.attention import (
    alibi,
    append,
    backward,
    bias,
    cache_dtype,
    causal,
    data,
    e4m3,
    grouped_heads,
    head_dim_v,
    layout,
    lengths,
    lse,
    mask,
    pages,
    ragged,
    scale,
    scores,
    sink,
    softcap,
    splits,
    thd,
    window,
)
from pytest_fa.attention.mistake import ChangeScores, Hide, Mistake, Positions
from pytest_fa.attention.part import CacheShape, CallInputs, Convention, Part, PartTensor
from pytest_fa.attention.rows import Padding
from pytest_fa.attention.token import Token

if TYPE_CHECKING:
    import torch

OfPart = TypeVar("OfPart")
OfCall = TypeVar("OfCall")  # `gpu.inputs.Inputs`

# In the order in which an id has them, and in which they change the scores.
PARTS: list[Part] = [
    causal.PART,
    window.PART,
    grouped_heads.PART,
    lengths.PART,
    ragged.PART,
    pages.PART,
    cache_dtype.PART,
    append.PART,
    head_dim_v.PART,
    scale.PART,
    softcap.PART,
    bias.PART,
    alibi.PART,
    mask.PART,
    sink.PART,
    layout.PART,
    thd.PART,
    scores.PART,
    backward.PART,
    e4m3.PART,
    data.PART,
    lse.PART,
    splits.PART,
]


AnyCached = TypeVar("AnyCached", bound=Callable[..., Any])
_caches: list[Any] = []


def cached(function: AnyCached) -> AnyCached:
    """Keep the results of a function of hashable arguments until a part is added or removed."""
    kept: Any = functools.lru_cache(maxsize=2**14)(function)
    _caches.append(kept)
    return kept  # type: ignore[no-any-return]  # called as the function


def add(part: Part) -> None:
    """Add a part to the list, as the last one."""
    PARTS.append(part)
    _forget()


def remove(part: Part) -> None:
    """Remove a part that was added."""
    PARTS.remove(part)
    _forget()


def _forget() -> None:
    for kept in _caches:
        kept.cache_clear()


@cached
def tokens() -> tuple[Token, ...]:
    """The tokens of all parts, in the order of an id."""
    return tuple(token for part in PARTS for token in part.tokens)


def grammar() -> str:
    """The form of a case id."""
    return f"b<B>h<H>s<S>d<D>-<dtype>{''.join(token.grammar for token in tokens())}-seed<N>"


def shapes_of(suite: str) -> tuple[str, ...]:
    """The shapes that the parts add to a suite."""
    return tuple(shape for part in PARTS for shape in part.shapes.get(suite, ()))


def claimed_parts() -> list[Part]:
    """The parts that a manifest claims, in the order in which claims are combined."""
    return sorted((part for part in PARTS if part.supports), key=lambda part: part.claim_order)


def words() -> dict[str, Part]:
    """The words of `entry.call` for the parts, and whose each one is."""
    return {word: part for part in PARTS for word in part.words}


def made_words() -> dict[str, Part]:
    """The words of `entry.call` that are made of others, and whose each one is."""
    return {word: part for part in PARTS for word in part.made_words}


def arguments_of(case: Any) -> dict[str, Any]:  # `catalog.case.Case`
    """The words of a call on a case, each with its value, besides tensors."""
    return {word: value for part in PARTS for word, value in part.arguments(case).items()}


def words_beyond_plain(case: Any) -> dict[str, Part]:  # `catalog.case.Case`
    """The words whose values in a call on a case are not those of a plain one, and whose each one is."""
    passed = ((part, word, value) for part in PARTS for word, value in part.arguments(case).items())
    values = {word: part for part, word, value in passed if value != part.plain_argument(word)}
    return values | {word: part for word, part in tensor_words().items() if part.is_passed(word, case)}


def hints() -> tuple[str, ...]:
    """The words that no function needs."""
    return tuple(word for part in PARTS for word in part.hints)


def tensor_words() -> dict[str, Part]:
    """The words that are tensors, and whose each one is."""
    return {word: part for part in PARTS for word in part.tensors}


def tensor_form(word: str) -> PartTensor:
    """What the tensor of a word is like."""
    return tensor_words()[word].tensors[word]


def is_table(word: str) -> bool:
    """Whether a word is a tensor that says where others lie, and nothing that attention is computed from."""
    return word in tensor_words() and tensor_form(word).vector == "table"


def conventions() -> dict[str, tuple[Part, Convention]]:
    """The keys of a manifest's `conventions`, each with its part."""
    return {key: (part, convention) for part in PARTS for key, convention in part.conventions.items()}


def given(word: str, value: Any, declared: Mapping[str, str]) -> Any:  # of the word's type
    """What a call in declared conventions has for a word, a tensor or `scale`."""
    for part in PARTS if declared else ():
        value = part.given(word, value, declared)
    return value


def meant(word: str, value: Any, declared: Mapping[str, str]) -> Any:  # of the word's type
    """The inverse of `given`."""
    for part in PARTS if declared else ():
        value = part.meant(word, value, declared)
    return value


def outputs() -> dict[str, Part]:
    """The outputs that a call may have besides `out`, and whose each one is."""
    return {part.output: part for part in PARTS if part.output}


def title_of(output: str) -> str:
    """A further output in words."""
    return outputs()[output].output_title


def represented(inputs: OfCall) -> OfCall:
    """The call with the values that its tensors have where they lie in memory."""
    for part in PARTS:
        inputs = part.call_represented(inputs)
    return inputs


def written(inputs: CallInputs) -> tuple[str, ...]:
    """The inputs that a call writes."""
    writing = (part for part in PARTS if any(inputs.word(word) is not None for word in part.tensors))
    return tuple(name for part in writing for name in part.written)


def after(inputs: OfCall) -> OfCall:
    """What a call, as its tensors lie in memory, leaves of them."""
    for part in PARTS:
        inputs = part.call_after(inputs)
    return inputs


def renew(inputs: CallInputs) -> None:
    """Undo in place, as far as that is cheap, what a call wrote into its inputs."""
    for part in PARTS:
        part.renew(inputs)


def wrong_change(name: str, before: CallInputs, found: torch.Tensor) -> str:
    """Why an input that a call left otherwise than `after` is wrong, in a sentence; empty if no part knows."""
    return next(filter(None, (part.wrong_change(name, before, found) for part in PARTS)), "")


def of_head(word: str, tensor: Any, batch: int, kv_head: int, cache: Any) -> Any:  # tensors
    """What one head of a call reads of a tensor that `call_placed` made."""
    return tensor_words()[word].of_head(word, tensor, batch, kv_head, cache)


def cache_of(case: Any) -> CacheShape | None:  # `catalog.case.Case`
    """The cache in which a case has k and v; None if it has none."""
    return next(filter(None, (part.cache_of(case) for part in PARTS)), None)


def dense_output(inputs: Any, name: str, output: Any) -> Any:  # `gpu.inputs.Inputs` and tensors
    """An output of a placed call as [batch, heads, seq_q] or with a further axis, or a gradient as its tensor."""
    for part in reversed(PARTS):
        output = part.output_dense(inputs, name, output)
    return output


def fitted(inputs: OfCall) -> OfCall:
    """A call that was given other numbers of queries and keys, with tensors of parts that fit them."""
    for part in PARTS:
        inputs = part.call_fitted(inputs)
    return inputs


def passed_cache(tensor: Any, words: Mapping[str, Any]) -> Any:  # tensors
    """What `entry.call` passes for k or v of a call with these words; None if that is no cache."""
    caches = (part.passed_cache(tensor, words) for part in PARTS)
    return next((cache for cache in caches if cache is not None), None)


@cached
def always_passed() -> tuple[str, ...]:
    """The words that each call passes."""
    return tuple(word for part in PARTS for word in part.always)


def keywords() -> tuple[str, ...]:
    """The keywords that the function of a variant has, unless its manifest says otherwise."""
    return ("scale", *always_passed(), "out")


def names_of_words() -> dict[str, tuple[str, ...]]:
    """The names that functions of attention libraries give to the words and to the further outputs."""
    of_parts = ((*part.words.items(), *part.made_words.items(), *part.output_names.items()) for part in PARTS)
    return {word: names for pairs in of_parts for word, names in pairs}


# -- the judge --------------------------------------------------------------------------------------------------------


def changed_scores(
    inputs: CallInputs, scores: torch.Tensor, positions: Positions, *, but: Part | None = None
) -> torch.Tensor:
    """The scores of some queries, [batch, heads, rows, keys], after all parts; they are scaled before.

    `but` is left out.
    """
    for part in score_parts(inputs):
        if part is not but:
            scores = part.scores(inputs, scores, positions)
    return scores


def score_parts(inputs: CallInputs) -> list[Part]:
    """The parts in the order in which they change the scores of a call."""
    return sorted(PARTS, key=lambda part: part.is_last(inputs))


def parts_in_scores(inputs: CallInputs) -> list[Part]:
    """The parts that change the scores of a call."""
    return [part for part in PARTS if part.in_scores and any(inputs.word(word) is not None for word in part.words)]


def hidden_keys(inputs: CallInputs, positions: Positions, *, but: Part | None = None) -> torch.Tensor | None:
    """True where a part hides a key, [rows, keys] or with batch and heads; None if none does.  `but` is left out."""
    whole: torch.Tensor | None = None
    for part in PARTS:
        if part is not but and (hidden := part.hidden(inputs, positions)) is not None:
            whole = hidden if whole is None else whole | hidden
    return whole


def positions_of(inputs: CallInputs, queries: torch.Tensor, keys: torch.Tensor) -> Positions:
    """The positions of some queries, [rows], and keys, [keys]."""
    return Positions(queries[:, None], keys, inputs.q.shape[2], inputs.k.shape[2], shift=shift(inputs))


def shift(inputs: CallInputs) -> torch.Tensor | None:
    """`Positions.shift`; None if each sequence has the lengths of the tensors."""
    return _first(part.shift(inputs) for part in PARTS)


def padding(inputs: CallInputs) -> Padding | None:
    """The rows of the output that are not judged, or None."""
    return _first(part.padding(inputs) for part in PARTS)


def key_padding(inputs: CallInputs) -> Padding | None:
    """The rows of the gradients of K and V that are not judged, or None."""
    return _first(part.key_padding(inputs) for part in PARTS)


def sinks(inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
    """The scores that have no value, [batch or 1, heads or 1, rows or 1, n]; None if there are none."""
    return _first(part.sinks(inputs, positions) for part in PARTS)


def _first(answers: Iterable[OfPart | None]) -> OfPart | None:
    """The answer of the first part that has one."""
    return next((answer for answer in answers if answer is not None), None)


def level_matters(inputs: CallInputs) -> bool:
    """Whether the result of a call changes if one number is added to all scores of a row."""
    return any(part.level_matters(inputs) for part in PARTS)


def adds_to_scores(inputs: CallInputs) -> bool:
    """Whether a part adds numbers to the scores."""
    return any(part.adds_to_scores(inputs) for part in PARTS)


def order_matters(inputs: CallInputs) -> bool:
    """Whether the result of a call changes if its keys and values come in another order."""
    return any(part.order_matters(inputs) for part in PARTS)


def nonfinite_cause(inputs: CallInputs, bad_rows: torch.Tensor, *, others_are_right: bool) -> str:
    """Why exactly these rows, [batch, heads, seq_q], are NaN or Inf, if it is because of a part; else empty."""
    causes = (part.nonfinite_cause(inputs, bad_rows, others_are_right=others_are_right) for part in reversed(PARTS))
    return next(filter(None, causes), "")


def mistakes(inputs: CallInputs) -> Iterator[Mistake]:
    """The mistakes in each part, while the other parts are right."""
    for part in PARTS:
        for mistake in part.mistakes(inputs):
            hide = mistake.hide and _with_other_masks(inputs, part, mistake.hide)
            score = mistake.score and _with_other_scores(inputs, part, mistake.score, is_first=mistake.is_score_first)
            yield mistake._replace(hide=hide, score=score)


def other_conventions(inputs: CallInputs) -> Iterator[Mistake]:
    """The conventions of kernels that are not declared and change the output of a call."""
    for key, (part, convention) in conventions().items():
        declared = inputs.convention(key)
        is_seen = not convention.is_seen_in or any(inputs.word(word) is not None for word in convention.is_seen_in)
        for value in convention.values if is_seen and not part.output else ():
            if value != (declared or convention.plain):
                words = convention.advice(key, declared, value)
                yield Mistake(words, change=partial(_misread, part, key, value), is_convention=True)


def _misread(part: Part, key: str, value: str, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    return part.call_misread(inputs.as_given, key, value)


def _with_other_masks(inputs: CallInputs, part: Part, hide: Hide) -> Hide:
    def hidden(positions: Positions) -> torch.Tensor:
        others, own = hidden_keys(inputs, positions, but=part), hide(positions)
        return own if others is None else own | others

    return hidden


def _with_other_scores(inputs: CallInputs, part: Part, score: ChangeScores, *, is_first: bool) -> ChangeScores:
    order = score_parts(inputs)
    if is_first:
        order.sort(key=lambda other: other is not part)

    def changed(scores: torch.Tensor, positions: Positions) -> torch.Tensor:
        for other in order:
            scores = score(scores, positions) if other is part else other.scores(inputs, scores, positions)
        return scores

    return changed
