"""The named suites of cases."""

from __future__ import annotations

from pytest_fa.catalog.case import Case, parse_case

TARGET_SHAPE = "b1h8s512d64-fp16"


def _seeded(shapes: tuple[str, ...], seeds: int) -> tuple[Case, ...]:
    return tuple(parse_case(f"{shape}-seed{seed}") for shape in shapes for seed in range(seeds))


SMOKE_SHAPES = ("b1h2s64d64-fp16", "b1h2s65d64-fp16-causal", "b1h2s64d64-bf16")

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

# With 16 heads, there are enough tiles for every SM of a large GPU.  The last two shapes have so few tiles that their
# number matters.
LONG_SHAPES = (
    *(
        f"{size}d{head_dim}-fp16{mask}"
        for size in ("b4h16s2048", "b2h16s4096", "b1h16s8192", "b1h16s16384")
        for head_dim in (64, 128)
        for mask in ("", "-causal")
    ),
    "b1h8s2048d64-fp16",
    "b1h8s4096d64-fp16",
)

SUITES: dict[str, tuple[Case, ...]] = {
    "smoke": _seeded(SMOKE_SHAPES, 1),
    "history": _seeded(HISTORY_SHAPES, 3),
    "mission": _seeded((TARGET_SHAPE,), 100),
    "edge": _seeded(EDGE_SHAPES, 1),
    "long": _seeded(LONG_SHAPES, 1),
}
DEFAULT_SUITE = "history"
