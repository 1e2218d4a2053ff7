"""Write a variant for a sweep in which no configuration is faster than the variant itself.

python -m tests.null_sweep
pytest --fa-sweep=null_sweep --fa-trials=200 -n 8

Each configuration stores another constant in a branch that no call takes.  Their machine code differs, and their times
do not.  So the sweep must end with `no configuration is better than the parent`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.honest_cases import KERNELS

PARENT = KERNELS / "swizzle_async"
CONFIGURATIONS = 200
BEFORE = "  // Load Q, then the first STAGES - 1 tiles of K and V.\n"
BRANCH = """\
  if (args.batch < 0) {  // never
    *static_cast<volatile int*>(args.out) = NEVER_STORED;
    return;
  }
"""
MANIFEST = """\
step: a constant that no call stores
parent: swizzle_async
because: the machine code differs, and the time does not
expect: the time of swizzle_async
supports: {{dtype: [fp16], head_dim: [64], seq_k_min: 0}}
returns: [out, lse]
defines: {{BLOCK_M: 64, BLOCK_N: 64, STAGES: 2, NEVER_STORED: 201}}  # nvcc stores 0 with another instruction
sweep:
  values: {{NEVER_STORED: {constants}}}
  cases: [b1h8s512d64-fp16]
"""


def write_null_sweep(kernels: Path) -> Path:
    """Write the variant `null_sweep` into a folder of variants that has the folder `include`; return its own folder."""
    source = (PARENT / "kernel.cu").read_text(encoding="utf-8")
    if source.count(BEFORE) != 1:
        raise SystemExit(f"{PARENT}/kernel.cu has changed: it has no place for the branch")
    code = source[source.index("#include") :]  # the comment at the top describes the parent's step
    folder = kernels / "null_sweep"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cu").write_text(code.replace(BEFORE, BRANCH + BEFORE), encoding="utf-8")
    constants = list(range(1, CONFIGURATIONS + 1))
    (folder / "variant.yaml").write_text(MANIFEST.format(constants=constants), encoding="utf-8")
    return folder


def main() -> int:
    """Write the variant into `kernels/`, and say where it is."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    sys.stdout.write(f"wrote {write_null_sweep(KERNELS)}; delete it after the sweep\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
