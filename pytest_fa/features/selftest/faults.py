"""The self-test's wrong kernels: the check that must detect each one, and the cases it is tried on.

`only` marks a fault that no other check detects, which proves that its check is needed.  The wrong kernels are variants
with `role: wrong` in folders beside this module.  Twins are correct kernels that are written alike; no check may reject
them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pytest_fa.attention import parts
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.properties import PROPERTIES

# All checks that can reject a kernel, properties included.
CHECKS = (
    "output",
    "inputs",
    "guard bands",
    "finite",
    "max",
    "rms",
    "row rms",
    "gain",
    "rows past",
    *parts.outputs(),
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

# The cases of correct twins, and of faults whose part of attention has no cases: two heads and a tail, in fp16 and
# fp32; the cases of all parts; 520 keys.
CASES = (
    "b1h2s113d64-fp16-seed0",
    *(f"{shape}-seed0" for part in parts.PARTS for shape in part.selftest_shapes),
    "b1h1s520d64-fp16-seed0",
    "b1h2s113d64-fp32-seed0",
)


class Fault(NamedTuple):
    """The check that must detect a wrong kernel, and whether no other check may.

    `besides` names checks that may also detect it.  On a GPU, Python code that reads its data on the host cannot be
    captured in a CUDA graph.  On a slow machine a sample is a single call, at the addresses of the sample before it.
    `twin` is the correct kernel that a slower one is gated against.  `shapes` are the cases of the part that it is in.
    """

    caught_by: str
    only: bool = False
    besides: tuple[str, ...] = ()
    twin: str = ""
    shapes: tuple[str, ...] = ()

    @property
    def shows_in_shapes(self) -> bool:
        """Whether the cases of its part are all that it is tried on."""
        return bool(self.shapes) and self.caught_by not in PROPERTIES

    def is_settled_by(self, caught: Collection[str]) -> bool:
        """Whether further cases of its part can change nothing, after these checks."""
        return self.shows_in_shapes and not self.only and self.caught_by in caught


FAULTS: dict[str, Fault] = {
    **{
        name: Fault(check, only=only, shapes=part.fault_shapes or part.selftest_shapes)
        for part in parts.PARTS
        for name, (check, only) in part.faults.items()
    },
    # arithmetic
    "wrong_scale": Fault("gain"),
    "gain_only": Fault("gain", only=True),
    "one_element": Fault("max", only=True),
    "noise": Fault("rms", only=True),
    "one_row": Fault("row rms", only=True),
    "undeclared_tf32": Fault("max"),
    "no_rescale": Fault("max"),
    "no_maximum": Fault("hard_data"),
    "clamped_scores": Fault("hard_data", only=True),
    "max_starts_finite": Fault("hard_data", only=True),
    "hides_nan": Fault("contained_nan", only=True),
    "maximum_before_scale": Fault("negative_scale", only=True),
    "scale_or_default": Fault("zero_scale", only=True),
    # tiles, heads
    "last_key_dropped": Fault("gain"),
    "tail_dropped": Fault("max"),
    "one_maximum": Fault("head_independence", only=True),
    "leaks_next_head": Fault("contained_nan", only=True),
    # memory
    "unwritten_tail": Fault("finite"),
    "bf16_as_fp16": Fault("max"),
    "changes_input": Fault("inputs", only=True),
    "writes_past_end": Fault("guard bands", only=True),
    "reads_past_end": Fault("finite"),
    "takes_equal_strides_for_dense": Fault("padded_rows", only=True, besides=("unaligned_rows", "far_offsets")),
    "takes_strides_of_k": Fault("different_strides", only=True),
    "aligns_rows": Fault("unaligned_rows", only=True),
    "takes_zero_stride_for_none": Fault("expanded_heads", only=True),
    "takes_zero_batch_stride_for_none": Fault("expanded_batch", only=True),
    "aligns_base": Fault("offset_pointers", only=True),
    "other_dtype": Fault("output", only=True),
    "nan_when_long": Fault("finite", only=True),
    # state
    "kept_by_address": Fault("new_data"),
    "kept_by_version": Fault("new_data"),
    "super_batch": Fault("new_data"),
    "kept_up_to_sign": Fault("new_data", only=True, besides=("graph_capture", "timed outputs")),
    "kept_when_moved": Fault("timed outputs", only=True, besides=("graph_capture",)),
    "shape_kept_by_address": Fault("new_shape", only=True),
    "flickers": Fault("repeats", only=True),
    "calls_sdpa": Fault("delegation", only=True),
    "bits_by_batches": Fault("batch_invariance", only=True),
    "bits_by_place": Fault("position_invariance", only=True),
    "bits_by_queries": Fault("chunk_invariance", only=True),
    "bits_by_splits": Fault("split_invariance", only=True),
    "takes_bits_of_k": Fault("malformed_arguments", only=True),
    "exits_for_other_rank": Fault("malformed_arguments", only=True),
    "wraps_pages": Fault("malformed_arguments", only=True),
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
    "cuda_short_row_offsets": Fault("far_offsets", only=True),
    "cuda_short_heads": Fault("many_heads", only=True, besides=("many_batches",)),
    "cuda_short_batches": Fault("many_batches", only=True),
    "cuda_short_rows": Fault("many_queries", only=True),
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
TWINS = (
    "twin_right",
    "twin_right_allocates",
    "twin_right_may_differ",
    "twin_right_float32",
    "twin_right_in_any_company",
    "twin_right_that_checks",
    *(twin for part in parts.PARTS for twin in part.twins),
    "twin_right_parts",
    "cuda_twin",
    "cuda_twin_workspace",
)


def cases_of(name: str) -> tuple[Case, ...]:
    """Return the cases that a kernel is tried on."""
    fault = FAULTS.get(name)
    own = (
        fault.shapes if fault else [shape for part in parts.PARTS if name in part.twins for shape in part.fault_shapes]
    )
    ids = (*(() if fault and fault.shows_in_shapes else CASES), *(f"{shape}-seed0" for shape in own))
    return tuple(parse_case(case_id) for case_id in dict.fromkeys(ids))


def detection_problem(name: str, caught_by: list[str]) -> str:
    """Return why the checks in `caught_by` are not those that must reject the kernel `name`; empty if they are."""
    rejecting = ", ".join(caught_by) or "no check"
    fault = FAULTS.get(name)
    if fault is None:
        return f"a correct kernel was rejected by {rejecting}" if caught_by else ""
    if fault.caught_by not in caught_by:
        return f"{fault.caught_by} must reject this kernel; it was rejected by {rejecting}"
    if fault.only and set(caught_by) - {fault.caught_by, *fault.besides}:
        return f"only {fault.caught_by} may reject this kernel; it was rejected by {rejecting}"
    return ""
