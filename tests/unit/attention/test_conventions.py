"""How kernels count: what is declared is translated, what is not is named with the line to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fa.attention import parts
from pytest_fa.catalog.case import parse_case
from pytest_fa.catalog.conventions import read_conventions
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.own_tolerance import own_tolerance
from pytest_fa.catalog.properties import GRADIENTS_ONLY, ON_GPU, PROMISED
from pytest_fa.catalog.variant import Variant
from pytest_fa.errors import ManifestError
from pytest_fa.judge.pipeline import run_case
from pytest_fa.judge.properties import PROPERTIES
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, WriteVariant, cpu_job
from tests.unit.attention.counting_kernels import ENTRY, KERNELS, counting_kernel

# Each key and value, with a case that shows it, one in which other parts are there, too, and a ragged batch.
DEVIATIONS = {
    ("scale", "times_log2e"): ("", "win15_3-sk80-scale0p5"),
    ("lse", "base2"): ("", "kv2-sink", "var3"),
    ("lse_empty", "+inf"): ("causal_br-sk40", "maskhq", "causal_br-sk40-var3"),
    ("lse_empty", "0"): ("causal_br-sk40", "maskbhq", "causal_br-sk40-var3"),
    ("lse_order", "bsh"): ("", "kv2-sink", "var3"),
    ("lse_order", "hbs"): ("", "mask", "var3"),
    ("lse_has_sink", "false"): ("sink", "causal_br-sk80-kv2-cap2-sink", "var3-sink"),
    ("window", "total"): ("win15_0", "win15_3-sk80-kv2-cap2"),
    ("window_open", "none"): ("win15_o", "wino_5-sk80"),
    ("window_align", "top_left"): ("win15_3-sk80", "win15_0-sk80-kv2-sink"),
    ("sink", "base2"): ("sink", "win15_0-sk80-cap2-sink"),
    ("mask_true", "hides"): ("maskbhq", "maskhq-sink"),
    ("add", "before_cap"): ("cap2-biasbhq", "cap2-alibi"),
    ("groups", "interleaved"): ("kv2", "causal_br-sk80-kv2-sink"),
    ("rows_past", "zero"): ("var3", "causal_br-kv2-sk80-var3-sink"),
    ("alibi", "signed"): ("alibi", "sk80-kv2-alibi-sink"),
    ("alibi_align", "top_left"): ("sk80-alibi", "sk80-cap2-alibi"),
}
KEPT = [("plain", 0), ("plain", 1), ("plain", 2), ("tiles", 0), ("backwards", 0)]
ROWS = [
    pytest.param(*deviation, rest, kernel, marks=[] if (kernel, place) in KEPT else [pytest.mark.nightly])
    for deviation, cases in DEVIATIONS.items()
    for place, rest in enumerate(cases)
    for kernel in KERNELS
]
VariantOf = Callable[..., Variant]


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(kernel, counts, declared)`: see `counting_kernel`."""
    return lambda *texts: counting_kernel(write_variant, tmp_path, *texts)


def case_of(rest: str) -> str:
    """A small case with these parts; the order of the tokens is that of an id."""
    tokens = rest.split("-") if rest else []
    keys = next((token for token in tokens if token.startswith("sk")), "")
    order = ("causal", "win", "kv", "sk", "var", "scale", "cap", "bias", "alibi", "mask", "sink")
    placed = sorted((token for token in tokens if token != keys), key=lambda token: _place(token, order))
    seq_k = [keys] if keys else []
    before = [token for token in placed if _place(token, order) < order.index("sk")]
    return "-".join(["b2h4s56d32-fp16", *before, *seq_k, *placed[len(before) :], "seed1"])


def _place(token: str, order: tuple[str, ...]) -> int:
    return next(place for place, name in enumerate(order) if token.startswith(name))


def judged(variant: Variant, rest: str, **changes: object) -> CaseResult:
    """The result of one case on the CPU."""
    return run_case(cpu_job(variant, case_of(rest), repeats=2, **changes))


def cause_of(result: CaseResult) -> str:
    """The cause in words; empty if the result is correct."""
    return result.diagnosis.cause if result.diagnosis else result.message


@pytest.mark.parametrize(("key", "value", "rest", "kernel"), ROWS)
def test_what_is_not_declared_is_named(variant_of: VariantOf, key: str, value: str, rest: str, kernel: str) -> None:
    """A right kernel that counts in another way is wrong, and the cause ends with the line to write."""
    result = judged(variant_of(kernel, f"{key}={value}"), rest)
    convention = parts.conventions()[key][1]
    assert result.outcome == "wrong"
    line = f"{convention.values[value]}: if that is meant, declare `conventions: {{{key}: {value}}}`"
    assert cause_of(result).removesuffix(" of the log-sum-exp") == line


