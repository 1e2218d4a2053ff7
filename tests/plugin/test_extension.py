"""Entry kind `torch`: an existing PyTorch extension is built, called as its manifest says, and judged."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fa.build import extension
from pytest_fa.build.extension import find_torch
from pytest_fa.build.recipe import request_key
from pytest_fa.catalog.manifest import read_manifest
from tests.factories import PYTHON_SOURCE, WriteVariant
from tests.projects import CASE, ONE_CASE, NewProject, Project, Run

# Attention in plain loops.  It includes few headers and compiles in 10 s; with all of ATen it would take a minute.
SOURCE = """\
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "factor.h"

void forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor out, double scale, bool causal) {
  TORCH_CHECK(q.is_contiguous() && k.is_contiguous() && v.is_contiguous() && out.is_contiguous(), "not contiguous");
  const int64_t heads = q.size(0) * q.size(1), seq_q = q.size(2), seq_k = k.size(2), dim = q.size(3);
  const c10::Half *queries = q.const_data_ptr<c10::Half>(), *keys = k.const_data_ptr<c10::Half>();
  const c10::Half* values = v.const_data_ptr<c10::Half>();
  c10::Half* outs = out.mutable_data_ptr<c10::Half>();
  std::vector<double> p(seq_k), o(dim);
  for (int64_t row = 0; row < heads * seq_q; ++row) {
    const int64_t head = row / seq_q, visible = causal ? std::min(seq_k, row % seq_q + 1) : seq_k;
    double most = -INFINITY, sum = 0.0;
    for (int64_t key = 0; key < visible; ++key) {
      p[key] = 0.0;
      for (int64_t d = 0; d < dim; ++d)
        p[key] += double(queries[row * dim + d]) * double(keys[(head * seq_k + key) * dim + d]);
      most = std::max(most, p[key] *= scale * FACTOR);
    }
    std::fill(o.begin(), o.end(), 0.0);
    for (int64_t key = 0; key < visible; ++key) {
      sum += p[key] = std::exp(p[key] - most);
      for (int64_t d = 0; d < dim; ++d) o[d] += p[key] * double(values[(head * seq_k + key) * dim + d]);
    }
    for (int64_t d = 0; d < dim; ++d) outs[row * dim + d] = static_cast<float>(o[d] / sum + OFF_BY);
  }
}

TORCH_LIBRARY(mine, module) {
  module.def("forward(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float scale, bool causal) -> ()", &forward);
}
"""

MANIFEST = """\
step: loops in C++
because: there was an extension already
expect: right, and slow
entry:
  kind: torch
  sources: [../../csrc/forward.cpp]
  include: [../../csrc]
  target: mine::forward
  call: {arguments: [q, k, v, out, scale, causal], contiguous: true}
defines: {OFF_BY: 0}
supports: {device: [cpu], causal: [none, top_left]}
variants:
  mine: {}
  mine_off: {defines: {OFF_BY: 1}}
