"""Published speeds of kernels that can be measured here, as `profiles/claims.yaml` lists them.

The file is a list of sources.  Each has a list of claims:

    - by: NVIDIA, cudnn-frontend            # who published it
      source: https://github.com/...        # where
      version: cuDNN 9.19.1                 # of the library that was measured
      date: "2026-02-27"
      gpu: NVIDIA H200                      # as NVML names it
      flops: half                           # what TFLOP/s count: half, full or unknown
      claims:
        - {variant: sdpa_cudnn, case: b1h64s2048d128-bf16-kv8, tflops: 633}
        - {variant: flash_attention_3, case: b1h8s32768d64-bf16, us: 4517.09}
        - {variant: sdpa_cudnn, case: b8h16s8192d128-fp16, times_as_fast: 1.25, rival: flash_attention_3}

A forward call has 4 D operations for each pair of a query and a key, a backward call 2.5 times as many.  With `half`,
half of the pairs count under a causal mask, with `full` all pairs do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.yaml_file import load_yaml
from pytest_fa.errors import FaError, ManifestError, UsageProblem
from pytest_fa.records.ranges import PositiveUs, Rate

BACKWARD_FLOPS = 2.5  # of a backward call, for each of the forward call: five products instead of two

Convention = Literal["half", "full", "unknown"]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class ClaimProblem(FaError):
    """A file of claims that cannot be read, or a claim that is none."""


class PublishedClaim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A speed of a variant at a case without its seed: a rate, a time per call, or a ratio to another variant."""

    variant: Text
    case: Text
    tflops: Rate | None = None
    us: PositiveUs | None = None
    times_as_fast: Rate | None = None
    rival: str = ""

    @property
    def shape(self) -> Case:
        """The case.  Raises `UsageProblem` if it is none."""
        return parse_case(f"{self.case}-seed0")

    @property
    def name(self) -> str:
        """The variant and the case."""
        return f"{self.variant} at {self.case}"


class ClaimSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Claims with one source, and the settings that they share.

    `sm_mhz` is the SM clock if it was locked, in MHz.  `settings` is what else is known of the measurement.
    """

    by: Text
    source: Annotated[str, msgspec.Meta(pattern=r"^https://\S+$")]
    version: Text
    date: Annotated[str, msgspec.Meta(pattern=r"^20\d\d-\d\d-\d\d$")]
    gpu: Text
    claims: Annotated[tuple[PublishedClaim, ...], msgspec.Meta(min_length=1)]
    flops: Convention | None = None
    sm_mhz: Annotated[int, msgspec.Meta(ge=1)] | None = None
    settings: str = ""


def read_claims(path: Path) -> tuple[ClaimSource, ...]:
    """The sources of a file.  Raises `ClaimProblem` with the file, the place and what is allowed."""
    try:
        sources = msgspec.convert(load_yaml(path), tuple[ClaimSource, ...])
    except ManifestError as problem:
        raise ClaimProblem(str(problem)) from None
    except msgspec.ValidationError as problem:
        allowed = f"a source has {_keys(ClaimSource)}; a claim has {_keys(PublishedClaim)}"
        raise ClaimProblem(f"{path}: {problem}; {allowed}") from None
    for source in sources:
        for claim in source.claims:
            for said in _problems(source, claim):
                raise ClaimProblem(f"{path}: {claim.name}: {said}")
    return sources


def _keys(of: type[msgspec.Struct]) -> str:
    return ", ".join(field.encode_name for field in msgspec.structs.fields(of))


def _problems(source: ClaimSource, claim: PublishedClaim) -> Iterator[str]:
    """What is wrong with a claim whose types are correct."""
    figures = [name for name in ("tflops", "us", "times_as_fast") if getattr(claim, name) is not None]
    if len(figures) != 1:
        yield f"it has {' and '.join(figures) or 'no figure'}; give one of tflops, us and times_as_fast"
    if bool(claim.rival) != (claim.times_as_fast is not None):
        yield "rival and times_as_fast belong together: give both, or none of them"
    if claim.rival == claim.variant:
        yield "rival is the variant itself; name another variant"
    if claim.tflops is not None and source.flops is None:
        yield "tflops needs flops in its source: half, full or unknown"
    try:
        shape = claim.shape
    except UsageProblem as problem:
        yield str(problem)
        return
    if claim.tflops is not None and not _has_convention(shape):
        yield "tflops is defined without a mask and for a causal mask over as many queries as keys; give us"


def _has_convention(shape: Case) -> bool:
    """Whether all conventions say what a call of this shape counts."""
    pairs = shape.seq_q * shape.seq_k
    if shape.causal != "none":
        pairs = shape.seq_q * (shape.seq_q + 1) // 2 if shape.seq_q == shape.seq_k else 0
    return shape.visible_pairs == pairs and shape.computes != "scores"


def claimed_us(source: ClaimSource, claim: PublishedClaim) -> float | None:
    """The time of one call that a claim states, in microseconds; None for a ratio, or if nobody says what it counts."""
    if claim.tflops is None or source.flops == "unknown":
        return claim.us
    shape = claim.shape
    pairs = shape.batch * shape.heads * shape.seq_q * shape.seq_k
    share = 0.5 if shape.causal != "none" and source.flops == "half" else 1.0
    passes = BACKWARD_FLOPS if shape.computes == "gradients" else 1.0
    return passes * share * pairs * 2 * (shape.head_dim + shape.head_dim_v) / (claim.tflops * 1e6)
