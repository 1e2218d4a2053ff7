"""`auto` calls the rung that is expected to be the fastest, or the next one if that refuses."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
import torch

from kernels.auto import costs as costs_module
from kernels.auto import entry, measure
from kernels.auto.costs import Costs, Table, costs_of, fitted
from kernels.auto.problem import Problem
from kernels.auto.regret import choices
from kernels.auto.rung_times import UNSEEN, read_rung_times
from kernels.auto.work import RUNGS, _busiest_sm
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.discover import discover
from pytest_fa.catalog.suites import SUITES
from pytest_fa.errors import UnsupportedCase
from pytest_fa.records.ceilings import read_ceilings
from pytest_fa.records.log import read_records
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from pytest_fa.records.standing import standing_results

REPOSITORY = Path(__file__).parents[2]
H200 = REPOSITORY / "profiles" / "nvidia-h200"
MAX_REGRET = 1.035  # the time of the chosen rung over that of the fastest variant, in a recorded case
MAX_UNSEEN_REGRET = 1.1  # the same over that of the fastest rung, in a problem that no cost is fitted to
# Two problems of one rung, one of which takes twice the sum of its terms.
TABLE: Table = {
    "a GPU": {
        "sms": 132,
        "copy_gb_per_s": 4000.0,
        "rungs": {
            "long_shapes": {
                "d64": {"us": [10, *[0] * 10], "measured": {"b1h8s512d64-fp16": 20.0, "b1h8s8192d64-fp16": 10.0}}
            },
            "cluster_latency": {"d64": {"us": [15, *[0] * 10], "measured": {"b1h8s8192d64-fp16": 12.0}}},
        },
    }
}


def problem_of(shape: str) -> Problem:
    """The problem of a case without a seed."""
    return Problem.of(parse_case(f"{shape}-seed0"))


@functools.cache
def records() -> tuple[Record, ...]:
    """What is saved of an H200."""
    paths = sorted(H200.glob("*.jsonl"))
    return tuple(standing_results(record for path in paths for record in read_records(path)).records)


@functools.cache
def times() -> list[tuple[str, dict[str, float]]]:
    """The saved times of candidates and SDPA backends in fp16 by variant, of each shape and card."""
    found: dict[tuple[str, str | None], dict[str, float]] = defaultdict(dict)
    for record in records():
        is_compared = record.role in ("candidate", "baseline")
        if is_compared and record.kind == "speed" and record.speed and record.case and record.case.dtype == "fp16":
            card = record.machine.gpu_hash if record.machine else None
            found[record.case.shape_id, card][record.variant] = record.speed.device.median_us
    return [(shape, us) for (shape, _), us in found.items()]


# -- expected times ---------------------------------------------------------------------------------------------------


def test_a_measured_problem_is_expected_to_take_what_it_took() -> None:
    """A record counts more than the sum of terms, and the rungs are ranked by it."""
    ranked = Costs("a GPU", TABLE["a GPU"], 132).ranked(problem_of("b1h8s8192d64-fp16"))
    assert [(each.rung, each.us, each.is_measured) for each in ranked] == [
        ("long_shapes", 10.0, True),
        ("cluster_latency", 12.0, True),
    ]


def test_the_records_of_like_problems_correct_the_sum_of_terms() -> None:
    """Near the problem that took twice the sum, nearly twice is expected; far from it, the sum."""
    costs = Costs("a GPU", TABLE["a GPU"], 132)
    near, far = (costs.of("long_shapes", problem_of(shape)) for shape in ("b1h8s500d64-fp16", "b1h8s64d64-fp16"))
    assert near is not None
    assert far is not None
    assert 16 < near.us < 20
    assert not near.is_measured
    assert far.us == pytest.approx(10, rel=0.01)


def test_another_gpu_does_not_expect_the_measured_time() -> None:
    """With half the SMs, what a problem took there says only how far the sum of its terms is off."""
    costs = Costs("a GPU", TABLE["a GPU"], 66, is_own=False)
    expected = costs.of("long_shapes", problem_of("b1h8s512d64-fp16"))
    assert expected is not None
    assert not expected.is_measured
    assert expected.us == pytest.approx(17, rel=0.1)


def test_bytes_that_come_from_memory_take_their_time() -> None:
    """1074 MB at 4000 GB/s take 268 us, however little the terms say."""
    expected = Costs("a GPU", TABLE["a GPU"], 132).of("long_shapes", problem_of("b64h8s1d64-fp16-sk8192"))
    assert expected is not None
    assert expected.us == pytest.approx(268.5, rel=0.01)


def test_a_rung_without_costs_for_a_problem_is_not_ranked() -> None:
    """Masked problems have costs of their own."""
    assert Costs("a GPU", TABLE["a GPU"], 132).ranked(problem_of("b1h8s512d64-fp16-causal")) == []


def test_a_gpu_without_records_gets_the_costs_of_one_with_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rungs run on it is decided later, by their architectures."""
    monkeypatch.setattr(costs_module, "_table", lambda: TABLE)
    costs = costs_of("another GPU", 66)
    assert costs is not None
    assert costs.gpu == "a GPU"
    monkeypatch.setattr(costs_module, "_table", dict)
    assert costs_of("another GPU", 66) is None