"""


def write_extension(project: Project, manifest: str = MANIFEST) -> None:
    """Write an extension to `csrc` and its manifest to `kernels`."""
    project.write("csrc/forward.cpp", SOURCE)
    project.write("csrc/factor.h", "#define FACTOR 1.0\n")
    project.write("kernels/mine/variant.yaml", manifest)


@dataclasses.dataclass(frozen=True)
class Story:
    """The runs of one extension: built, built again, with an edited header, with the old header, with an error."""

    both: Run
    again: Run
    edited: Run
    back: Run
    broken: Run
    project: Project
    stages: list[Path]
    builds: Path  # a copy of the cache after the first run


@pytest.fixture(scope="module")
def story(new_project: NewProject) -> Story:
    """Run two variants of one extension twice, then one of them with the header edited, restored and broken."""
    project = new_project("extension")
    write_extension(project)
    cache = project.folder / "cache"
    stale_stage = cache / ".stage-0123" / "0" / "objects"  # as after a build that was killed
    stale_stage.mkdir(parents=True)
    (stale_stage / "lock").touch()
    arguments = (f"--fa-cache={cache}", ONE_CASE, "-k", "test_build or test_correct")
    both = project.suite(*arguments)
    builds = shutil.copytree(cache, project.folder / "builds of the first run")
    again = project.suite(*arguments)
    project.write("csrc/factor.h", "#define FACTOR 1.5\n")
    edited = project.suite(*arguments, "--fa-variant=mine")
    project.write("csrc/factor.h", "#define FACTOR 1.0\n")
    back = project.suite(*arguments, "--fa-variant=mine")
    project.write("csrc/factor.h", "#define FACTOR 1.0 nonsense\n")
    broken = project.suite(*arguments, "--fa-variant=mine")
    return Story(both, again, edited, back, broken, project, list(cache.glob(".stage-*")), builds)


CORRECT, CORRECT_OFF = (f"test_correct[{name}-b1h2s64d64-fp16-seed0]" for name in ("mine", "mine_off"))


@pytest.mark.nightly
def test_two_variants_of_one_extension_in_one_run(story: Story) -> None:
    """Two variants that register the same operator and differ in a definition are judged separately in one run."""
    expected = {
        "test_build[mine]": "passed",
        "test_build[mine_off]": "passed",
        CORRECT: "passed",
        CORRECT_OFF: "failed",
    }
    assert expected == story.both.outcomes
    assert "max error" in story.both.reasons[CORRECT_OFF]


@pytest.mark.nightly
def test_builds_are_cached(story: Story) -> None:
    """The second run compiles nothing."""
    assert any("2 compiled, 0 cached" in line for line in story.both.outlines)
    assert any("0 compiled, 2 cached" in line for line in story.again.outlines)


@pytest.mark.nightly
def test_an_edited_header_is_rebuilt(story: Story) -> None:
    """Editing a header triggers a rebuild; restoring it uses the cached build again."""
    assert story.edited.outcomes == {"test_build[mine]": "passed", CORRECT: "failed"}
    assert any("1 compiled" in line for line in story.edited.outlines)
    assert story.back.outcomes == {"test_build[mine]": "passed", CORRECT: "passed"}
    assert any("0 compiled" in line for line in story.back.outlines)


@pytest.mark.nightly
def test_a_compile_error_shows_the_compilers_lines(story: Story) -> None:
    """A compile error shows the compiler's own lines and a short form of the command."""
    assert story.broken.outcomes == {"test_build[mine]": "failed", CORRECT: "skipped"}
    reason = story.broken.reasons["test_build[mine]"]
    assert re.match(r"not built: .*factor\.h:.* error: .* \(mine for host\)$", reason.splitlines()[0])
    assert "torch.utils.cpp_extension 'c++[-O3 -fno-gnu-unique]' ../../csrc/forward.cpp -DOFF_BY=0" in reason
    assert "-MMD" not in reason


@pytest.mark.nightly
def test_stale_staging_folders_are_removed(story: Story) -> None:
    """A staging folder with a lock file, as after a killed build, is removed."""
    assert story.stages == []


@pytest.mark.nightly
def test_each_build_has_a_record(story: Story) -> None:
    """Each build is for the host, and its record names the compilers and the PyTorch version."""
    builds = [build for record in story.project.records if record.kind == "build" for build in record.builds]
    assert {build.arch for build in builds} == {"host"}
    assert all(f"torch {find_torch().version}" in build.compiler for build in builds)
    assert len({build.key for build in builds}) == 3


# A Python variant that puts the library of `mine_off` in the place of that of `mine` when it is imported.
EXCHANGES = """
import os
import shutil
from pathlib import Path

(library,) = Path({cache!r}).glob("builds/mine-host-*/*/kernel.so")
(other,) = Path({cache!r}).glob("builds/mine_off-host-*/*/kernel.so")
shutil.copyfile(other, library.with_name("new"))
os.replace(library.with_name("new"), library)
"""


