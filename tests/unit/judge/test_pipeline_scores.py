"""`run_case` on probes of scores: correct ones pass, and every wrong one is caught by its check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.properties import ON_GPU, properties_of, property_case
from pytest_fa.catalog.variant import Variant
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseJob, CaseResult
from tests.factories import MANIFEST, SCORES_MANIFEST, SCORES_SOURCE, WriteVariant

ProbeOf = Callable[[str], Variant]

SQUARE, TILE = "b1h1s4d4-fp16-scores", "b1h1s32d64-fp16-sk64-scores"

# The last line of the correct kernel, which the wrong kernels replace or extend.
LAST = "    return result if out is None else out.copy_(result)\n"
WRONG = {
    "scale": SCORES_SOURCE.replace("* scale", "* scale * 1.01"),
    "row": SCORES_SOURCE.replace(LAST, "    result[:, :, 2] = result[:, :, 1]\n" + LAST),
    "transposed": SCORES_SOURCE.replace("k.float().transpose(2, 3)", "k.float().reshape(*k.shape[:2], k.shape[3], -1)"),
    "dropped": SCORES_SOURCE.replace(LAST, "    result[..., -1] = 0\n" + LAST),
    "unwritten": SCORES_SOURCE.replace(LAST, "    out[..., :-1] = result[..., :-1]\n    return out\n"),
    "untouched": SCORES_SOURCE.replace(LAST, "    return out\n"),
    "shape": SCORES_SOURCE.replace(LAST, "    return torch.empty_like(q)[..., :3]\n"),
    "changes k": SCORES_SOURCE.replace(LAST, "    k.mul_(2)\n" + LAST),
    "past the end": SCORES_SOURCE.replace(
        LAST, "    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1)\n" + LAST
    ),
    "flickers": SCORES_SOURCE.replace(
        LAST, "    calls.append(0)\n    result.view(torch.int16)[..., 0] ^= len(calls) % 2 == 0\n" + LAST
    ),
}
STALE = SCORES_SOURCE.replace(LAST, "    kept.setdefault(q.shape, result)\n    return kept[q.shape]\n")


@pytest.fixture
def probe_of(write_variant: WriteVariant, tmp_path: Path) -> ProbeOf:
    """`probe_of(source)`: a probe of scores for the CPU."""

    def make(source: str) -> Variant:
        text = source.replace("import torch\n", "import torch\n\nkept, calls = {}, []\n", 1)
        folder = write_variant("probe_of_a_test", manifest=SCORES_MANIFEST, **{"entry.py": text})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def judged(variant: Variant, shape: str, *, time: bool = False, property_name: str | None = None) -> CaseResult:
    """Run a probe on one of its shapes, or check one property of it."""
    (case,) = [each for each in variant.cases if each.shape_id == shape]
    if property_name:
        case = property_case(variant)
    job = CaseJob(
        variant,
        case,
        None,
        "cpu",
        "same_precision",
        checks_output=True,
        time=time,
        repeats=3,
        property_name=property_name,
    )
    return run_case(job)


@pytest.mark.parametrize("shape", [SQUARE, TILE])
def test_a_right_probe(probe_of: ProbeOf, shape: str) -> None:
    """A correct probe is ok at every stage, including `speed`, and its output has one element per query and key."""
    result = judged(probe_of(SCORES_SOURCE), shape, time=True)
    assert (result.outcome, result.message) == ("ok", "")
    assert [stage.state for stage in result.stages] == ["ok"] * 4
    assert result.check is not None
    assert result.check.element_count == (16 if shape == SQUARE else 32 * 64)


@pytest.mark.parametrize("shape", [SQUARE, TILE])
@pytest.mark.parametrize(
    ("name", "caught_by"),
    [
        ("scale", "gain"),
        ("row", "max"),
        ("transposed", "max"),
        ("dropped", "max"),
        ("unwritten", "finite"),
        ("untouched", "finite"),
        ("shape", "output"),
        ("changes k", "inputs"),
        ("past the end", "guard bands"),
        ("flickers", "repeats"),
    ],
)
def test_a_wrong_probe_is_found(probe_of: ProbeOf, name: str, caught_by: str, shape: str) -> None:
    """Each mistake is caught by its own check, as for attention."""
    result = judged(probe_of(WRONG[name]), shape)
    assert (result.outcome, caught_by in result.caught_by) == ("wrong", True), result.message


def test_a_kept_result_is_no_time(probe_of: ProbeOf) -> None:
    """A probe that returns a kept result fails while it is timed, because the sign of K changes between timed calls."""
    result = judged(probe_of(STALE), TILE, time=True)
    assert (result.outcome, result.caught_by, result.speed) == ("wrong", ("timed outputs",), None)


def test_a_stale_output_shows_with_other_data(probe_of: ProbeOf) -> None:
    """The property `new_data` catches a probe that returns a kept result."""
    assert judged(probe_of(STALE), TILE, property_name="new_data").caught_by == ("new_data",)


def test_a_right_probe_holds_every_property(probe_of: ProbeOf) -> None:
    """A correct probe passes every property of scores that needs no GPU."""
    probe = probe_of(SCORES_SOURCE)
    names = [name for name in properties_of(probe) if name not in ON_GPU]
    assert {name: judged(probe, TILE, property_name=name).outcome for name in names} == dict.fromkeys(names, "ok")


def test_a_leak_between_heads_is_found(probe_of: ProbeOf) -> None:
    """A probe in which a NaN of one head reaches the scores of another is caught by `contained_nan`."""
    leaky = SCORES_SOURCE.replace(LAST, "    result = result + 0 * result.sum(1, keepdim=True)\n" + LAST)
    assert judged(probe_of(leaky), TILE, property_name="contained_nan").caught_by == ("contained_nan",)


def test_a_diagnosis_speaks_of_scores(probe_of: ProbeOf) -> None:
    """The diagnosis of a probe with a wrong scale names the scale as the likely cause."""
    result = judged(probe_of(WRONG["scale"]), TILE)
    assert result.diagnosis is not None
    assert result.diagnosis.cause == "the scale is 1 % too large"


def test_a_probe_of_attention_is_judged_as_attention(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A probe with `computes: attention` must give attention, so an output of scores is wrong."""
    lines = 'role: probe\ncases: [b1h1s4d64-fp16]\nentry: {kind: python, target: "entry:forward"}\n'
    manifest = f"{MANIFEST}{lines}supports: {{device: [cpu]}}\n"
    source = SCORES_SOURCE.replace(LAST, "    return result\n")
    folder = write_variant("probe_of_a_test", manifest=manifest, **{"entry.py": source})
    (probe,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    assert judged(probe, "b1h1s4d64-fp16").caught_by == ("output",)
