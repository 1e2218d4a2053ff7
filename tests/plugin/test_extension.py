"""Entry kind `torch`: an extension that somebody has already is built, called as its manifest says, and judged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pytest_fa.build import extension
from pytest_fa.build.extension import find_torch
from pytest_fa.build.recipe import request_key
from pytest_fa.catalog.manifest import read_manifest
from tests.factories import WriteVariant
from tests.plugin.conftest import ONE_CASE, NewProject, Project, Run

# Attention by the book in plain loops, with few headers: ten seconds to compile where ATen's own take a minute.
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
    """A repository with an extension in csrc and a manifest in kernels."""
    project.write("csrc/forward.cpp", SOURCE)
    project.write("csrc/factor.h", "#define FACTOR 1.0\n")
    project.write("kernels/mine/variant.yaml", manifest)


@dataclasses.dataclass(frozen=True)
class Story:
    """One extension through its life."""

    both: Run
    again: Run
    edited: Run
    back: Run
    broken: Run
    project: Project
    stages: list[Path]


@pytest.fixture(scope="module")
def story(new_project: NewProject) -> Story:
    """Two variants of one extension; the same again; a header edited, put back, and broken."""
    project = new_project("extension")
    write_extension(project)
    cache = project.folder / "cache"
    leftover = cache / ".stage-0123" / "0" / "objects"  # what a build that was killed leaves behind
    leftover.mkdir(parents=True)
    (leftover / "lock").touch()
    words = (f"--fa-cache={cache}", ONE_CASE, "-k", "test_build or test_correct")
    both, again = project.suite(*words), project.suite(*words)
    project.write("csrc/factor.h", "#define FACTOR 1.5\n")
    edited = project.suite(*words, "--fa-variant=mine")
    project.write("csrc/factor.h", "#define FACTOR 1.0\n")
    back = project.suite(*words, "--fa-variant=mine")
    project.write("csrc/factor.h", "#define FACTOR 1.0 nonsense\n")
    broken = project.suite(*words, "--fa-variant=mine")
    return Story(both, again, edited, back, broken, project, list(cache.glob(".stage-*")))


CORRECT, CORRECT_OFF = (f"test_correct[{name}-b1h2s64d64-fp16-seed0]" for name in ("mine", "mine_off"))


def test_two_variants_of_one_extension_live_in_one_run(story: Story) -> None:
    """They register the same operator, differ in a definition, and each is judged for what it is."""
    expected = {
        "test_build[mine]": "passed",
        "test_build[mine_off]": "passed",
        CORRECT: "passed",
        CORRECT_OFF: "failed",
    }
    assert expected == story.both.outcomes
    assert "max error" in story.both.reasons[CORRECT_OFF]


def test_what_was_built_is_found_again(story: Story) -> None:
    """The second run compiles nothing."""
    assert any("2 compiled, 0 cached" in line for line in story.both.outlines)
    assert any("0 compiled, 2 cached" in line for line in story.again.outlines)


def test_an_edited_header_is_rebuilt(story: Story) -> None:
    """A header beside the sources counts as they do, and going back finds the old build."""
    assert story.edited.outcomes == {"test_build[mine]": "passed", CORRECT: "failed"}
    assert any("1 compiled" in line for line in story.edited.outlines)
    assert story.back.outcomes == {"test_build[mine]": "passed", CORRECT: "passed"}
    assert any("0 compiled" in line for line in story.back.outlines)


def test_the_compilers_words_are_shown(story: Story) -> None:
    """What does not compile fails with the compiler's own lines and with what was asked of it, once."""
    assert story.broken.outcomes == {"test_build[mine]": "failed", CORRECT: "failed"}
    reason = story.broken.reasons["test_build[mine]"]
    assert "mine for host: it did not compile:" in reason
    assert "error:" in reason
    assert "torch.utils.cpp_extension 'c++[-O3 -fno-gnu-unique -DOFF_BY=0]' ../../csrc/forward.cpp" in reason
    assert "-MMD" not in reason


def test_leftovers_are_in_nobodys_way(story: Story) -> None:
    """A staging folder with a lock in it, as after a killed build, is swept."""
    assert story.stages == []


def test_each_build_has_a_record(story: Story) -> None:
    """The build is for the host, and says with which compilers and which PyTorch it was made."""
    builds = [build for record in story.project.records if record.kind == "build" for build in record.builds]
    assert {build.arch for build in builds} == {"host"}
    assert all(f"torch {find_torch().version}" in build.compiler for build in builds)
    assert len({build.key for build in builds}) == 3


def test_a_new_header_beside_a_source_is_seen(tmp_path: Path, write_variant: WriteVariant) -> None:
    """What `#include` would find first asks for a new build, though no list of files names it; so do CXXFLAGS."""
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
    assert len(set(keys)) == 3


@pytest.mark.parametrize("prefix", ["/usr/include", "/opt/mine/csrc"])
def test_only_what_the_system_brings_is_kept_by_its_folder(prefix: str) -> None:
    """A header of the project is compared wherever it lies: also by a run that may not build."""
    own = [Path("/opt/mine/kernels/fast"), Path("/opt/mine/csrc")]
    expected = {"/usr/include": "/usr/include/x.h", "/opt/mine/csrc": "src/../../csrc/x.h"}[prefix]
    assert extension._portable(Path(prefix) / "x.h", own) == expected


def test_an_operator_is_registered_once(story: Story) -> None:
    """Two builds that register one operator are an error of the second, and not the end of a user's own test run."""
    project = story.project
    project.write("csrc/factor.h", "#define FACTOR 1.0\n")  # as when both were built
    project.write(
        "test_own.py",
        "def test_own(fa_variant, fa_module, fa_inputs):\n"
        "    q, k, v, scale, causal = fa_inputs\n"
        "    fa_module(q, k, v, scale=scale, causal=causal)\n",
    )
    run = project.run("test_own.py", "--fa-variant=mine,mine_off", f"--fa-cache={project.folder / 'cache'}", ONE_CASE)
    outcomes = sorted(outcome for name, outcome in run.outcomes.items() if name.startswith("test_own["))
    assert outcomes == ["error", "passed"]
    assert "has registered it in this process already" in run.text


@pytest.mark.skipif(find_torch().cuda is not None, reason="this torch has CUDA")
def test_cuda_sources_need_a_torch_with_cuda(project: Project) -> None:
    """Where torch has none, the variant is skipped and says so; its neighbours go on."""
    project.write("kernels/gpu/kernel.cu", "")
    project.write(
        "kernels/gpu/variant.yaml",
        "step: s\nbecause: b\nexpect: e\nentry: {kind: torch, sources: [kernel.cu], target: forward}\n",
    )
    project.python_variant("beside")
    run = project.suite(ONE_CASE, "-k", "test_build or test_correct")
    expected = f"torch {find_torch().version} has no CUDA, which CUDA sources need"
    assert run.outcomes["test_build[gpu]"] == "skipped"
    assert expected in run.reasons["test_build[gpu]"]
    assert run.outcomes["test_correct[beside-b1h2s64d64-fp16-seed0]"] == "passed"
