"""`auto` asks the variant that was measured fastest nearby, then the next: tried on the CPU with a table of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch

from pytest_fa.records.log import read_records

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
    """A module of `kernels/auto`, anew."""
    spec = importlib.util.spec_from_file_location(f"auto_{name}", REPOSITORY / "kernels" / "auto" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`auto` with the small table."""
    module = module_of("entry")
    monkeypatch.setattr(module, "_choices", lambda: TABLE)
    return module


def tensors(keys: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of two heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((1, 2, keys, 64), generator=generator).to(dtype) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize(("keys", "first"), [(60, "cublas_hybrid"), (100, "cublas_hybrid"), (400, "reference")])
def test_the_nearest_case_decides(entry: ModuleType, keys: int, first: str) -> None:
    """The variant that was fastest on the nearest measured shape comes first."""
    q, k, _ = tensors(keys)
    assert entry.choose(q, k, "none")[0].variant == first


def test_another_dtype_is_judged_by_fp16(entry: ModuleType) -> None:
    """What was not measured in bf16 is taken to be as it is in fp16."""
    q, k, _ = tensors(60, torch.bfloat16)
    assert entry.choose(q, k, "none")[0].variant == "cublas_hybrid"


def test_a_variant_that_does_not_take_the_call_is_passed_over(entry: ModuleType) -> None:
    """The mask from the bottom right is none of `cublas_hybrid`'s, and no CUDA kernel runs here."""
    q, k, _ = tensors(60)
    assert [choice.variant for choice in entry.choose(q, k, "bottom_right")] == ["reference"]


def test_it_says_which_and_why(entry: ModuleType) -> None:
    """`explain` names the choice, its figure, and the case that it was measured on."""
    q, k, _ = tensors(60)
    assert entry.explain(q, k).splitlines() == [
        "cublas_hybrid: 3.00 us on b1h2s64d64-fp16, cpu: the nearest measured",
        "reference: not measured on cpu; the portable order",
    ]


@pytest.mark.parametrize("scale", [0.125, 0.0])
def test_where_the_first_refuses_the_next_one_answers(entry: ModuleType, scale: float) -> None:
    """`cublas_hybrid` refuses a scale of zero; the output is right all the same."""
    q, k, v = tensors(60)
    wanted = torch.softmax(q.double() @ k.double().mT * scale, -1) @ v.double()
    assert float((entry.forward(q, k, v, scale=scale).double() - wanted).abs().max()) < 2e-3


def test_the_table_ranks_what_was_right() -> None:
    """Candidates by their time; one that was wrong anywhere is left out."""
    choices = module_of("choices")
    records = read_records(REPOSITORY / "profiles" / "nvidia-h200" / "minimal.jsonl")
    (table,) = choices.choices(records).values()
    assert [list(row["device_us"]) for row in table["fp16-d64-none"]] == [["minimal"]] * len(table["fp16-d64-none"])
    spoilt = [*records, msgspec.structs.replace(records[0], outcome="wrong")]
    assert choices.choices(spoilt) == {}
