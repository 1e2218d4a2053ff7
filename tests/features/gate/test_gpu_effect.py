"""A gate on several GPUs: what its samples are, how often it is wrong, and on which GPUs its processes run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.errors import UsageProblem
from pytest_fa.features.bundle.recompute import contradictions
from pytest_fa.features.gate import gpu_workers
from pytest_fa.features.gate.decision import ANALYSES, CONFIDENCE, MIN_SD_SHARE, analyse
from pytest_fa.features.gate.gate import GateQuestion, decide_gate, gate_question
from pytest_fa.features.gate.gate_gpus import gpus_of_gate
from pytest_fa.features.gate.gate_lines import gate_lines
from pytest_fa.features.gate.gated import Gate
from pytest_fa.features.gate.gpu_effect import detectable_on, gpu_sd, independent_samples, process_sd
from pytest_fa.features.gate.intervals import PROCESS_SD, detectable_effect
from pytest_fa.features.gate.plugin import ALL_GPUS, GateOptions
from pytest_fa.host.client import Workers
from pytest_fa.records.environment import Gpu
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.paired import PairSamples
from pytest_fa.records.read import read_record
from pytest_fa.records.record import Record, to_json
from pytest_fa.session.refusals import Refused
from pytest_fa.session.run_plan import RunPlan
from pytest_fa.wire.jobs import PairedJob, PairedResult
from tests.factories import PYTHON_MANIFEST, WriteVariant, options, record, speed
from tests.fake_nvml import pretend
from tests.features.gate.test_run import SimulatedRunner, blocks

pytestmark = pytest.mark.usefixtures("fresh_gpu")

CASE = parse_case("b1h8s512d64-fp16-seed0")
RATIO = 0.95
GATES = 4000
MAX_COUNTED = int(stats.binom.isf(1e-4, GATES, 0.01))  # of wrong verdicts, if the error rate is 1 %


def gpu(number: int, name: str = "NVIDIA H200") -> Gpu:
    """A GPU of this model."""
    return Gpu(name, f"GPU-{number}", (9, 0), "580.1", "13.1")


# -- the statistics ---------------------------------------------------------------------------------------------------


def test_a_gpu_is_one_sample() -> None:
    """On several GPUs the samples are the GPUs' means; the processes' noise is that within a GPU."""
    means, gpus = [0.1, 0.5, 0.3, 0.7], ("a", "b", "a", "b")
    assert independent_samples(means, gpus) == pytest.approx([0.2, 0.6])
    assert process_sd(means, gpus) == pytest.approx(math.sqrt(0.02))
    # The variance of the two means is 0.08; the noise of two processes explains 0.01 of it.
    assert gpu_sd(means, gpus) == pytest.approx(math.sqrt(0.07))
    assert (independent_samples(means, ()), gpu_sd(means, ())) == (means, None)


def test_gpus_that_do_not_differ_have_no_spread() -> None:
    """A spread between GPUs that the noise of the processes explains is 0; with a lost process it is not known."""
    assert gpu_sd([0.1, 0.11, 0.2, 0.19], ("a", "b", "a", "b")) == 0.0
    assert gpu_sd([0.1, math.nan, 0.2, 0.19], ("a", "b", "a", "b")) is None


def test_few_gpus_detect_little() -> None:
    """Two GPUs detect large differences only, eight detect smaller ones than twelve processes on one."""
    effects = [detectable_on(PROCESS_SD, ANALYSES[-1], gpus, CONFIDENCE) for gpus in (2, 4, 8)]
    alone = detectable_on(PROCESS_SD, ANALYSES[-1], 0, CONFIDENCE)
    assert alone == detectable_effect(PROCESS_SD, ANALYSES[-1], CONFIDENCE)
    assert effects[0] > 0.1 > alone > effects[1] > effects[2]


def test_the_page_has_these_differences() -> None:
    """The table in docs/explanation/gate.md is what a gate announces for a spread of 0.8 %."""
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "gate.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    counts = next(line for line in lines if line[0] == "GPUs" and len(line) == 7)[1:]
    shown = next(line for line in lines if line[0].startswith("smallest difference after twelve"))[1:]
    effects = [detectable_on(0.008, ANALYSES[-1], int(count), CONFIDENCE) for count in counts]
    assert shown == [f"{100 * effect:.1f}" for effect in effects]


def simulated(gpus: int, spread: float, *, nested: bool) -> np.ndarray:
    """Whether each of many gates whose true mean ratio is the required one has a verdict.

    `spread` is the standard deviation of the log-ratio between GPUs.  With `nested`, the samples are those of
    `independent_samples`; without, every process counts as one, as if it had been drawn from all GPUs.
    """
    draw = np.random.default_rng(gpus)
    effects = draw.normal(0, spread, (GATES, gpus, 1))
    means = effects + draw.normal(0, PROCESS_SD, (GATES, gpus, ANALYSES[-1]))
    decided = np.zeros(GATES, bool)
    for count in ANALYSES:
        part = means[..., :count]
        samples = part.mean(axis=-1) if nested else part.reshape(GATES, -1)
        least_sd = MIN_SD_SHARE * PROCESS_SD / (math.sqrt(count) if nested else 1)
        error = np.maximum(samples.std(axis=-1, ddof=1), least_sd) / math.sqrt(samples.shape[-1])
        decided |= np.abs(samples.mean(axis=-1)) > error * stats.t.ppf((1 + CONFIDENCE) / 2, samples.shape[-1] - 1)
    return decided


@pytest.mark.parametrize("spread", [0.0, 0.003, 0.01])
@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_equal_kernels_are_rarely_decided(gpus: int, spread: float) -> None:
    """At most 1 % of the gates at the true ratio end with a verdict, however much GPUs differ."""
    assert simulated(gpus, spread, nested=True).sum() <= MAX_COUNTED


def test_processes_of_one_gpu_are_not_independent() -> None:
    """The test above detects a gate that ignores the GPUs: if they differ by 1 %, it is wrong in most gates."""
    assert simulated(8, 0.01, nested=False).mean() > 0.3


@pytest.mark.parametrize("difference", [0.0, -0.02, 0.02])
def test_the_simulation_has_the_verdicts_of_a_gate(difference: float) -> None:
    """`analyse` decides as the simulation does: by the means of the GPUs, by both clocks."""
    draw = np.random.default_rng(3)
    for _ in range(40):
        # [processes, GPUs]: the GPUs take turns
        means = draw.normal(math.log(RATIO) + difference, PROCESS_SD, (6, 4)) + draw.normal(0, 0.005, 4)
        rows = tuple((mean,) for mean in means.ravel())
        control = tuple((mean,) for mean in draw.normal(0, 1e-4, means.size))
        pair = PairSamples("s", "b", rows, control, (), tuple(means.ravel()), ("a", "b", "c", "d") * 6)
        samples = means.mean(axis=0) - math.log(RATIO)
        error = max(samples.std(ddof=1), MIN_SD_SHARE * PROCESS_SD / math.sqrt(6)) / 2
        is_clear = abs(samples.mean()) > error * stats.t.ppf((1 + CONFIDENCE) / 2, 3)
        expected = ("PASS" if samples.mean() < 0 else "FAIL") if is_clear else "INCONCLUSIVE"
        assert analyse([pair], RATIO, is_last=True).verdict == expected


def test_one_noisy_gpu_is_not_hidden_by_the_others() -> None:
    """If the A/A control of one of eight GPUs deviates by 3 %, there is no PASS at a ratio that is 2 % away."""
    gpus = tuple("abcdefgh") * 6
    draw = np.random.default_rng(8)
    means = math.log(0.93) + draw.normal(0, 0.001, len(gpus))
    control = draw.normal(0, 1e-4, len(gpus)) + np.array([0.03 if gpu == "e" else 0.0 for gpu in gpus])
    rows, controls = (tuple((value,) for value in values) for values in (means, control))
    analysis = analyse([PairSamples("s", "b", rows, controls, (), (), gpus)], RATIO, is_last=True)
    assert (analysis.verdict, "noisy machine: the A/A control" in analysis.reason) == ("INCONCLUSIVE", True)
    quiet = tuple((value,) for value in draw.normal(0, 1e-4, len(gpus)))
    assert analyse([PairSamples("s", "b", rows, quiet, (), (), gpus)], RATIO, is_last=True).verdict == "PASS"


def test_a_variant_for_the_cpu_is_not_gated_on_gpus(
    monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant, tmp_path: Path
) -> None:
    """Processes on the same cores are no samples of several GPUs."""
    pretend(monkeypatch, gpu(0), gpu(1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = write_variant("mine", manifest=PYTHON_MANIFEST, **{"entry.py": ""})
    (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    variant = msgspec.structs.replace(variant, supports=msgspec.structs.replace(variant.supports, device=("cpu",)))
    run_plan = RunPlan(options(tmp_path, cases=(CASE.id,), parts=(GateOptions(RATIO, gpus=2),)))
    with pytest.raises(Refused, match="mine runs on the CPU; drop it"):
        gate_question(run_plan, variant, RATIO)


# -- which GPUs -------------------------------------------------------------------------------------------------------


def test_the_option_names_the_first_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number means the first visible GPUs, `all` all of them; one GPU is the usual gate."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host = [gpu(number) for number in range(8)]
    pretend(monkeypatch, *host)
    assert gpus_of_gate(3) == tuple(host[:3])
    assert gpus_of_gate(ALL_GPUS) == tuple(host)
    assert gpus_of_gate(1) == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    assert gpus_of_gate(ALL_GPUS) == (host[5], host[2])


@pytest.mark.parametrize(
    ("host", "wanted", "message"),
    [
        ((gpu(0), gpu(1)), 3, "--fa-gate-gpus=3: 2 GPUs are visible; give 1 to 2, or all"),
        ((), ALL_GPUS, "--fa-gate-gpus=all: 0 GPUs are visible; drop it"),
        ((gpu(0), gpu(1, "NVIDIA H100")), 2, "a gate needs GPUs of one model, these are NVIDIA H100, NVIDIA H200"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, host: tuple[Gpu, ...], wanted: int | None, message: str
) -> None:
    """Too many GPUs, none at all, or GPUs of several models are a usage error that says what to type."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend(monkeypatch, *host)
    with pytest.raises(UsageProblem, match=message):
        gpus_of_gate(wanted)


