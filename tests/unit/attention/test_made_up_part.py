"""A new part of attention is one file: it is parsed, judged, explained, refused, claimed and documented."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import pytest_fa
from pytest_fa.attention import not_judged, parts
from pytest_fa.attention.mistake import Positions
from pytest_fa.attention.part import CallInputs, Part, Shape
from pytest_fa.attention.token import Choice, Number
from pytest_fa.candidate.adapter import adapted
from pytest_fa.candidate.signature import signature_problem
from pytest_fa.catalog.case import Case, parse_case
from pytest_fa.catalog.claims import claim_cases, unjudged
from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.catalog.variant import Call, Entry, Variant
from pytest_fa.errors import ManifestError, UsageProblem
from pytest_fa.features.api.this_process import forward_of
from pytest_fa.gpu.inputs import make_inputs
from pytest_fa.judge.pipeline import run_case
from pytest_fa.wire.jobs import CaseResult
from tests.factories import MANIFEST, PYTHON_SOURCE, WriteVariant, cpu_job
from tests.projects import NewProject
from tests.unit.attention.even_bias import PART
from tools.docs import list_block

CASE = "b1h2s64d64-fp16-evens2-seed0"
MASKED = "b1h2s64d64-fp16-causal-evens2-seed0"
CPU = torch.device("cpu")
MaskedOrNot = pytest.mark.parametrize("case", [CASE, MASKED])

IGNORES = PYTHON_SOURCE.replace("out=None)", "out=None, evens=0.0, lse=None)")
RIGHT = IGNORES.replace(
    "* scale\n", "* scale\n    scores = scores + evens * (torch.arange(scores.shape[-1]) % 2 == 0)\n"
).replace("    return", "    if lse is not None:\n        lse.copy_(torch.logsumexp(scores, -1))\n    return")
SHIFTED = RIGHT.replace("% 2 == 0", "% 2 == 1")
CLAIMED = "{device: [cpu], causal: [none, top_left], evens: true}"
UNCLAIMED = "{device: [cpu], causal: [none, top_left]}"
VariantOf = Callable[..., Variant]


@pytest.fixture(autouse=True)
def made_up() -> Iterator[None]:
    """The made-up part is on the list."""
    parts.add(PART)
    yield
    parts.remove(PART)


@pytest.fixture
def variant_of(write_variant: WriteVariant, tmp_path: Path) -> VariantOf:
    """`variant_of(source)`: a variant that supports the part, or what else `supports` says."""

    def make(source: str = RIGHT, supports: str = CLAIMED, more: str = "") -> Variant:
        manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {supports}\n{more}'
        folder = write_variant("mine", manifest=manifest, **{"entry.py": source})
        (variant,) = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
        return variant

    return make


def judged(variant: Variant, case: str, property_name: str | None = None) -> CaseResult:
    """The result of one case on the CPU."""
    return run_case(cpu_job(variant, case, repeats=2, property_name=property_name))


# -- the case ---------------------------------------------------------------------------------------------------------


@MaskedOrNot
def test_an_id_has_the_part(case: str) -> None:
    """The text of the part in an id gives its value, and comes back in the id of the case, also out of JSON."""
    parsed = parse_case(case)
    copy = msgspec.json.decode(msgspec.json.encode(parsed), type=Case)
    assert (parsed.value_of("evens"), parsed.id, copy.id, copy) == (2.0, case, case, parsed)


def test_a_plain_case_is_as_before() -> None:
    """A case without the part has neither its text nor a field of it."""
    plain = parse_case("b1h2s64d64-fp16-seed0")
    assert (plain.value_of("evens"), plain.id) == (0.0, "b1h2s64d64-fp16-seed0")
    assert b"modifiers" not in msgspec.json.encode(plain)


def test_other_changes_keep_the_part() -> None:
    """A case with another seed, dtype or field keeps the part; it can be given to a plain case, and taken away."""
    case = parse_case(CASE)
    assert case.with_seed(3).with_dtype("bf16").id == "b1h2s64d64-bf16-evens2-seed3"
    assert case.with_fields({"layout": "bshd"}).id == "b1h2s64d64-fp16-bshd-evens2-seed0"
    assert case.with_fields({"evens": 0.0}).id == "b1h2s64d64-fp16-seed0"
    assert parse_case("b1h2s64d64-fp16-seed0").with_fields({"evens": 2.0}) == case


def test_its_work_is_counted() -> None:
    """The operations of the part are added to those of the matrix products; it reads no more bytes."""
    case, plain = parse_case(CASE), parse_case("b1h2s64d64-fp16-seed0")
    assert case.flops_per_call - plain.flops_per_call == 2 * 64 * 32
    assert case.bytes_per_call == plain.bytes_per_call


def test_cases_are_ordered() -> None:
    """A plain case comes before one with the part."""
    case, plain = parse_case(CASE), parse_case("b1h2s64d64-fp16-seed0")
    assert sorted([case, plain, case.with_seed(1)]) == [plain, case, case.with_seed(1)]


def test_a_process_without_the_part_keeps_its_text() -> None:
    """The id of a recorded case is the same where the part is not known."""
    recorded = msgspec.json.encode(parse_case(CASE).with_seed(77))
    parts.remove(PART)
    try:
        assert msgspec.json.decode(recorded, type=Case).id == "b1h2s64d64-fp16-evens2-seed77"
    finally:
        parts.add(PART)


def test_the_form_of_an_id_lists_it() -> None:
    """The message for a malformed id has the part."""
    with pytest.raises(UsageProblem, match=r"\[-evens2\]-seed<N>"):
        parse_case("b1h2s64d64-fp16-evens3-seed0")


# -- the manifest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "supported"), [("true", (0.0, 2.0)), ("false", (0.0,)), ("[2.0]", (2.0,))], ids=["true", "false", "list"]
)
def test_a_manifest_claims_it(variant_of: VariantOf, claim: str, supported: tuple[float, ...]) -> None:
    """`supports` has the key of the part, with true, false or a list of values."""
    variant = variant_of(supports=f"{{device: [cpu], evens: {claim}}}")
    assert PART.supported(variant.supports) == supported


@pytest.mark.parametrize(
    ("supports", "message"),
    [
        ("{evens: 3}", "supports.evens is 3; allowed are true, false, or a list of 0.0, 2.0"),
        ("{evens: [1.0]}", "supports.evens is [1.0]; allowed are true, false, or a list of 0.0, 2.0"),
        ("{evenss: true}", "unknown key 'evenss' in supports; did you mean 'evens'? (allowed: "),
        ("{more: []}", "unknown key 'more' in supports (allowed: "),
    ],
)
def test_a_wrong_claim_is_refused(variant_of: VariantOf, supports: str, message: str) -> None:
    """A value that the part does not have, and a key that is none, end with what is allowed."""
    with pytest.raises(ManifestError) as problem:
        variant_of(supports=supports)
    assert message in str(problem.value)


def test_a_variant_without_the_claim_refuses_it(variant_of: VariantOf) -> None:
    """A variant whose manifest does not claim the part refuses its cases with the key to write."""
    refusal = variant_of(supports=UNCLAIMED).refuses(parse_case(CASE))
    expected = "evens is 2.0, supports 0.0 (extend supports.evens if the kernel can)"
    assert refusal == f"mine does not support b1h2s64d64-fp16-evens2: {expected}"
    assert variant_of().refuses(parse_case(CASE)) is None


def test_claims_are_covered(variant_of: VariantOf) -> None:
    """The cases that judge what a manifest claims have the part, alone and under a mask; without them it is listed."""
    claims = {(case.causal, case.value_of("evens")) for case in claim_cases(variant_of(), [])}
    assert {("none", 2.0), ("top_left", 2.0), ("top_left", 0.0)} <= claims
    assert "evens: 2.0" in [each.text for each in unjudged(variant_of(), [parse_case("b1h2s64d64-fp16-seed0")])]
    assert {case.value_of("evens") for case in claim_cases(variant_of(supports=UNCLAIMED), [])} == {0.0}


def test_it_is_no_longer_listed_as_not_judged() -> None:
    """What a part of attention knows is not answered with `not judged`; without the part, it is."""

    class Dropout(Part):
        """A part with a name that is not judged."""

        name = "dropout"
        supports = "dropout"

    assert not_judged.recognised("dropout_p") is not_judged.rows()["dropout"]
    assert not_judged.remark("dropout").startswith(", which is not judged: ")
    parts.add(part := Dropout())
    try:
        assert ("dropout" in not_judged.rows(), not_judged.recognised("dropout_p")) == (False, None)
        assert not_judged.remark("dropout") == "; if it is meant, declare `dropout` in `supports`"
    finally:
        parts.remove(part)


# -- the call ---------------------------------------------------------------------------------------------------------


def test_a_call_has_its_word() -> None:
    """The word of the part is among the keywords of a call on its case, and of no other call."""
    plain, masked = (make_inputs(parse_case(case), CPU).keywords for case in ("b1h2s64d64-fp16-seed0", MASKED))
    assert (list(plain), masked["causal"], masked["evens"]) == (["scale", "causal"], "top_left", 2.0)


def test_another_function_gets_it_by_its_own_name() -> None:
    """`entry.call` passes the word of the part to a parameter of any name; a plain call passes its plain value."""
    values: list[float] = []

    def library(q: object, k: object, v: object, *, score_evens: float, softmax_scale: float) -> object:  # noqa: ARG001
        values.append(score_evens)
        return q

    forward = adapted(library, Call(keywords={"softmax_scale": "scale", "score_evens": "evens"}))
    for case in (CASE, "b1h2s64d64-fp16-seed0"):
        inputs = make_inputs(parse_case(case), CPU)
        forward(*inputs[:3], **inputs.keywords)
    assert values == [2.0, 0.0]


def test_a_function_that_does_not_take_it_is_told_so(variant_of: VariantOf) -> None:
    """A function of a variant that claims the part must have its keyword, and gets the line with the library's name."""

    def library(q: object, k: object, v: object, scale: float, score_evens: float) -> None: ...

    problem = signature_problem(library, Entry(target="a:b"), variant_of().passed)
    assert problem is not None
    assert "evens=evens" in problem
    assert "arguments: [q, k, v, scale, evens]" in problem