@pytest.mark.parametrize(("key", "value", "rest", "kernel"), ROWS)
def test_what_is_declared_is_translated(variant_of: VariantOf, key: str, value: str, rest: str, kernel: str) -> None:
    """The same kernel is correct if its manifest says how it counts."""
    result = judged(variant_of(kernel, f"{key}={value}", f"{key}: {value}"), rest)
    assert (result.outcome, cause_of(result)) == ("ok", "")


@pytest.mark.parametrize(("key", "value", "rest", "kernel"), ROWS)
def test_what_is_declared_and_not_so_is_named(
    variant_of: VariantOf, key: str, value: str, rest: str, kernel: str
) -> None:
    """A kernel in the plain convention is wrong if its manifest says otherwise, and the cause says that."""
    result = judged(variant_of(kernel, "", f"{key}: {value}"), rest)
    convention = parts.conventions()[key][1]
    if key == "window_open":  # it gets None, and compares it with a number
        assert (result.outcome, "NoneType" in result.message) == ("failed", True)
        return
    line = f"the manifest declares `conventions: {{{key}: {value}}}`: drop `{key}`"
    assert (result.outcome, cause_of(result)) == ("wrong", f"{convention.values[convention.plain]}, but {line}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_alignment_of_a_causal_mask_is_named(write_variant: WriteVariant, tmp_path: Path, kernel: str) -> None:
    """For a mask that is passed as true or false, `supports` says the alignment."""
    variant = counting_kernel(write_variant, tmp_path, kernel, "causal=top_left")
    line = (
        "the causal mask is top left where it should be bottom right: if that is meant, write `top_left` in `supports: "
    )
    assert cause_of(judged(variant, "causal_br-sk80")) == f"{line}{{causal: [...]}}`"
    entry = ENTRY.replace("bottom_right", "top_left")
    assert (
        cause_of(judged(counting_kernel(write_variant, tmp_path, kernel, "causal=top_left", "", entry), "causal-sk80"))
        == ""
    )


CASES_OF_ALL = "win15_3-sk80-kv2-cap2-biasbhq-maskhq-sink", "sk80-kv2-cap2-alibi-maskbhq-sink", "causal_br-sk40-kv2"
# One value of each key but `lse_empty`, which has no place beside a sink.
ALL = {key: value for key, value in DEVIATIONS if (key, value) not in {("lse_empty", "0"), ("lse_order", "hbs")}}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rest", CASES_OF_ALL)
def test_all_conventions_are_declared_at_once(variant_of: VariantOf, rest: str, kernel: str) -> None:
    """A kernel that deviates in everything is correct, also in its timed calls."""
    counts, declared = (" ".join(f"{key}={value}" for key, value in ALL.items()), yaml_of(ALL))
    result = judged(variant_of(kernel, counts, declared), rest, time=True)
    assert (result.outcome, cause_of(result), result.speed is not None) == ("ok", "", True)


def yaml_of(declared: dict[str, str]) -> str:
    """The inner part of a mapping in YAML."""
    return ", ".join(f"{key}: {value}" for key, value in declared.items())


@pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in ON_GPU | PROMISED | GRADIENTS_ONLY])
@pytest.mark.parametrize("rest", CASES_OF_ALL[:2])
def test_properties_follow_the_conventions(variant_of: VariantOf, name: str, rest: str) -> None:
    """Each property makes its calls in the declared conventions."""
    counts, declared = (" ".join(f"{key}={value}" for key, value in ALL.items()), yaml_of(ALL))
    result = judged(variant_of("plain", counts, declared), rest, property_name=name)
    assert (result.outcome, cause_of(result)) in (("ok", ""), ("unsupported", result.message))


def test_two_deviations_of_the_log_sum_exp_are_named(variant_of: VariantOf) -> None:
    """Base 2 in another order is one cause with both lines."""
    cause = cause_of(judged(variant_of("plain", "lse=base2 lse_order=bsh"), ""))
    lines = [f"declare `conventions: {{{pair}}}`" for pair in ("lse: base2", "lse_order: bsh")]
    assert [line in cause for line in lines] == [True, True]


def test_a_returned_output_in_another_order_is_named(write_variant: WriteVariant) -> None:
    """A function that returns [batch, queries, heads] is told what to declare, and is correct then."""
    source = (
        "import torch\n\n\ndef forward(q, k, v, *, scale, causal, out, lse):\n"
        "    scores = q.float() @ k.float().transpose(2, 3) * scale\n"
        "    out.copy_(torch.softmax(scores, -1) @ v.float())\n"
        "    return out, scores.logsumexp(-1).transpose(1, 2).contiguous()\n"
    )
    manifest = (
        f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {{device: [cpu], head_dim: [32]}}\n'
        "returns: [out, lse]\n"
    )
    for declared, outcome in (("", "wrong"), ("conventions: {lse_order: bsh}\n", "ok")):
        folder = write_variant("returning", manifest=manifest + declared, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", folder.parent)
        result = judged(variant, "")
        assert result.outcome == outcome
        line = "the log-sum-exp is [batch, queries, heads]: if that is meant, declare `conventions: {lse_order: bsh}`"
        assert (line in result.message) is (outcome == "wrong")


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ("lse: base3", "conventions.lse is 'base3'; allowed are natural, base2"),
        ("lse_empty: 1", "conventions.lse_empty is 1; allowed are -inf, +inf, 0"),
        ("lse_has_sink: 0.5", "conventions.lse_has_sink is 0.5; allowed are true, false"),
        ("windw: total", "unknown key 'windw' in conventions; did you mean 'window'? (allowed: window, "),
        ("lse: [base2]", "conventions.lse is ['base2']; allowed are natural, base2"),
    ],
)
def test_a_wrong_value_is_one_error(variant_of: VariantOf, declared: str, problem: str) -> None:
    """The error has the key, the value and what is allowed."""
    with pytest.raises(ManifestError) as error:
        variant_of("plain", "", declared)
    assert (problem in str(error.value), len(str(error.value).splitlines())) == (True, 1)


