"""The judge's store: what outputs are compared with is computed once for the same data, and never mixed up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_fa.catalog.case import parse_case
from pytest_fa.gpu.inputs import Inputs, clone, make_inputs
from pytest_fa.judge import truth_store
from pytest_fa.judge.oracle import truth_of
from pytest_fa.judge.truth import Truth
from pytest_fa.judge.truth_store import TruthStore

CPU = torch.device("cpu")
POLICY = "same_precision"


def inputs_of(case: str = "b1h2s16d64-fp16-seed0") -> Inputs:
    """The data of a case."""
    return make_inputs(parse_case(case), CPU)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Inputs]:
    """The inputs of each truth that is computed."""
    calls: list[Inputs] = []

    def counted(computes: str, inputs: Inputs, *arguments: object) -> Truth:
        calls.append(inputs)
        return truth_of(computes, inputs, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(truth_store, "truth_of", counted)
    return calls


def test_the_same_data_are_computed_once(computed: list[Inputs]) -> None:
    """Truth of the same bits is computed once, at whatever address and with whatever strides they lie."""
    store, inputs = TruthStore(), inputs_of()
    first = store.truth_of("attention", inputs, (), POLICY)
    strided = inputs._replace(q=inputs.q.transpose(1, 2).contiguous().transpose(1, 2))
    for same in (inputs, clone(inputs), inputs_of(), strided):
        assert store.truth_of("attention", same, (), POLICY) is first
    assert len(computed) == 1
    assert torch.equal(first.out, truth_of("attention", inputs, (), POLICY).out)


CHANGES: dict[str, Callable[[Inputs], Inputs]] = {
    "one bit": lambda inputs: inputs._replace(v=inputs.v.index_fill(3, torch.tensor([3]), 0.5)),
    "k and v exchanged": lambda inputs: inputs._replace(k=inputs.v, v=inputs.k),
    "shape": lambda inputs: inputs._replace(**{name: getattr(inputs, name).view(2, 1, 16, 64) for name in "qkv"}),
    "dtype": lambda inputs: inputs._replace(**{name: getattr(inputs, name).view(torch.bfloat16) for name in "qkv"}),
    "scale": lambda inputs: inputs._replace(scale=inputs.scale * (1 + 2**-50)),
    "mask": lambda inputs: inputs._replace(causal="top_left"),
    "other seed": lambda _: inputs_of("b1h2s16d64-fp16-seed1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_have_a_truth_of_their_own(computed: list[Inputs], change: str) -> None:
    """Whatever determines the result is part of the key."""
    store, inputs = TruthStore(), inputs_of()
    store.truth_of("attention", inputs, (), POLICY)
    other = CHANGES[change](inputs)
    truth = store.truth_of("attention", other, (), POLICY)
    assert len(computed) == 2
    assert torch.equal(truth.out.nan_to_num(), truth_of("attention", other, (), POLICY).out.nan_to_num())


def test_roundings_and_policies_have_a_truth_of_their_own(computed: list[Inputs]) -> None:
    """The declared roundings, and whether a policy reads the spread, are part of the key; other policies share."""
    store, inputs = TruthStore(), inputs_of()
    plain = store.truth_of("attention", inputs, (), POLICY)
    assert store.truth_of("attention", inputs, (), "absolute") is plain
    assert store.truth_of("attention", inputs, ("p",), POLICY) is not plain
    assert store.truth_of("attention", inputs, (), "fp8").spread is not None
    assert store.truth_of("scores", inputs, (), POLICY) is not plain
    assert len(computed) == 4


def test_memory_is_limited_and_the_oldest_result_goes_first(computed: list[Inputs]) -> None:
    """The store forgets what was not used for longest, and keeps nothing that is larger than the store itself."""
    seeds = [inputs_of(f"b1h2s16d64-fp16-seed{seed}") for seed in range(3)]
    store = TruthStore(5 * 8 * seeds[0].q.numel())  # room for two truths, of two outputs and some bytes each
    for inputs in (seeds[0], seeds[1], seeds[0], seeds[2], seeds[0], seeds[1]):
        store.truth_of("attention", inputs, (), POLICY)
    assert [int(torch.equal(each.q, seeds[1].q)) for each in computed] == [0, 1, 0, 1]
    large = inputs_of("b4h8s16d64-fp16-seed0")
    for _ in range(2):
        store.truth_of("attention", large, (), POLICY)
    assert len(computed) == 6
    store.truth_of("attention", seeds[1], (), POLICY)
    assert len(computed) == 6  # what is too large has not displaced anything


def test_large_inputs_are_not_hashed(computed: list[Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs above the limit, which take longer to hash than truth takes on a fast GPU, are computed each time."""
    store, inputs = TruthStore(), inputs_of()
    monkeypatch.setattr(truth_store, "MAX_INPUT_BYTES", sum(tensor.nbytes for tensor in inputs[:3]) - 1)
    for _ in range(2):
        store.truth_of("attention", inputs, (), POLICY)
    assert [each is inputs for each in computed] == [True, True]


