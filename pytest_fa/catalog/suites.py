"""The named suites of cases."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from pytest_fa.attention import parts
from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.catalog.case import Case, parse_case, plain_case
from pytest_fa.catalog.factors import Factors

TARGET_SHAPE = "b1h8s512d64-fp16"


def _seeded(shapes: tuple[str, ...], seeds: int) -> tuple[Case, ...]:
    cases = (parse_case(f"{shape}-seed0") for shape in shapes)
    return tuple(case.with_seed(seed) for case in cases for seed in range(seeds))


SMOKE_SHAPES = ("b1h2s64d64-fp16", "b1h2s65d64-fp16-causal", "b1h2s64d64-bf16", "b1h2s64d64-fp32")

HISTORY_SHAPES = ("b1h2s64d64-fp16", "b1h4s128d64-fp16", TARGET_SHAPE, "b2h2s64d64-fp16")

# Shapes on which tail, mask and stride bugs show: one query, prime lengths, lengths within 1 of a tile edge (32, 64,
# 128), more queries than keys and fewer, no keys, grouped heads, the layout bshd, and each mask.
EDGE_SHAPES = (
    "b1h2s1d64-fp16",
    "b1h2s17d64-fp16",
    "b2h3s31d64-fp16",
    "b1h2s33d64-bf16",
    "b1h2s63d64-fp16-causal",
    "b1h2s65d64-bf16-causal",
    "b1h2s113d64-fp16",
    "b1h2s113d64-fp16-sk203",
    "b1h2s113d64-bf16-causal-sk203",
    "b1h2s127d64-fp16",
    "b1h2s129d64-fp16-causal",
    "b1h2s203d64-fp16-causal-sk113",
    "b1h2s203d64-fp16-causal_br-sk113",
    "b1h2s113d64-fp16-causal_br-sk203",
    "b1h2s64d64-fp16-sk0",
    "b1h2s64d64-fp16-sk1",
    "b1h2s1d64-fp16-sk1023",
    "b1h2s17d64-fp16-sk65537",
    "b1h8s77d64-fp16-kv2",
    "b2h4s77d64-bf16-causal-kv1",
    "b2h3s77d64-fp16-bshd",
    "b1h2s1023d64-fp16",
    "b1h2s1023d64-bf16-causal",
)

# With 16 heads, there are enough tiles for every SM of a large GPU.  The last four shapes have so few tiles that their
# number matters.
LONG_SHAPES = (
    *(
        f"{size}d{head_dim}-fp16{mask}"
        for size in ("b4h16s2048", "b2h16s4096", "b1h16s8192", "b1h16s16384")
        for head_dim in (64, 128)
        for mask in ("", "-causal")
    ),
    *(f"b2h16s4096d{head_dim}-bf16{mask}" for head_dim in (64, 128) for mask in ("", "-causal")),
    *(f"b1h8s{length}d64-fp16{mask}" for length in (2048, 4096) for mask in ("", "-causal")),
)

# Few queries and many keys.  The first nine shapes are those of the comparison in kernels/README.md; up to 4096 keys of
# one batch fit into L2.  The others have odd lengths, both masks of several queries, and groups of 1, 4 and 8 heads.
DECODE_SHAPES = (
    "b1h32s1d128-fp16-kv8-sk1024",
    "b1h32s1d128-fp16-kv8-sk4096",
    "b1h32s1d128-fp16-kv8-sk32768",
    "b16h32s1d128-fp16-kv8-sk4096",
    "b32h32s1d128-fp16-kv8-sk4096",
    "b64h32s1d128-fp16-kv8-sk8192",
    "b1h32s4d128-fp16-kv8-sk4096",
    "b8h32s8d128-fp16-kv8-sk4096",
    "b1h8s1d64-fp16-sk4096",
    "b1h32s4d128-fp16-causal_br-kv8-sk4096",
    "b8h32s8d128-fp16-causal_br-kv8-sk4096",
    "b1h32s1d128-bf16-kv8-sk1000",
    "b1h32s1d128-fp16-kv4-sk2049",
    "b2h8s2d64-fp16-causal_br-sk1537",
    "b3h24s3d128-bf16-causal_br-kv3-sk5003",
    "b1h8s5d128-fp16-causal_br-kv1-sk16381",
    "b2h16s7d64-bf16-causal_br-kv4-sk8191-bshd",
    "b1h64s8d64-fp16-causal_br-kv8-sk10007",
    "b1h8s1d128-fp16-kv1-sk131072",
    "b1h4s1d64-bf16-kv1-sk131071",
)

# Calls of served models: new tokens and chunks of prompts, of sequences with different numbers of keys, some in pages,
# some with new keys that the call appends.
# The models are like Llama (32 query and 8 key heads, head_dim 128), Qwen (64 and 8, 128) and gpt-oss (64 and 8, 64,
# with sinks, and with a window of 128 keys in every other layer).  Truth of a case takes less than 40 GB.
SERVING_SHAPES = (
    "b1h32s1d128-bf16-kv8-sk131072",
    "b16h32s1d128-fp16-kv8-sk4096-var4-page16",
    "b64h32s1d128-bf16-kv8-sk8192-var4-page64",
    "b8h32s512d128-bf16-causal_br-kv8-sk4096-var4",
    "b1h64s1d128-bf16-kv8-sk32768",
    "b32h64s1d128-fp16-kv8-sk1024-var4-page16",
    "b2h64s1d128-bf16-kv8-sk65536-var4",
    "b2h64s1024d128-bf16-causal_br-kv8-sk8192-var4",
    "b1h64s1d64-bf16-win127_0-kv8-sk131072-sink",
    "b64h64s1d64-bf16-win127_0-kv8-sk8192-var4-page16-sink",
    "b16h64s1d64-bf16-kv8-sk32768-var4-page64hnd-sink",
    "b4h64s512d64-bf16-win127_0-kv8-sk4096-var4-sink",
    "b32h32s1d128-bf16-kv8-sk4096-var4-page16-append",
    "b16h32s4d128-fp16-causal_br-kv8-sk4096-var4-append",
    "b16h64s1d64-bf16-win127_0-kv8-sk8192-var4-page64-append-sink",
)

# The shapes of each suite, and its number of seeds.  Parts of attention add the shapes that show their mistakes.
_OWN: dict[str, tuple[tuple[str, ...], int]] = {
    "smoke": (SMOKE_SHAPES, 1),
    "history": (HISTORY_SHAPES, 3),
    "mission": ((TARGET_SHAPE,), 100),
    "edge": (EDGE_SHAPES, 1),
    "long": (LONG_SHAPES, 1),
    "decode": (DECODE_SHAPES, 1),
    "serving": (SERVING_SHAPES, 1),
    "fp8": ((), 1),
    "ragged": ((), 1),
    "data": ((), 1),
}
# The head_dims of the suite `modifiers`: multiples of 64, of 32, of 16 and of 8.
HEAD_DIMS = (64, 128, 80, 96, 192, 256)
MODIFIERS = "modifiers"


def factors_of_modifiers() -> Factors:
    """What differs between the cases of the suite `modifiers`: dtype, head_dim, and all parts of attention."""
    values = {part: part.varied for part in parts.PARTS if len(part.varied) > 1}
    built = itertools.product(DTYPES, HEAD_DIMS)
    return Factors(plain_case(2, 4, 193, 64, "fp16"), built, values)  # type: ignore[arg-type]  # a dtype is one of them


def modifiers() -> tuple[Case, ...]:
    """A few cases that have any two values which one case can have."""
    factors, used, cases = factors_of_modifiers(), Counter[object](), list[Case]()
    for claim in factors.claims:
        cases.append(claim.applied_to(factors.plain, used))
        used.update(claim.placed)
    return tuple(cases)


class _Suites(Mapping[str, tuple[Case, ...]]):
    """The cases of each suite, which are made when they are needed."""

    def __getitem__(self, name: str) -> tuple[Case, ...]:
        if name not in self:
            raise KeyError(name)
        return _cases_of(name)

    def __contains__(self, name: object) -> bool:
        return name in _OWN or name == MODIFIERS

    def __iter__(self) -> Iterator[str]:
        return iter((*_OWN, MODIFIERS))

    def __len__(self) -> int:
        return len(_OWN) + 1


@functools.cache
def _cases_of(name: str) -> tuple[Case, ...]:
    if name == MODIFIERS:
        return modifiers()
    shapes, seeds = _OWN[name]
    return _seeded((*shapes, *parts.shapes_of(name)), seeds)


SUITES = _Suites()
DEFAULT_SUITE = "history"