def test_a_function_of_this_process_needs_it() -> None:
    """`pytest_fa.check` of a function without the keyword says what to add."""

    def forward(q: object, k: object, v: object, *, scale: float) -> object:  # noqa: ARG001  # never called
        return q

    with pytest.raises(UsageProblem, match="forward takes no keyword `evens`; add it, or drop -evens2"):
        forward_of(forward, parse_case(CASE))


# -- the judge --------------------------------------------------------------------------------------------------------


@MaskedOrNot
def test_a_right_kernel_passes(variant_of: VariantOf, case: str) -> None:
    """A kernel that adds the bias is right, and so is its log-sum-exp."""
    result = judged(variant_of(more="returns: [out, lse]\n"), case)
    assert (result.outcome, result.message) == ("ok", "")
    assert result.check is not None
    assert result.check.rows["lse"].bad_count == 0


@MaskedOrNot
@pytest.mark.parametrize(
    ("source", "cause"),
    [(IGNORES, "the bias is not added"), (SHIFTED, "the bias is added to the odd keys")],
    ids=["ignored", "shifted"],
)
def test_a_wrong_kernel_is_found_and_explained(variant_of: VariantOf, source: str, cause: str, case: str) -> None:
    """A kernel that ignores the part, or does it wrong, fails, and the diagnosis names the mistake."""
    result = judged(variant_of(source), case)
    assert (result.outcome, "max" in result.caught_by) == ("wrong", True)
    assert result.diagnosis is not None
    assert result.diagnosis.cause.startswith(cause)


