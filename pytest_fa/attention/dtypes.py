"""The dtypes of q, k and v."""

from __future__ import annotations

from typing import Literal, NamedTuple

Dtype = Literal["fp16", "bf16", "fp32", "e4m3"]


class NumberFormat(NamedTuple):
    """What the rest of the package knows of a dtype: its size, its code in the C interface, and torch's name."""

    element_bytes: int
    code: int
    torch_name: str


FORMATS: dict[str, NumberFormat] = {
    "fp16": NumberFormat(2, 0, "float16"),
    "bf16": NumberFormat(2, 1, "bfloat16"),
    "fp32": NumberFormat(4, 2, "float32"),
    "e4m3": NumberFormat(1, 3, "float8_e4m3fn"),
}
# What else libraries call them, besides torch's names.
OTHER_NAMES = {
    "half": "fp16",
    "f16": "fp16",
    "bf": "bf16",
    "float": "fp32",
    "f32": "fp32",
    "fp8": "e4m3",
    "float8": "e4m3",
    "fp8_e4m3": "e4m3",
    "e4m3fn": "e4m3",
    "float8_e4m3": "e4m3",
}
DTYPES: tuple[str, ...] = tuple(FORMATS)
ELEMENT_BYTES: dict[str, int] = {name: each.element_bytes for name, each in FORMATS.items()}


def dtype_called(name: str) -> str | None:
    """The dtype that `float16`, `torch.half` or the like stands for; None for a name of no dtype here."""
    text = name.lower().removeprefix("torch.")
    of_torch = {each.torch_name: dtype for dtype, each in FORMATS.items()}
    return text if text in FORMATS else of_torch.get(text, OTHER_NAMES.get(text))
