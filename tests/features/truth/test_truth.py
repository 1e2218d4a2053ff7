"""--fa-truth and the manifest key `truth`: judging against functions of the user's in place of attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fa.catalog.case import parse_case
from pytest_fa.errors import UsageProblem
from pytest_fa.features.truth.functions import functions_of
from pytest_fa.records.outcome import Outcome
from pytest_fa.records.record import Record
from tests.projects import CASE, ONE_CASE, NewProject, Project, Run

# A window of 16 keys; `off_by_one` sees 17.
KERNEL = """\
import torch


def attend(q, k, v, scale, window):
    scores = q.float() @ k.float().transpose(2, 3) * scale
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    return (torch.softmax(scores, -1).nan_to_num() @ v.float()).to(q.dtype)


def forward(q, k, v, *, scale, causal="none", out=None):
    return attend(q, k, v, scale, 16)


def off_by_one(q, k, v, *, scale, causal="none", out=None):
    return attend(q, k, v, scale, 17)
"""
TRUTH = """\
import os
import time

import torch


def weights(q, k, scale):
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = q @ k.transpose(2, 3) * scale
    scores = scores.masked_fill((distance < 0) | (distance >= 16), float("-inf"))
    return torch.softmax(scores, -1).nan_to_num()


def truth(q, k, v, *, scale):
    return weights(q, k, scale) @ v


def reference(q, k, v, *, scale, dtype):
    p = weights(q, k, scale)
    largest = p.amax(-1, keepdim=True).clamp_min(1e-300)
    return (p / largest).to(dtype).double() @ v * largest


def nan(q, k, v, *, scale):
    out = truth(q, k, v, scale=scale)
    out[0, 1, 2, 3] = float("nan")
    return out


def short(q, k, v, *, scale):
    return truth(q, k, v, scale=scale)[:, :, 1:]


def half(q, k, v, *, scale):
    return truth(q, k, v, scale=scale).half()


def kernel(q, k, v, *, scale):
    return truth(q.half().float(), k.half().float(), v.half().float(), scale=scale).half().double()


def raises(q, k, v, *, scale):
    raise ValueError("no such window")


def nothing(q, k, v, *, scale):
    pass


def window(q, k, v, *, scale, size):
    return truth(q, k, v, scale=scale)


def hangs(q, k, v, *, scale):
    time.sleep(1000)


def ends(q, k, v, *, scale):
    os._exit(3)


def other(q, k, v, *, scale):
    return truth(q, k, v, scale=scale) * 1.1
"""
RAGGED_TRUTH = """\
import torch


def weights(q, k, scale, seqlens_k):
    scores = q @ k.transpose(2, 3) * scale
    hidden = torch.arange(k.shape[2]) >= seqlens_k.view(-1, 1, 1, 1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).nan_to_num()


def truth(q, k, v, *, scale, seqlens_q, seqlens_k):
    return weights(q, k, scale, seqlens_k) @ v


def reference(q, k, v, *, scale, dtype, seqlens_q, seqlens_k):
    p = weights(q, k, scale, seqlens_k)
    largest = p.amax(-1, keepdim=True).clamp_min(1e-300)
    return (p / largest).to(dtype).double() @ v * largest
"""
RAGGED_KERNEL = """

def forward(q, k, v, *, scale, causal="none", out=None, seqlens_q, seqlens_k):
    past = (torch.arange(k.shape[2])[:, None] >= seqlens_k.view(-1, 1, 1, 1))
    result = weights(q.float(), k.float(), scale, seqlens_k) @ v.float().masked_fill(past, 0.0)
    return result.to(q.dtype).masked_fill(torch.arange(q.shape[2])[:, None] >= seqlens_q.view(-1, 1, 1, 1), 0.0)