def test_a_wrong_log_sum_exp_is_found(variant_of: VariantOf) -> None:
    """A log-sum-exp without the bias, beside a right output, is caught by `lse`."""
    source = RIGHT.replace("torch.logsumexp(scores, -1)", "torch.logsumexp(q.float() @ k.float().mT * scale, -1)")
    assert judged(variant_of(source, more="returns: [out, lse]\n"), CASE).caught_by == ("lse",)


@pytest.mark.parametrize("name", ["hard_data", "head_independence", "contained_nan", "negative_scale", "new_data"])
def test_properties_hold_with_the_part(variant_of: VariantOf, name: str) -> None:
    """The properties hold for a right kernel in a case with the part."""
    result = judged(variant_of(), "b2h3s150d64-fp16-evens2-seed0", name)
    assert (result.outcome, result.message) == ("ok", "")


# -- two parts that hide keys -----------------------------------------------------------------------------------------


class FirstHidden(Part):
    """No query sees key 0."""

    name = "first_hidden"
    summary = "key 0 is hidden"
    tokens = (Choice("first_hidden", (("nofirst", True),), False),)
    supports = "first_hidden"
    claims = (False, True)
    words = {"first_hidden": ("first_hidden",)}  # noqa: RUF012  # as `Part` declares it

    def hidden(self, inputs: CallInputs, positions: Positions) -> torch.Tensor | None:
        """Key 0."""
        return (positions.keys == 0) | positions.nothing_hidden if inputs.word("first_hidden") else None