def out_of_memory_until(used: list[bool], is_enough: Callable[[], bool]) -> Callable[[], str]:
    """Work that needs GPU memory, and notes each try."""

    def work() -> str:
        used.append(is_enough())
        if not used[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    return work


def test_a_full_gpu_empties_the_store(computed: list[Inputs]) -> None:
    """If the GPU's memory is used up, all results are forgotten, and the work is done once more."""
    store, inputs, tries = TruthStore(), inputs_of(), list[bool]()
    store.truth_of("attention", inputs, (), POLICY)
    assert store.with_memory(out_of_memory_until(tries, lambda: not store._kept)) == "done"
    assert (tries, len(store._kept)) == ([False, True], 0)
    store.truth_of("attention", inputs, (), POLICY)
    assert len(computed) == 2


@pytest.mark.parametrize(("kept", "tried"), [(0, 1), (1, 2)], ids=["an empty store", "a store that does not help"])
def test_a_full_gpu_is_an_error_that_stays(kept: int, tried: int) -> None:
    """Without a result that could be forgotten there is no second try, and after one the error stays."""
    store, tries = TruthStore(), list[bool]()
    for seed in range(kept):
        store.truth_of("attention", inputs_of(f"b1h2s16d64-fp16-seed{seed}"), (), POLICY)
    with pytest.raises(torch.OutOfMemoryError):
        store.with_memory(out_of_memory_until(tries, lambda: False))
    assert len(tries) == tried


@pytest.mark.parametrize("name", ["clone", "truth_of"])
def test_truth_is_computed_though_the_store_fills_the_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Truth, and the private copy of its inputs, get the memory of earlier results."""
    store, real = TruthStore(), getattr(truth_store, name)
    store.truth_of("attention", inputs_of(), (), POLICY)

    def needs_all_memory(*arguments: object) -> object:
        if store._kept:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(truth_store, name, needs_all_memory)
    other = inputs_of("b1h2s16d64-fp16-seed1")
    assert torch.equal(store.truth_of("attention", other, (), POLICY).out, truth_of("attention", other, (), POLICY).out)


def test_a_store_without_memory_keeps_nothing(computed: list[Inputs]) -> None:
    """A process in which a variant runs has no store: nothing that it could find is left behind."""
    store, inputs = TruthStore(0), inputs_of()
    for _ in range(2):
        store.truth_of("attention", inputs, (), POLICY)
    assert len(computed) == 2
    assert not store._kept


def test_a_result_that_was_changed_is_computed_again(computed: list[Inputs]) -> None:
    """If something writes into a kept truth, the next use computes it anew."""
    store, inputs = TruthStore(), inputs_of()
    store.truth_of("attention", inputs, (), POLICY).out.add_(1.0)
    again = store.truth_of("attention", inputs, (), POLICY)
    assert len(computed) == 2
    assert torch.equal(again.out, truth_of("attention", inputs, (), POLICY).out)


def test_data_that_change_meanwhile_do_not_spoil_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that writes into its inputs while truth is computed cannot put another truth under their key."""
    inputs, store = inputs_of(), TruthStore()

    def attacked(computes: str, private: Inputs, *arguments: object) -> Truth:
        inputs.v.zero_()  # the memory that the variant sees
        return truth_of(computes, private, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(truth_store, "truth_of", attacked)
    store.truth_of("attention", inputs, (), POLICY)
    stored = store.truth_of("attention", inputs_of(), (), POLICY)
    assert torch.equal(stored.out, truth_of("attention", inputs_of(), (), POLICY).out)


@pytest.mark.parametrize("name", ["make_row_truth", "cross_check_all"])
def test_the_log_sum_exp_and_cross_checks_are_shared(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The truth of the log-sum-exp and the verdicts on SDPA's backends are computed once for the same data."""
    results: list[object] = []
    real = getattr(truth_store, name)

    def counted(*arguments: object) -> object:
        results.append(real(*arguments))
        return results[-1]

    monkeypatch.setattr(truth_store, name, counted)
    store, inputs = TruthStore(), inputs_of()
    truth = store.truth_of("attention", inputs, (), POLICY)
    for _ in range(2):
        store._row_truth_of("lse", inputs, (), POLICY)
        store.cross_checks((), inputs, truth, (), POLICY)
    assert len(results) == 1


def test_e4m3_numbers_alone_are_no_key() -> None:
    """Equal e4m3 numbers with other descales, or with another dtype of the output, have truths of their own."""
    store = TruthStore()
    inputs = make_inputs(parse_case("b1h2s16d64-e4m3-seed0"), torch.device("cpu"))
    assert inputs.descales is not None
    louder = inputs._replace(descales=inputs.descales._replace(v=inputs.descales.v * 2))
    in_bf16 = inputs._replace(out_dtype=torch.bfloat16)

    plain, twice, rounded = (store.truth_of("attention", each, (), "fp8") for each in (inputs, louder, in_bf16))

    assert torch.equal(twice.out, 2 * plain.out)
    assert torch.equal(rounded.out, plain.out)
    assert not torch.equal(rounded.same_precision, plain.same_precision)
