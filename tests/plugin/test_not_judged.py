"""A run with a kernel of another kind: what is not judged is said, and the adapter of the message makes it right."""

from __future__ import annotations

import re

from tests.projects import CASE, NewProject
from tests.unit.candidate.test_adapter_lines import ATTEND, FUNCTIONS

SOURCE = ATTEND + FUNCTIONS["varlen"].replace("    return out,", "    out = out.to(q.dtype)\n    return out,")
MANIFEST = 'entry: {target: "entry:forward"}\nsupports: {device: [cpu]}\n'


def test_the_lines_of_a_run_make_a_varlen_function_right(new_project: NewProject) -> None:
    """A function with `cu_seqlens` fails with an adapter's lines; once they are pasted, it is judged and right."""
    project = new_project("varlen")
    project.python_variant("mine", SOURCE, MANIFEST)
    arguments = ("--fa-variant=mine", f"--fa-case={CASE}", "--benchmark-disable", "-k", "test_correct and mine")
    failed = project.suite(*arguments)
    lines = failed.failure(f"test_correct[mine-{CASE}]")
    (line,) = re.findall(r"write in variant.yaml `(.*?)`", "\n".join(lines))
    start = lines.index("import torch")
    end = next(index for index in range(start, len(lines)) if lines[index].startswith("    return "))
    adapter = "\n".join(lines[start : end + 1])
    project.python_variant("mine", f"{SOURCE}\n\n{adapter}\n", MANIFEST.replace(MANIFEST.splitlines()[0], line))
    repaired = project.suite(*arguments)
    assert (failed.ret, repaired.ret) == (1, 0), repaired.text
    assert (
        "a tensor of sequences one behind the other is not judged; judge the kernel with equal lengths" in failed.text
    )
    assert "mine: 1/1 checks passed" in repaired.text