HIDES_FIRST = (
    PYTHON_SOURCE.replace("out=None)", "out=None, first_hidden=False)")
    .replace("    result", '    if first_hidden:\n        scores[..., 0] = float("-inf")\n    result', 1)
    .replace("torch.softmax(scores, -1)", "torch.softmax(scores, -1).nan_to_num()")
)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (HIDES_FIRST, ""),
        (HIDES_FIRST.replace('"top_left"', '"bottom_right"'), "the causal mask is none where it should be top left"),
        (HIDES_FIRST.replace("if first_hidden", "if False"), "not diagnosed"),
    ],
    ids=["right", "without the causal mask", "without the other"],
)
def test_masks_of_two_parts_add_up(variant_of: VariantOf, source: str, cause: str) -> None:
    """A key is hidden if one part hides it, and a mistake in the mask of one leaves that of the other as it is."""
    part = FirstHidden()
    parts.add(part)
    try:
        variant = variant_of(source, "{device: [cpu], causal: [none, top_left], first_hidden: true}")
        result = judged(variant, "b1h2s64d64-fp16-causal-nofirst-seed0")
    finally:
        parts.remove(part)
    assert result.outcome == ("wrong" if cause else "ok")
    if cause != "not diagnosed":
        assert (result.diagnosis.cause if result.diagnosis else "").startswith(cause)


# -- a part with a number ---------------------------------------------------------------------------------------------


class Past(Part):
    """A query sees the last keys before its own position."""

    name = "past"
    summary = "a query sees so many keys"
    tokens = (Number("past", "past", "keys", like="seq_k"),)
    supports = "past"
    claims = (0, 8, 2048)
    words = {"past": ("past",)}  # noqa: RUF012  # as `Part` declares it

    def visible_pairs(self, case: Shape) -> int | None:
        """The sum over the queries."""
        is_plain = case.value_of("past") == case.seq_k
        return None if is_plain else sum(len(self.visible_keys(case, query)) for query in range(case.seq_q))

    def visible_keys(self, case: Shape, query: int) -> range:
        """The last keys."""
        return range(max(0, query + 1 - case.value_of("past")), case.seq_k)


@pytest.fixture
def past() -> Iterator[None]:
    """The part is on the list."""
    part = Past()
    parts.add(part)
    yield
    parts.remove(part)


@pytest.mark.usefixtures("past")
def test_pairs_that_no_part_hides_are_counted() -> None:
    """A pair is visible if no part hides it; with one part alone, its own count is taken."""
    both, alone, plain = (parse_case(f"b1h1s64d64-fp16{text}-seed0") for text in ("-causal-past8", "-past8", ""))
    expected = sum(max(0, query - 7) <= key <= query for query in range(64) for key in range(64))
    assert (both.visible_pairs, both.flops_per_call) == (expected, 4 * 64 * expected)
    assert alone.visible_pairs == sum(key >= query - 7 for query in range(64) for key in range(64))
    assert plain.visible_pairs == 64 * 64