"""
BAD = {
    "nan": "returned NaN at [0, 1, 2, 3], not finite in 1 of 8192 elements (the output of a row that sees no key is 0)",
    "short": "returned an output of shape [1, 2, 63, 64]; the kernel's is [1, 2, 64, 64]",
    "half": "returned float16; compute and return float64",
    "kernel": "does not compute in float64: V times 1 + 1e-12 gives the same output, as a kernel's would be",
    "raises": "raised ValueError: no such window (window.py:43)",
    "nothing": "returned nothing; return the output, or (out, lse), as tensors",
    "window": "raised TypeError: window() missing 1 required keyword-only argument: 'size'",
    "hangs": "did not return within 6 s; --fa-watchdog=SECONDS allows it more",
    "ends": "ended its process",
}
BAD_REFERENCES = {
    "truth": "rounds nothing: it returns what truth returns",
    "other": "is 0.1 (RMS, relative) away from truth; roundings cause at most 0.00098, so it computes something else",
}
SUPPORTS = "supports: {device: [cpu, cuda], causal: [none, top_left], dtype: [fp16, bf16], head_dim: [64]}\n"
PLAIN = f'entry: {{kind: python, target: "entry:forward"}}\n{SUPPORTS}'
FILE = "../../window.py"


def manifest() -> Iterator[str]:
    """A manifest whose variants have the kernel and different functions."""
    yield f"{PLAIN}truth: {FILE}:truth,reference\nvariants:\n  slide: {{}}\n"
    yield "  slide_off: {target: 'entry:off_by_one'}\n"
    yield from (f"  bad_{name}: {{truth: '{FILE}:{name},reference'}}\n" for name in BAD)
    yield from (f"  bad_reference_{name}: {{truth: '{FILE}:truth,{name}'}}\n" for name in BAD_REFERENCES)


@pytest.fixture(scope="module")
def slides(new_project: NewProject) -> Project:
    """The kernels, with functions that their manifest names."""
    project = new_project("slides")
    project.write("window.py", TRUTH)
    project.python_variant("slides", KERNEL, "".join(manifest()))
    return project


@pytest.fixture(scope="module")
def judged(slides: Project) -> Run:
    """One run of the two with good functions, on one case."""
    return slides.suite(ONE_CASE, "-k", "test_correct", "--fa-variant=slide,slide_off")


@pytest.fixture(scope="module")
def badly_judged(slides: Project) -> Run:
    """One run of those with bad functions, on one case."""
    return slides.suite(ONE_CASE, "-k", "test_correct", "--fa-watchdog=6", "--fa-variant=bad_*")


def record_of(project: Project, name: str) -> Record:
    """The record of a variant."""
    (record,) = [record for record in project.records if record.variant == name and record.kind == "correct"]
    return record


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(("name", "outcome"), [("slide", Outcome.OK), ("slide_off", Outcome.WRONG)])
def test_a_window_is_judged(slides: Project, name: str, outcome: Outcome) -> None:
    """A kernel with a sliding window is right by the functions of its manifest; one key more is wrong."""
    record = record_of(slides, name)
    assert record.reference is not None
    assert record.check is not None
    assert (record.outcome, record.reference.functions, record.check.against) == (
        outcome,
        f"{FILE}:truth,reference",
        f"against your reference {FILE}:truth,reference",
    )


@pytest.mark.usefixtures("judged")
def test_known_mistakes_are_not_compared(slides: Project) -> None:
    """The diagnosis of such an output says that it knows only plain attention, and asks no SDPA backend."""
    diagnosis = record_of(slides, "slide_off").diagnosis
    assert diagnosis is not None
    assert (diagnosis.cause, diagnosis.cross_checks, diagnosis.conclusion) == (
        "wrong in query 16 to 63 of 64; the diagnosis knows only mistakes in plain attention",
        (),
        "",
    )


def test_rows_that_belong_to_no_query_need_no_truth(new_project: NewProject) -> None:
    """A function of a ragged batch may return anything there."""
    project = new_project("ragged")
    project.write("ragged.py", RAGGED_TRUTH)
    claims = "returns: [out]\nconventions: {rows_past: zero}\ntruth: ../../ragged.py:truth,reference\n"
    ragged = PLAIN.replace("dtype: [fp16, bf16]", "ragged: [both]") + claims
    project.python_variant("ragged", f"{RAGGED_TRUTH}{RAGGED_KERNEL}", ragged)
    run = project.suite("--fa-case=b4h2s150d64-fp16-var2-seed0", "-k", "test_correct", "--fa-variant=ragged")
    assert run.ret == 0, run.text


@pytest.mark.nightly
@pytest.mark.usefixtures("badly_judged")
@pytest.mark.parametrize(
    ("variant", "function", "said"),
    [
        *((f"bad_{name}", name, said) for name, said in BAD.items()),
        *((f"bad_reference_{name}", name, said) for name, said in BAD_REFERENCES.items()),
    ],
)
def test_bad_functions_give_no_verdict(slides: Project, variant: str, function: str, said: str) -> None:
    """Whatever is no truth, or no reference, gets one sentence, and the kernel no verdict."""
    record = record_of(slides, variant)
    expected = f"your reference {FILE}:{function} {said}; nothing was judged"
    assert (record.outcome, record.check, record.message.splitlines()[0]) == (Outcome.INCONCLUSIVE, None, expected)


@pytest.mark.nightly
def test_a_named_case_that_is_not_judged_outweighs_one_without_a_verdict(slides: Project) -> None:
    """To run again cannot help a case that no kernel computes, so the exit status is that of a failure."""
    masked = CASE.replace("-fp16", "-fp16-causal")
    undecided, also_unjudged = (
        slides.suite(f"--fa-case={cases}", "--fa-variant=bad_nan", "-k", "test_correct")
        for cases in (CASE, f"{CASE},{masked}")
    )
    assert (undecided.ret, also_unjudged.ret) == (10, 1), also_unjudged.text
    answers = [line for line in also_unjudged.outlines if line.endswith("; 1 named case not judged")]
    assert len(answers) == 1, also_unjudged.text


def test_every_verdict_is_marked(judged: Run) -> None:
    """The line below the table, the answer and the failure say against what was judged; no verdict, no such line."""
    lines = [line for line in judged.outlines if "against your reference" in line]
    notes = [line for line in lines if "not against attention" in line]
    assert notes == [
        f"{name}: judged against your reference {FILE}:truth,reference, not against attention"
        for name in ("slide", "slide_off")
    ]
    assert any(re.match(r"wrong: max error \S+, allowed \S+ against your reference", line) for line in lines)
    assert judged.ret == 1


@pytest.fixture(scope="module")
def plain(new_project: NewProject) -> Project:
    """The kernel without functions in its manifest."""
    project = new_project("plain_slide")
    project.write("window.py", TRUTH)
    project.python_variant("slide", KERNEL, PLAIN)
    return project


def test_the_option_judges_every_candidate(plain: Project) -> None:
    """With --fa-truth and a largest error the kernel is right, timed calls too; a masked case is not asked for."""
    masked = CASE.replace("-fp16", "-fp16-causal")
    run = plain.suite(
        f"--fa-case={CASE},{masked}",
        "--fa-truth=window.py:truth",
        "--fa-tolerance=absolute:0.01",
        "-rs",
        *("-k", "(test_correct or test_speed) and slide"),
    )
    records = [record for record in plain.records if record.variant == "slide"]
    assert [(record.kind, record.outcome) for record in records] == [("correct", "ok"), ("speed", "ok")], run.text
    assert {record.reference and record.reference.max_error for record in records} == {0.01}
    assert {bound.allowed for record in records if record.check for bound in record.check.bounds[1:]} == {0.01}
    reason = f"{masked.removesuffix('-seed0')} is not judged: window.py:truth takes no keyword argument `causal`"
    assert reason in run.text
    assert "; judged against your reference window.py:truth" in run.text
    assert "--fa-truth=window.py:truth" in records[0].rerun_command


BORROWED = """\
import sys

