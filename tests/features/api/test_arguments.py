"""The messages of wrong arguments: they name arguments, not options of the command line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pytest_fa
from pytest_fa.attention.dtypes import DTYPES
from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import FaError, ManifestError, UsageProblem
from pytest_fa.features.api.arguments import Settings, case_of, cases_of
from pytest_fa.session.refusals import Refused
from tests.factories import WriteVariant

CASE = "b1h2s64d64-fp16"
THD = "b4h2s8d64-fp16-var2-thd"
FORM = (
    "b<B>h<H>s<S>d<D>-<dtype>[-causal|-causal_br][-win<left>_<right>][-kv<heads>][-sk<keys>][-var1|-var2|-var3|-var4|-var5]"
    "[-page<size>[hnd]][-kv_e4m3_t|-kv_e4m3_h|-kv_e4m3_th|-kv_int8_t|-kv_int8_h|-kv_int8_th][-append]"
    "[-dv<size>][-scale<factor>][-cap<cap>][-bias<axes>][-alibi][-mask<axes>][-sink]"
    "[-bshd|-packed|-thd][-scores|-bwd][-dlse][-out_bf16][-zero_head|-outlier|-tiny]"
    "[-data_outlier_channels|-data_massive_key|-data_low_lse|-data_high_lse|-data_one_hot|-data_equal_scores"
    "|-data_long_tail|-data_subnormal|-data_value_range][-seed<N>]"
)


def forward(q: Any, k: Any, v: Any) -> Any:  # noqa: ARG001  # never called
    """Return one of the inputs."""
    return q


# Calls, and the messages of their errors.  HERE stands for the current folder.
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "name": (
        lambda: pytest_fa.check("mien", CASE),
        "function: no variant 'mien'; did you mean 'mine'? (looked in HERE/kernels and in installed packages)",
    ),
    "glob": (
        lambda: pytest_fa.check("sdpa_*", CASE),
        "function: 'sdpa_*' selects 18 variants (sdpa_flash, sdpa_flash_cpu, sdpa_cudnn, ...); give the name of one",
    ),
    "definition": (
        lambda: pytest_fa.check("mine@X", CASE),
        "function=mine@X: 'X' is malformed; the form is NAME=VALUE",
    ),
    "neither name nor function": (
        lambda: pytest_fa.time(3, CASE),  # type: ignore[arg-type]
        "function: 3 is neither the name of a variant nor a function f(q, k, v, ...)",
    ),
    "class": (
        lambda: pytest_fa.check(Settings, CASE),
        "function: Settings is a class; give an instance, such as Settings(), or a function",
    ),
    "not checked": (
        lambda: pytest_fa.check("noop", CASE),
        "function: the output of noop cannot be checked: it computes nothing (role overhead)",
    ),
    "case": (
        lambda: pytest_fa.check("mine", "b1h2"),
        f"case: 'b1h2' is malformed; the form is {FORM}, as in b1h8s512d64-fp16",
    ),
    "case of another type": (
        lambda: pytest_fa.check("mine", 64),  # type: ignore[arg-type]
        f"case: 64 is not the id of a case; the form is {FORM}, as in b1h8s512d64-fp16",
    ),
    "malformed case with a seed": (
        lambda: pytest_fa.time(forward, "b1h2-seed3"),
        f"case: 'b1h2-seed3' is malformed; the form is {FORM}, as in b1h8s512d64-fp16",
    ),
    "dtype of a case": (
        lambda: pytest_fa.check("mine", "b1h2s64d64-fp17"),
        f"case: 'b1h2s64d64-fp17': no dtype 'fp17'; allowed: {', '.join(DTYPES)}",
    ),
    "causal case": (
        lambda: pytest_fa.check(forward, f"{CASE}-causal"),
        f"case: {CASE}-causal-seed0 is causal, but forward takes no keyword `causal`; add it, or drop -causal",
    ),
    "sequences behind one another": (
        lambda: pytest_fa.check(forward, THD),
        f"case: {THD}-seed0 is cu_seqlens_q, but forward takes no keyword `cu_seqlens_q`; add it, or drop -thd",
    ),
    "tolerance": (
        lambda: pytest_fa.check("mine", CASE, tolerance="exact"),
        "tolerance: no 'exact' (allowed: same_precision, absolute, fp8)",
    ),
    "tolerance of a dtype": (
        lambda: pytest_fa.check("mine", "b1h2s64d64-bf16", tolerance="absolute"),
        "tolerance=absolute judges fp16 only; case b1h2s64d64-bf16-seed0 is bf16 (use same_precision)",
    ),
    "tolerance of a function": (
        lambda: pytest_fa.check(forward, "b1h2s64d64-bf16", tolerance="absolute"),
        "tolerance: 'absolute' does not judge bf16 attention, as in b1h2s64d64-bf16-seed0 (use 'same_precision')",
    ),
    "repeats": (lambda: pytest_fa.check("mine", CASE, repeats=0), "repeats: '0' repeats; give 1 to 1000000"),
    "kernels": (
        lambda: pytest_fa.check("mine", CASE, kernels="nowhere"),
        (
            "kernels: no folder 'HERE/nowhere'; `python -m pytest_fa new NAME --kernels=HERE/nowhere` writes a variant "
            "into HERE/nowhere"
        ),
    ),
    "one variant's folder": (
        lambda: pytest_fa.check("mine", CASE, kernels=["kernels/mine"]),
        "kernels: no <variant>/variant.yaml in 'HERE/kernels/mine'; give the folder above it",
    ),
    "kernels of another type": (
        lambda: pytest_fa.check("mine", CASE, kernels=5),  # type: ignore[arg-type]
        "kernels: 5 is neither a folder nor a list of folders",
    ),
    "kernels of a function": (
        lambda: pytest_fa.time(forward, CASE, kernels="kernels"),
        "kernels, cache: a function is called as it is; these go with the name of a variant",
    ),
    "gate of a function": (
        lambda: pytest_fa.gate(forward, 0.95, CASE),  # type: ignore[arg-type]
        (
            "name: forward is not the name of a variant; a gate starts fresh processes, and a function of this process "
            "is not in them; `python -m pytest_fa new NAME --kind python` writes a folder with a manifest for it"
        ),
    ),
    "gate of an empty kernel": (
        lambda: pytest_fa.gate("noop", 0.95, CASE),
        (
            "name: no selected variant can be gated: noop (overhead, computes attention); a gated variant must compute "
            "all of attention, or its gradients"
        ),
    ),
    "ratio": (
        lambda: pytest_fa.gate("mine", 0, CASE),
        "ratio: '0' is not a ratio; give 0.01 to 100, such as 0.95",
    ),
    "ratio and cases exchanged": (
        lambda: pytest_fa.gate("mine", [CASE], 1),  # type: ignore[arg-type]
        f"cases: 1 is not the id of a case; the form is {FORM}, as in b1h8s512d64-fp16",
    ),
    "malformed case of a gate": (
        lambda: pytest_fa.gate("mine", 1, [CASE, "b1h2"]),
        f"cases: 'b1h2' is malformed; the form is {FORM}, as in b1h8s512d64-fp16",
    ),
    "no cases": (
        lambda: pytest_fa.gate("mine", 0.95, []),
        "cases: there is none; give the id of a case, such as 'b1h2s64d64-fp16', or a list of ids",
    ),
    "cases of another type": (
        lambda: pytest_fa.gate("mine", 0.95, 64),  # type: ignore[arg-type]
        f"cases: 64 is not the id of a case; the form is {FORM}, as in b1h8s512d64-fp16",
    ),
    "baseline": (
        lambda: pytest_fa.gate("mine", 0.95, CASE, baseline="othr"),
        "baseline: no variant 'othr'; did you mean 'other'? (looked in HERE/kernels and in installed packages)",
    ),
    "baselines": (
        lambda: pytest_fa.gate("mine", 0.95, CASE, baseline="sdpa_*"),
        "baseline: 'sdpa_*' must name exactly one variant with a readable manifest",
    ),
    "baseline of a build": (
        lambda: pytest_fa.gate("mine", 0.95, CASE, baseline="key:12"),
        "baseline: 'key:12' must name one cached build; it matches none",
    ),
    "gate of a number": (
        lambda: pytest_fa.gate(3, 0.95, CASE),  # type: ignore[arg-type]
        "name: 3 is not the name of a variant; give a text, such as 'mine'",
    ),
    "loaded function": (
        lambda: pytest_fa.load(forward),  # type: ignore[arg-type]
        (
            "name: forward is not the name of a variant; a function needs no loading: call it, or give it to check or "
            "time"
        ),
    ),
    "nothing loaded": (
        lambda: pytest_fa.load(None),  # type: ignore[arg-type]
        "name: None is not the name of a variant; give a text, such as 'mine'",
    ),
    "loaded name": (
        lambda: pytest_fa.load("mien"),
        "name: no variant 'mien'; did you mean 'mine'? (looked in HERE/kernels and in installed packages)",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_names_the_argument(folder: Path, what: str) -> None:
    """The message of a wrong argument names the argument, the value and what is allowed, and no option."""
    call, message = ERRORS[what]
    with pytest.raises(UsageProblem) as caught:
        call()
    assert message == str(caught.value).replace(str(folder), "HERE")
    assert re.findall(r"--fa-\S+", message) == []


def test_a_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without `kernels`, an unknown name gives that folder; the shipped variants are still known."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageProblem) as caught:
        pytest_fa.check("mine", CASE)
    assert str(caught.value).startswith(f"function: no variant 'mine'; looked for {tmp_path}/kernels")
    assert str(caught.value).endswith(f"`python -m pytest_fa new mine` writes a variant into {tmp_path}/kernels")
    assert callable(pytest_fa.load("sdpa_math"))


def test_a_broken_manifest_is_quoted(folder: Path, write_variant: WriteVariant) -> None:
    """A variant whose manifest cannot be read is refused with the path of the manifest."""
    write_variant("broken", manifest="step: [")
    with pytest.raises(UsageProblem, match=rf"^function: broken cannot be used: {folder}/kernels/broken/variant.yaml"):
        pytest_fa.check("broken", CASE)
    with pytest.raises(ManifestError, match=r"broken/variant\.yaml"):
        pytest_fa.load("broken")


@pytest.mark.usefixtures("folder")
def test_an_unsupported_case_is_refused() -> None:
    """A case that the variant does not support raises `Refused`, which is a `FaError`, with the manifest's field."""
    with pytest.raises(Refused, match="head_dim is 128, supports 64") as caught:
        pytest_fa.check("mine", "b1h2s64d128-fp16")
    assert isinstance(caught.value, FaError)


def test_a_case_may_omit_the_seed() -> None:
    """A case is an id with or without a seed, or a `Case`; several are a sequence, each counted once."""
    case = parse_case(f"{CASE}-seed0")
    assert [case, case, case.with_seed(3)] == [case_of(CASE), case_of(case), case_of(f"{CASE}-seed3")]
    assert ((case,), (case, case.with_seed(1))) == (cases_of(CASE), cases_of([CASE, case, f"{CASE}-seed1"]))


def test_the_rerun_command_has_what_was_given(folder: Path) -> None:
    """The rerun command of a record is a command line of pytest with the same folders, policy, repeats and cache."""
    settings = Settings(("kernels", "kernels"), "builds", "fp8")
    options = (f"--fa-kernels={folder}/kernels,{folder}/kernels", "--fa-tolerance=fp8", "--fa-soak=7")
    command = ("pytest", "--pyargs", "pytest_fa.suite", *options, f"--fa-cache={folder}/builds")
    assert command == settings.options(soak=7).rerun
    assert ("pytest", "--pyargs", "pytest_fa.suite") == Settings().options().rerun
