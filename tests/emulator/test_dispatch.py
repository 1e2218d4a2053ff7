"""The C entry of `auto`, compiled for the CPU and called with functions in the place of rungs."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from kernels.auto import entry

ROOT = Path(__file__).parents[2]
# Calls problems of 1 to 3 batches; prints each status, and which of two rungs computed.
PROGRAM = r"""
#include "../dispatch.cu"

#include <cstdio>

int called = 0;
int first(const FaForwardArgs*, cudaStream_t) { called = 1; return FA_OK; }
int second(const FaForwardArgs* args, cudaStream_t) { called = 2; return fa_refuse(args, "scale is 0"); }
size_t bytes(const FaForwardArgs*) { return 64; }

FaForwardArgs problem(int64_t batch, uintptr_t address = 0) {
  FaForwardArgs args = {};
  args.abi_version = FA_ABI_VERSION;
  args.struct_size = sizeof(args);
  args.batch = batch;
  args.q = reinterpret_cast<const void*>(4096 + address);
  return args;
}

void call(FaForwardArgs args) {
  called = 0;
  const size_t workspace = fa_workspace_bytes(&args);
  const int status = fa_forward(&args, nullptr);
  std::printf("%d/%d/%zu ", status, called, workspace);
}

int main() {
  call(problem(1));
  fa_dispatch_choose(&first, nullptr);
  call(problem(1));        // the first rung
  call(problem(2));        // no rung yet
  fa_dispatch_choose(&second, &bytes);
  call(problem(2));        // the second rung, which refuses
  fa_dispatch_choose(&first, nullptr);  // no choice is missing, so this changes nothing
  call(problem(2));
  call(problem(1, 16));    // another alignment is another problem
  call(problem(1, 256));   // the same alignment is not
  for (int64_t batch = 100; batch < 165; ++batch) call(problem(batch)), fa_dispatch_choose(&first, nullptr);
  std::printf("\n");
  call(problem(1));        // 65 newer problems took its place
  FaForwardArgs capped = problem(1);
  capped.features = FA_SOFTCAP;
  call(capped);            // refused: it is none of the problems that are remembered
  fa_dispatch_choose(&second, nullptr);
  call(problem(1));        // so the choice for it is not one for this problem
}
"""


@pytest.mark.needs_nvcc
def test_each_problem_goes_to_the_rung_that_was_chosen_for_it(tmp_path: Path) -> None:
    """A problem without a choice is refused, and a choice is for the problem that was refused last."""
    source = tmp_path / "program" / "program.cu"
    source.parent.mkdir()
    source.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "dispatch.cu").symlink_to(ROOT / "kernels" / "auto" / "dispatch" / "dispatch.cu")
    includes = [f"-I{ROOT / folder}" for folder in ("kernels/include", "pytest_fa/include")]
    program = tmp_path / "program.out"
    command = ["nvcc", "-std=c++17", "-O1", *includes, str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    lines = subprocess.run([program], check=True, timeout=30, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].split()[:7] == ["-1/0/0", "0/1/0", "-1/0/0", "-1/2/64", "-1/2/64", "-1/0/0", "0/1/0"]
    assert lines[0].split()[7:] == ["-1/0/0"] * 65
    assert lines[1].split() == ["-1/0/0"] * 3


@pytest.mark.needs_nvcc
def test_it_is_built_and_loaded_as_a_cuda_variant() -> None:
    """Its library has the function that `auto` calls with a choice."""
    loaded = entry._dispatch()
    assert loaded.library is not None
    assert ctypes.CDLL(loaded.library).fa_dispatch_choose