@pytest.mark.usefixtures("past")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("past08", "is not in its shortest form; write 'b1h1s64d64-fp16-past8-seed0'"),
        ("past64", "is not in its shortest form; write 'b1h1s64d64-fp16-seed0'"),
        ("past99999999999", "past is 99999999999; it must be at most"),
    ],
)
def test_a_number_has_one_form(text: str, message: str) -> None:
    """An id with zeros before the number, the plain value or a number without bounds is refused."""
    with pytest.raises(UsageProblem, match=re.escape(message)):
        parse_case(f"b1h1s64d64-fp16-{text}-seed0")


@pytest.mark.usefixtures("past")
def test_a_plain_case_needs_the_first_claim() -> None:
    """A case without the token calls a kernel without the word, and needs no claim."""
    plain, case = (parse_case(f"b1h1s64d64-fp16{text}-seed0") for text in ("", "-past8"))
    part = parts.words()["past"]
    assert (part.claimed_by(plain), part.claimed_by(case)) == (0, 8)
    assert ("past" in parts.arguments_of(plain), parts.arguments_of(case)["past"]) == (False, 8)


# -- what users see ---------------------------------------------------------------------------------------------------


def test_the_tables_of_the_documentation_have_it() -> None:
    """The tables of ids, and of what can be judged, have a row for the part."""
    ids, judged = (list_block.block(words, Path()) for words in ("tokens", "judged"))
    assert "| `-evens2` | 2 is added to the scores of every second key |" in ids
    assert f"| {PART.summary} | yes, not in CUDA sources | `evens`: `0.0`, `2.0` |" in judged


REGISTER = "from even_bias import PART\n\nfrom pytest_fa.attention import parts\n\nparts.add(PART)\n"


@pytest.mark.nightly
def test_a_run_of_pytest_judges_it(new_project: NewProject, tmp_path: Path) -> None:
    """Where each process registers the part, `--help` has it, a right kernel passes, and one that ignores it fails."""
    project = new_project("made_up")
    for name, source, supports in (("right", RIGHT, CLAIMED), ("ignores", IGNORES, CLAIMED), ("old", RIGHT, UNCLAIMED)):
        manifest = f'{MANIFEST}entry: {{target: "entry:forward"}}\nsupports: {supports}\n'
        project.python_variant(name, source, manifest)
    (tmp_path / "sitecustomize.py").write_text(REGISTER, encoding="utf-8")
    paths = (tmp_path, Path(__file__).parent, Path(pytest_fa.__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTEST_FA_SERVER": str(tmp_path / "none.sock")}
    assert "-evens2]" in "".join(line.strip() for line in project.run("--help", env=env).outlines)
    collected = project.suite("--fa-variant=right", "--fa-suite=edge", "--collect-only", "-q", env=env)
    assert "test_correct[right-b1h2s65d64-fp16-causal-evens2-seed0]" in collected.ids
    run = project.suite("--fa-variant=right,ignores,old", f"--fa-case={CASE}", "-k", "test_correct", "-rs", env=env)
    outcomes = {record.variant: (record.outcome, record.case and record.case.id) for record in project.records}
    assert run.ret == 1
    assert outcomes == {"right": ("ok", CASE), "ignores": ("wrong", CASE)}
    assert "old does not support b1h2s64d64-fp16-evens2: evens is 2.0, supports 0.0" in run.text


def test_a_cuda_source_cannot_claim_what_it_cannot_get(write_variant: WriteVariant, tmp_path: Path) -> None:
    """The C interface has no field for the part, so the manifest of a CUDA source that claims it is refused."""
    folder = write_variant("mine", manifest=f"{MANIFEST}supports: {{evens: true}}\n", **{"kernel.cu": ""})
    with pytest.raises(
        ManifestError, match=r"supports.evens is 0.0, 2.0, but the C interface has no field for it; drop"
    ):
        read_manifest(folder / "variant.yaml", tmp_path / "kernels")