@pytest.mark.parametrize(
    ("declared", "changes", "problem"),
    [
        ("lse: base2", ("returns: [out, lse]", "returns: [out]"), "but returns is [out]; write `returns: [out, lse]`"),
        (
            "window: total",
            ("window: [none, left, both], ", ""),
            "but supports.window is not claimed; claim it, or drop",
        ),
        ("sink: base2", ("sink: true, ", ""), "but supports.sink is not claimed; claim it, or drop sink"),
        ("rows_past: any", ("ragged: true", "ragged: [none, keys]"), "but supports.ragged does not list both"),
        ("scale: times_log2e", ("lse, scale,", "lse,"), "but entry.call does not pass 'scale'; pass it, or drop scale"),
    ],
)
def test_what_has_no_use_is_one_error(
    write_variant: WriteVariant, tmp_path: Path, declared: str, changes: tuple[str, str], problem: str
) -> None:
    """A convention of what the kernel does not claim, return or get is refused."""
    entry = ENTRY.replace(*changes)
    if "returns" in changes[0]:
        entry = entry.replace("out, lse, ", "out, ")
    with pytest.raises(ManifestError) as error:
        counting_kernel(write_variant, tmp_path, "plain", "", declared, entry)
    assert problem in str(error.value)


def test_a_part_that_every_case_has_is_claimed(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A kernel for windows or ragged batches alone declares how it counts them."""
    entry = ENTRY.replace("causal: [none, bottom_right], ", "")
    for own, claims, declared in (
        ("[none, left, both]", "[left]", "window: total"),
        ("ragged: true", "ragged: [both]", "rows_past: any"),
    ):
        assert counting_kernel(write_variant, tmp_path, "plain", "", declared, entry.replace(own, claims)).conventions


def test_negative_sides_need_none_for_an_open_one(write_variant: WriteVariant, tmp_path: Path) -> None:
    """A function that takes None for an open side may claim negative ones, which are then passed and judged."""
    entry = ENTRY.replace("[none, left, both]", "[none, left, both, negative]")
    with pytest.raises(ManifestError, match="if the function takes None"):
        counting_kernel(write_variant, tmp_path, "plain", "", "", entry)
    variant = counting_kernel(write_variant, tmp_path, "plain", "window_open=none", "window_open: none", entry)
    for rest in ("winm1_9", "wino_m2-sk80", "winm1_o"):
        assert cause_of(judged(variant, rest)) == ""


def test_a_window_at_the_first_key_is_judged_with_equal_lengths(variant_of: VariantOf) -> None:
    """With other lengths it has other keys, so that a time would be compared with that of other work."""
    variant = variant_of("plain", "window_align=top_left", "window_align: top_left, lse: base2")
    cases = [case_of(rest).replace("d32", "d64") for rest in ("win15_0-sk80", "win15_0", "sk80")]
    refusals = [str(variant.refuses(parse_case(case))) for case in cases]
    assert ["with equal lengths only" in refusal for refusal in refusals] == [True, False, False]
    assert own_tolerance(variant) == "conventions: window_align: top_left"


def test_plain_values_and_those_of_yaml_are_read() -> None:
    """A plain value declares nothing; numbers, infinities and null are read as they are meant."""
    declared = {"lse": "natural", "lse_has_sink": False, "window_open": None, "lse_empty": float("inf")}
    assert read_conventions(declared) == {"lse_empty": "+inf", "lse_has_sink": "false", "window_open": "none"}


def test_each_convention_has_a_plain_value_and_others() -> None:
    """Each key is of one part; a kernel that reads a table's tail fails, and strides say how a cache lies."""
    keys = [key for part in parts.PARTS for key in part.conventions]
    assert (len(keys), len(set(keys))) == (19, 19)
    assert {key for key, _ in DEVIATIONS} == {*keys} - {
        "table_tail",
        "padding",
        "kv_cache",
        "appended_lengths",
    }  # which change no right output
    assert all(len(convention.values) > 1 for _, convention in parts.conventions().values())
