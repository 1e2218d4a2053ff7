"""Quantised caches: k and v are e4m3 or int8 numbers with float32 scales, beside a q of 16 bits.

The judge's own k and v are the exact products, in float32.  A call gets numbers, of the shape and strides of k and v,
and `k_scale` and `v_scale`: one number, one for each key/value head, or one for each key of each head.  A scale is the
largest element over the largest number, rounded to bfloat16, so that its products with numbers are exact.  Where a key
is NaN, because no sequence has it, e4m3 numbers are NaN; int8 has none: its numbers are 127, and scales of single keys
are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fa.attention.dtypes import ELEMENT_BYTES
from pytest_fa.attention.mistake import Mistake
from pytest_fa.attention.pages import PART as PAGES
from pytest_fa.attention.part import CallInputs, Part, PartTensor, Shape
from pytest_fa.attention.token import Choice

if TYPE_CHECKING:
    import torch

LARGEST = {"e4m3": 448.0, "int8": 127.0}
# What shares a scale: the axes of [batch, kv_heads, seq_k, dim] over which its largest element is taken.
SHARED = {"t": (0, 1, 2, 3), "h": (0, 2, 3), "th": (3,)}
WORDS = {"k_scale": "k", "v_scale": "v"}
PLAIN = "none"
HEAD_STEP = 1.5  # between the magnitudes of adjacent heads, so that no head is right with another's scale
OUTLIERS = {"k": 32.0, "v": 20.0}  # of scales that differ
STEPS = 5  # by the seed
SCALE_BYTES = 4
LOOK = "look at the scales of the cache"


class CacheDtype(Part):
    """float32 scales: [1], [kv_heads], or [batch, kv_heads, seq_k], with pages [pages, kv_heads, page_size]."""

    name = "cache_dtype"
    summary = "keys and values quantised to 8 bits, with scales"
    tokens = (Choice("cache_dtype", tuple((f"kv_{of}_{by}", f"{of}_{by}") for of in LARGEST for by in SHARED), PLAIN),)
    rows = (
        ("`-kv_e4m3_t`", "k and v are e4m3 numbers with a scale for the whole tensor; `_h`: for each key/value head"),
        ("`-kv_int8_th`", "k and v are int8 numbers with a scale for each key of each head"),
    )
    supports = "cache_dtype"
    claims = (PLAIN, *(f"{of}_{by}" for of in LARGEST for by in SHARED))
    words = {
        "k_scale": ("k_scale", "k_scales", "k_cache_scale", "key_scale"),
        "v_scale": ("v_scale", "v_scales", "v_cache_scale", "value_scale"),
    }
    tensors = {word: PartTensor("float32", "scale", is_random=False) for word in words}

    faults = dict.fromkeys(
        (
            "cache_k_scale_ignored",
            "cache_v_scale_ignored",
            "cache_scale_twice",
            "cache_scales_exchanged",
            "cache_scale_of_next_head",
            "cache_scale_of_next_key",
            "cuda_cache_scale_ignored",
            "cuda_cache_scale_of_next_head",
            "cuda_cache_scale_of_first_key",
            "cuda_cache_int8_unsigned",
        ),
        ("max", False),
    )
    selftest_shapes = (
        "b2h6s70d64-fp16-kv3-kv_e4m3_h",
        "b2h4s70d64-fp16-causal-kv2-kv_int8_th",
        "b4h4s3d64-fp16-kv2-sk150-var1-page16-kv_e4m3_th",
    )

    # -- the case ---------------------------------------------------------------------------------------------------

    def impossible(self, case: Shape) -> str | None:
        """Scales of a cache stand beside a q of 16 bits."""
        if case.value_of("cache_dtype") == PLAIN:
            return None
        if case.dtype not in ("fp16", "bf16"):
            return f"a quantised cache is judged beside fp16 and bf16, not {case.dtype}"
        return "scores alone have no v; drop -kv" if case.computes == "scores" else None

    def fields_for(self, dtype: str) -> Mapping[str, Any]:
        """Plain k and v for other dtypes."""
        return {} if dtype in ("fp16", "bf16") else {"cache_dtype": PLAIN}

    def size_bytes(self, case: Shape) -> int:
        """The scales, less what numbers of a byte save."""
        value = case.value_of("cache_dtype")
        if value == PLAIN:
            return 0
        keys = case.value_of("kv_heads") * sum(each.seq_k for each in case.sequences)
        saved: int = (ELEMENT_BYTES[case.dtype] - 1) * keys * (case.head_dim + case.value_of("head_dim_v"))
        scales: int = {"t": 1, "h": case.value_of("kv_heads"), "th": keys}[value.split("_")[1]]
        return 2 * SCALE_BYTES * scales - saved

    def further_touched_bytes(self, case: Shape) -> int:
        """The same."""
        return self.size_bytes(case)

    def in_words(self, case: Shape) -> str:
        """The dtype, for the title of a picture."""
        value = case.value_of("cache_dtype")
        return "" if value == PLAIN else f", {value.split('_')[0]} cache"

    # -- the manifest -----------------------------------------------------------------------------------------------

    @property
    def varied(self) -> tuple[Any, ...]:
        """No scales, one for each head, and one for each key."""
        return (PLAIN, "e4m3_h", "int8_th")

    def claim_words(self, claim: Any) -> str:  # one of `claims`
        """The cache that was not judged."""
        return "a cache that is not quantised" if claim == PLAIN else f"a cache of {claim}"

    # -- the call ---------------------------------------------------------------------------------------------------

    def plain_argument(self, word: str) -> None:  # noqa: ARG002  # one of both
        """No scale."""
        return

    def is_passed(self, word: str, case: Shape) -> bool:  # noqa: ARG002  # one of both
        """Whether a call on a case has a tensor that `call_placed` makes."""
        return bool(case.value_of("cache_dtype") != PLAIN)

    def call_of(self, inputs: Any, case: Shape) -> Any:  # `gpu.inputs.Inputs`
        """The call with heads of k and v of different sizes, one of zeros, and an outlier that the seed changes."""
        value = case.value_of("cache_dtype")
        if value == PLAIN:
            return inputs
        grown = 1 + case.value_of("seed") % STEPS / STEPS
        k, v = (_with_special_heads(getattr(inputs, name).float(), grown * OUTLIERS[name]) for name in "kv")
        return inputs._replace(k=k, v=v, cache_dtype=value)

    def call_given(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The values that numbers and scales represent; padding, which is NaN by now, does not count."""
        return represented(inputs)

    def call_represented(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with products of numbers and scales."""
        return represented(inputs)

    def call_placed(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with numbers and scales."""
        if not inputs.cache_dtype or "k_scale" in inputs.extra:
            return inputs
        (k, of_k), (v, of_v) = (_quantised(tensor, inputs) for tensor in (inputs.k, inputs.v))
        return inputs._replace(k=k, v=v, extra={**inputs.extra, "k_scale": of_k, "v_scale": of_v})

    def call_dense(self, inputs: Any) -> Any:  # `gpu.inputs.Inputs`
        """The call with the products."""
        if not inputs.cache_dtype or "k_scale" not in inputs.extra:
            return inputs
        changed = {name: _product(getattr(inputs, name), inputs.extra[word]) for word, name in WORDS.items()}
        extra = {name: tensor for name, tensor in inputs.extra.items() if name not in WORDS}
        return inputs._replace(**changed, extra=extra)

    def made_shape(self, word: str, case: Shape) -> tuple[int, int, int, int]:  # noqa: ARG002  # one of both
        """[batch or 1, kv_heads or 1, seq_k or 1, 1]; with pages [pages or 1, kv_heads or 1, page_size or 1, 1]."""
        cache, heads = PAGES.cache_of(case), case.value_of("kv_heads")
        sizes = (cache.pages, heads, cache.page_size) if cache else (case.batch, heads, case.seq_k)
        return *scale_sizes(case.value_of("cache_dtype").split("_")[1], *sizes), 1

    def of_head(self, word: str, tensor: torch.Tensor, batch: int, kv_head: int, cache: Any) -> torch.Tensor:  # noqa: ARG002
        """The scales of one head of one batch, or of one head of a cache in pages."""
        if tensor.dim() == 1:
            return tensor if len(tensor) == 1 else tensor[kv_head : kv_head + 1]
        rows = slice(None) if cache is not None else slice(batch, batch + 1)
        return tensor[rows, kv_head : kv_head + 1]

    # -- the judge --------------------------------------------------------------------------------------------------

    def mistakes(self, inputs: CallInputs) -> Iterator[Mistake]:
        """Scales that are ignored, applied twice, or those of others."""
        value = getattr(inputs, "cache_dtype", "")
        if not value:
            return
        changes = {"{} is ignored": lambda scale: scale * 0 + 1, "{} is applied twice": lambda scale: scale * scale}
        if not value.endswith("_t"):
            changes["{} of each head is that of the next one"] = lambda scale: scale.roll(
                -1, 0 if scale.dim() == 1 else 1
            )
        if value.endswith("_th"):
            changes["{} of each key is that of the next one"] = lambda scale: scale.roll(-1, 2)
        for words, change in changes.items():
            for chosen in (("k_scale",), ("v_scale",), ("k_scale", "v_scale")):
                yield Mistake(f"{words.format(' and '.join(chosen))}: {LOOK}", change=_misread(chosen, change))
        yield Mistake(f"k and v have each other's scales: {LOOK}", change=_exchanged)


def represented(inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """The call with the values that its k and v have as numbers and scales; itself without a quantised cache."""
    return PART.call_dense(PART.call_placed(inputs))


def _quantised(tensor: torch.Tensor, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of [batch, kv_heads, seq_k, dim], with its strides, and their scales."""
    of, by = inputs.cache_dtype.split("_")
    single = tensor
    for axis, stride in enumerate(tensor.stride()):
        single = single.narrow(axis, 0, 1) if stride == 0 and tensor.shape[axis] > 1 else single
    known = single.nan_to_num(0.0)
    axes = SHARED[by]
    sizes = [1 if axis in axes else size for axis, size in enumerate(known.shape)]
    largest = known.abs().amax(axes, keepdim=True) if known.numel() else known.new_zeros(sizes)
    scale = (largest / LARGEST[of]).bfloat16().float()  # [1 or batch, 1 or kv_heads, 1 or seq_k, 1]
    ratio = (single / scale.where(scale > 0, 1.0)).clamp(-LARGEST[of], LARGEST[of])
    is_nan = single.isnan()
    if of == "int8":
        numbers = ratio.nan_to_num(LARGEST[of]).round().char()
        scale = scale.masked_fill(is_nan.any(3, keepdim=True), float("nan")) if by == "th" else scale
    else:
        numbers = inputs.e4m3_of(ratio)
    whole = _with_strides(numbers, single).expand(tensor.shape)
    return whole, _given(scale.expand(*scale_sizes(by, *tensor.shape[:3]), 1), by)


def scale_sizes(by: str, batch: int, heads: int, keys: int) -> tuple[int, int, int]:
    """The sizes of the scales of [batch, kv_heads, seq_k, dim]; 1 along an axis on which they do not depend."""
    return {"t": (1, 1, 1), "h": (1, heads, 1), "th": (batch, heads, keys)}[by]


def _given(scale: torch.Tensor, by: str) -> torch.Tensor:
    """The scales as a call gets them: [1], [kv_heads], or [batch, kv_heads, seq_k]."""
    return scale[..., 0].contiguous() if by == "th" else scale.flatten().contiguous()


def _with_strides(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The numbers in memory with the strides of another tensor; gaps have no numbers that are meant."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(like.shape, like.stride(), strict=True))
    storage = numbers.new_empty(max(size, 1))
    placed: torch.Tensor = storage.as_strided(like.shape, like.stride())
    return placed.copy_(numbers)


def _product(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 products of numbers, [batch, kv_heads, seq_k, dim], and their scales."""
    factor = scale[..., None] if scale.dim() > 1 else scale.view(1, -1, 1, 1)
    product: torch.Tensor = numbers.float() * factor
    return product


def _with_special_heads(tensor: torch.Tensor, outlier: float) -> torch.Tensor:
    """A copy whose heads have different sizes, the last one of several zero, with an outlier in the first one."""
    heads, keys = tensor.shape[1:3]
    factors = tensor.new_tensor([HEAD_STEP ** (head % 4) for head in range(heads)])
    copy: torch.Tensor = tensor * factors.view(1, -1, 1, 1)
    if heads > 1:
        copy[:, -1] = 0
    if keys:
        copy[:, 0, keys // 2, 0] = outlier
    return copy


def _misread(words: tuple[str, ...], change: Any) -> Any:  # a function of scales, and one of `gpu.inputs.Inputs`
    """What a call means to a kernel that has other scales."""

    def changed(inputs: Any) -> Any:
        placed = PART.call_placed(inputs)
        other = {word: change(placed.extra[word]) for word in words}
        return PART.call_dense(placed._replace(extra={**placed.extra, **other}))

    return changed


def _exchanged(inputs: Any) -> Any:  # `gpu.inputs.Inputs`
    """What a call means to a kernel that takes the scales of k for those of v."""
    placed = PART.call_placed(inputs)
    of_k, of_v = (placed.extra[word] for word in WORDS)
    return PART.call_dense(placed._replace(extra={**placed.extra, "k_scale": of_v, "v_scale": of_k}))


PART = CacheDtype()