sys.path.insert(0, "kernels/borrower")
import entry


def truth(q, k, v, *, scale):
    return entry.attend(q, k, v, scale, 16).double()
"""


@pytest.mark.parametrize(
    ("returns", "function", "reason"),
    [
        ("out", "borrowed.py:truth", "imports {}/kernels/borrower/entry.py, which is in the folder of a kernel"),
        ("lse", "lse.py:truth", "does not return lse, which borrower declares in `returns`"),
    ],
)
def test_a_kernel_is_not_its_own_truth_and_no_output_goes_unjudged(
    new_project: NewProject, returns: str, function: str, reason: str
) -> None:
    """A truth from a kernel's folder, and one without a declared output, end the test without a verdict."""
    project = new_project("borrower")
    project.write("borrowed.py", BORROWED)
    project.write("lse.py", TRUTH)
    outputs = {"out": "", "lse": "returns: [out, lse]\n"}[returns]
    source = KERNEL.replace("out=None):\n    return", "out=None, lse=None):\n    return", 1)
    project.python_variant("borrower", source, f"{PLAIN}{outputs}")
    run = project.suite(
        ONE_CASE, "-k", "test_correct and borrower", f"--fa-truth={function}", "--fa-tolerance=absolute:0.1"
    )
    (record,) = [each for each in project.records if each.kind == "correct"][-1:]
    assert (record.outcome, run.ret) == (Outcome.INCONCLUSIVE, 10), run.text
    assert reason.format(project.folder) in record.message