# -- the flow ---------------------------------------------------------------------------------------------------------


class SimulatedHost:
    """A host whose GPUs have these log-ratios.

    `seeds` has the seeds of the processes on each GPU, and `locked` the GPUs in the order in which they were locked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log_ratios: dict[str, float]) -> None:
        self.log_ratios, self.seeds, self.locked = log_ratios, {uuid: [] for uuid in log_ratios}, []  # type: ignore[var-annotated]
        host = self

        class OneGpu(Workers):
            def __init__(self, _: Path, gpu_uuid: str) -> None:
                super().__init__()
                self.uuid = gpu_uuid

            def start(self, *, on_gpu: bool = False, with_candidate: bool = False) -> None:
                pass

            def run_paired(self, job: PairedJob) -> PairedResult:
                host.seeds[self.uuid].append(job.seed)
                self.add_output(f"seed {job.seed}\n")
                if self.show_live:
                    self.show_live(f"seed {job.seed}\n")
                if math.isnan(host.log_ratios[self.uuid]):
                    return PairedResult(Outcome.CRASHED, "the GPU fell off the bus", ())
                draw = np.random.default_rng(job.seed)
                return blocks(*(host.log_ratios[self.uuid] + draw.normal(0, 1e-4, 6)).tolist())

        @contextmanager
        def lock(gpu: Gpu) -> Iterator[None]:
            self.locked.append(gpu.uuid)
            yield

        monkeypatch.setattr(gpu_workers, "Workers", OneGpu)
        monkeypatch.setattr(gpu_workers, "timing_lock", lock)


def gate_on(
    host: SimulatedHost, write_variant: WriteVariant, tmp_path: Path
) -> tuple[Record, list[str], dict[str, list[int]]]:
    """The record of a gate at 0.95 on every GPU of a host, what it announced, and the seeds of each GPU's processes."""
    variants = []
    for name in ("candidate", "fast"):
        folder = write_variant(name, manifest=PYTHON_MANIFEST, **{"entry.py": ""})
        variants += read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    pilot = {"candidate": record("candidate", speed=speed(9.0)), "fast": record("fast", speed=speed(10.0))}
    runner = SimulatedRunner(tmp_path, pilot, blocks(0.0))
    question = GateQuestion(RATIO, (CASE,), (variants[1],), gpus=tuple(gpu(int(uuid[-1])) for uuid in host.log_ratios))
    announced: list[str] = []
    gated = decide_gate(runner, variants[0], question, announced.append)
    assert runner.jobs == []  # no process on the GPU of the pilot alone
    return gated, announced, host.seeds