# -- the committed table ----------------------------------------------------------------------------------------------


def test_the_committed_costs_are_fitted_from_the_records() -> None:
    """`python -m kernels.auto.costs profiles/nvidia-h200` writes what is there, up to the rounding of a machine."""
    times_of_rungs, ceilings = read_rung_times(H200), read_ceilings(H200.parent, "NVIDIA H200")
    assert times_of_rungs is not None
    assert ceilings is not None
    anew = fitted(records(), [times_of_rungs], [ceilings])["NVIDIA H200"]["rungs"]
    committed = json.loads(costs_module.COSTS.read_text(encoding="utf-8"))["NVIDIA H200"]["rungs"]
    assert {rung: list(kinds) for rung, kinds in anew.items()} == {
        rung: list(kinds) for rung, kinds in committed.items()
    }
    for rung, kinds in anew.items():
        for kind, costs in kinds.items():
            assert costs["measured"] == committed[rung][kind]["measured"]
            assert costs["us"] == pytest.approx(committed[rung][kind]["us"], rel=0.02, abs=0.02), (rung, kind)


def test_a_rung_that_was_wrong_has_no_costs() -> None:
    """One wrong result of a rung removes it; one without a verdict does not."""
    of_rung = [record for record in records() if record.variant == "long_shapes"]
    for outcome, rungs in ((Outcome.WRONG, []), (Outcome.INCONCLUSIVE, ["long_shapes"])):
        changed = [*of_rung, msgspec.structs.replace(of_rung[0], kind="correct", outcome=outcome)]
        assert list(fitted(changed)["NVIDIA H200"]["rungs"]) == rungs


def test_half_of_the_problems_predict_the_other_half() -> None:
    """The rung that is expected to be the fastest is so, or nearly, where it was not fitted."""
    all_times, ceilings = read_rung_times(H200), read_ceilings(H200.parent, "NVIDIA H200")
    assert all_times is not None
    assert ceilings is not None
    shapes = sorted(all_times.us)
    known = msgspec.structs.replace(all_times, us={shape: all_times.us[shape] for shape in shapes[::2]})
    costs = Costs("NVIDIA H200", fitted([], [known], [ceilings])["NVIDIA H200"], 132)
    others = msgspec.structs.replace(all_times, us={shape: all_times.us[shape] for shape in shapes[1::2]})
    regrets = {each.problem: each.regret for each in choices(others, costs)}
    assert len(regrets) > 400
    assert statistics.mean(regrets.values()) < 1.01
    assert {problem: regret for problem, regret in regrets.items() if regret > 1.3} == {}


def test_unseen_problems_do_not_regret_the_choice() -> None:
    """At problems that no cost is fitted to, the choice is as fast as a rung can be, and no slower than SDPA."""
    seen, unseen, costs = read_rung_times(H200), read_rung_times(H200, UNSEEN), costs_of("NVIDIA H200", 132)
    assert seen is not None
    assert unseen is not None
    assert costs is not None
    assert seen.us.keys().isdisjoint(unseen.us)
    chosen = choices(unseen, costs)
    assert len(chosen) > 100
    assert statistics.mean(each.regret for each in chosen) < 1.01
    assert [each for each in chosen if each.regret > MAX_UNSEEN_REGRET or (each.to_sdpa or 0) > 1] == []