@pytest.mark.nightly
def test_properties_use_the_truth(plain: Project) -> None:
    """Every property of the kernel holds by the user's functions."""
    run = plain.suite("--fa-truth=window.py:truth,reference", "-k", "test_property", "--fa-variant=slide")
    assert (run.ret, set(run.outcomes.values()) - {"skipped"}) == (0, {"passed"}), run.text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--fa-truth=window.py:truth"],
            (
                "window.py:truth says what is true, not how large an error may be, so nothing is judged; add a second "
                "function, the same formula with the kernel's roundings (window.py:truth,reference), or "
                "--fa-tolerance=absolute:MAX"
            ),
        ),
        (
            ["--fa-tolerance=absolute:0.01"],
            (
                "--fa-tolerance=absolute:0.01 is for a truth of your own, and slide has none; add "
                "--fa-truth=FILE.py:FUNCTION, or use same_precision"
            ),
        ),
        (
            ["--fa-truth=window.py:truth", "--fa-tolerance=absolute:none"],
            (
                "--fa-tolerance=absolute:none: 'none' is no largest error; give a number above 0 and up to 1e+06, "
                "such as 0.01"
            ),
        ),
        (["--fa-truth="], "--fa-truth: '' is not FILE.py:TRUTH or FILE.py:TRUTH,REFERENCE"),
        (["--fa-truth=window"], "--fa-truth: 'window' is not FILE.py:TRUTH or FILE.py:TRUTH,REFERENCE"),
        (
            ["--fa-truth=window.py:truth,reference", "--fa-tolerance=fp8"],
            "policy fp8 needs P, which window.py:truth,reference does not return; add --fa-tolerance=same_precision",
        ),
    ],
    ids=["no allowed error", "no truth", "no number", "nothing", "no function", "fp8"],
)
def test_a_run_that_cannot_judge_is_a_usage_error(plain: Project, arguments: list[str], complaint: str) -> None:
    """Options without which nothing could be judged end the run, with one sentence."""
    result = plain.collect(*arguments, "--fa-variant=slide")
    assert (result.ret, result.all_lines) == (pytest.ExitCode.USAGE_ERROR, [f"ERROR: {complaint}"])