def test_one_verdict_and_the_ratio_of_each_gpu(
    monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant, tmp_path: Path
) -> None:
    """Six processes on each GPU, all seeds different, decide; the record has the ratio of each GPU and their spread."""
    ratios = {"GPU-2": -0.80, "GPU-0": -0.81, "GPU-1": -0.79}
    host = SimulatedHost(monkeypatch, ratios)
    gated, announced, seeds = gate_on(host, write_variant, tmp_path)
    assert host.locked == ["GPU-0", "GPU-1", "GPU-2"]
    assert [len(each) for each in seeds.values()] == [6, 6, 6]
    assert len({seed for each in seeds.values() for seed in each}) == 18
    assert "6 processes on each of 3 GPUs" in announced[0]
    gate = Gate.of(gated)
    assert gate is not None
    assert (gated.outcome, gate.verdict, gate.processes) == ("ok", "PASS", 18)
    (pair,) = gate.pairs
    assert [each.ratio for each in pair.gpu_ratios] == pytest.approx(
        [math.exp(each) for each in ratios.values()], rel=1e-3
    )
    assert len({each.gpu_hash for each in pair.gpu_ratios}) == 3
    assert not any(uuid in to_json(gated).decode() for uuid in ratios)
    assert pair.gpu_sd == pytest.approx(0.01, rel=0.02)
    (line,) = [line for line in gate_lines("candidate", gate) if "by GPU" in line]
    assert line.endswith("; standard deviation between GPUs 1.00 %")
    assert read_record(to_json(gated)) == gated