def test_a_choice_is_compared_with_the_other_rungs_and_with_sdpa() -> None:
    """The regret is the time of the chosen rung over the fastest one; a problem that one rung takes has no choice."""
    us = {
        "b1h8s500d64-fp16": {"long_shapes": 22.0, "cluster_latency": 20.0, "sdpa_cudnn": 44.0, "sdpa_flash": 55.0},
        "b1h8s400d64-fp16": {"long_shapes": 22.0, "sdpa_cudnn": 44.0},
    }
    saved = read_rung_times(H200)
    assert saved is not None
    times = msgspec.structs.replace(saved, us=us)
    faster = {"us": [10, *[0] * 10], "measured": {}}
    rungs = {**TABLE["a GPU"]["rungs"], "long_shapes": {"d64": faster}}
    (chosen,) = choices(times, Costs("a GPU", {**TABLE["a GPU"], "rungs": rungs}, 132))
    assert tuple(chosen) == (problem_of("b1h8s500d64-fp16"), "long_shapes", 1.1, 0.5)


def test_each_backend_of_sdpa_is_timed_by_its_name() -> None:
    """Pinned to cuDNN, SDPA has no backend on a CPU; the output is that of the call, not of a rung before it."""
    tensor, out = torch.ones(1, 1, 16, 64, dtype=torch.float16), torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    call_of = functools.partial(measure._calls, problem=problem_of("b1h1s16d64-fp16"))
    buffers = [measure.Buffers(tensor, tensor, tensor, out)]
    with pytest.raises(RuntimeError, match="No viable backend"):
        call_of("sdpa_cudnn", sets=buffers)[0]()
    assert torch.equal(call_of("sdpa_flash", sets=buffers)[0](), tensor)


def test_no_recorded_case_regrets_the_choice() -> None:
    """The first of the timed rungs takes a few percent more than any of them at most.

    If it is the choice, it is compared with all rungs of the ladders, also with those that auto does not call.
    """
    costs, regrets = costs_of("NVIDIA H200", 132), []
    assert costs is not None
    for shape, us in times():
        ranked = [each.rung for each in costs.ranked(problem_of(shape))]
        timed = [rung for rung in ranked if rung in us]
        of_ladders = ("cluster", "long", "decode") if timed[:1] == ranked[:1] else tuple(RUNGS)
        others = [name for name in us if name.startswith(of_ladders)]
        if timed and len(others) > 1:
            regrets.append((us[timed[0]] / min(us[name] for name in others), shape))
    assert len(regrets) > 60
    assert [each for each in regrets if each[0] > MAX_REGRET] == []


SLOWER_THAN_CUDNN = {"b2h32s1d128-fp16-kv8-sk32768"}  # 1.03: both are at the rate of the memory


def test_the_chosen_rung_is_no_slower_than_an_sdpa_backend() -> None:
    """Where both were timed, with one exception; the gate can tell 1 %."""
    costs, slower, compared = costs_of("NVIDIA H200", 132), {}, 0
    assert costs is not None
    for shape, us in times():
        backends = [us[name] for name in us if name.startswith("sdpa_")]
        ranked = costs.ranked(problem_of(shape))
        if ranked and backends and ranked[0].rung in us:
            compared += 1
            if us[ranked[0].rung] > 1.01 * min(backends):
                slower[shape] = us[ranked[0].rung] / min(backends)
    assert compared > 30
    assert set(slower) == SLOWER_THAN_CUDNN, slower


@pytest.mark.parametrize("suite", ["long", "decode"])
def test_suites_get_the_kernels_that_were_made_for_them(suite: str) -> None:
    """At every case of theirs in 16 bits."""
    costs, variants = costs_of("NVIDIA H200", 132), discover((REPOSITORY / "kernels",)).variants
    assert costs is not None
    first = set()
    for case in SUITES[suite]:
        ranked = [each.rung for each in costs.ranked(Problem.of(case)) if variants[each.rung].refuses(case) is None]
        first.add(ranked[0].partition("_")[0])
    assert first == {suite}