SOURCE = "import numpy as np\n\ndef truth(q, k, v, *, scale):\n    pass\n\ndef any_words(q, k, v, **words):\n    pass\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "absent.py:truth",
            "{folder}/absent.py cannot be read: No such file or directory (a path is relative to {folder})",
        ),
        (
            "mine.py",
            "'mine.py' names no function; {folder}/mine.py has: truth, any_words; write mine.py:truth,any_words",
        ),
        ("mine.py:trth", "{folder}/mine.py has no 'trth'; did you mean 'truth'? (it has: truth, any_words)"),
        ("broken.py:truth", "{folder}/broken.py, line 1: invalid syntax"),
        ("mine.py:truth,truth,truth", "'mine.py:truth,truth,truth' is not FILE.py:TRUTH or FILE.py:TRUTH,REFERENCE"),
    ],
)
def test_functions_that_are_not_there(tmp_path: Path, text: str, complaint: str) -> None:
    """A file or a function that is not there is named, without the file being run."""
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def def")
    with pytest.raises(UsageProblem) as caught:
        functions_of("truth", text, tmp_path)
    assert str(caught.value) == f"truth: {complaint.format(folder=tmp_path)}"


@pytest.mark.parametrize(("name", "takes"), [("truth", ("q", "k", "v", "scale")), ("any_words", None), ("np", None)])
def test_keywords_are_read_from_the_source(tmp_path: Path, name: str, takes: tuple[str, ...] | None) -> None:
    """The keywords of a plain function are known before it is called; of others, only a call can tell."""
    (tmp_path / "mine.py").write_text(SOURCE)
    assert functions_of("truth", f"mine.py:{name},truth", tmp_path).takes == (takes, ("q", "k", "v", "scale"))


def test_a_reference_without_the_mask_is_named(tmp_path: Path) -> None:
    """A case that only the second function cannot compute is not judged, and that function is named."""
    (tmp_path / "mine.py").write_text(
        "def truth(q, k, v, *, scale, causal):\n    pass\n\n\ndef reference(q, k, v, *, scale):\n    pass\n"
    )
    own = functions_of("truth", "mine.py:truth,reference", tmp_path)
    masked = parse_case(CASE.replace("-fp16", "-fp16-causal"))
    reason = "is not judged: mine.py:reference takes no keyword argument `causal`"
    assert (own.refuses(parse_case(CASE), None), own.refuses(masked, None)) == (None, f"{masked.shape_id} {reason}")


def test_what_a_file_imports_is_part_of_it(tmp_path: Path) -> None:
    """A change of a module that the functions import, also by another one, changes the hash; others do not."""
    (tmp_path / "parts").mkdir()
    files = {
        "mine.py": "import torch\nfrom helper import weights\n" + SOURCE,
        "helper.py": "def weights():\n    from parts.scores import scores\n",
        "parts/__init__.py": "",
        "parts/scores.py": "scores = None\n",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    first = functions_of("truth", "mine.py:truth", tmp_path)
    assert [Path(file).relative_to(tmp_path).as_posix() for file in first.files] == [
        *("mine.py", "helper.py", "parts/__init__.py", "parts/scores.py")
    ]
    changes = {name: tmp_path / name for name in ("other.py", "parts/scores.py")}
    for path in changes.values():
        path.write_text("scores = 1\n")
        digest = functions_of("truth", "mine.py:truth", tmp_path).sha256
        assert (digest != first.sha256) == (path.name == "scores.py")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (f"{FILE}:truht,reference", "has no 'truht'; did you mean 'truth'?"),
        (
            f"['{FILE}:truth', '{FILE}:reference']",
            "Expected a text `FILE.py:TRUTH or FILE.py:TRUTH,REFERENCE`, got ['../../window.py:truth'",
        ),
    ],
    ids=["misspelt", "list"],
)
def test_a_manifest_with_a_wrong_truth_is_refused(project: Project, value: str, complaint: str) -> None:
    """The manifest's error names the file, the key and the functions that are there, or the form of the key."""
    project.write("window.py", TRUTH)
    project.python_variant("slide", KERNEL, f"{PLAIN}truth: {value}\n")
    assert complaint in project.collect("--fa-variant=slide").text