@pytest.mark.nightly
def test_a_library_that_changes_after_the_build_is_not_loaded(new_project: NewProject, story: Story) -> None:
    """A library that is exchanged after the builds were checked is not judged; the next run compiles it again."""
    project = new_project("exchanged")
    write_extension(project)
    cache = shutil.copytree(story.builds, project.folder / "cache")
    arguments = (
        f"--fa-cache={cache}",
        ONE_CASE,
        "-k",
        "test_build or test_correct",
        "--fa-variant=first,mine,mine_off",
    )
    project.python_variant("first", PYTHON_SOURCE + EXCHANGES.format(cache=str(cache)))
    run, again = project.suite(*arguments), project.suite(*arguments)
    assert any("0 compiled, 2 cached" in line for line in run.outlines)
    assert run.outcomes[CORRECT.replace("mine", "first")] == "passed"
    assert run.outcomes[CORRECT] == again.outcomes[CORRECT] == "failed"
    (library,) = cache.glob("builds/mine-host-*/*/kernel.so")
    assert run.reasons[CORRECT].startswith(f"{library} has changed since it was built: its sha256 is ")
    assert any("compiling mine/host again: " in line for line in again.all_lines)
    record = next(each for each in project.records if each.kind == "correct" and each.variant == "mine")
    assert (record.outcome, record.check) == ("build_changed", None)


# Three functions of one extension, which does not compile.
BROKEN_SET = """\
step: s
because: b
expect: e
entry: {kind: torch, sources: [forward.cpp], target: plain}
supports: {device: [cpu]}
variants:
  plain: {}
  fast: {target: fast}
  faster: {target: faster}
"""


@pytest.mark.nightly
def test_a_shared_compilation_that_fails_is_shown_once(new_project: NewProject) -> None:
    """One test fails with the compiler's lines and every variant's name; the others are skipped and name that test."""
    project = new_project("shared_failure")
    project.write("kernels/set/variant.yaml", BROKEN_SET)
    project.write("kernels/set/forward.cpp", "#error not written yet\n")
    run = project.suite(ONE_CASE, "-k", "(plain or fast) and (build or correct or streams)")
    assert {name for name, outcome in run.outcomes.items() if outcome == "failed"} == {"test_build[plain]"}
    assert run.ret == 1
    lines = run.failure("test_build[plain]")
    assert lines[0].endswith("error: #error not written yet (plain, fast, faster for host)")
    assert sum(line.startswith("command: ") for line in run.outlines) == 1
    assert run.reasons["test_build[fast]"].endswith("build of fast failed: it is that of test_build[plain]")
    assert run.reasons[f"test_correct[fast-{CASE}]"].endswith("build of fast failed (see test_build[fast])")
    assert "builds: 3 failed, 0 compiled, 0 cached" in run.text
    kinds = [(record.kind, record.variant, record.outcome) for record in project.records if record.kind == "build"]
    assert kinds == [("build", name, "not_built") for name in ("plain", "fast", "faster")]


@pytest.mark.nightly
def test_a_shared_failure_is_reported_by_the_first_selected_test(new_project: NewProject) -> None:
    """Without the test of the first variant, that of the next one fails; also if no build test is selected."""
    project = new_project("shared_failure_again")
    project.write("kernels/set/variant.yaml", BROKEN_SET)
    project.write("kernels/set/forward.cpp", "#error not written yet\n")
    for words, first in (("fast and build", "test_build[fast]"), ("fast and correct", f"test_correct[fast-{CASE}]")):
        run = project.suite(ONE_CASE, "-k", words)
        assert {name for name, outcome in run.outcomes.items() if outcome == "failed"} == {first}
        assert (run.ret, len(run.outcomes)) == (1, 2)
        assert "error: #error not written yet (fast, faster for host)" in run.reasons[first]