def test_other_gpus_stay_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit changes its own GPU alone, and a folder without times of rungs changes nothing."""
    monkeypatch.setattr(costs_module, "COSTS", tmp_path / "costs.json")
    monkeypatch.setattr(costs_module, "_table", lambda: TABLE)
    assert costs_module.main([str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())
    assert costs_module.main([str(H200)]) == 0
    assert list(json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))) == ["a GPU", "NVIDIA H200"]


def test_records_that_cannot_be_read_make_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a line of a record file cannot be read, the program prints one sentence and does not change the table."""
    monkeypatch.setattr(costs_module, "COSTS", tmp_path / "costs.json")
    (tmp_path / "x.jsonl").write_text("{", encoding="utf-8")
    assert costs_module.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/x.jsonl: 1 of 1 lines cannot be read; line 1: ")
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


# -- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", sorted(RUNGS))
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_more_keys_are_more_work(rung: str, causal: str) -> None:
    """Every term is a finite number of at least 0, and the last problem has more work than the first."""
    problems = [Problem(2, 16, 4, min(keys, 1024), keys, 128, causal) for keys in (1, 65, 1000, 9000)]
    terms = [RUNGS[rung](problem, 132) for problem in problems]
    assert all(math.isfinite(term) and term >= 0 for each in terms for term in each)
    assert sum(terms[-1]) > sum(terms[0])


def test_two_blocks_of_an_sm_get_tiles_as_launchers_deal_them() -> None:
    """Three tiles of length 2 come before three of length 1; in the second round, the last block is dealt to first."""
    assert _busiest_sm([1, 2], copies=3, sms=2, per_sm=2) == (2 + 2 + 1, 3)  # tiles 0, 2 and 5
    assert _busiest_sm([1, 2], copies=1, sms=2, per_sm=2) == (2, 1)
    assert _busiest_sm([1, 2], copies=300, sms=2, per_sm=2) == (450, 300)  # of many tiles, the mean


def test_the_keys_of_tiles_under_masks() -> None:
    """A tile sees the keys of its last query."""
    assert Problem(1, 1, 1, 100, 100, 64, "none").tile_lengths(64) == [100, 100]
    assert Problem(1, 1, 1, 100, 100, 64, "top_left").tile_lengths(64) == [64, 100]
    assert Problem(1, 1, 1, 100, 130, 64, "bottom_right").tile_lengths(64) == [94, 130]


# -- calls ------------------------------------------------------------------------------------------------------------


def tensors(keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v with two heads, `keys` positions and head_dim 64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, keys, 64), generator=generator).half() for _ in range(3))
    return q, k, v


def test_a_dtype_that_no_variant_has_is_refused() -> None:
    """With the dtypes that `auto` has."""
    q, k, v = (tensor.double() for tensor in tensors(60))
    with pytest.raises(UnsupportedCase, match=r"q is torch.float64; auto supports torch.float16, "):
        entry.choose_and_call(q, k, v, scale=1.0)


def test_while_a_cache_grows_the_choice_stays() -> None:
    """Many keys are rounded up for a choice; a square problem and few keys are not."""
    assert {Problem(1, 32, 8, 1, keys, 128, "none").coarse().seq_k for keys in range(4033, 4097)} == {4096}
    assert Problem(1, 32, 8, 1, 1000, 128, "none").coarse().seq_k == 1000
    assert Problem(1, 8, 8, 2000, 2000, 64, "none").coarse().seq_k == 2000


def test_a_cpu_gets_the_reference() -> None:
    """CUDA kernels do not run there; `explain` says so."""
    q, k, _ = tensors(60)
    assert entry.explain(q, k, "bottom_right") == "reference: portable, for where no rung runs"


@pytest.mark.parametrize("scale", [0.125, 0.0])
def test_where_the_first_refuses_the_next_one_answers(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """The output is correct even if the first choice refuses: `cublas_hybrid` refuses a scale of zero."""
    choices = [entry.Choice(name, "") for name in ("cublas_hybrid", "reference")]
    monkeypatch.setattr(entry, "choose", lambda *_: choices)
    q, k, v = tensors(60)
    expected = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    assert float((entry.choose_and_call(q, k, v, scale=scale).double() - expected).abs().max()) < 2e-3


def test_e4m3_gets_fp8_stages() -> None:
    """It comes first of the variants without costs, and takes each case that `auto_e4m3` takes."""
    variants = discover((REPOSITORY / "kernels",)).variants
    cases = [case for case in SUITES["fp8"] if variants["auto_e4m3"].refuses(case) is None]

    assert next(iter(entry.OTHERS)) == "fp8_stages"
    assert cases
    assert [case.id for case in cases if variants["fp8_stages"].refuses(case)] == []
