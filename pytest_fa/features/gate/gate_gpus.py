"""The GPUs of a gate: which ones `--fa-gate-gpus` names."""

from __future__ import annotations

from pytest_fa.errors import UsageProblem
from pytest_fa.features.gate.plugin import ALL_GPUS
from pytest_fa.records.environment import Gpu, find_gpus


def gpus_of_gate(wanted: int | None) -> tuple[Gpu, ...]:
    """The GPUs that `--fa-gate-gpus` asks for; empty for `wanted` = 1, a gate on the first GPU or on the CPU.

    `wanted` is a number of GPUs, or `ALL_GPUS`.  Raises `UsageProblem` if there are fewer, or if they are of several
    models.
    """
    if wanted == 1:
        return ()
    visible = find_gpus()
    count = len(visible) if wanted is ALL_GPUS else wanted
    if count is None or not 1 <= count <= len(visible):
        raise UsageProblem(
            f"--fa-gate-gpus={'all' if wanted is ALL_GPUS else wanted}: {len(visible)} GPUs are visible; "
            + (f"give 1 to {len(visible)}, or all" if visible else "drop it")
        )
    gpus = tuple(visible[:count])
    if len(models := sorted({gpu.name for gpu in gpus})) > 1:
        raise UsageProblem(
            f"--fa-gate-gpus: a gate needs GPUs of one model, these are {', '.join(models)}; "
            f"choose some with CUDA_VISIBLE_DEVICES"
        )
    return gpus if count > 1 else ()
