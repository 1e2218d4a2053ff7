"""Data profiles: what q, k and v of a case are like.

Random numbers from N(0, 1) hide mistakes that show on the activations of models.  A profile makes other data of the
same random numbers.  Every kernel must be right on all of them, so no manifest claims them.

Only sums, products and quotients are used, which every CPU rounds alike: a case has the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_fa.attention.layout import stored
from pytest_fa.attention.part import Part, Shape
from pytest_fa.attention.token import Choice

DataChange = Callable[[Any, Shape], Any]  # of `gpu.inputs.Inputs`
FIELD, NORMAL, PREFIX = "profile", "normal", "data_"
OUTLIER_DIM, OUTLIER_Q, OUTLIER_K = 3, 12.0, 8.0  # as in the activations of models
MASSIVE = 100.0
LEVEL, LEVEL_KEY = 100.0, 8.0  # the log-sum-exp of rows far from 0, and the element of each key that makes it
HOT_STEP, HOT_Q, HOT_KEY = 37, 30.0, 60.0
HOT_SCORE = 30.0  # a key with this score has all the weight of a row
TAIL = 0.25
TINY_DIMS = slice(None, None, 4)
# The factors of V and of some dims of K.  In bf16 and fp32, they leave room above 2^-126, because sums may cancel: a
# right kernel that is compiled with -ftz=true flushes smaller numbers to 0.
TINY_V, TINY_KEY = {"fp16": 2.0**-17}, {"fp16": 2.0**-13}
TINY = 2.0**-100
# The largest |V|.  In bf16 and fp32, a right kernel sums many such V in float32 before it divides by the row sum.
LARGEST_V, LARGEST_V_FLOAT32 = {"fp16": 60000.0}, 2.0**96
MAX_SCALE_OF_DK = 1.5  # times 1/sqrt(head_dim), where Q is large: dK is a sum of its rows
LARGEST_V_OF_DS = 256.0  # where dS is in fp16
MIN_SCALE = 2.0**-11  # with which an element of fp16 makes a score of `LEVEL`


def outlier_channels(inputs: Any) -> Any:
    """One dim of q and k is far larger than the others."""
    q, k = inputs.q.clone(), inputs.k.clone()
    dim = min(OUTLIER_DIM, q.shape[3] - 1)
    q[..., dim] *= OUTLIER_Q
    k[..., dim] *= OUTLIER_K
    return inputs._replace(q=q, k=k)


def massive_key(inputs: Any, place: int = 0) -> Any:
    """One key is 100 times as large as the others: its score is far above all others or far below."""
    k = inputs.k.clone()
    k[:, :, place : place + 1] *= MASSIVE
    return inputs._replace(k=k)


def far_from_zero(inputs: Any, level: float) -> Any:
    """The log-sum-exp of each row is near a level; without a scale, it stays as it is."""
    q, k = inputs.q.clone(), inputs.k.clone()
    k[..., 0] = LEVEL_KEY
    q[..., 0] = level / (LEVEL_KEY * inputs.scale) if inputs.scale else 0.0
    return inputs._replace(q=q, k=k)


def one_hot(inputs: Any) -> Any:
    """Every 37th key outweighs all others for its queries, so that each row of the output is one row of V.

    With more than 37 keys per dimension, the distance is larger, so that no two such keys share a dimension: the mean
    of two rows of V often lies halfway between two numbers of the output's dtype, and is then rounded by chance.
    """
    k, q = inputs.k / 8, inputs.q * 0
    keys, dims = k.shape[2:]
    picked = range(0, keys, max(HOT_STEP, math.ceil(keys / dims) | 1))
    for dim, key in enumerate(picked):
        k[:, :, key] = 0
        k[:, :, key, dim] = HOT_KEY
        q[:, :, dim :: len(picked), dim] = HOT_Q
    return inputs._replace(q=q, k=k)


def equal_scores(inputs: Any) -> Any:
    """Two keys in turn, so that every second score of a row is the same.

    If all were, no rounding would be independent of another one, and right kernels would break the bound of the gain:
    all rows of an output would be one row, and rounding P would change all weights by one factor.
    """
    keys = inputs.k.shape[2]
    return inputs._replace(k=inputs.k[:, :, :2].repeat(1, 1, (keys + 1) // 2, 1)[:, :, :keys])


def long_tail(inputs: Any) -> Any:
    """Each number x becomes x + x^3 / 4, so that there are many moderate outliers."""
    return inputs.map(lambda tensor: tensor * (1 + TAIL * tensor * tensor))


def subnormal(inputs: Any, case: Shape) -> Any:
    """V and some dims of K are near the smallest normal number of the dtype or below it.

    Q is larger in these dims, so that they count in the scores.
    """
    q, k, of_key = inputs.q.clone(), inputs.k.clone(), TINY_KEY.get(case.dtype, TINY)
    q[..., TINY_DIMS] /= of_key
    k[..., TINY_DIMS] *= of_key
    of_v = 1.0 if _has_ds_in_fp16(case) else TINY_V.get(case.dtype, TINY)
    return inputs._replace(q=q, k=k, v=inputs.v * of_v)


def value_range(inputs: Any, case: Shape) -> Any:
    """A third of the numbers in V is as large as possible, and each second dim has one sign, as has the output."""
    largest = LARGEST_V_OF_DS if _has_ds_in_fp16(case) else LARGEST_V.get(case.dtype, LARGEST_V_FLOAT32)
    v = inputs.v.clamp(-1, 1) * largest
    v[..., ::2] = v[..., ::2].abs()
    return inputs._replace(v=v)


def _has_ds_in_fp16(case: Shape) -> bool:
    """Whether right kernels store dS, which is as large or as small as V, in fp16: it may be 0 or infinite there."""
    return case.computes == "gradients" and case.dtype == "fp16"


# What each profile makes of the inputs of a case.
PROFILES: Mapping[str, DataChange] = {
    "outlier_channels": lambda inputs, _: outlier_channels(inputs),
    "massive_key": lambda inputs, _: massive_key(inputs),
    "low_lse": lambda inputs, _: far_from_zero(inputs, -LEVEL),
    "high_lse": lambda inputs, _: far_from_zero(inputs, LEVEL),
    "one_hot": lambda inputs, _: one_hot(inputs),
    "equal_scores": lambda inputs, _: equal_scores(inputs),
    "long_tail": lambda inputs, _: long_tail(inputs),
    "subnormal": subnormal,
    "value_range": value_range,
}


# Of the suite `data`: each profile without a mask and with one.
SHAPES = tuple(
    f"b1h2s113d64-fp16{mask}{profile}"
    for profile in ("", *(f"-{PREFIX}{name}" for name in PROFILES))
    for mask in ("", "-causal")
)


# The planted fault that a profile reveals, and no other one.
FAULTS = {
    NORMAL: "fast_exp_of_tame_data",
    "outlier_channels": "outlier_channels_in_dtype",
    "massive_key": "massive_key_without_value",
    "low_lse": "maximum_starts_at_minus_50",
    "high_lse": "maximum_at_most_88",
    "one_hot": "one_weight_of_first_key",
    "equal_scores": "tied_keys_counted_once",
    "long_tail": "outliers_of_v_clipped",
    "subnormal": "subnormal_v_flushed",
    "value_range": "sum_of_values_in_dtype",
}


class DataProfile(Part):
    """The tensors of a call stay those of a plain case; their values change."""

    name = "data"
    summary = "other data than N(0, 1)"
    tokens = (Choice(FIELD, tuple((f"{PREFIX}{name}", name) for name in PROFILES), NORMAL),)
    rows = (("`-data_long_tail`", "[data](../how-to/choose-cases.md#choose-the-data) other than N(0, 1)"),)
    shapes = {"data": SHAPES}
    is_after_scores = False

    faults = {**dict.fromkeys(FAULTS.values(), ("max", False)), FAULTS["value_range"]: ("finite", False)}
    twins = ("twin_right_data",)
    fault_shapes = SHAPES[::2]  # no other kernel needs them: `hard_data` has such data

    def impossible(self, case: Shape) -> str | None:
        """Quantised data are special already, and some parts of attention would undo a profile."""
        profile = case.value_of(FIELD)
        if profile == NORMAL:
            return None
        reason = next(_obstacles(case, profile), None)
        return reason and f"{reason}; drop -{PREFIX}{profile}"

    def fields_for(self, dtype: str) -> Mapping[str, Any]:
        """e4m3 has special data of its own."""
        return {FIELD: NORMAL} if dtype == "e4m3" else {}

    def refusal(self, case: Shape, supports: Any, remedy: str) -> str | None:  # noqa: ARG002  # `catalog.variant.Supports`
        """A case of the suite that what the variant computes, or its dtype, has made impossible."""
        return self.impossible(case)

    def claimed_by(self, case: Shape) -> str:
        """The profile."""
        return str(case.value_of(FIELD))

    def hunted_claims(self, supports: Any) -> tuple[Any, ...]:  # noqa: ARG002  # `catalog.variant.Supports`
        """All profiles: no manifest claims one."""
        return (NORMAL, *PROFILES)

    def random_fields(self, claim: Any, heads: int, whole: Callable[[int, int], int]) -> Mapping[str, Any]:  # noqa: ARG002
        """The profile."""
        return {FIELD: claim}

    def call_of(self, inputs: Any, case: Shape) -> Any:  # `gpu.inputs.Inputs`
        """The call with the data of the profile."""
        profile, layout = case.value_of(FIELD), case.value_of("layout")
        if profile == NORMAL:
            return inputs
        return PROFILES[profile](inputs, case).map(lambda tensor: stored(tensor, layout))


def _obstacles(case: Shape, profile: str) -> Iterator[str]:
    """Why a case cannot have a profile."""
    if case.dtype == "e4m3" or case.value_of("cache_dtype") != "none":
        yield "quantised data are special already"
    if profile in ("low_lse", "high_lse", "one_hot") and case.value_of("softcap"):
        yield "a soft cap keeps scores near 0"
    scale: float = case.value_of("scale")
    if profile in ("low_lse", "high_lse") and abs(scale) < MIN_SCALE:
        yield f"with the scale {scale:g}, no scores are near {LEVEL:g}"
    if profile == "one_hot" and scale * HOT_Q * HOT_KEY < HOT_SCORE:
        yield f"with the scale {scale:g}, no key has all the weight"
    if profile == "low_lse" and case.value_of("sink"):
        yield "a sink is part of the log-sum-exp"
    if profile == "equal_scores" and (case.value_of("bias") is not None or case.value_of("alibi")):
        yield "a bias makes scores differ"
    if profile == "subnormal" and _has_ds_in_fp16(case) and abs(scale) > MAX_SCALE_OF_DK / math.sqrt(case.head_dim):
        yield f"with the scale {scale:g}, dK is beyond fp16"
    if profile == "value_range" and case.dtype == "fp32" and case.value_of("sink"):
        yield "beside a large sink, weights are subnormal in float32, and V makes their rounding count"
    if profile == "value_range" and case.computes == "scores":
        yield "scores alone do not read V"


PART = DataProfile()