def test_flags_of_the_environment_change_the_key(tmp_path: Path, write_variant: WriteVariant) -> None:
    """CXXFLAGS changes the build key; a header that nothing looks for does not."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "forward.cpp").touch()
    text = MANIFEST.replace("  include: [../../csrc]\n", "")
    folder = write_variant("mine", manifest=text)
    before, *_ = read_manifest(folder / "variant.yaml", tmp_path / "kernels")
    keys = [request_key(before, "host")]
    (tmp_path / "csrc" / "factor.hh").touch()
    keys.append(request_key(before, "host"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXXFLAGS", "-O0")
        keys.append(request_key(before, "host"))
    assert (keys[0] == keys[1], len(set(keys))) == (True, 2)


@pytest.mark.parametrize("prefix", ["/usr/include", "/opt/mine/csrc"])
def test_only_system_headers_keep_absolute_paths(prefix: str) -> None:
    """Headers of the project are stored by relative paths, system headers by absolute ones."""
    project_folders = [Path("/opt/mine/kernels/fast"), Path("/opt/mine/csrc")]
    expected = {"/usr/include": "/usr/include/x.h", "/opt/mine/csrc": "src/../../csrc/x.h"}[prefix]
    assert extension._portable(Path(prefix) / "x.h", project_folders) == expected


@pytest.mark.nightly
def test_an_operator_is_registered_once(story: Story) -> None:
    """If two builds register the same operator in a user's own tests, the second test is an error, not a crash."""
    project = story.project
    project.write("csrc/factor.h", "#define FACTOR 1.0\n")  # the header that both builds were made with
    project.write(
        "test_own.py",
        "def test_own(fa_variant, fa_module, fa_inputs):\n"
        "    q, k, v, scale, causal = fa_inputs\n"
        "    fa_module(q, k, v, scale=scale, causal=causal)\n",
    )
    run = project.run("test_own.py", "--fa-variant=mine,mine_off", f"--fa-cache={project.folder / 'cache'}", ONE_CASE)
    outcomes = sorted(outcome for name, outcome in run.outcomes.items() if name.startswith("test_own["))
    assert outcomes == ["error", "passed"]
    assert "has already registered this operator in this process" in run.text


LOADS_TWO_COPIES = """
import sys
from pathlib import Path

import torch

from pytest_fa.catalog.manifest import read_manifest
from pytest_fa.candidate.module import load_forward

variant = read_manifest(Path("kernels/mine/variant.yaml"), Path("kernels"))[0]
q = torch.randn(1, 1, 8, 8).half()
for library in sys.argv[1:]:
    load_forward(variant, library)(q, q, q, scale=1.0, causal="none", out=torch.empty_like(q))
"""


@pytest.mark.nightly
def test_copies_of_one_library_register_their_operator_once(story: Story, tmp_path: Path) -> None:
    """Variants that share a build can be loaded together in one process: the second copy uses the first one."""
    first = next((story.project.folder / "cache").glob("builds/mine-host-*/*/kernel.so"))
    copy = shutil.copytree(first.parent, tmp_path / "copy") / "kernel.so"
    command = [sys.executable, "-c", LOADS_TWO_COPIES, str(first), str(copy)]
    subprocess.run(command, cwd=story.project.folder, check=True, timeout=120)


@pytest.mark.skipif(find_torch().cuda is not None, reason="this torch has CUDA")
def test_cuda_sources_need_a_torch_with_cuda(project: Project) -> None:
    """With a torch without CUDA, a variant with CUDA sources is skipped with that reason, and the others run."""
    project.write("kernels/gpu/kernel.cu", "")
    project.write(
        "kernels/gpu/variant.yaml",
        "step: s\nbecause: b\nexpect: e\nentry: {kind: torch, sources: [kernel.cu], target: forward}\n",
    )
    project.python_variant("on_cpu")
    run = project.suite(ONE_CASE, "-k", "test_build or test_correct")
    expected = f"torch {find_torch().version} has no CUDA, which CUDA sources need; install a torch with CUDA"
    assert run.outcomes["test_build[gpu]"] == "skipped"
    assert expected in run.reasons["test_build[gpu]"]
    assert run.outcomes["test_correct[on_cpu-b1h2s64d64-fp16-seed0]"] == "passed"
