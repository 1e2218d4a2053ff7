"""`auto` calls the variant that was fastest on the nearest measured case, or the next one if that refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.suites import SUITES
from pytest_fa.records.log import read_records
from pytest_fa.records.outcome import Outcome

REPOSITORY = Path(__file__).parents[2]
TABLE = {
    "cpu": {
        "fp16-d64-none": [
            {"case": "b1h2s64d64-fp16", "rows": 128, "seq_k": 64, "device_us": {"cublas_hybrid": 3.0, "minimal": 9.0}},
            {"case": "b1h2s512d64-fp16", "rows": 1024, "seq_k": 512, "device_us": {"reference": 5.0}},
        ]
    }
}


def module_of(name: str) -> ModuleType:
    """A fresh import of a module of `kernels/auto`."""
    spec = importlib.util.spec_from_file_location(f"auto_{name}", REPOSITORY / "kernels" / "auto" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`auto` with the small table above."""
    module = module_of("entry")
    monkeypatch.setattr(module, "_choices", lambda: TABLE)
    return module


def tensors(keys: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v with two heads, `keys` positions and head_dim 64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, keys, 64), generator=generator).to(dtype) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize(("keys", "first"), [(60, "cublas_hybrid"), (100, "cublas_hybrid"), (400, "reference")])
def test_the_nearest_case_decides(entry: ModuleType, keys: int, first: str) -> None:
    """The first choice is the variant that was fastest on the nearest measured case."""
    q, k, _ = tensors(keys)
    assert entry.choose(q, k, "none")[0].variant == first


@pytest.mark.parametrize(("queries", "first"), [(1, "minimal"), (16, "minimal"), (17, "cublas_hybrid")])
@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_few_queries_have_their_own_table(
    monkeypatch: pytest.MonkeyPatch, entry: ModuleType, queries: int, first: str, causal: str
) -> None:
    """Up to 16 queries, only cases with few queries decide, also for a mask that was not measured."""
    few = [{"case": "b1h2s1d64-fp16-sk60", "rows": 2, "seq_k": 60, "device_us": {"minimal": 1.0}}]
    monkeypatch.setattr(entry, "_choices", lambda: {"cpu": {**TABLE["cpu"], "fp16-d64-none-few": few}})
    monkeypatch.setattr(entry, "_supports", lambda *_: True)
    q, k, _ = tensors(60)
    assert entry.choose(q[:, :, :queries], k, causal)[0].variant == first


def test_another_dtype_is_judged_by_fp16(entry: ModuleType) -> None:
    """If bf16 was not measured, the times in fp16 decide."""
    q, k, _ = tensors(60, torch.bfloat16)
    assert entry.choose(q, k, "none")[0].variant == "cublas_hybrid"


