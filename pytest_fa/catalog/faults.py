"""Which check must find which wrong kernel, and on what each is tried.

A fault that only one check can find proves that this check is needed: `only`.  The kernels themselves are variants of
`role: wrong` under `kernels/`; twins are right, and no check may find anything in them.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.properties import PROPERTIES

# What can find a kernel wrong, beside the properties.
CHECKS = (
    "output",
    "inputs",
    "guard bands",
    "finite",
    "max",
    "rms",
    "row rms",
    "gain",
    "repeats",
    "delegation",
    "timed outputs",
    "exception",
    "launch",
    "device error",
    "isolation",
    "watchdog",
    "gate",
    *PROPERTIES,
)
ON_GPU_ONLY = ("launch", "device error", "gate")

# Every fault is tried on these: two heads and a tail; a mask and grouped heads; bf16 in the other layout; many keys.
CASES = (
    "b1h2s113d64-fp16-seed0",
    "b2h4s77d64-fp16-causal-kv2-seed0",
    "b1h2s65d64-bf16-bshd-seed0",
    "b1h1s520d64-fp16-seed0",
)
REPEATS = 30


class Fault(NamedTuple):
    """A check that must find it, and whether no other may.

    `besides` names what also finds it on a GPU: a Python fault that looks at its data cannot be captured there.  `twin`
    is the right kernel that a slower one is gated against.
    """

    caught_by: str
    only: bool = False
    besides: tuple[str, ...] = ()
    twin: str = ""


FAULTS: dict[str, Fault] = {
    # arithmetic
    "wrong_scale": Fault("gain"),
    "gain_only": Fault("gain", only=True),
    "one_element": Fault("max", only=True),
    "noise": Fault("rms", only=True),
    "one_row": Fault("row rms", only=True),
    "no_rescale": Fault("max"),
    "no_maximum": Fault("hard_data"),
    "clamped_scores": Fault("hard_data", only=True),
    "maximum_before_scale": Fault("negative_scale", only=True),
    "scale_or_default": Fault("zero_scale", only=True),
    # masks, tiles, heads
    "mask_off_by_one": Fault("max"),
    "last_key_dropped": Fault("gain"),
    "tail_dropped": Fault("max"),
    "heads_modulo": Fault("max"),
    "one_maximum": Fault("head_independence", only=True),
    "leaks_next_head": Fault("contained_nan", only=True),
    # memory
    "unwritten_tail": Fault("finite"),
    "strides_ignored": Fault("max"),
    "bf16_as_fp16": Fault("max"),
    "changes_input": Fault("inputs", only=True),
    "writes_past_end": Fault("guard bands", only=True),
    "reads_past_end": Fault("finite"),
    "assumes_dense_rows": Fault("padded_rows", only=True),
    "takes_zero_stride_for_none": Fault("expanded_heads", only=True),
    "aligns_base": Fault("offset_pointers", only=True),
    "other_dtype": Fault("output", only=True),
    "nan_when_long": Fault("finite", only=True),
    # state
    "kept_by_address": Fault("new_data"),
    "kept_by_version": Fault("new_data"),
    "super_batch": Fault("new_data"),
    "kept_up_to_sign": Fault("new_data", only=True, besides=("graph_capture",)),
    "kept_by_scores": Fault("timed outputs", only=True, besides=("graph_capture",)),
    "shape_kept_by_address": Fault("new_shape", only=True),
    "flickers": Fault("repeats", only=True),
    "calls_sdpa": Fault("delegation", only=True),
    # endings
    "raises": Fault("exception", only=True),
    "exits": Fault("isolation", only=True),
    "sleeps": Fault("watchdog", only=True),
    # on a GPU
    "cuda_wrong_stream": Fault("streams", only=True),
    "cuda_no_wait": Fault("streams"),
    "cuda_shared_scratch": Fault("streams", only=True),
    "cuda_waits_later": Fault("graph_capture", only=True),
    "cuda_sets_up_late": Fault("first_call_in_capture", only=True),
    "cuda_short_offsets": Fault("far_offsets", only=True),
    "cuda_short_heads": Fault("many_heads", only=True),
    "cuda_reads_smem": Fault("finite"),
    "cuda_reads_workspace": Fault("finite"),
    "cuda_race_in_tile": Fault("finite"),
    "cuda_race_in_sum": Fault("repeats", only=True),
    "cuda_writes_past_end": Fault("guard bands", only=True),
    "cuda_reads_past_end": Fault("finite"),
    "cuda_illegal_address": Fault("device error", only=True),
    "cuda_traps": Fault("device error", only=True),
    "cuda_fails_silently": Fault("finite"),
    "cuda_does_not_launch": Fault("launch", only=True),
    "cuda_endless": Fault("watchdog", only=True),
    "cuda_set_up_once": Fault("other_device", only=True),
    "cuda_slower": Fault("gate", only=True, twin="cuda_twin"),
}
TWINS = ("twin_right", "twin_right_allocates", "twin_right_may_differ", "cuda_twin", "cuda_twin_workspace")


def cases() -> tuple[Case, ...]:
    """The cases that every fault is tried on."""
    return tuple(parse_case(each) for each in CASES)


def disappointment(name: str, caught_by: list[str]) -> str:
    """What is wrong with a judge that found just this; empty where it found what it must."""
    found = ", ".join(caught_by) or "nothing"
    fault = FAULTS.get(name)
    if fault is None:
        return f"a right kernel was blamed by {found}" if caught_by else ""
    if fault.caught_by not in caught_by:
        return f"it must be found by {fault.caught_by}; it was found by {found}"
    if fault.only and set(caught_by) - {fault.caught_by, *fault.besides}:
        return f"only {fault.caught_by} may find it; it was found by {found}"
    return ""
