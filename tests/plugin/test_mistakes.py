"""Usual mistakes of a newcomer, and the one sentence that answers each.

The grades:

- A: the sentence names the thing, the value found, and what is allowed or to be typed.
- B: it names the thing and what is wrong; what to do is said in words, or is plain from them.

Neither is a traceback or a screen of usage, and the exit status is never 0.  Nothing here has a lower grade.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import pytest

from tests.factories import CUDA_SOURCE
from tests.projects import ONE_CASE, NewProject, Project

SUPPORTS = "supports: {device: [cpu, cuda], dtype: [fp16], causal: [none], head_dim: [64]}\n"
PLAIN = f'entry: {{kind: python, target: "entry:forward"}}\n{SUPPORTS}'
ATTENTION = """\
def attention(q, k, v, scale):
    return (torch.softmax(q.float() @ k.float().transpose(2, 3) * scale, -1) @ v.float()).to(q.dtype)

"""
GOOD = (
    f"import torch\n\n{ATTENTION}\ndef forward(q, k, v, *, scale, causal, out):\n    return attention(q, k, v, scale)\n"
)
TO_DO = re.compile(
    r"`|did you mean|such as|allowed|is not FILE|; (add|give|drop|write|rename|install|the form)|\(suite|in 'supports'"
)


class Mistake(NamedTuple):
    """One mistake: what is typed or written, and the sentence that answers."""

    grade: Literal["A", "B"]
    text: str
    answer: str


OPTIONS = (
    Mistake(
        "A",
        "--fa-varient=good",
        "--fa-varient: there is no such option; did you mean '--fa-variant'? (see pytest --help)",
    ),
    Mistake("A", "--fa-variant=god", "--fa-variant: no variant 'god'; did you mean 'good'? (see --fa-list)"),
    Mistake("A", "--fa-seeds=-1", "--fa-seeds: '-1' is not a seed; give a count such as 5, or a list such as 3,7"),
    Mistake("A", "--fa-tolerance=loose", "--fa-tolerance: no 'loose' (allowed: same_precision, absolute, fp8)"),
    Mistake(
        "A",
        "--fa-tolerance=absolute:0.01",
        "--fa-tolerance=absolute:0.01 is for a truth of your own, and good has none; add "
        "--fa-truth=FILE.py:FUNCTION, or use same_precision",
    ),
    Mistake(
        "A",
        "--fa-tolerance=absolute:none",
        "--fa-tolerance=absolute:none: 'none' is no largest error; give a number above 0 and up to 1e+06, such as 0.01",
    ),
    Mistake(
        "A",
        "--fa-kernels=kernel",
        "--fa-kernels: no folder '{folder}/kernel'; did you mean 'kernels'?; `python -m pytest_fa new NAME "
        "--kernels={folder}/kernel` writes a variant into {folder}/kernel",
    ),
    Mistake("A", "--fa-gate=fast", "--fa-gate: 'fast' is not a ratio; give 0.01 to 100, such as 0.95"),
    Mistake("A", "--fa-gate=1.1x", "--fa-gate: '1.1x' is not a ratio; give 0.01 to 100, such as 0.95"),
    Mistake(
        "A",
        "--fa-case=*causal_br*",
        "--fa-case: '*causal_br*' matches no case of suite history (suite edge has some: add --fa-suite=edge)",
    ),
    Mistake("B", "--fa-case=*x*", "--fa-case: '*x*' matches no case of suite history (see --collect-only -q)"),
    Mistake("B", "--fa-define=BLOKC=3", "--fa-define: no selected variant has 'BLOKC' (they have: none)"),
    Mistake("A", "--fa-watch -n 2", "--fa-watch: one process at a time builds, checks and times; drop -n"),
    Mistake(
        "A",
        "--fa-sweep=good",
        "--fa-sweep: the manifest of good has no `sweep`; write for example `sweep: {values: {BLOCK_M: [32, 64]}}` "
        "(see docs/how-to/sweep.md)",
    ),
    Mistake(
        "B",
        "--fa-truth=no.py:truth",
        "--fa-truth: {folder}/no.py cannot be read: No such file or directory (a path is relative to {folder})",
    ),
    Mistake("A", "--fa-truth=pytest.ini", "--fa-truth: 'pytest.ini' is not FILE.py:TRUTH or FILE.py:TRUTH,REFERENCE"),
)
MANIFESTS = (
    Mistake(
        "A", PLAIN.replace("supports", "suports"), "unknown key 'suports' in the manifest; did you mean 'supports'?"
    ),
    Mistake("A", PLAIN.replace("kind: python", "kind: pythn"), "entry.kind is 'pythn'; allowed: cuda, torch, python"),
    Mistake("A", PLAIN.replace("[64]", "64"), "supports.head_dim is 64; write `head_dim: [64]`"),
    Mistake(
        "A",
        PLAIN.replace("[64]", "sixty"),
        "supports.head_dim is 'sixty'; it must be a list of numbers, such as `head_dim: [64, 128]`",
    ),
    Mistake(
        "B",
        PLAIN.replace("[none]", "true"),
        "supports.causal is true; it must be a list of none, top_left, bottom_right",
    ),
    Mistake("A", f"{PLAIN}returns: [out, softmax_lse]\n", "returns[1] is 'softmax_lse'; allowed: out, lse"),
    Mistake("B", PLAIN + PLAIN, "duplicate key 'entry' on line 3"),
    Mistake(
        "B", f"{PLAIN}truth: w.py:truth\n", "truth: {folder}/kernels/bad/w.py cannot be read: No such file or directory"
    ),
    Mistake(
        "A",
        PLAIN.replace("head_dim", "dropout: 0.1, head_dim"),
        "unknown key 'dropout' in supports: dropout is not judged; judge the kernel with a probability of 0; drop the "
        "key",
    ),
    Mistake(
        "B",
        PLAIN.replace("head_dim", "window: [128], head_dim"),
        "supports.window is [128]; allowed are true, false, or a list of none, left, both, negative",
    ),
    Mistake(
        "A",
        SUPPORTS,
        "entry.source is 'kernel.cu'; that file does not exist; for entry.py write `entry: {target: "
        '"entry:FUNCTION"}`',
    ),
)
NEVER = "while True: pass"
KERNELS = (
    Mistake(
        "A",
        "return None",
        "the output is None (write `return out` at the end of the function), it must be torch.float16 [1, 2, 64, 64]",
    ),
    Mistake(
        "A",
        "return attention(q, k, v, scale).transpose(1, 2)",
        "the output is torch.float16 [1, 64, 2, 64], it must be torch.float16 [1, 2, 64, 64] (heads and queries are "
        "exchanged: write `return out.transpose(-3, -2)`)",
    ),
    Mistake(
        "A",
        "return attention(q, k, v, scale).float()",
        "the output is torch.float32 [1, 2, 64, 64], it must be torch.float16 [1, 2, 64, 64] (write `return "
        "out.to(q.dtype)`)",
    ),
    Mistake(
        "A",
        "return attention(q, k, v, scale).numpy()",
        "the output is a numpy.ndarray (write `return torch.from_numpy(out)`), it must be torch.float16 [1, 2, 64, 64]",
    ),
    Mistake("B", "return {'out': out}", "the output is a dict, it must be torch.float16 [1, 2, 64, 64]"),
    Mistake("B", "return attention(q, k, v, 1)", "the softmax scale is not applied"),
    Mistake("B", "return attention(q.cuda(), k, v, scale)", "(entry.py:8)"),
    Mistake(
        "B",
        "import ctypes; ctypes.string_at(0)",
        "crashed: SIGSEGV in stage launch; a new worker process replaces this one",
    ),
    Mistake(
        "B", "import os; os._exit(0)", "crashed: exit status 0 in stage launch; a new worker process replaces this one"
    ),
    Mistake("B", NEVER, "hung: no progress for 4 s in stage launch; the worker process was killed"),
    Mistake(
        "B",
        "return forward(q, k, v, scale=scale, causal=causal, out=out)",
        "RecursionError: maximum recursion depth exceeded",
    ),
)
SOURCES = (
    Mistake(
        "B",
        f"import flash_atn\n{GOOD}",
        "No module named 'flash_atn': entry.target 'entry:forward' of source_0 cannot be imported; install the package "
        "with 'flash_atn' for the Python that runs pytest",
    ),
    Mistake(
        "B",
        f"import torch\n\n{ATTENTION}",
        "entry has no 'forward'; it has attention (entry.target 'entry:forward' of source_1)",
    ),
    Mistake(
        "B",
        GOOD.replace("def forward", "async def forward"),
        "the output is a coroutine (the function must not be `async`), it must be torch.float16 [1, 2, 64, 64]",
    ),
)
BUILDS = (
    Mistake(
        "A",
        f'#include "cutlas/cutlass.h"\n{CUDA_SOURCE}',
        "kernels/build_0/kernel.cu:1: there is no cutlas/cutlass.h; name the folder that has it: "
        "`entry: {include: [FOLDER]}`",
    ),
    Mistake(
        "A",
        "",
        "kernel.cu defines no function fa_forward; write `FA_EXPORT int fa_forward(const FaForwardArgs* args, "
        "cudaStream_t stream) { ... }`",
    ),
)


@pytest.fixture(scope="module")
def newcomers(new_project: NewProject) -> Project:
    """A project with one right variant."""
    project = new_project("newcomers")
    project.python_variant("good", GOOD, PLAIN)
    return project


@pytest.mark.parametrize("mistake", OPTIONS, ids=lambda each: each.text)
def test_an_option(newcomers: Project, mistake: Mistake) -> None:
    """A wrong option ends the run with status 4 and one line."""
    words = [] if re.search("variant=|sweep", mistake.text) else ["--fa-variant=good"]
    answer = mistake.answer.replace("{folder}", str(newcomers.folder))
    assert newcomers.complaint(*mistake.text.split(), *words) == [f"ERROR: {answer}"]


@pytest.mark.parametrize("mistake", MANIFESTS, ids=lambda each: each.answer[:40])
def test_a_manifest(new_project: NewProject, mistake: Mistake) -> None:
    """A wrong manifest ends the run with status 4 and one line that begins with its path."""
    project = new_project("manifests")
    project.python_variant("bad", GOOD, mistake.text)
    (line,) = project.complaint("--fa-variant=bad")
    answer = mistake.answer.replace("{folder}", str(project.folder))
    assert line.startswith(
        f"ERROR: --fa-variant: bad cannot be used: {project.folder}/kernels/bad/variant.yaml: {answer}"
    )


@pytest.mark.nightly
def test_kernels(new_project: NewProject) -> None:
    """A wrong kernel has its own sentence in its record, and the run fails."""
    project = new_project("mistaken")
    bodies = [GOOD.replace("return attention(q, k, v, scale)", mistake.text) for mistake in KERNELS]
    for index, source in enumerate(bodies):
        project.python_variant(f"kernel_{index}", source, PLAIN)
    for index, mistake in enumerate(SOURCES):
        project.python_variant(f"source_{index}", mistake.text, PLAIN)
    run = project.suite(ONE_CASE, "-k", "test_correct", "--fa-variant=kernel_*,source_*", "--fa-watchdog=4")
    assert run.ret == pytest.ExitCode.TESTS_FAILED, run.text
    judged = {record.variant: record for record in project.records if record.kind == "correct"}
    causes = {name: record.diagnosis.cause if record.diagnosis else "" for name, record in judged.items()}
    said = {name: f"{record.message.splitlines()[0]}: {causes[name]}" for name, record in judged.items()}
    expected = {f"kernel_{index}": mistake for index, mistake in enumerate(KERNELS)}
    expected |= {f"source_{index}": mistake for index, mistake in enumerate(SOURCES)}
    assert said.keys() == expected.keys()
    assert {name: said[name] for name, mistake in expected.items() if mistake.answer not in said[name]} == {}


@pytest.mark.nightly
def test_builds(new_project: NewProject) -> None:
    """A source that does not compile: the place as the user writes it, and what to write."""
    project = new_project("unbuilt")
    for index, mistake in enumerate(BUILDS):
        project.cuda_variant(f"build_{index}", mistake.text, "arch: [sm_90]\n")
    run = project.suite("-k", "test_build", "--fa-variant=build_*")
    assert run.ret == pytest.ExitCode.TESTS_FAILED, run.text
    assert [mistake.answer for mistake in BUILDS if mistake.answer not in run.text] == []
    assert "Traceback" not in run.text


def test_the_grades() -> None:
    """A sentence of grade A says what to do; there are at least 30 mistakes, and no sentence has two lines."""
    everything = [*OPTIONS, *MANIFESTS, *KERNELS, *SOURCES, *BUILDS]
    assert [each.text for each in everything if each.grade == "A" and not TO_DO.search(each.answer)] == []
    assert not any("\n" in each.answer for each in everything)
    assert len(everything) >= 30