def test_a_near_case_of_fp16_comes_before_a_far_one_of_bf16(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """If bf16 was measured only on a much smaller case, the times in fp16 decide."""
    far = {"case": "b1h2s16d64-bf16", "rows": 32, "seq_k": 16, "device_us": {"cublas_hybrid": 2.0}}
    monkeypatch.setattr(entry, "_choices", lambda: {"cpu": {**TABLE["cpu"], "bf16-d64-none": [far]}})
    q, k, _ = tensors(400, torch.bfloat16)
    assert entry.choose(q, k, "none")[0].variant == "reference"


def test_a_variant_that_does_not_support_the_call_is_no_choice(entry: ModuleType) -> None:
    """`cublas_hybrid` does not support the bottom-right mask, and CUDA kernels do not run on a CPU."""
    q, k, _ = tensors(60)
    assert [choice.variant for choice in entry.choose(q, k, "bottom_right")] == ["reference"]


def test_it_says_which_and_why(entry: ModuleType, snapshot: SnapshotAssertion) -> None:
    """`explain` names each choice with its time and the case on which it was measured."""
    q, k, _ = tensors(60)
    assert snapshot == entry.explain(q, k).splitlines()


@pytest.mark.parametrize("scale", [0.125, 0.0])
def test_where_the_first_refuses_the_next_one_answers(entry: ModuleType, scale: float) -> None:
    """The output is correct even if the first choice refuses: `cublas_hybrid` refuses a scale of zero."""
    q, k, v = tensors(60)
    expected = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    assert float((entry.forward(q, k, v, scale=scale).double() - expected).abs().max()) < 2e-3


def test_the_table_ranks_correct_variants() -> None:
    """The table ranks the candidates by time, without those that were wrong on any case."""
    choices = module_of("choices")
    records = read_records(REPOSITORY / "profiles" / "nvidia-h200" / "minimal.jsonl")
    (table,) = choices.choices(records).values()
    assert [list(row["device_us"]) for row in table["fp16-d64-none"]] == [["minimal"]] * len(table["fp16-d64-none"])
    with_failure = [*records, msgspec.structs.replace(records[0], outcome=Outcome.WRONG)]
    assert choices.choices(with_failure) == {}
    without_verdict = [*records, msgspec.structs.replace(records[0], outcome=Outcome.INCONCLUSIVE)]
    assert choices.choices(without_verdict) == choices.choices(records)


def test_cases_with_few_queries_are_listed_separately() -> None:
    """Cases with up to 16 queries have tables of their own, which include grouped heads."""
    choices = module_of("choices")
    records = read_records(REPOSITORY / "profiles" / "nvidia-h200" / "minimal.jsonl")
    timed = next(record for record in records if record.kind == "speed" and record.case)
    few = msgspec.structs.replace(timed, case=parse_case("b1h32s16d64-fp16-kv8-sk4096-seed0"))
    grouped = msgspec.structs.replace(timed, case=parse_case("b1h32s17d64-fp16-kv8-sk4096-seed0"))
    (table,) = choices.choices([few, grouped]).values()
    assert {"fp16-d64-none-few": ["b1h32s16d64-fp16-kv8-sk4096"]} == {
        name: [row["case"] for row in rows] for name, rows in table.items()
    }


def row_of(keys: int, us: dict[str, float], sdpa_us: float) -> dict[str, Any]:
    """A row of `choices.py` before the candidates are ranked: one case with as many rows as keys."""
    return {"case": str(keys), "rows": keys, "seq_k": keys, "device_us": us, "sdpa_us": {"sdpa_cudnn": sdpa_us}}


@pytest.mark.parametrize(("us", "is_listed"), [(1.0, True), (1.8, False)])
def test_the_steps_of_one_source_count_if_they_gain_on_sdpa(us: float, is_listed: bool) -> None:  # noqa: FBT001
    """A case with variants of one source is listed if its ratio to SDPA is below that of the nearest compared case."""
    choices = module_of("choices")
    compared = row_of(512, {"minimal": 9.0, "wmma": 3.0, "mma_regs": 2.0, "long_ring": 4.0}, 3.0)
    alone = row_of(4096, dict.fromkeys(("long_ring", "long_turns", "long_overlap", "long_max"), us), 2.0)
    listed = choices._listed({"a": compared, "b": alone})
    assert listed == ([compared, alone] if is_listed else [compared])


def test_records_that_cannot_be_read_make_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a line of a record file cannot be read, the program prints one sentence and does not change the table."""
    choices = module_of("choices")
    monkeypatch.setattr(choices, "__file__", str(tmp_path / "choices.py"))
    (tmp_path / "x.jsonl").write_text("{", encoding="utf-8")
    assert choices.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/x.jsonl: 1 of 1 lines cannot be read; line 1: ")
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize(("suite", "folder"), [("long", "long_wgmma"), ("decode", "decode_cluster")])
def test_the_committed_table_knows_long_keys(suite: str, folder: str) -> None:
    """On an H200, `auto` calls a kernel for long sequences or one for few queries at every case of their suites."""
    entry = module_of("entry")
    first = {}
    for case in SUITES[suite]:
        choices = [each.variant for each in entry._nearest_measured(case, "NVIDIA H200")]
        supporting = [name for name in choices if entry._variants()[name].refuses(case) is None]
        first[case.id] = entry._variants()[supporting[0]].folder if supporting else None
    assert set(first.values()) == {str(REPOSITORY / "kernels" / folder)}