def test_gpus_that_disagree_permit_no_verdict(
    monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant, tmp_path: Path
) -> None:
    """If one of three GPUs has another ratio, twelve processes on each do not decide."""
    host = SimulatedHost(monkeypatch, {"GPU-0": -0.10, "GPU-1": -0.10, "GPU-2": 0.02})
    gated, _, seeds = gate_on(host, write_variant, tmp_path)
    assert (gated.outcome, [len(each) for each in seeds.values()]) == ("inconclusive", [12, 12, 12])


def test_a_lost_gpu_ends_the_gate(
    monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """A GPU whose process crashes ends the gate after its first processes, and is never left out silently."""
    host = SimulatedHost(monkeypatch, {"GPU-0": -0.8, "GPU-1": math.nan})
    gated, _, seeds = gate_on(host, write_variant, tmp_path)
    assert gated.outcome == "crashed"
    assert snapshot == gated.message
    assert [len(each) for each in seeds.values()] == [1, 1]


@pytest.mark.parametrize("is_live", [False, True])
def test_what_processes_print_is_shown_with_their_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_live: bool, snapshot: SnapshotAssertion
) -> None:
    """The output of every GPU's process becomes that of the test, in the order of the GPUs; with `-s`, it is live."""
    host, first, live = SimulatedHost(monkeypatch, {"GPU-0": -0.8, "GPU-1": math.nan}), Workers(), list[str]()
    first.show_live = live.append if is_live else None
    jobs = [PairedJob((), "cuda", "same_precision", seed, 1.0) for seed in (5, 6)]
    with gpu_workers.gate_processes(first, [gpu(int(uuid[-1])) for uuid in host.log_ratios], tmp_path) as run_processes:
        run_processes(jobs)
        assert snapshot == first.take_output()
        run_processes(jobs[:1])
    assert first.take_output() == "(on GPU 0 of the gate:)\nseed 5\n"
    shown = ["GPU 0 of the gate: seed 5", "GPU 0 of the gate: seed 5", "GPU 1 of the gate: seed 6"]
    assert sorted(live) == (shown if is_live else [])


def _forged(gate: Gate, **changes: object) -> Gate:
    (pair,) = gate.pairs
    return msgspec.structs.replace(gate, pairs=(msgspec.structs.replace(pair, **changes),))


def test_a_forged_gpu_is_found(monkeypatch: pytest.MonkeyPatch, write_variant: WriteVariant, tmp_path: Path) -> None:
    """A record whose ratio of one GPU, spread or assignment of processes was changed contradicts its samples."""
    gated, _, _ = gate_on(SimulatedHost(monkeypatch, {"GPU-0": -0.8, "GPU-1": -0.9}), write_variant, tmp_path)
    gate = Gate.of(gated)
    assert gate is not None

    def problems(changed: Gate) -> str:
        return "\n".join(contradictions(changed.to(gated), None, PROCESS_SD))

    (pair,) = gate.pairs
    assert "GPU" not in problems(gate)
    first = msgspec.structs.replace(pair.gpu_ratios[0], ratio=0.4)
    assert "the ratios of the GPUs of fast" in problems(_forged(gate, gpu_ratios=(first, pair.gpu_ratios[1])))
    assert "the ratios of the GPUs of fast" in problems(_forged(gate, gpu_ratios=()))
    assert "gpu_sd of fast" in problems(_forged(gate, gpu_sd=0.0))
    moved = msgspec.structs.replace(pair.samples, gpus=(pair.samples.gpus[0], *pair.samples.gpus[:-1]))
    assert "do not have the same number of processes" in problems(_forged(gate, samples=moved))
    alone = msgspec.structs.replace(pair.samples, gpus=())
    assert "high of fast at b1h8s512d64-fp16 is" in problems(_forged(gate, samples=alone, gpu_ratios=(), gpu_sd=None))
