"""`run_gate` on the CPU: one process of a gate, its blocks, and the order of the arms in its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.judge.truth_store import TruthStore
from pytest_fa.measure.arm_orders import recorded_order, setup_order
from pytest_fa.measure.arm_timer import ArmTimer
from pytest_fa.run.inputs import make_inputs
from pytest_fa.worker import gate_process
from pytest_fa.worker.gate_process import run_gate
from pytest_fa.worker.jobs import Arm, ArmPair, GateJob, GateResult, decode_answer, encode
from tests.factories import PYTHON_MANIFEST, PYTHON_SOURCE, WriteVariant

SEED = 1234
CASE = parse_case("b1h2s64d64-fp16-seed0")
ALLOCATED: list[str] = []


class RecordingTimer(ArmTimer):
    """An arm that takes 2 us, or 3 us in the role of the candidate, and notes when its buffers were allocated."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.letter = "ABC"[setup_order(3, SEED)[len(ALLOCATED)]]
        ALLOCATED.append(self.letter)

    def sample_us(self) -> float:
        """Call the kernel on every set of buffers, and return the prepared time."""
        super().sample_us()
        self.samples_us[-1] = 3.0 if self.letter == "A" else 2.0
        return self.samples_us[-1]


@pytest.fixture
def result(write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateResult:
    """The result of one process whose candidate and baseline are the same variant."""
    ALLOCATED.clear()
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    monkeypatch.setattr(gate_process, "ArmTimer", RecordingTimer)
    monkeypatch.setattr("pytest_fa.measure.arm_timer.CPU_SAMPLE_US", 200.0)
    arm = Arm(variant, None)
    return run_gate(GateJob((ArmPair(CASE, arm, arm),), "cpu", "same_precision", SEED))


@pytest.mark.parametrize("changed", ["candidate", "baseline"])
def test_a_changed_library_ends_the_process(write_variant: WriteVariant, tmp_path: Path, changed: str) -> None:
    """If the library of one arm is not the one of its build, nothing is measured, and the outcome says so."""
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    library = tmp_path / "kernel.so"
    library.write_bytes(b"a library")
    arms = {name: Arm(variant, None) for name in ("candidate", "baseline")}
    arms[changed] = Arm(variant, str(library), {"kernel.so": "0" * 64})
    result = run_gate(GateJob((ArmPair(CASE, **arms),), "cpu", "same_precision", SEED))
    assert (result.outcome, result.arm_pairs) == ("build_changed", ())
    assert result.message.startswith(f"{library} has changed since it was built")


@pytest.mark.parametrize("name", ["make_inputs", "truth_of"])
def test_a_full_gpu_ends_no_gate_that_the_store_filled(
    write_variant: WriteVariant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Inputs and truth of a gate get the memory that the truths of earlier jobs have filled."""
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": PYTHON_SOURCE})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    store, real = TruthStore(), getattr(gate_process, name)
    store.truth_of("attention", make_inputs(CASE, torch.device("cpu")), (), "same_precision")

    def needs_memory(*arguments: object) -> object:
        if store._kept:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(gate_process, name, needs_memory)
    monkeypatch.setattr("pytest_fa.measure.arm_timer.CPU_SAMPLE_US", 200.0)
    arm = Arm(variant, None)
    result = run_gate(GateJob((ArmPair(CASE, arm, arm),), "cpu", "same_precision", SEED), truths=store)
    assert (result.outcome, len(store._kept)) == ("ok", 0), result.message


def test_the_result_has_the_order_that_was_used(result: GateResult) -> None:
    """Buffers are allocated in the recorded order; the orders are those of the job's seed, and survive as JSON."""
    (pair,) = result.arm_pairs
    assert pair.order is not None
    assert pair.order == recorded_order(3, SEED)
    assert pair.order.setup == "".join(ALLOCATED)
    assert decode_answer(encode(result)) == result


def test_each_block_has_one_value(result: GateResult) -> None:
    """Six blocks have the log-ratio of the prepared times, and the A/A control has 0."""
    (pair,) = result.arm_pairs
    assert pair.blocks == pytest.approx([0.405465] * 6, abs=1e-6)
    assert pair.control == pytest.approx([0.0] * 6, abs=1e-12)
    assert (pair.candidate_us, pair.baseline_us, pair.dropped) == (3.0, 2.0, 0)
